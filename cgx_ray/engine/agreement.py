"""Agreement of all ranks on the step at which a new plan takes effect and gains are measured. No rank waits for it."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from cgx_ray.collectives import Transport
from cgx_ray.errors import WireError


class Agreement:
    """Starts, in each step, a minimum over ranks of the newest plan version held, and reads that of the step before.

    The 64 bytes travel beside the gradients, in ceil(log3 N) rounds among N > 17 ranks (`collectives.minimum`). They
    have a whole step to arrive, so no rank waits. A plan takes effect in the second step after the last rank received
    it.

    The message also carries the step, the plan in force and the loss scale, as they are and negated, so that ranks that
    differ are found. Its last number is the step from which this rank can afford to measure gains.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pending: Callable[[], Tensor] | None = None

    def post(self, *, step: int, in_force: int, held: int, affordable_from: int, loss_scale: float) -> None:
        """Send the state of this rank at the start of `step`; see `settle` for the numbers."""
        assert self._pending is None
        # The bits of positive numbers are in the order of the numbers.
        (scale,) = struct.unpack("<q", struct.pack("<d", loss_scale))
        self._pending = self._transport.start_minimum(
            torch.tensor([held, step, -step, in_force, -in_force, scale, -scale, -affordable_from])
        )

    def settle(self) -> tuple[int, int] | None:
        """Read the result of the previous step. Return None before the first step.

        Returns the newest plan version that every rank held when that step started, and the first step in which all
        ranks can afford to measure gains.

        Raises WireError if ranks are at different steps or plans: their messages would not match. Also if gradients of
        the previous step had different loss scales: their sum, and the memory that is left of it, have none.
        """
        if self._pending is None:
            return None
        values_8 = self._pending()
        self._pending = None
        held, step, minus_step, in_force, minus_in_force, scale, minus_scale, minus_affordable_from = values_8.tolist()
        if step != -minus_step or in_force != -minus_in_force:
            raise WireError(
                f"rank {self._transport.rank}: ranks are at steps {step} to {-minus_step} and plans {in_force} to "
                f"{-minus_in_force}; every rank must run the same number of synchronised backward passes and resume "
                "from the same checkpoint"
            )
        if scale != -minus_scale:
            low, high = struct.unpack("<2d", struct.pack("<2q", scale, -minus_scale))
            raise WireError(
                f"rank {self._transport.rank}: ranks had loss scales {low:g} to {high:g} in step {step}; scale the "
                "loss on every rank in every step, also if a rank has no data"
            )
        return int(held), -int(minus_affordable_from)

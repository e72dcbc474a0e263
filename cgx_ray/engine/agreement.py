"""Switching plans, and measuring gains, on all ranks at the same step, without anyone waiting for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cgx_ray.collectives import Transport
from cgx_ray.errors import WireError


class Agreement:
    """Each step starts a minimum over ranks of the newest plan version held, and reads the one of the step before.

    48 bytes that travel beside the gradients. A whole step passes before anyone reads them, so nobody stalls, and a
    plan takes effect in the second step after the last rank got hold of it. The same message carries step and plan
    in force, both as they are and negated, so that ranks that have drifted apart find out before they exchange, and
    from which step on the rank can afford to measure gains.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pending: Callable[[], Tensor] | None = None

    def post(self, *, step: int, in_force: int, held: int, meter_from: int) -> None:
        """Tell the others what this rank holds at the start of `step`."""
        assert self._pending is None
        self._pending = self._transport.start_minimum(
            torch.tensor([held, step, -step, in_force, -in_force, -meter_from])
        )

    def settle(self) -> tuple[int, int] | None:
        """As of when the last step started: the newest version that every rank held, and from which step on all of
        them can measure gains. None before the first step.

        Raises WireError if ranks are at different steps or plans: their messages would not fit together.
        """
        if self._pending is None:
            return None
        values_6 = self._pending()
        self._pending = None
        held, step, minus_step, in_force, minus_in_force, minus_meter_from = values_6.tolist()
        if step != -minus_step or in_force != -minus_in_force:
            raise WireError(
                f"rank {self._transport.rank}: ranks are at steps {step} to {-minus_step} and plans {in_force} to "
                f"{-minus_in_force}; every rank must run the same number of synchronised backward passes and resume "
                "from the same checkpoint"
            )
        return int(held), -int(minus_meter_from)

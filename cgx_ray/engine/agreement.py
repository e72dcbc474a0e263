"""Agreement of all ranks on the step at which a new plan takes effect and gains are measured. No rank waits for it.

Ranks whose weights differ are found on the way.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cgx_ray.collectives import Transport
from cgx_ray.engine.weight_check import NO_HASH
from cgx_ray.errors import ReplicaError, WireError, listed

_LARGEST = torch.iinfo(torch.int64).max


class Agreement:
    """Starts, in each step, a minimum over ranks of the newest plan version held, and reads that of the step before.

    The 80 bytes travel beside the gradients, in ceil(log3 N) rounds among N > 17 ranks (`collectives.minimum`). They
    have a whole step to arrive, so no rank waits. A plan takes effect in the second step after the last rank received
    it.

    The message also carries the step, the plan in force, the loss scale and a hash of the weights, as they are and
    negated, so that ranks that differ are found. Its last number is the step from which this rank can afford to measure
    gains.

    same_weights_at  newest step in which all ranks were found to hold the same weights; None before the first check
    """

    def __init__(self, transport: Transport) -> None:
        self.same_weights_at: int | None = None
        self._transport = transport
        self._pending: Callable[[], Tensor] | None = None
        self._hash = NO_HASH

    def post(
        self, *, step: int, in_force: int, held: int, affordable_from: int, loss_scale: float, weights: int = NO_HASH
    ) -> None:
        """Send the state of this rank at the start of `step`; see `settle` for the numbers.

        weights  hash of the weights, see `WeightCheck.hash_at`
        """
        assert self._pending is None
        self._hash = weights
        # The bits of positive numbers are in the order of the numbers.
        (scale,) = struct.unpack("<q", struct.pack("<d", loss_scale))
        self._pending = self._transport.start_minimum(
            torch.tensor([held, step, -step, in_force, -in_force, scale, -scale, weights, -weights, -affordable_from])
        )

    def settle(self) -> tuple[int, int] | None:
        """Read the result of the previous step. Return None before the first step.

        Returns the newest plan version that every rank held when that step started, and the first step in which all
        ranks can afford to measure gains.

        Raises WireError if ranks are at different steps or plans: their messages would not match. Also if gradients of
        the previous step had different loss scales: their sum, and the memory that is left of it, have none.

        Raises ReplicaError, on all ranks, if they held different weights when that step started.
        """
        if self._pending is None:
            return None
        values_10 = self._pending()
        self._pending = None
        held, step, minus_step, in_force, minus_in_force, scale, minus_scale, *rest = values_10.tolist()
        weights, minus_weights, minus_affordable_from = rest
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
        if weights != -minus_weights:
            raise self._differing(step)
        if weights != NO_HASH:
            self.same_weights_at = step
        return int(held), -int(minus_affordable_from)

    def _differing(self, step: int) -> ReplicaError:
        """Ask all ranks for their hashes and return the error that names the ranks. All ranks come here together."""
        hash_R = torch.full((self._transport.world_size,), _LARGEST)
        hash_R[self._transport.rank] = self._hash
        odd, others = odd_ranks(self._transport.start_minimum(hash_R)().tolist())
        before = "this was the first check"
        if self.same_weights_at is not None:
            before = f"they were the same before step {self.same_weights_at}"
        return ReplicaError(
            f"rank {self._transport.rank}: before step {step} the weights of {_ranks(odd)} differ from those of "
            f"{_ranks(others)}; {before}. Possible causes: a rank changed or loaded weights by itself; processors of "
            "different kinds, whose optimizers round differently; memory that returns other bits. Resume all ranks "
            "from one checkpoint; with weight_check_steps=0 nothing is compared"
        )


def odd_ranks(hashes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the ranks whose hash is another than that of the most ranks, and these; rank 0 counts more in a tie."""
    usual, _ = Counter(hashes).most_common(1)[0]
    odd = [rank for rank, one in enumerate(hashes) if one != usual]
    return odd, [rank for rank, one in enumerate(hashes) if one == usual]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed([str(rank) for rank in ranks])}"

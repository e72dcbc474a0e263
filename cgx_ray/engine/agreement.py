"""Agreement of all ranks on the step at which a new plan takes effect and gains are measured. No rank waits for it.

Ranks whose weights differ are found on the way.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cgx_ray.codecs import build_kernels
from cgx_ray.engine.weight_check import NO_HASH, WeightCheck
from cgx_ray.errors import ConfigError, PlanError, ReplicaError, WireError, listed
from cgx_ray.plan import CodecSpec, Plan

_LARGEST = torch.iinfo(torch.int64).max
# Growth of the difference between two warnings of it.
WARN_AGAIN = 10.0
# Seconds in which a plan reaches all ranks, or else is held by some alone.
ARRIVES_S = 10.0

logger = logging.getLogger(__name__)


class HeldPlans:
    """Plans that this rank holds and that are not in force yet, by version. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._plans: dict[int, Plan] = {}

    def add(self, plan: Plan, in_force: Plan) -> None:
        """Hold a plan. Raises PlanError if it is not newer than all others."""
        with self._lock:
            newest = self.newest(in_force)
            if plan.version <= newest:
                raise PlanError(f"plan {plan.version} is not newer than plan {newest}; give it a higher version")
            self._plans[plan.version] = plan

    def newest(self, in_force: Plan) -> int:
        """Return the newest version that is in force or held, with that of its fallback."""
        with self._lock:
            return max(plan.last_version for plan in (in_force, *self._plans.values()))

    def take(self, version: int) -> Plan:
        """Return a plan that is held, and forget it and those before it."""
        with self._lock:
            plan = self._plans[version]
            self._plans = {newer: held for newer, held in self._plans.items() if newer > version}
        return plan

    def at(self, step: int, in_force: Plan) -> tuple[frozenset[int], int | None]:
        """Return the versions held when `step` begins, and the one that all ranks are known to hold, if any is."""
        with self._lock:
            sure: int | None = None
            if in_force.lease is not None and step > in_force.lease.last_step:
                # All ranks are at the same step and plan, so all hold the fallback from this step on.
                sure = in_force.lease.fallback.version
                self._plans[sure] = in_force.lease.fallback
            return frozenset(self._plans), sure


def build_for(plan: Plan, codecs: Iterable[CodecSpec], device: torch.device) -> None:
    """Build what `codecs` launch on `device`. Raises PlanError if a kernel does not compile or computes wrong bits."""
    try:
        build_kernels(codecs, device)
    except (ConfigError, OSError, RuntimeError) as error:
        raise PlanError(f"the kernels of plan {plan.version} cannot be built: {error}") from error


class Minima(Protocol):
    """The part of a `Transport` to all ranks that an agreement uses."""

    rank: int
    world_size: int

    def start_minimum(self, values_K: Tensor) -> Callable[[], Tensor]:
        """See `Transport.start_minimum`."""


class Agreement:
    """Starts, in each step, a minimum over ranks of the newest plan version held, and reads that of the step before.

    The 96 bytes travel beside the gradients, in ceil(log3 N) rounds among N > 17 ranks
    (`collectives.transport.greeting`). They have a whole step to arrive, so no rank waits. A plan takes effect in the
    second step after the last rank received it; in the third if some ranks hold a newer one as well, because they may
    lack this one. Until all ranks hold the same one, the plan in force stays.

    The message also carries the step, the plan in force, the loss scale and a hash of the weights, as they are and
    negated, so that ranks that differ are found. Its last number is the step from which this rank can afford to measure
    gains.

    weight_check     compares weights whose hashes differ
    compared_step    newest step whose weights were compared; None before the first check
    drift            how much they differed then, see `Drift.ratio`: 0 if all bits were the same
    """

    def __init__(self, transport: Minima) -> None:
        self.weight_check: WeightCheck | None = None
        self.compared_step: int | None = None
        self.drift = 0.0
        self._same_at: int | None = None
        self._warned_of: float | None = None
        self._transport = transport
        self._pending: Callable[[], Tensor] | None = None
        self._hash = NO_HASH
        # Version that was the newest on some ranks, but not on all: all report in the next step whether they hold it.
        self._asked: int | None = None
        self._named: int | None = None
        self._sure: int | None = None
        # Newest version that not all ranks hold, and since when; None once it was warned of.
        self._partly: tuple[int, float | None] = -1, None

    def post(
        self,
        *,
        step: int,
        in_force: Plan,
        held: HeldPlans,
        affordable_from: int = 0,
        loss_scale: float = 1.0,
        weights: int = NO_HASH,
    ) -> None:
        """Send the state of this rank at the start of `step`; see `settle` for the numbers.

        held      plans that this rank holds
        weights   hash of the weights, see `WeightCheck.hash_at`
        """
        assert self._pending is None
        versions, self._sure = held.at(step, in_force)
        self._hash = weights
        is_held = self._asked is None or self._asked <= in_force.version or self._asked in versions
        if not is_held and self._named != self._asked:
            self._named = self._asked
            logger.warning(
                "rank %d, step %d: other ranks hold plan %d, which this rank never got: plan %d stays in force until "
                "all ranks hold the same newer one",
                self._transport.rank,
                step,
                self._asked,
                in_force.version,
            )
        # The bits of positive numbers are in the order of the numbers.
        (scale,) = struct.unpack("<q", struct.pack("<d", loss_scale))
        newest = max(versions, default=in_force.version)
        both = [sign * value for value in (newest, step, in_force.version, scale, weights) for sign in (1, -1)]
        numbers = [*both, int(is_held), -affordable_from]
        self._pending = self._transport.start_minimum(torch.tensor(numbers, dtype=torch.int64, device="cpu"))

    def settle(self) -> tuple[int, int] | None:
        """Read the result of the previous step. Return None before the first step.

        Returns a plan version that every rank held when that step started, at least that in force, and the first step
        in which all ranks can afford to measure gains.

        Raises WireError if ranks are at different steps or plans: their messages would not match. Also if gradients of
        the previous step had different loss scales: their sum, and the memory that is left of it, have none.

        Raises ReplicaError, on all ranks, if they held different weights when that step started, and more than rounding
        is the cause. Of rounding it warns. Call it in a backward pass.
        """
        if self._pending is None:
            return None
        values_12 = self._pending()
        self._pending = None
        held, minus_held, step, minus_step, in_force, minus_in_force, *rest = values_12.tolist()
        scale, minus_scale, weights, minus_weights, is_held, minus_affordable_from = rest
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
            self._compare(step)
        elif weights != NO_HASH:
            self._same_at, self.drift = step, 0.0
        if weights != NO_HASH:
            self.compared_step = step
        is_same = held in (-minus_held, self._sure)
        if not is_same:
            self._warn_of(-minus_held, step, in_force)
        asked, self._asked = self._asked, None if is_same else held
        agreed = held if self._asked is None else in_force
        if self._asked is not None and asked is not None and is_held:
            agreed = max(asked, in_force)
        return int(agreed), -int(minus_affordable_from)

    def _warn_of(self, version: int, step: int, in_force: int) -> None:
        """Warn once of a plan that some ranks have held for long, and others not."""
        known, since_s = self._partly
        if known != version:
            self._partly = version, time.monotonic()
        elif since_s is not None and time.monotonic() - since_s >= ARRIVES_S:
            self._partly = version, None
            if self._transport.rank == 0:
                logger.warning(
                    "step %d: some ranks hold plan %d, others do not: plan %d stays in force; call hold on every rank",
                    step,
                    version,
                    in_force,
                )

    def drift_at(self, step: int) -> float | None:
        """Return how much the ranks' weights differed before `step`, 0 if not at all; None if it is not known."""
        return self.drift if self.compared_step == step else None

    def _compare(self, step: int) -> None:
        """Find how much the weights differ, and which ranks'. All ranks come here together.

        Raises ReplicaError if more than rounding is the cause.
        """
        assert self.weight_check is not None
        hash_R = torch.full((self._transport.world_size,), _LARGEST, dtype=torch.int64, device="cpu")
        hash_R[self._transport.rank] = self._hash
        odd, others = odd_ranks(self._transport.start_minimum(hash_R)().tolist())
        layer, self.drift, limit = self.weight_check.drift(self._transport.start_minimum(self.weight_check.bounds())())
        before = "this was the first check"
        if self._same_at is not None:
            before = f"they were the same before step {self._same_at}"
        said = (
            f"rank {self._transport.rank}: before step {step} the weights of {_ranks(odd)} differ from those of "
            f"{_ranks(others)}; {before}. They differ most in layer {layer}, by {self.drift:.2g} of its norm"
        )
        if self.drift > limit:
            raise ReplicaError(
                f"{said}, more than rounding explains ({limit:.2g}). Possible causes: one rank alone changed or loaded "
                "weights; memory that returns other bits. Resume all ranks from one checkpoint; with "
                "weight_check_steps=0 nothing is compared"
            )
        has_grown = self._warned_of is None or self.drift > WARN_AGAIN * self._warned_of
        if has_grown and self._transport.rank == 0:
            self._warned_of = self.drift
            logger.warning(
                "%s, so training goes on. Processors of different kinds round differently in the optimizer; "
                "average_weights=True makes the weights the same again after each check. Above %.2g the training ends",
                said,
                limit,
            )


def odd_ranks(hashes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the ranks whose hash is another than that of the most ranks, and these; rank 0 counts more in a tie."""
    usual, _ = Counter(hashes).most_common(1)[0]
    odd = [rank for rank, one in enumerate(hashes) if one != usual]
    return odd, [rank for rank, one in enumerate(hashes) if one == usual]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed([str(rank) for rank in ranks])}"

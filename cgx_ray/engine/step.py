"""One step: gradients arrive in buckets, groups run in order, finished buckets go back to DDP."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Phases, Transport
from cgx_ray.engine.gain_meter import StepMeter
from cgx_ray.engine.group import Group
from cgx_ray.engine.loss_scale import Scales
from cgx_ray.engine.step_clock import StepClock
from cgx_ray.engine.unused import begin_unused_by_all


@dataclass(slots=True, kw_only=True)
class PendingBucket:
    """One of DDP's buckets, whose gradients became ready at `arrived_s`. DDP waits for its `future`.

    future       gets `buffer` once all gradients in it are averaged
    scales       loss scales of the gradients, see `LossScale.now`
    unused       layers without a gradient on this rank; None if DDP delivers the averages of all layers
    computed     on a CUDA device: the event after which the gradients and the scales can be read
    num_waiting  layers that are not averaged yet
    """

    gradients: Mapping[str, Tensor]
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    scales: Scales = ()
    unused: frozenset[str] | None = None
    computed: torch.cuda.Event | None = None
    arrived_s: float = field(default_factory=time.perf_counter)
    num_waiting: int = 0


class StepRun:
    """Runs every group once, as soon as its layers have arrived and the groups before it are done."""

    def __init__(
        self,
        groups: Sequence[Group],
        transport: Transport,
        clock: StepClock,
        *,
        plan_version: int,
        number: int,
        seed: int,
        meter: StepMeter | None,
        has_memory: bool,
    ) -> None:
        """
        number      number of the step
        has_memory  True if codecs remember something. A step with NaN or Inf, which GradScaler skips, must not change
                    their memory
        """
        self.groups = groups
        self.plan_version, self.number = plan_version, number
        self.meter = meter
        self.buckets: list[PendingBucket] = []
        self.phases: list[Phases] = []
        self.ready_at: list[float] = [0.0] * len(groups)
        self.last_arrival = 0.0
        self._transport = transport
        self._clock = clock
        self._seed = seed
        self._has_memory = has_memory
        self._unused_by_all: Callable[[], frozenset[str]] | None = None
        self._group_of = {name: group for group in groups for name in group.plan.layers}
        self._bucket_of: dict[str, PendingBucket] = {}

    def take(self, bucket: PendingBucket) -> None:
        """Accept a bucket and run the groups that are ready. Buckets go back when their last layer is averaged."""
        if bucket.computed is not None:
            # The bucket may have waited in the queue: it counts as arrived when the device had computed it.
            bucket.arrived_s = self._clock.time_of(bucket.computed)
        self.last_arrival = bucket.arrived_s
        self.buckets.append(bucket)
        bucket.num_waiting = len(bucket.gradients)
        for name, gradient in bucket.gradients.items():
            group = self._group_of[name]
            group.arrive(name, gradient)
            self._bucket_of[name] = bucket
            if group.is_ready:
                self.ready_at[group.index] = self.last_arrival
        if len(self._bucket_of) == len(self._group_of) and self._has_memory and bucket.unused is not None:
            unused = frozenset().union(*(bucket.unused or () for bucket in self.buckets))
            self._unused_by_all = begin_unused_by_all(self._group_of, unused, self._transport)
        while not self.is_done and self.groups[len(self.phases)].is_ready:
            self._run(self.groups[len(self.phases)])

    @property
    def is_done(self) -> bool:
        """True if all groups have run."""
        return len(self.phases) == len(self.groups)

    @property
    def missing(self) -> list[str]:
        """Layers whose gradients have not arrived."""
        return [name for name in self._group_of if name not in self._bucket_of]

    def settle(self) -> None:
        """Make the codecs' new memory valid if all averages are finite.

        The averages are the same on all ranks, so all ranks decide alike. Layers that no rank used keep their memory
        from before the step.
        """
        unused = self._unused_by_all() if self._unused_by_all is not None else frozenset[str]()
        if all(group.is_finite for group in self.groups):
            for group in self.groups:
                group.settle(unused)

    def release(self) -> None:
        """Give finished buckets back to DDP. Training continues when the last one is back."""
        for bucket in self.buckets:
            if bucket.num_waiting == 0 and not bucket.future.done():
                bucket.future.set_result(bucket.buffer)

    def _run(self, group: Group) -> None:
        stamp = Stamp(
            plan_version=self.plan_version, step=self.number, group=group.index, codec=group.plan.option.codec.name
        )
        self.phases.append(group.run(stamp, self._seed, self.meter, checks_finite=self._has_memory))
        for name in group.plan.layers:
            self._bucket_of[name].num_waiting -= 1
        if not self.is_done:
            self.release()

"""One step in the making: buckets come in, groups run in order, buckets are given back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Phases
from cgx_ray.engine.group import Group, StepMeter


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Gradients that became ready together, at `arrived_s`. `future` gets `buffer` once all of them are averaged.

    computed  on a CUDA device, when they are there
    """

    gradients: Mapping[str, Tensor]
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    computed: torch.cuda.Event | None = None
    arrived_s: float = field(default_factory=time.perf_counter)
    num_waiting: int = 0


class StepRun:
    """Runs every group once, as soon as its layers are in and the groups before it are done."""

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        plan_version: int,
        step: int,
        seed: int,
        meter: StepMeter | None,
        checks_finite: bool,
        began: tuple[float, torch.cuda.Event | None] = (0.0, None),
    ) -> None:
        """
        checks_finite  something is remembered that a step with NaN or Inf, which GradScaler skips, must leave
        began          when the step did, and the same moment on the CUDA device
        """
        self.meter = meter
        self.buckets: list[Bucket] = []
        self.phases: list[Phases] = []
        self.ready_at: list[float] = [0.0] * len(groups)
        self.last_arrival = 0.0
        self._groups = groups
        self._checks_finite = checks_finite
        self._began = began
        self._group_of = {name: group for group in groups for name in group.plan.layers}
        self._bucket_of: dict[str, Bucket] = {}
        self._plan_version, self._step, self._seed = plan_version, step, seed

    def take(self, bucket: Bucket) -> None:
        """Take in a bucket and run what has become runnable. Buckets go back when their last layer is done."""
        if bucket.computed is not None:
            began_s, began = self._began
            assert began is not None
            bucket.computed.synchronize()
            # It may have waited here since: what counts is when it was done.
            bucket.arrived_s = began_s + 1e-3 * began.elapsed_time(bucket.computed)
        self.last_arrival = bucket.arrived_s
        self.buckets.append(bucket)
        bucket.num_waiting = len(bucket.gradients)
        for name, gradient in bucket.gradients.items():
            group = self._group_of[name]
            group.arrive(name, gradient)
            self._bucket_of[name] = bucket
            if group.is_ready:
                self.ready_at[group.index] = self.last_arrival
        while not self.is_done and self._groups[len(self.phases)].is_ready:
            self._run(self._groups[len(self.phases)])

    @property
    def is_done(self) -> bool:
        """All groups have run."""
        return len(self.phases) == len(self._groups)

    @property
    def missing(self) -> list[str]:
        """Layers whose gradients have not come."""
        return [name for name in self._group_of if name not in self._bucket_of]

    def settle(self) -> None:
        """Let codecs remember this step, on all ranks or on none: the averages are the same everywhere."""
        if all(group.is_finite for group in self._groups):
            for group in self._groups:
                group.settle()

    def release(self) -> None:
        """Give back what is complete: training goes on when the last bucket is back."""
        for bucket in self.buckets:
            if bucket.num_waiting == 0 and not bucket.future.done():
                bucket.future.set_result(bucket.buffer)

    def _run(self, group: Group) -> None:
        stamp = Stamp(
            plan_version=self._plan_version, step=self._step, group=group.index, codec=group.plan.option.codec.name
        )
        self.phases.append(group.run(stamp, self._seed, self.meter, checks_finite=self._checks_finite))
        for name in group.plan.layers:
            self._bucket_of[name].num_waiting -= 1
        if not self.is_done:
            self.release()

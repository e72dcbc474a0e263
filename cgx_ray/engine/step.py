"""One step: gradients arrive, groups are averaged side by side, finished buckets go back to DDP."""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median_low

import torch.futures
from torch import Tensor

from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Handle, Phases, Transport
from cgx_ray.collectives.transport.transport_like import VendorCall, ring_bytes
from cgx_ray.engine.gains.gain_meter import StepMeter
from cgx_ray.engine.group import Group
from cgx_ray.engine.loss_scale import Scales
from cgx_ray.engine.unused import StepResult, begin_marked_by_all
from cgx_ray.engine.weight_check import NOT_HASHED, WeightHash
from cgx_ray.errors import CGXError, listed
from cgx_ray.runtime_ext.streams import DONE, Mark, Streams
from cgx_ray.torch_compat import profiled

# Steps whose median is the usual time, and the fewest that show it: the first step is unlike all others.
USUAL_STEPS, LEAST_STEPS = 31, 3
# Times the usual time from which the rest is a pause. Less is noise of small models and of data loaders.
PAUSE_FACTOR = 2.0


class Content(StrEnum):
    """Numbers that ranks average: gradients, or what steps without an exchange have changed in the parameters."""

    GRADIENTS = "gradients"
    CHANGES = "changes"


class StepClock:
    """The time at which the step under way began, which is when the host had ended the step before it.

    began_s  host time, as of `time.perf_counter`
    """

    def __init__(self, streams: Streams, watch: Callable[[Mark], None]) -> None:
        """Begin the first step. `watch` has another thread note when the device comes to a mark."""
        self._streams, self._watch = streams, watch
        self.restart()

    def restart(self) -> None:
        """Begin a step. The device may still do work of the step before."""
        self._end_before = self._streams.mark()
        self._watch(self._end_before)
        self.began_s = time.perf_counter()

    def time_of(self, arrived: EarlyGradient | PendingBucket) -> float:
        """Return the host time at which `arrived` was computed, for gradients that have been averaged. Never waits."""
        if arrived.computed is DONE:
            return arrived.arrived_s
        # Another thread has noted it long ago: before the gradients could be computed, the weights were updated.
        seen_s = self._end_before.seen_s
        if seen_s is None or not arrived.computed.is_done:
            return time.perf_counter()
        return seen_s + arrived.computed.seconds_since(self._end_before)


class PauseWatch:
    """Finds pauses between steps, such as an evaluation, a checkpoint or a report, beside what each step needs.

    Optimizer, data loading and forward come before a step's first gradient. If that takes more than PAUSE_FACTOR times
    the median of the last steps, the time beyond the median is a pause. A pause in each step is a part of the step,
    unless it is known.
    """

    def __init__(self) -> None:
        self._before_s: deque[float] = deque(maxlen=USUAL_STEPS)
        self._backward_s: deque[float] = deque(maxlen=USUAL_STEPS)

    def add_step(self, before_s: float, backward_s: float, known_s: float) -> float:
        """Add a step; return the seconds of its pauses, 0 if it had none.

        before_s    from the end of the step before to the first gradient
        backward_s  from the first gradient to the last one. A long batch needs more time for both
        known_s     known pauses of `before_s`
        """
        pause_s, known_s = 0.0, min(known_s, before_s)
        before_s -= known_s
        if len(self._before_s) >= LEAST_STEPS:
            usual_s, usual_backward_s = median_low(self._before_s), median_low(self._backward_s)
            if backward_s > usual_backward_s > 0:
                usual_s *= backward_s / usual_backward_s
            pause_s = before_s - usual_s if before_s > PAUSE_FACTOR * usual_s else 0.0
        self._before_s.append(before_s)
        self._backward_s.append(backward_s)
        return known_s + pause_s


@dataclass(slots=True, kw_only=True)
class EarlyGradient:
    """The gradient of one layer, in its place in an incomplete bucket. The other fields are as in `PendingBucket`."""

    name: str
    gradient: Tensor
    scales: Scales = ()
    computed: Mark = DONE
    weights: WeightHash = NOT_HASHED
    arrived_s: float = field(default_factory=time.perf_counter)


@dataclass(slots=True, kw_only=True)
class PendingBucket:
    """One of DDP's buckets, which came at `arrived_s`. DDP waits for its `future`. Or the changes of all parameters.

    future       gets `buffer` once all gradients in it are averaged
    scales       loss scales of the gradients, see `LossScale.now`
    unused       layers without a gradient on this rank; None if DDP delivers the averages of all layers
    computed     after it the gradients and the scales can be read
    weights      hash of this rank's weights, if they are compared in this step; only what comes first in a step has it
    summed       sum over ranks of the divided `buffer`, which DDP's own group has begun; None if the engine averages it
    content      of `gradients`
    steps        of changes, the steps that made them
    shared       on the host, float64: gets its mean over ranks. All ranks give as many numbers, or none
    num_waiting  layers that are not averaged yet
    """

    gradients: Mapping[str, Tensor]
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    scales: Scales = ()
    unused: frozenset[str] | None = None
    computed: Mark = DONE
    weights: WeightHash = NOT_HASHED
    arrived_s: float = field(default_factory=time.perf_counter)
    summed: VendorCall | None = None
    content: Content = Content.GRADIENTS
    steps: range = range(0)
    shared: Tensor | None = None
    num_waiting: int = 0


@dataclass(slots=True)
class StepStart:
    """Asks for a step to begin before its first gradient.

    `future` gets True if DDP's own all-reduce may average the step.
    """

    future: concurrent.futures.Future[bool] = field(default_factory=concurrent.futures.Future)


Arrived = EarlyGradient | PendingBucket | StepStart


@dataclass(slots=True)
class _UnderWay:
    """A group whose exchange has begun, and the handle that it has waited for since `since_s`."""

    group: Group
    phases: Phases
    turns: Iterator[Handle]
    handle: Handle = field(default_factory=list)
    since_s: float = 0.0


class StepRun:
    """Averages every group once.

    Groups begin in plan order, each when its layers have arrived and the device has computed them. Those that a device
    sums by itself do not wait for that. From then on they share the thread: of the groups that can go on, the oldest
    does. So the network carries one group while the thread encodes or decodes another. The order in which ranks go on
    with their groups may differ; the messages of each group have a channel of their own.

    unread   arrivals whose loss scales were not read yet; first the one that began the step
    is_open  True once the first of them was read: no group begins before that
    """

    def __init__(
        self,
        groups: Sequence[Group],
        transport: Transport,
        clock: StepClock,
        *,
        plan_version: int,
        steps: range,
        seed: int,
        meter: StepMeter | None,
        has_memory: bool,
    ) -> None:
        """
        steps       steps that have made what is averaged; the last one is the number of this step
        has_memory  True if codecs remember something. A step with NaN or Inf, which GradScaler skips, must not change
                    their memory
        """
        self.groups = groups
        self.plan_version, self.num_steps, self.number = plan_version, len(steps), steps[-1]
        self.meter = meter
        self.buckets: list[PendingBucket] = []
        # Those of them that DDP waits for.
        self._kept: list[PendingBucket] = []
        self.phases = [Phases() for _ in groups]
        self.ready_at: list[float] = [0.0] * len(groups)
        self.first_arrival = self.last_arrival = 0.0
        self.unread: deque[EarlyGradient | PendingBucket] = deque()
        self.is_open = False
        self._first: EarlyGradient | PendingBucket | None = None
        # By group, what brought its last layer.
        self._completed_by: dict[int, EarlyGradient | PendingBucket] = {}
        self._transport = transport
        self._clock = clock
        self._seed = seed
        self._has_memory = has_memory
        self._unused_by_all: Callable[[], frozenset[str]] | None = None
        self._group_of = {name: group for group in groups for name in group.plan.layers}
        self._bucket_of: dict[str, PendingBucket] = {}
        self._num_begun = 0
        self._averaged: set[str] = set()
        # Averages that may go back: those of groups with NaN or Inf wait until all ranks know in which layers it is.
        self._returned: set[str] = set()
        # Of what `PendingBucket.shared` has.
        self.shared_bytes = 0
        self._under_way: list[_UnderWay] = []

    def take_early(self, early: EarlyGradient) -> None:
        """Accept a gradient before its bucket."""
        self._arrive({early.name: early.gradient}, early)

    def take(self, bucket: PendingBucket) -> None:
        """Accept a bucket. Buckets go back when their last layer is averaged."""
        self.buckets.append(bucket)
        self._kept.append(bucket)
        if bucket.summed is not None:
            self._transport.count_sum(bucket.buffer)
        self._arrive({n: gradient for n, gradient in bucket.gradients.items() if n not in self._averaged}, bucket)
        bucket.num_waiting = sum(name not in self._returned for name in bucket.gradients)
        self._bucket_of.update(dict.fromkeys(bucket.gradients, bucket))
        if len(self._bucket_of) == len(self._group_of) and self._has_memory and bucket.unused is not None:
            unused = frozenset().union(*(bucket.unused or () for bucket in self.buckets))
            self._unused_by_all = begin_marked_by_all(self._group_of, unused, self._transport)
        if not self._is_averaged:
            self.release()

    @property
    def has_work(self) -> bool:
        """True if `work` can do or wait for something."""
        return bool(self._under_way) or self._next is not None or bool(self.unread)

    @property
    def is_done(self) -> bool:
        """True if all gradients are averaged, all buckets are here and their loss scales were read."""
        return self._is_averaged and not self.unread

    @property
    def _is_averaged(self) -> bool:
        return len(self._averaged) == len(self._bucket_of) == len(self._group_of)

    @property
    def missing(self) -> list[str]:
        """Layers whose gradients have not arrived."""
        return [name for name in self._group_of if name not in self._bucket_of]

    def overdue(self) -> CGXError:
        """Return the error of a step whose gradients do not arrive in time."""
        timeout_s = f"{self._transport.timeout_s:g} s"
        return CGXError(
            f"rank {self._transport.rank}, step {self.number}: {len(self.missing)} of {len(self._group_of)} layers "
            f"have no gradient {timeout_s} after the last one arrived: {listed(self.missing)}. Possible causes: the "
            "loss does not use them (give DistributedDataParallel find_unused_parameters=True); they were frozen or "
            "unfrozen after DistributedDataParallel was built (build it and attach again); backward raised an "
            f"error; or backward takes longer than {timeout_s} (give attach or CGXConfig a larger timeout_s)"
        )

    def closed_within(self) -> CGXError:
        """Return the error of a step in which the engine was closed."""
        return CGXError(
            f"rank {self._transport.rank}, step {self.number}: closed in the middle of backward, before the gradients "
            f"of {listed(self.missing)} had come; close between steps, or once the thread that trains has ended"
        )

    def work(self) -> None:
        """Go on with the oldest group that can, or begin one; if none can, wait until one can or the thread is woken.

        Raises TransportError if a group waits for longer than the time-out.
        """
        group = self._next
        awaited = self._awaited_before(group)
        can_begin = group is not None and awaited is None
        handles = [one.handle for one in self._under_way]
        if awaited is not None:
            handles.append(awaited)
        if handles:
            since_s = self._under_way[0].since_s if self._under_way else time.perf_counter()
            wait_s = 0.0 if can_begin else since_s + self._transport.timeout_s - time.perf_counter()
            place = self._transport.wait_any(handles, max(wait_s, 0.0))
            if place is None and not can_begin and wait_s <= 0:
                place = 0
            if place == len(self._under_way):
                self._transport.finish(handles[place])
                return
            if place is not None:
                one = self._under_way[place]
                self._transport.group_index = one.group.index
                self._transport.finish(one.handle, time.perf_counter() - one.since_s)
                self._go_on(one)
                return
        if group is not None and can_begin:
            self._begin(group)

    def conclude(self) -> StepResult:
        """Return what the model gets. A layer that has NaN or Inf on any rank then has it in its average.

        The averages are the same on all ranks, so all ranks know whether to exchange the names of layers.
        """
        for bucket in self.buckets:
            if bucket.shared is not None:
                self._share(bucket.shared)
        unused = self._unused_by_all() if self._unused_by_all is not None else frozenset[str]()
        suspects = [group for group in self.groups if not group.is_finite]
        if not suspects:
            return StepResult(unused=unused)
        names = frozenset(name for group in suspects for name in group.plan.layers)
        sound = names.difference(*(group.find_broken() for group in suspects))
        broken = names - begin_marked_by_all(names, sound, self._transport)()
        for group in suspects:
            group.mark(broken)
            self._return(group)
        return StepResult(unused=unused, broken=broken)

    def note_arrivals(self) -> None:
        """Set the times at which gradients arrived, of a step that is done."""
        assert self._first is not None
        self.first_arrival = self._clock.time_of(self._first)
        self.last_arrival = self._clock.time_of(self.buckets[-1])
        for index, arrived in self._completed_by.items():
            self.ready_at[index] = self._clock.time_of(arrived)
            self.phases[index].leave_out_before(self.ready_at[index])

    def release(self) -> None:
        """Give finished buckets back to DDP. Training continues when the last one is back."""
        finished = [bucket for bucket in self._kept if bucket.num_waiting == 0]
        if finished:
            self._kept = [bucket for bucket in self._kept if bucket.num_waiting]
        for bucket in finished:
            bucket.future.set_result(bucket.buffer)

    def _share(self, shared: Tensor) -> None:
        """Replace `shared` by its mean over ranks. All ranks have started their groups' sums by now."""
        self.shared_bytes += ring_bytes(shared.numel() * shared.element_size(), self._transport.world_size)
        for handle in self._transport.all_reduce(shared):
            self._transport.finish(handle)
        shared /= self._transport.world_size

    def _arrive(self, gradients: Mapping[str, Tensor], brought_by: EarlyGradient | PendingBucket) -> None:
        self._first = self._first or brought_by
        for name, gradient in gradients.items():
            group = self._group_of[name]
            was_ready = group.is_ready
            summed = brought_by.summed if isinstance(brought_by, PendingBucket) else None
            group.arrive(name, gradient, brought_by.computed, summed)
            if group.is_ready and not was_ready:
                self._completed_by[group.index] = brought_by

    @property
    def _next(self) -> Group | None:
        """The group that may begin as soon as the device has computed its gradients; None if there is none."""
        if not self.is_open or self._num_begun == len(self.groups) or not self.groups[self._num_begun].is_ready:
            return None
        group = self.groups[self._num_begun]
        if not self._under_way:
            return group
        begun_bytes = sum(one.group.message_bytes for one in self._under_way)
        is_free = self._transport.takes_many and not any(one.group.keeps_order for one in self._under_way)
        return group if is_free and begun_bytes + group.message_bytes <= group.window_bytes else None

    def _awaited_before(self, group: Group | None) -> Mark | None:
        """Return what the device must come to before `group`, the next one, begins; None if it can begin now.

        If there is no such group, that is before the next loss scale can be read.
        """
        if group is not None:
            # The host reads the gradients that it measures.
            return None if group.is_enqueued and self.meter is None else group.awaited
        if not self.unread:
            return None
        computed, hashed = self.unread[0].computed, self.unread[0].weights.written
        return hashed if computed.is_done else computed

    def _begin(self, group: Group) -> None:
        stamp = Stamp(
            plan_version=self.plan_version, step=self.number, group=group.index, codec=group.plan.option.codec.name
        )
        phases = self.phases[group.index]
        turns = group.turns(stamp, self._seed, self.meter, phases, checks_finite=self._has_memory)
        self._num_begun += 1
        # Groups begin in plan order, so the oldest stays first.
        self._under_way.append(_UnderWay(group, phases, turns))
        self._transport.group_index = group.index
        self._go_on(self._under_way[-1])

    def _go_on(self, one: _UnderWay) -> None:
        one.phases.resume()
        with profiled(f"group {one.group.index}"):
            handle = next(one.turns, None)
        if handle is None:
            self._under_way = [other for other in self._under_way if other is not one]
            self._end(one.group)
        else:
            one.handle, one.since_s = handle, time.perf_counter()

    def _end(self, group: Group) -> None:
        """Note that `group` is averaged, and release the buckets that this finishes."""
        self._averaged.update(group.plan.layers)
        if group.is_finite:
            self._return(group)
        if not self._is_averaged:
            self.release()

    def _return(self, group: Group) -> None:
        self._returned.update(group.plan.layers)
        for name in group.plan.layers:
            if name in self._bucket_of:
                self._bucket_of[name].num_waiting -= 1

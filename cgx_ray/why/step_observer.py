"""Times of the steps of all DDP models of a process, by hooks that change nothing and wait for nothing."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from cgx_ray.engine.forward_hook import ForwardHook
from cgx_ray.runtime_ext.streams import Mark, streams_of
from cgx_ray.torch_compat import bucket_parameters, call_after_backward, has_rebuilt_buckets
from cgx_ray.why.records import ObservedLayer, StepTimes

# First steps, in which DDP makes its buckets anew, kernels are chosen and caches fill.
NUM_WARM_STEPS = 5
# Steps whose readiness of gradients is kept: it is that of the median one.
_NUM_READY = 16

Part = Literal["input", "forward", "backward", "exposed", "rest"]


class _Clock(Protocol):
    """Marks points of time, and reads them when they are known."""

    def mark(self) -> Any: ...

    def is_done(self, mark: Any) -> bool: ...

    def seconds(self, first: Any, last: Any) -> float: ...


class _HostMarks:
    def mark(self) -> float:
        return time.perf_counter()

    def is_done(self, mark: float) -> bool:
        return True

    def seconds(self, first: float, last: float) -> float:
        return last - first


class _DeviceMarks:
    """Marks the current stream, behind which the host runs ahead. Nobody waits for a mark."""

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)

    def mark(self) -> Mark:
        return self._streams.mark()

    def is_done(self, mark: Mark) -> bool:
        return mark.is_done

    def seconds(self, first: Mark, last: Mark) -> float:
        return last.seconds_since(first)


class _Raw(NamedTuple):
    """A step whose marks may not be reached yet.

    parts        what ended at each mark, the first of which is the begin of the step
    full_bucket  when DDP could begin to average, and the end of that backward; None if unknown
    """

    parts: Sequence[tuple[Part, Any]]
    full_bucket: tuple[Any, Any] | None
    processor_s: float
    num_exchanges: int


class _Observed:
    """A model, and when its gradients were ready in the last steps: seconds from the begin of forward, on the host.

    first_bucket, missing
              places of the gradients with which the exchange begins, and of those still to come in this backward
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        # A script may build a model, throw it away and build another one.
        self.model = weakref.ref(model)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.numel = sum(parameter.numel() for parameter in parameters)
        self.begin_s = 0.0
        self.ready_at_s = [0.0] * len(parameters)
        self.ready_s: deque[list[float]] = deque(maxlen=_NUM_READY)
        self.first_bucket: frozenset[int] = frozenset()
        self.missing: set[int] = set()


class StepObserver:
    """Observes each DDP model given to `add_model`.

    A step ends with the last optimizer step before the next forward pass. It may have several backward passes, of one
    model or more; parts of one name are added up. Without an exchange it is none. Evaluations are in no step.

    lead  the largest model that was there after the warm steps; None before that
    """

    def __init__(self, num_steps: int, on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
        """
        num_steps  steps to measure, after NUM_WARM_STEPS
        on_begin   called after the last warm step
        on_end     called after the last step, when its times are known
        """
        self._num_steps, self._on_begin, self._on_end = num_steps, on_begin, on_end
        self._clock: _Clock = _HostMarks()
        self._handles: list[Any] = []
        self._models: list[_Observed] = []
        self.lead: _Observed | None = None
        self.device = ""
        # Of the step under way. The first of the parts is its begin.
        self._parts: list[tuple[Part, Any]] = []
        self._full_bucket: list[Any] = []
        self._num_exchanges = 0
        self._will_average = self._in_backward = self._has_stepped = False
        self._knows_optimizer = False
        self._processor_s = time.process_time()
        self._waiting: deque[_Raw] = deque()
        self._all_exchanges = 0
        self.num_warm = 0
        self.steps: list[StepTimes] = []
        self.bucket_bytes: tuple[int, ...] = ()
        self.is_done = False

    @property
    def num_models(self) -> int:
        """Models that were built so far."""
        return len(self._models)

    @property
    def mean_exchanges(self) -> float:
        """Exchanges of a step: above 1 if gradients are averaged in each of several backward passes."""
        return self._all_exchanges / len(self.steps) if self.steps else 1.0

    def add_model(self, model: DistributedDataParallel, guarded: Callable[..., Callable[..., None]]) -> None:
        """Observe `model` from now on. `guarded`: as `Guard.wrapped`."""
        if self.is_done:
            return
        one, first = _Observed(model), next(model.parameters())
        if not self._models:
            self.device = first.device.type
            if self.device == "cuda":
                self._clock = _DeviceMarks(first.device)
            # Dynamo, which compiled models and steps would have look into hooks, cannot.
            stepped = torch.compiler.disable(guarded(self._optimizer_stepped))
            self._handles.append(register_optimizer_step_post_hook(stepped))
        before = torch.compiler.disable(guarded(partial(self._before_forward, one), self.close))
        after = torch.compiler.disable(guarded(partial(self._after_forward, one)))
        self._handles.append(model.register_forward_pre_hook(ForwardHook(before)))
        self._handles.append(model.register_forward_hook(ForwardHook(after)))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for place, parameter in enumerate(trained):
            call = guarded(partial(self._gradient_ready, one, place))
            self._handles.append(parameter.register_post_accumulate_grad_hook(call))
        self._models.append(one)

    def layers(self) -> tuple[ObservedLayer, ...]:
        """Return the parameters of the leading model; on a device without the times of their gradients."""
        model = self.lead.model() if self.lead is not None else None
        if self.lead is None or model is None:
            return ()
        named = [(name, one) for name, one in model.module.named_parameters() if one.requires_grad]
        times = [median(times) for times in zip(*self.lead.ready_s, strict=True)]
        is_timed = isinstance(self._clock, _HostMarks) and len(times) == len(named)
        return tuple(
            ObservedLayer(
                name=name,
                shape=tuple(one.shape),
                dtype=str(one.dtype).removeprefix("torch."),
                ready_s=max(0.0, ready_s),
            )
            for (name, one), ready_s in zip(named, times if is_timed else [0.0] * len(named), strict=True)
        )

    def close(self) -> None:
        """Take the hooks out. Not from within a hook of an optimizer, whose hooks torch is going through."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def finish(self) -> None:
        """Count the step under way, if its optimizer has stepped: there may be no other one."""
        if self._num_exchanges and (self._has_stepped or not self._knows_optimizer):
            self._end_step()

    def _before_forward(self, one: _Observed, *_: object) -> None:
        self.finish()
        if self.is_done:
            self.close()
        elif not torch.is_grad_enabled():
            if not self._num_exchanges:
                self._parts = []  # the script evaluates: the next forward pass begins a step
        else:
            self._in_backward = False  # also if the last one has raised
            self._parts.append(("input", self._clock.mark()))
            one.begin_s = time.perf_counter()

    def _after_forward(self, one: _Observed, *_: object) -> None:
        model = one.model()
        if not torch.is_grad_enabled() or self.is_done or model is None:
            return
        self._parts.append(("forward", self._clock.mark()))
        if model.require_backward_grad_sync:
            self._will_average = True
            one.missing = set(one.first_bucket)

    def _gradient_ready(self, one: _Observed, place: int, _: Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            # DDP's own callback, which waits for the averages, is there when the first of these is called. So the
            # second one comes after it.
            call_after_backward(self._backward_ended)
        one.ready_at_s[place] = time.perf_counter()
        if place in one.missing:
            one.missing.discard(place)
            if not one.missing:
                self._full_bucket = [self._clock.mark()]

    def _backward_ended(self) -> None:
        mark = self._clock.mark()
        self._parts.append(("backward", mark))
        if len(self._full_bucket) == 1:
            self._full_bucket.append(mark)
        call_after_backward(self._exchange_ended)

    def _exchange_ended(self) -> None:
        self._in_backward = False
        if self._will_average:
            self._parts.append(("exposed", self._clock.mark()))
            self._num_exchanges += 1
            if (lead := self.lead) is not None:
                lead.ready_s.append([at_s - lead.begin_s for at_s in lead.ready_at_s])
        self._will_average = False

    def _optimizer_stepped(self, *_: object) -> None:
        self._knows_optimizer = True
        if self._num_exchanges:
            self._parts.append(("rest", self._clock.mark()))
            self._has_stepped = True

    def _end_step(self) -> None:
        now_s = time.process_time()
        ends = (self._full_bucket[0], self._full_bucket[1]) if len(self._full_bucket) == 2 else None
        self._waiting.append(_Raw(self._parts, ends, now_s - self._processor_s, self._num_exchanges))
        self._processor_s = now_s
        self._parts = [("rest", self._parts[-1][1])]
        self._full_bucket, self._num_exchanges, self._has_stepped = [], 0, False
        while self._waiting and self._clock.is_done(self._waiting[0].parts[-1][1]) and not self.is_done:
            self._take(self._waiting.popleft())

    def _take(self, raw: _Raw) -> None:
        if self.num_warm < NUM_WARM_STEPS:
            self.num_warm += 1
            if self.num_warm == NUM_WARM_STEPS:
                self._choose_lead()
                self._on_begin()
                # What `on_begin` took is in no step.
                self._parts = [("rest", self._clock.mark())]
            return
        seconds: dict[Part, float] = dict.fromkeys(("input", "forward", "backward", "exposed", "rest"), 0.0)
        for (_, before), (part, mark) in zip(raw.parts, raw.parts[1:], strict=False):
            seconds[part] += self._clock.seconds(before, mark)
        hidden_s = self._clock.seconds(*raw.full_bucket) if raw.full_bucket else 0.0
        named = {f"{part}_s": value for part, value in seconds.items()}
        self.steps.append(StepTimes(**named, hidden_s=max(0.0, hidden_s), processor_s=raw.processor_s))
        self._all_exchanges += raw.num_exchanges
        if len(self.steps) == self._num_steps:
            self.is_done = True
            self._on_end()

    def _choose_lead(self) -> None:
        alive = [(one, model) for one in self._models if (model := one.model()) is not None]
        self.lead, model = max(alive, key=lambda pair: pair[0].numel)
        if not has_rebuilt_buckets(model):
            return  # with unused parameters DDP keeps its first buckets, in another order than that of backward
        try:
            buckets = bucket_parameters(model)
        except RuntimeError:
            return  # gradients are sparse, of which DDP does not say where they are
        self.bucket_bytes = tuple(sum(one.numel() * one.element_size() for one in bucket) for bucket in buckets)
        places = {id(one): place for place, one in enumerate(one for one in model.parameters() if one.requires_grad)}
        # Parameters that were frozen since are in DDP's buckets still.
        self.lead.first_bucket = frozenset(places[id(one)] for one in buckets[0] if id(one) in places)

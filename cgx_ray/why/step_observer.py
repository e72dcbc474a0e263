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
from torch.utils.hooks import RemovableHandle

from cgx_ray.engine.forward_hook import ForwardHook
from cgx_ray.runtime_ext.streams import Mark, streams_of
from cgx_ray.torch_compat import bucket_parameters, call_after_backward, has_rebuilt_buckets
from cgx_ray.why.records import ObservedLayer, StepTimes

# First steps, in which DDP makes its buckets anew, kernels are chosen and caches fill.
NUM_WARM_STEPS = 5

Part = Literal["input", "forward", "backward", "exposed", "rest"]


class _Clock(Protocol):
    """Marks points of time, and reads them when they are known."""

    def mark(self) -> Any: ...

    def is_done(self, mark: Any) -> bool: ...

    def seconds(self, first: Any, last: Any) -> float: ...

    def is_capturing(self) -> bool: ...


class _HostMarks:
    def mark(self) -> float:
        return time.perf_counter()

    def is_done(self, mark: float) -> bool:
        return True

    def seconds(self, first: float, last: float) -> float:
        return last - first

    def is_capturing(self) -> bool:
        return False


class _DeviceMarks:
    """Marks the current stream, behind which the host runs ahead. Nobody waits for a mark."""

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)
        self.is_capturing = self._streams.is_capturing

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
    """A model, and when its gradients were ready in the warm steps: seconds from the begin of forward, on the host.

    hooks        of its gradients, in the order of its parameters
    first_full   place of the gradient with which the exchange begins, the only one with a hook after the warm steps:
                 a call for each gradient takes 5 % of short steps. None, and hooks on all, if DDP does not say which
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        # A script may build a model, throw it away and build another one.
        self.model = weakref.ref(model)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.numel = sum(parameter.numel() for parameter in parameters)
        self.hooks: list[RemovableHandle] = []
        self.begin_s = 0.0
        self.ready_at_s = [0.0] * len(parameters)
        self.ready_s: list[list[float]] = []
        self.first_full: int | None = None
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}

    def end_warm_steps(self, model: DistributedDataParallel) -> tuple[int, ...]:
        """Keep only the hook that times need; return the bytes of DDP's buckets, or () if it does not say them."""
        if not has_rebuilt_buckets(model):
            return ()  # with unused parameters DDP keeps its first buckets, in another order than that of backward
        try:
            buckets = bucket_parameters(model)
        except RuntimeError:
            return ()  # gradients are sparse, of which DDP does not say where they are
        last = max((self._places[id(one)] for one in buckets[0]), key=lambda place: self.ready_at_s[place])
        if self.ready_at_s[last]:  # and not frozen since DDP was built
            self.first_full = last
            for hook in self.hooks[:last] + self.hooks[last + 1 :]:
                hook.remove()
        return tuple(sum(one.numel() * one.element_size() for one in bucket) for bucket in buckets)


class StepObserver:
    """Observes each DDP model given to `add_model`.

    A step ends with the last optimizer step before the next forward pass. It may have several backward passes, of one
    model or more; parts of one name are added up. Without an exchange it is none. Evaluations are in no step.

    While a CUDA graph is captured, hooks do nothing.

    lead  the largest model that was there after the warm steps; None before that
    """

    def __init__(
        self,
        num_steps: int,
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
        guarded: Callable[..., Callable[..., None]],
    ) -> None:
        """
        num_steps  steps to measure, after NUM_WARM_STEPS
        on_begin   called after the last warm step
        on_end     called after the last step, when its times are known
        guarded    as `Guard.wrapped`
        """
        self._num_steps, self._on_begin, self._on_end, self._guarded = num_steps, on_begin, on_end, guarded
        self._on_backward_end, self._on_exchange_end = guarded(self._backward_ended), guarded(self._exchange_ended)
        self._clock: _Clock = _HostMarks()
        self._handles: list[RemovableHandle] = []
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

    def add_model(self, model: DistributedDataParallel) -> None:
        """Observe `model` from now on."""
        if self.is_done:
            return
        one, first = _Observed(model), next(model.parameters())
        if not self._models:
            self.device = first.device.type
            if self.device == "cuda":
                self._clock = _DeviceMarks(first.device)
            # Dynamo, which compiled models and steps would have look into hooks, cannot.
            stepped = torch.compiler.disable(self._hook(self._optimizer_stepped))
            self._handles.append(register_optimizer_step_post_hook(stepped))
        before = torch.compiler.disable(self._hook(partial(self._before_forward, one), self.close))
        after = torch.compiler.disable(self._hook(partial(self._after_forward, one)))
        self._handles.append(model.register_forward_pre_hook(ForwardHook(before)))
        self._handles.append(model.register_forward_hook(ForwardHook(after)))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for place, parameter in enumerate(trained):
            call = self._hook(partial(self._gradient_ready, one, place))
            one.hooks.append(parameter.register_post_accumulate_grad_hook(call))
        self._handles += one.hooks
        self._models.append(one)

    def _hook(self, act: Callable[..., None], *when_over: Callable[[], None]) -> Callable[..., None]:
        def call(*given: Any) -> None:
            # A CUDA graph would hold the marks of its capture, and its replay calls no hook.
            if not self._clock.is_capturing():
                act(*given)

        return self._guarded(call, *when_over)

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

    def _gradient_ready(self, one: _Observed, place: int, _: Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            # DDP's own callback, which waits for the averages, is there when the first of these is called. So the
            # second one comes after it.
            call_after_backward(self._on_backward_end)
        if self.lead is None:
            one.ready_at_s[place] = time.perf_counter()
        elif one is self.lead and place == one.first_full and self._will_average:
            self._full_bucket = [self._clock.mark()]

    def _backward_ended(self) -> None:
        mark = self._clock.mark()
        self._parts.append(("backward", mark))
        if len(self._full_bucket) == 1:
            self._full_bucket.append(mark)
        call_after_backward(self._on_exchange_end)

    def _exchange_ended(self) -> None:
        self._in_backward = False
        if self._will_average:
            self._parts.append(("exposed", self._clock.mark()))
            self._num_exchanges += 1
            for one in self._models if self.lead is None else ():
                if one.begin_s:
                    one.ready_s.append([at_s - one.begin_s for at_s in one.ready_at_s])
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
        self.lead, _ = max(alive, key=lambda pair: pair[0].numel)
        for one, model in alive:
            bucket_bytes = one.end_warm_steps(model)
            if one is self.lead:
                self.bucket_bytes = bucket_bytes

"""Times at which the gradients of a model are ready: backward measured by hooks, for the planner."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from cgx_ray.errors import ConfigError
from cgx_ray.runtime_ext.streams import Mark, streams_of


def measure_ready_s(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    num_steps: int,
    num_warm_steps: int,
    on_step: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return seconds from the start of forward until each gradient of `model` is ready: the median of `num_steps`.

    loss            runs forward and returns the loss; its gradients are computed and thrown away
    num_warm_steps  steps before the measured ones

    On a CUDA device the times are those of its stream, which runs behind the host. Raises ConfigError if no parameter
    requires a gradient, or if one of them gets none.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ConfigError("the model has no parameter with requires_grad; give one that is trained")
    device = next(iter(trained.values())).device
    clock = _DeviceClock(device) if device.type == "cuda" else _HostClock()
    times_s: dict[str, list[float]] = defaultdict(list)
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: clock.mark(name))
        for name, parameter in trained.items()
    ]
    try:
        for step in range(num_warm_steps + num_steps):
            model.zero_grad(set_to_none=True)
            clock.start()
            value = loss()
            if value.numel() != 1 or not value.requires_grad:
                has = "a" if value.requires_grad else "no"
                raise ConfigError(
                    f"the loss has {value.numel()} elements with {has} gradient; return one number that has a gradient"
                )
            value.backward()
            for name, seconds in clock.read_s().items():
                if step >= num_warm_steps:
                    times_s[name].append(seconds)
            on_step()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    idle = [name for name in trained if name not in times_s]
    if idle:
        raise ConfigError(
            f"{idle[0]} and {len(idle) - 1} others of {len(trained)} parameters got no gradient; use them in the loss, "
            "or freeze them with requires_grad_(False), since every rank would wait for them"
        )
    return {name: median(times_s[name]) for name in trained}


class _HostClock:
    def __init__(self) -> None:
        self._marks: dict[str, float] = {}
        self._start = time.perf_counter()

    def start(self) -> None:
        self._marks = {}
        self._start = time.perf_counter()

    def mark(self, name: str) -> None:
        self._marks[name] = time.perf_counter()

    def read_s(self) -> dict[str, float]:
        return {name: mark - self._start for name, mark in self._marks.items()}


class _DeviceClock:
    """Autograd runs a hook on the stream of its parameter's gradient, so a mark made there comes after the gradient."""

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)
        self._marks: dict[str, Mark] = {}
        self._start = self._streams.mark()

    def start(self) -> None:
        self._marks = {}
        self._start = self._streams.mark()

    def mark(self, name: str) -> None:
        self._marks[name] = self._streams.mark()

    def read_s(self) -> dict[str, float]:
        self._streams.wait_for_all()
        return {name: mark.seconds_since(self._start) for name, mark in self._marks.items()}

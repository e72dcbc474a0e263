"""A model whose backward sleeps each layer's share and then returns a fixed gradient, as a GPU would compute it.

Several such "GPUs" fit on one processor, and what is left of it goes to codecs and exchange.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Seconds. A sleep takes some 0.06 ms longer than asked, so less than this is not worth one; the next layers make it up.
SHORTEST_SLEEP_S = 1e-4


class BackwardClock:
    """Tells backward when each layer's gradient is due.

    The times are absolute, since `begin`: a sleep that took too long, or the copy of a large gradient, shortens the
    sleeps after it.
    """

    def __init__(
        self,
        backward_s: Sequence[float],
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`backward_s`: seconds of each layer, in the order of backward."""
        self._due_s = tuple(itertools.accumulate(backward_s))
        self._now = now
        self._sleep = sleep
        self._began_s = 0.0

    def begin(self) -> None:
        self._began_s = self._now()

    def wait(self, index: int) -> None:
        """Sleep until the gradient of the layer with this place in backward is due."""
        left_s = self._began_s + self._due_s[index] - self._now()
        if left_s >= SHORTEST_SLEEP_S:
            self._sleep(left_s)


class SleepingModel(nn.Module):
    """Parameters of a real model, with a forward that is free and a backward that sleeps.

    Values of parameters are never read: the system gives them no memory. There must be no optimizer.
    """

    def __init__(self, names: Sequence[str], gradients: Sequence[Tensor], clock: BackwardClock) -> None:
        """
        names      allowed by torch, in registration order
        gradients  one per layer, returned by every backward; never changed, so models can share them
        """
        super().__init__()
        self._gradients = gradients
        self._clock = clock
        for name, gradient in zip(names, gradients, strict=True):
            self.register_parameter(name, nn.Parameter(torch.zeros_like(gradient)))

    def forward(self, token: Tensor) -> Tensor:
        """Pass a scalar through all layers. Backward then visits them from the last to the first."""
        last = len(self._gradients) - 1
        for index, (parameter, gradient) in enumerate(zip(self.parameters(), self._gradients, strict=True)):
            token = _LayerShare.apply(  # type: ignore[no-untyped-call]
                token, parameter, gradient, self._clock, last - index
            )
        return token


class _LayerShare(torch.autograd.Function):
    """One layer: the identity of `token` in forward."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, parameter: Tensor, gradient: Tensor, clock: BackwardClock, index: int
    ) -> Tensor:
        ctx.gradient, ctx.clock, ctx.index = gradient, clock, index
        return token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_token: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.wait(ctx.index)
        # A new tensor over the same memory: autograd keeps it without a copy, because nothing else holds it, and DDP
        # with gradient_as_bucket_view copies it into its bucket once and puts the bucket in its place.
        return grad_token, ctx.gradient.detach(), None, None, None


def fixed_gradients(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    """Return normal values for each shape, float32. Layers differ in size by up to 100 times, as in real models."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.Generator().manual_seed(0)  # the same on all ranks
    gradients = []
    for shape in shapes:
        scale = 10 ** (-2 - 2 * torch.rand((), generator=sizes).item())
        gradients.append(torch.randn(shape, generator=generator).mul_(scale))
    return gradients

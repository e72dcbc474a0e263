"""Steps of a training whose gradients are calls of a traced device, or computed at once on the CPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from cgx_ray.codecs.codec import HOST
from cgx_ray.collectives import Transport
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.step import EarlyGradient, PendingBucket
from cgx_ray.plan import CodecSpec, Layer, Plan
from cgx_ray.runtime_ext.streams import Mark
from support.device.traced_device import DEVICE, TracedDevice


class TracedTraining:
    """An engine, and gradients that are chosen by chance, the same on a device and on the CPU.

    given  gradients of the last step by layer
    """

    def __init__(
        self,
        rank: int,
        layers: Sequence[Layer],
        plan: Plan,
        transport: Transport,
        device: TracedDevice | None,
        by_layer: Sequence[CodecSpec] = (),
    ) -> None:
        self.engine = Engine(layers, plan, transport, device=HOST if device is None else DEVICE, by_layer=by_layer)
        self.num_groups = len(plan.groups)
        self.given: dict[str, Tensor] = {}
        self._layers = layers
        self._device, self._streams = device, self.engine.streams
        self._random = torch.Generator().manual_seed(rank)
        names = [name for one in plan.groups for name in one.layers]
        numels = {layer.name: layer.numel for layer in layers}
        self._buffer = torch.zeros(sum(numels.values()), dtype=getattr(torch, layers[0].dtype))
        self._views = dict(zip(names, self._buffer.split([numels[name] for name in names]), strict=True))
        if device is None:
            return
        device.own(self._buffer)
        for group in self.engine._banks.gradients.groups:
            if group._memory is not None and group._device == DEVICE:
                for value in (*group._memory.now.values(), *group._memory.next.values()):
                    device.own(value)

    def remember(self, value: float) -> None:
        """Let each layer have a residual of another plan in the device's memory, with this value in all elements."""
        residuals = {layer.name: torch.full((layer.numel,), value) for layer in self._layers}
        self.engine.load_state(0, {"residuals": residuals, "momentum": {}, "powersgd_q": {}})
        if self._device is not None:
            for layer in self._layers:
                residual = self.engine._banks.gradients.memories.residual(layer.name)
                assert residual is not None
                self._device.own(residual)

    def step(
        self, scales: tuple[Tensor, ...] = (), *, unused: Collection[str] | None = None, broken: str | None = None
    ) -> Tensor:
        """Return the averages of one step, in the order of the first plan.

        unused  layers that this rank has not used: their gradients are zero; None if DDP does not find them
        broken  layer in whose gradient one element is NaN
        """
        future = self._streams.future()
        computed = {name: self._backward(name, name in (unused or ()), name == broken) for name in self._views}
        *early, last = computed
        for name in early:
            self.engine.submit(
                EarlyGradient(name=name, gradient=self._views[name], scales=scales, computed=computed[name])
            )
        self.engine.submit(
            PendingBucket(
                gradients=self._views,
                buffer=self._buffer,
                future=future,
                scales=scales,
                computed=computed[last],
                unused=frozenset(unused) if unused is not None else None,
            )
        )
        future.wait()
        self._streams.mark().wait()
        if self._device is not None:
            self._device.touch([self._buffer], [], "the optimizer")
        return self._buffer.clone()

    def _backward(self, name: str, is_unused: bool, is_broken: bool) -> Mark:
        view = self._views[name]
        value = torch.randn(view.shape, generator=self._random).to(view.dtype)
        if is_unused:
            value.zero_()
        if is_broken:
            value[len(value) // 2] = torch.nan
        self.given[name] = value
        if self._device is None:
            view.copy_(value)
        else:
            self._device.launch(lambda: view.copy_(value), [], [view])
        return self._streams.mark()

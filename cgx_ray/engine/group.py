"""One group of layers at work: gathers the gradients, exchanges them, writes the averages back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import HOST, is_finite
from cgx_ray.codecs.feedback import Memories
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Handle, Phases, Transport, make_exchange
from cgx_ray.engine.gain_meter import StepMeter
from cgx_ray.errors import CGXError
from cgx_ray.plan import NONE, CodecSpec, GroupPlan, Intra, Layer, Scheme


class Group:
    """Buffers and state of one GroupPlan. Lives from one plan switch to the next.

    is_finite  True if the last average, as the model gets it, was finite or was not checked
    """

    def __init__(
        self,
        index: int,
        plan: GroupPlan,
        layers: Mapping[str, Layer],
        transport: Transport,
        memories: Memories,
        device: torch.device = HOST,
    ) -> None:
        """`device`: where the gradients are."""
        numels = [layers[name].numel for name in plan.layers]
        self.index = index
        self.plan = plan
        self.numel = sum(numels)
        self.dense_bytes = sum(layers[name].dense_bytes for name in plan.layers)
        self._layers = [layers[name] for name in plan.layers]
        self._transport = transport
        self._is_compressible = not all(layer.is_small for layer in self._layers)
        # Dense groups are summed in the type of the gradients, as DDP does; codecs work on float32.
        dtype = getattr(torch, self._layers[0].dtype) if plan.option.scheme is Scheme.DENSE else torch.float32
        # Sums inside a node are made on the host.
        if plan.device == "cpu" or plan.option.intra is not Intra.FLAT:
            device = HOST
        # Dense groups rarely use this buffer. The system gives it no memory before it is first written.
        self._flat_N = torch.empty(self.numel, dtype=dtype, device=device)
        self._slices = dict(zip(plan.layers, self._flat_N.split(numels), strict=True))
        self._use(plan.option.codec)
        self._memories = memories
        self._memory = memories.of_group(self._codec)
        # With a hierarchical scheme a residual belongs to the gradient of the whole node, so gains are measured without
        # it.
        self._own_memory = self._memory if plan.option.intra is Intra.FLAT else None
        self._paid: list[str] = []
        # By layer: where its gradient is, and where its average goes.
        self._arrived: dict[str, Tensor] = {}
        self._places: dict[str, Tensor] = {}
        # Metered energy of the step under way, and its average; None between steps.
        self._energy = 0.0
        self._average_N: Tensor | None = None
        self.is_finite = True

    def _use(self, spec: CodecSpec) -> None:
        """Encode by `spec` from now on. The memory stays."""
        self._codec = make_codec(spec, self._layers, self._transport.world_size, self._flat_N.device)
        item_bytes = self._flat_N.element_size()
        self.wire_bytes = self.numel * item_bytes if spec == NONE else self._codec.payload_bytes(self.numel)
        self.index_bytes = spec.index_bytes(self.numel)
        self.exchange = make_exchange(
            self._codec, self.plan.option.scheme, self.numel, item_bytes, self._transport, self.plan.option.intra
        )

    @property
    def is_in_place(self) -> bool:
        """True if the averages may be made in DDP's buckets, without a copy."""
        return self.plan.option.scheme is Scheme.DENSE

    @property
    def is_ready(self) -> bool:
        """True if the gradients of all layers have arrived."""
        return len(self._arrived) == len(self._slices)

    @property
    def is_averaged(self) -> bool:
        """True if the exchange has ended and all places of the averages are known."""
        return self._average_N is not None and len(self._places) == len(self._slices)

    def arrive(self, name: str, gradient: Tensor) -> None:
        """Note the gradient of a layer, to read it when all are there. Raises CGXError if it comes too late."""
        if self._average_N is not None or self.is_ready:
            raise CGXError(
                f"layer {name} got a second gradient in one backward pass, after its first one was sent; give "
                "DistributedDataParallel static_graph=True if the model uses the layer several times"
            )
        self._arrived[name] = gradient

    def place(self, name: str, view: Tensor) -> None:
        """Note where the average of a layer goes; until then its gradient is there, unless it has arrived before."""
        self._places[name] = view
        if name not in self._arrived:
            self.arrive(name, view)

    def turns(self, stamp: Stamp, seed: int, gain: StepMeter | None, phases: Phases) -> Iterator[Handle]:
        """Average this group over all ranks; yield each handle to wait for. `deliver` follows."""
        # All ranks change the codec's parameters at the same step, so the sizes of their messages match.
        if (spec := self.plan.option.codec.at_step(stamp.step)) != self._codec.spec:
            self._use(spec)
        views = [self._arrived[name] for name in self._slices]
        # DDP lays out its buckets alike on all ranks, so the order of the layers in memory is the same everywhere.
        in_place = self.is_in_place and views[0].device == self._flat_N.device
        joint_N = _joint_memory(views) if in_place else None
        if joint_N is None:
            for view, part in zip(views, self._slices.values(), strict=True):
                part.copy_(view.view(-1))
        grad_N = joint_N if joint_N is not None else self._flat_N
        if self._memory is None:
            self._pay_residuals(dict(zip(self._slices, views, strict=True)) if joint_N is not None else self._slices)
        if gain is not None and self._is_compressible:
            self._energy = gain.measure(self.index, lambda: self._fed(grad_N))
        phases.lap("encode")
        yield from self.exchange.turns(grad_N, self._memory, stamp, seed, phases)
        self._average_N = grad_N

    def deliver(self, gain: StepMeter | None, phases: Phases, *, checks_finite: bool) -> None:
        """Write the averages to their places, once `is_averaged`."""
        grad_N, views = self._average_N, [self._places[name] for name in self._slices]
        assert grad_N is not None
        phases.resume()
        if grad_N is self._flat_N:
            for view, part in zip(views, self._slices.values(), strict=True):
                view.view(-1).copy_(part)
        self.is_finite = not checks_finite or all(map(is_finite, _delivered(grad_N, views)))
        if gain is not None and self._own_memory is not None and self._energy > 0 and self.is_finite:
            left_N, energy = self._own_memory.next_N, self._energy
            gain.correct(self.index, str(self.plan.option.codec), lambda: 1 - float(left_N.norm()) ** 2 / energy)
        phases.lap("decode")
        self._arrived.clear()
        self._places.clear()
        self._average_N, self._energy = None, 0.0

    def settle(self, unused: Collection[str]) -> None:
        """Make the memory that `turns` wrote valid, and delete the residuals that it paid.

        Call it only for steps whose averages are all finite.

        unused  layers whose average the model does not get; their memory stays unchanged
        """
        if self._memory is not None:
            self._memories.keep(name for name in self.plan.layers if name in unused)
            self._memory.commit()
        for name in self._paid:
            if name not in unused:
                self._memories.forget(name)

    def _fed(self, grad_N: Tensor) -> Tensor:
        return grad_N if self._own_memory is None else self._codec.feed(grad_N, self._own_memory)

    def _pay_residuals(self, gradients: Mapping[str, Tensor]) -> None:
        """Add to the gradients the residuals that an earlier plan's codec has left."""
        self._paid = []
        for name, gradient in gradients.items():
            owed = self._memories.owed(name)
            if owed is not None:
                gradient.view(-1).add_(owed.to(gradient.device))
                self._paid.append(name)


def _delivered(grad_N: Tensor, views: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the average as the model gets it. Values from 65520 on are finite in float32 but Inf in float16."""
    return [grad_N] if all(view.dtype == grad_N.dtype for view in views) else views


def _joint_memory(views: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor over the memory of all `views` if they lie side by side, in any order; else None."""
    first = min(views, key=lambda view: view.data_ptr())
    last = max(views, key=lambda view: view.data_ptr())
    numel = sum(view.numel() for view in views)
    shared = all(view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for view in views)
    end = last.storage_offset() + last.numel()
    if not shared or not all(view.is_contiguous() for view in views) or end - first.storage_offset() != numel:
        return None
    return first.as_strided((numel,), (1,), first.storage_offset())

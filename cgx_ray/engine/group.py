"""One group of layers at work: gathers the gradients, exchanges them, writes the averages back."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import HOST, is_finite
from cgx_ray.codecs.feedback import Memories
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Handle, Phases, Transport, make_exchange
from cgx_ray.collectives.transport.transport_like import VendorCall, ring_bytes
from cgx_ray.engine.gains.gain_meter import GroupGradients, StepMeter
from cgx_ray.errors import CGXError
from cgx_ray.plan import DENSE, NONE, CodecSpec, Device, GroupPlan, Intra, Layer, Plan, Scheme
from cgx_ray.runtime_ext.streams import DONE, Mark, streams_of

# Bytes that a rank may send for groups that are not done. Other ranks have to keep them if they come before these
# ranks have begun the groups. It is ten times what DDP's default bucket sends between many ranks.
WINDOW_BYTES = 512 << 20
# The same where a device encodes: messages take its memory, and pinned memory of the host, while a group is under way.
DEVICE_WINDOW_BYTES = 64 << 20


class Group:
    """Buffers and state of one GroupPlan. Lives from one plan switch to the next.

    codec_text  codec in use, as in `CodecSpec.parse`
    is_finite   True if the last average was finite, also as the model gets it, or was not checked
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
        self.index = index
        self.plan = plan
        self._numels = [layers[name].numel for name in plan.layers]
        self.numel = sum(self._numels)
        self.dense_bytes = sum(layers[name].dense_bytes for name in plan.layers)
        self._layers = [layers[name] for name in plan.layers]
        # A plan has one type per group.
        self._own_dtype: torch.dtype = getattr(torch, self._layers[0].dtype)
        self._option = plan.option
        if plan.option.codec == NONE and self._own_dtype == torch.float64:
            # The other schemes send float32, with its range.
            self._option = replace(plan.option, scheme=Scheme.DENSE, device=Device.AUTO)
        elif plan.option == DENSE and device != HOST and not transport.sums_on_device:
            # Else by way of the host, in the vendor's ring.
            self._option = replace(DENSE, scheme=Scheme.SRA)
        device_sums = device != HOST and transport.inside is not None
        if device_sums and self._option.scheme is Scheme.DENSE:
            # The vendor's own sum sends no more between nodes.
            self._option = DENSE
        self._is_dense = self._option.scheme is Scheme.DENSE
        self._transport = transport
        self._is_compressible = not all(layer.is_small for layer in self._layers)
        self._device = HOST if self._option.needs_host(device_sums=device_sums) else device
        self._use(plan.option.codec)
        self._streams = streams_of(device)
        # True if the host encodes what another device computes.
        self._crosses = self._device != device
        self._is_enqueued = self._is_dense and self._device != HOST and transport.enqueues_sums
        self._dtype = self._working_dtype()
        self._memories = memories
        self._memory = memories.of_group(self._codec)
        # With a hierarchical scheme a residual belongs to the gradient of the whole node, so gains are measured without
        # it.
        self._own_memory = self._memory if self._option.intra is Intra.FLAT else None
        self._added: list[str] = []
        self._arrived: dict[str, Tensor] = {}
        # Of the gradients that the device may not have computed yet.
        self._marks: list[Mark] = []
        # Of the buckets that DDP's own group sums. True if it was so in the step under way, or in the last one.
        self._sums: list[VendorCall] = []
        self._is_summed_by_ddp = False
        self.is_finite = True
        self._is_copying = False
        # Where the model gets the last average, if that is not finite.
        self._views: Sequence[Tensor] = []

    def _use(self, spec: CodecSpec) -> None:
        """Encode by `spec` from now on. The memory stays."""
        self._codec = make_codec(spec, self._layers, self._transport.world_size, self._device)
        # Dense groups are summed in the type of the gradients, as DDP does. Codec none over others sends float32.
        item_bytes = (self._own_dtype if self._is_dense else torch.float32).itemsize
        self.wire_bytes = self.numel * item_bytes if spec == NONE else self._codec.payload_bytes(self.numel)
        self.index_bytes = self._codec.index_bytes(self.numel)
        self.codec_text = str(spec)
        self.exchange = make_exchange(
            self._codec, self._option.scheme, self.numel, item_bytes, self._transport, self._option.intra
        )

    def _working_dtype(self) -> torch.dtype:
        """Return the type in which the exchange gets the gradients: their own if it takes that, else float32."""
        takes_16_bit = self._device == HOST and self._codec.takes_16_bit and self.exchange.takes_16_bit
        takes_own = self._is_dense or (self._own_dtype.itemsize == 2 and takes_16_bit)
        return self._own_dtype if takes_own else torch.float32

    @cached_property
    def _flat_N(self) -> Tensor:  # noqa: N802 - tensors end in their dimensions
        """Return memory for all gradients, which groups whose layers lie side by side in a bucket do not use.

        On a device it is given back after each step, for the next group.
        """
        if self._crosses:
            return self._streams.host_memory(self.numel, self._dtype)
        return torch.empty(self.numel, dtype=self._dtype, device=self._device)

    @property
    def is_enqueued(self) -> bool:
        """True if a device sums it after the marks of its gradients, without the host, unless gains are measured."""
        return self._is_enqueued or bool(self._sums)

    @property
    def window_bytes(self) -> int:
        """Most bytes of messages that a rank may send for groups that are not done, this one among them."""
        return WINDOW_BYTES if self._device == HOST else DEVICE_WINDOW_BYTES

    @property
    def message_bytes(self) -> int:
        """Bytes of `sent_bytes` that go by messages; 0 if a device sums the group."""
        return 0 if self.is_enqueued or self._is_summed_by_ddp else self.sent_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in the step under way, or in the last one; see `Exchange`."""
        if self._is_summed_by_ddp:
            return ring_bytes(self.dense_bytes, self._transport.world_size)
        return self.exchange.sent_bytes

    @property
    def is_ready(self) -> bool:
        """True if the gradients of all layers have arrived."""
        return len(self._arrived) == len(self._numels)

    @property
    def awaited(self) -> Mark | None:
        """The point that the device must come to before `turns`: the last gradient that it has not computed yet."""
        self._marks = [mark for mark in self._marks if not mark.is_done]
        return self._marks[-1] if self._marks else None

    @property
    def keeps_order(self) -> bool:
        """True if no other group may begin now: `Exchange.keeps_order`, which is not known before it has begun."""
        return self._is_copying or self.exchange.keeps_order

    def arrive(self, name: str, view: Tensor, computed: Mark = DONE, summed: VendorCall | None = None) -> None:
        """Note the gradient of a layer. `turns` reads it and overwrites it with the average.

        computed  after it the device has computed the gradient
        summed    after it the gradient is the average: DDP's own group sums it

        It may be noted twice; then the first mark counts. Raises CGXError if it has moved meanwhile.
        """
        if name not in self._arrived:
            self._marks.append(computed)
            if summed is not None and all(summed is not known for known in self._sums):
                self._sums.append(summed)
        before = self._arrived.setdefault(name, view)
        if before.data_ptr() != view.data_ptr():
            raise CGXError(
                f"DDP has moved the gradient of layer {name} within a step, which this version cannot follow; build "
                "DistributedDataParallel again, then attach"
            )

    def turns(
        self, stamp: Stamp, seed: int, gain: StepMeter | None, phases: Phases, *, checks_finite: bool
    ) -> Iterator[Handle]:
        """Average this group over all ranks, in the gradients that have arrived; yield each handle to wait for.

        `stamp` to `phases` are those of `Exchange.turns`.
        """
        marks, self._marks = self._marks, []
        sums, self._sums, self._is_summed_by_ddp = self._sums, [], bool(self._sums)
        if sums:
            yield from self._await(sums, phases)
            return
        turns = self._average(stamp, seed, gain, phases, checks_finite=checks_finite)
        if self.is_enqueued and gain is None:
            # All up to the sum. What comes after it runs when the host has seen its end.
            with self._streams.apart(marks):
                enqueued = next(turns)
            yield enqueued
        yield from turns

    def _await(self, sums: Sequence[VendorCall], phases: Phases) -> Iterator[Handle]:
        """Wait until DDP's own group has averaged the gradients."""
        self.is_finite, self._views, self._added = True, [], []
        with phases.round():
            # To finish the call of a device only lets this thread's stream wait for it.
            yield from sums
            yield self._streams.mark()
        self._arrived.clear()

    def _average(
        self, stamp: Stamp, seed: int, gain: StepMeter | None, phases: Phases, *, checks_finite: bool
    ) -> Iterator[Handle]:
        # All ranks change the codec's parameters at the same step, so the sizes of their messages match.
        if (spec := self.plan.option.codec.at_step(stamp.step)) != self._codec.spec:
            self._use(spec)
        views = [self._arrived[name] for name in self.plan.layers]
        # Residuals are added in float32: once, after a plan switch.
        wide_N = self._streams.host_memory(self.numel, torch.float32) if self._needs_float32() else None
        grad_N, parts, copies = self._places(views, wide_N)
        yield from self._copy_out(copies)
        layers = dict(zip(self.plan.layers, parts, strict=True))
        if self._memory is None:
            self._add_residuals(layers)
        metered = gain if self._is_compressible else None
        if metered is not None:
            metered.measure(self.index, lambda: self._gradients(grad_N, layers))
        phases.lap("encode")
        yield from self.exchange.turns(grad_N, self._memory, stamp, seed, phases)
        # The host writes to its memory again only after the next gradients were copied there.
        self._streams.copy_each([(ours, theirs) for theirs, ours in copies])
        checks_finite = checks_finite or self._codec.record.loses_elements
        self.is_finite = not checks_finite or all(map(is_finite, _delivered(grad_N, views)))
        self._views = [] if self.is_finite else views
        if metered is not None and self._own_memory is not None and self.is_finite:
            metered.correct(self.index, str(self.plan.option.flat()), self._own_memory.next_N)
        if self._device != HOST:
            self.__dict__.pop("_flat_N", None)
        phases.lap("decode")
        self._arrived.clear()

    def _copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Handle]:
        """Copy the first of each pair to the second. If that is the host's, yield the end of the copies."""
        self._streams.copy_each(pairs)
        if self._crosses:
            self._is_copying = True
            yield self._streams.mark()
            self._is_copying = False

    def find_broken(self) -> set[str]:
        """Return the layers that this rank knows to have NaN or Inf after `turns`, if the average is not finite.

        A codec may leave out the NaN of one layer, and send it in place of an element of another layer. Then it is in
        the residual, or in no place if the codec keeps none.
        """
        if self._codec.record.loses_elements:
            return set(self.plan.layers)
        averages = {name: [view] for name, view in zip(self.plan.layers, self._views, strict=True)}
        if self._memory is not None and self._memory.residual_N is not None:
            for (name, _), left in zip(averages.items(), self._memory.next_N.split(self._numels), strict=True):
                averages[name].append(left)
        return {name for name, values in averages.items() if not all(map(is_finite, values))}

    def mark(self, broken: Collection[str]) -> None:
        """Put NaN into the averages of these layers, so that the optimizer sees it."""
        for name, view in zip(self.plan.layers, self._views, strict=True):
            if name in broken:
                view.view(-1)[:1] = math.nan

    def settle(self, not_applied: Collection[str]) -> None:
        """Make the memory that `turns` wrote valid, and delete the residuals of an earlier plan that it sent.

        not_applied  layers whose averages change no weight; their memory stays unchanged
        """
        if self._memory is not None:
            self._memories.keep(name for name in self.plan.layers if name in not_applied)
            self._memory.commit()
        for name in self._added:
            if name not in not_applied:
                self._memories.forget(name)

    def _gradients(self, grad_N: Tensor, layers: Mapping[str, Tensor]) -> GroupGradients:
        """Return what `GainMeter` measures, before it is encoded. `layers`: the parts of `grad_N`."""
        fed_N = grad_N if self._own_memory is None else self._codec.feed(grad_N, self._own_memory)
        large = {layer.name: layers[layer.name].view(-1) for layer in self._layers if not layer.is_small}
        return GroupGradients(fresh=grad_N, fed=fed_N, layers={} if self._added else large)

    def _places(
        self, views: Sequence[Tensor], wide_N: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor], list[tuple[Tensor, Tensor]]]:
        """Return where the exchange works, the part of each layer there, and pairs of what to copy and where to.

        wide_N  float32 memory to use in place of the usual one
        """
        joint_N = self._joint_memory(views)
        dtype = self._dtype if wide_N is None else wide_N.dtype
        if joint_N is not None and joint_N.dtype == dtype and not self._crosses:
            return joint_N, views, []
        flat_N = self._flat_N if wide_N is None else wide_N
        parts = flat_N.split(self._numels)
        if joint_N is None or self._is_dense:
            return flat_N, parts, list(zip(views, parts, strict=True))
        # One copy for all layers: with a GPU each one is a launch.
        return flat_N, parts, [(joint_N, flat_N)]

    def _joint_memory(self, views: Sequence[Tensor]) -> Tensor | None:
        """Return one tensor over the memory of all `views`, or None if they lie apart.

        They must lie side by side, as in a bucket of DDP: in the order of the layers, because each element has its
        place in the codec's memory, or in any order if they are only summed. DDP lays out its buckets alike on all
        ranks.
        """
        first = views[0]
        if self._is_dense:
            first = min(views, key=lambda view: view.data_ptr())
            views = sorted(views, key=lambda view: view.data_ptr())
        offset = first.storage_offset()
        for view in views:
            is_next = view.storage_offset() == offset and view.is_contiguous()
            is_same = view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            if not (is_next and is_same):
                return None
            offset += view.numel()
        return first.as_strided((self.numel,), (1,), first.storage_offset())

    def _needs_float32(self) -> bool:
        """Return True if residuals of an earlier plan are to be added to 16-bit gradients that would be encoded."""
        is_narrow = self._dtype.itemsize == 2 and not self._is_dense
        return is_narrow and any(self._memories.residual(name) is not None for name in self.plan.layers)

    def _add_residuals(self, gradients: Mapping[str, Tensor]) -> None:
        """Add to the gradients the residuals that an earlier plan's codec has left."""
        self._added = []
        for name, gradient in gradients.items():
            residual = self._memories.residual(name)
            if residual is not None:
                gradient.view(-1).add_(residual.to(gradient.device))
                self._added.append(name)


def _delivered(grad_N: Tensor, views: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the average as the model gets it. Values from 65520 on are finite in float32 but Inf in float16."""
    return [grad_N] if all(view.dtype == grad_N.dtype for view in views) else views


def codecs_on_device(plan: Plan, transport: Transport) -> list[CodecSpec]:
    """Return the codecs that work where the gradients are, of a plan and of the one that follows its lease."""
    plans = [plan] if plan.lease is None else [plan, plan.lease.fallback]
    options = [group.option for one in plans for group in one.groups]
    return [one.codec for one in options if not one.needs_host(device_sums=transport.inside is not None)]

"""One group of layers at work: gathers gradients, exchanges them, gives back the averages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from cgx_ray.codecs import Codec, make_codec
from cgx_ray.codecs.codec import HOST, is_finite
from cgx_ray.codecs.feedback import CURVE_SAMPLE_NUMEL, GainCurve, Memories, kept_energy, sample_blocks
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Phases, Transport, make_exchange
from cgx_ray.engine.telemetry import Telemetry
from cgx_ray.monitors.sample import CURVE_DENSITIES
from cgx_ray.plan import NONE, CodecSpec, GroupPlan, Intra, Layer, Scheme

T = TypeVar("T")


class Group:
    """Buffers and state of one GroupPlan. Lives from one plan switch to the next."""

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
        # Dense groups are summed in the gradient's own type, as DDP would; codecs work on float32.
        dtype = getattr(torch, self._layers[0].dtype) if plan.option.scheme is Scheme.DENSE else torch.float32
        # Sums inside a node are made on the host.
        if plan.device == "cpu" or plan.option.intra is not Intra.FLAT:
            device = HOST
        # Dense groups rarely need it; memory that is never touched is never really allocated.
        self._flat_N = torch.empty(self.numel, dtype=dtype, device=device)
        self._slices = dict(zip(plan.layers, self._flat_N.split(numels), strict=True))
        self._use(plan.option.codec)
        self._memories = memories
        self._memory = memories.of_group(self._codec)
        # Hierarchical: what a rank owes is of its node's gradients, so gains are those of gradients without it.
        self._own_memory = self._memory if plan.option.intra is Intra.FLAT else None
        self._paid: list[str] = []
        self._arrived: dict[str, Tensor] = {}
        # Of the last average; True as well if nobody asked.
        self.is_finite = True

    def _use(self, spec: CodecSpec) -> None:
        """Encode by `spec` from now on; the memory stays."""
        self._codec = make_codec(spec, self._layers, self._transport.world_size, self._flat_N.device)
        item_bytes = self._flat_N.element_size()
        self.wire_bytes = self.numel * item_bytes if spec == NONE else self._codec.payload_bytes(self.numel)
        self.index_bytes = spec.index_bytes(self.numel)
        self.exchange = make_exchange(
            self._codec, self.plan.option.scheme, self.numel, item_bytes, self._transport, self.plan.option.intra
        )

    @property
    def is_ready(self) -> bool:
        """All layers' gradients are in."""
        return len(self._arrived) == len(self._slices)

    def arrive(self, name: str, view: Tensor) -> None:
        """Take note of a layer's gradient. It is read, and overwritten with the average, in `run`."""
        self._arrived[name] = view

    def run(self, stamp: Stamp, seed: int, gain: StepMeter | None, *, checks_finite: bool) -> Phases:
        """Average this group over all ranks, in place in the gradients that arrived."""
        phases = Phases()
        self._transport.group_index = self.index
        views = [self._arrived[name] for name in self._slices]
        # Every rank at the same step, so their messages keep the same size.
        if (spec := self.plan.option.codec.at_step(stamp.step)) != self._codec.spec:
            self._use(spec)
        if self._memory is None:
            self._pay_residuals()
        # The same on all ranks, since DDP lays out its buckets alike: they add up memory that means the same.
        in_place = self.plan.option.scheme is Scheme.DENSE and views[0].device == self._flat_N.device
        joint_N = _joint_memory(views) if in_place else None
        grad_N = joint_N if joint_N is not None else self._gather(views)
        metered = gain if self._is_compressible else None
        energy = metered.measure(lambda: self._fed(grad_N)) if metered is not None else 0.0
        phases.lap("encode")
        self.exchange.run(grad_N, self._memory, stamp, seed, phases)
        if joint_N is None:
            for view, part in zip(views, self._slices.values(), strict=True):
                view.view(-1).copy_(part)
        self.is_finite = not checks_finite or is_finite(grad_N)
        if metered is not None and self._own_memory is not None and energy > 0 and self.is_finite:
            left_N = self._own_memory.next_N
            metered.correct(str(self.plan.option.codec), lambda: 1 - float(left_N.norm()) ** 2 / energy)
        phases.lap("decode")
        self._arrived.clear()
        return phases

    def settle(self) -> None:
        """Keep what `run` left to remember, and forget what it paid: for a step that will not be skipped."""
        if self._memory is not None:
            self._memory.commit()
        for name in self._paid:
            self._memories.forget(name)

    def _fed(self, grad_N: Tensor) -> Tensor:
        return grad_N if self._own_memory is None else self._codec.feed(grad_N, self._own_memory)

    def _pay_residuals(self) -> None:
        """Add what an earlier plan's codec failed to send."""
        self._paid = []
        for name, view in self._arrived.items():
            owed = self._memories.owed(name)
            if owed is not None:
                view.view(-1).add_(owed.to(view.device))
                self._paid.append(name)

    def _gather(self, views: Sequence[Tensor]) -> Tensor:
        for view, part in zip(views, self._slices.values(), strict=True):
            part.copy_(view.view(-1))
        return self._flat_N


def _joint_memory(views: Sequence[Tensor]) -> Tensor | None:
    """The memory of `views` as one tensor if they lie side by side, in any order; else None."""
    first = min(views, key=lambda view: view.data_ptr())
    last = max(views, key=lambda view: view.data_ptr())
    numel = sum(view.numel() for view in views)
    shared = all(view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for view in views)
    end = last.storage_offset() + last.numel()
    if not shared or not all(view.is_contiguous() for view in views) or end - first.storage_offset() != numel:
        return None
    return first.as_strided((numel,), (1,), first.storage_offset())


class GainMeter:
    """Compression gain of candidate codecs on samples of the groups of one step, in `seconds` so far."""

    def __init__(self, candidates: Mapping[str, Codec], key: int) -> None:
        self._candidates = candidates
        self._key = key
        # For each group its energy, by codec the share of it that is kept, and the gains at CURVE_DENSITIES.
        self._groups: list[tuple[float, dict[str, float], list[float]]] = []
        self.seconds = 0.0

    def measure(self, grad_N: Tensor) -> float:
        """Try all candidates on a sample of a group; returns the whole group's energy |g|^2."""
        # Of this thread: what other programs take meanwhile is not the meter's.
        start_s = time.thread_time()
        sample_N = sample_blocks(grad_N).float()
        sample_energy = float(sample_N.double().square().sum())
        curve = GainCurve(sample_blocks(grad_N, CURVE_SAMPLE_NUMEL))

        def gain(codec: Codec) -> float:
            spec = codec.spec
            if spec == NONE or not sample_energy:
                return 1.0
            if spec.name == "topk" and spec.value_bits == 32 and spec.density is not None:
                return curve.gain([spec.density])[0]
            return kept_energy(codec, sample_N, self._key) / sample_energy

        kept = {name: gain(codec) for name, codec in self._candidates.items()}
        energy = float(grad_N.float().norm()) ** 2
        self._groups.append((energy, kept, curve.gain(CURVE_DENSITIES)))
        self.seconds += time.thread_time() - start_s
        return energy

    def correct(self, name: str, kept: float) -> None:
        """Replace the estimate of the codec in use by what its exchange really kept of the group measured last.

        AR-Topk keeps less than a rank's own top-k: the indices are another worker's.
        """
        self._groups[-1][1][name] = kept

    def gains(self) -> dict[str, float]:
        """Gain by `str(CodecSpec)`, each group weighted by its energy; empty if that is zero or not finite."""
        total = self._energy
        if not 0 < total < math.inf:
            return {}
        return {
            name: sum(energy * kept.get(name, 0.0) for energy, kept, _ in self._groups) / total
            for name in self._candidates
        }

    def curve(self) -> tuple[float, ...]:
        """Gain of top-k at CURVE_DENSITIES, weighted likewise; empty if `gains` is."""
        total = self._energy
        if not 0 < total < math.inf:
            return ()
        weighted = [[energy * gain for gain in gains] for energy, _, gains in self._groups]
        return tuple(sum(column) / total for column in zip(*weighted, strict=True))

    @property
    def norm(self) -> float:
        """|g| of the groups that were measured."""
        return math.sqrt(self._energy)

    @property
    def _energy(self) -> float:
        return sum(energy for energy, _, _ in self._groups)


class StepMeter:
    """The GainMeter of one step. After an error the step has no gains: those of the other groups would mislead."""

    def __init__(self, meter: GainMeter, telemetry: Telemetry, step: int) -> None:
        self._meter: GainMeter | None = meter
        self._telemetry = telemetry
        self._step = step

    def measure(self, fed: Callable[[], Tensor]) -> float:
        """See `GainMeter`, for what `fed` returns; 0 after an error."""
        return self._ask(lambda meter: meter.measure(fed()), 0.0)

    def correct(self, name: str, kept: Callable[[], float]) -> None:
        """See `GainMeter`, for what `kept` returns."""
        self._ask(lambda meter: meter.correct(name, kept()), None)

    def gains(self) -> dict[str, float]:
        """See `GainMeter`; empty after an error."""
        return self._ask(lambda meter: meter.gains(), {})

    def curve(self) -> tuple[float, ...]:
        """See `GainMeter`; empty after an error."""
        return self._ask(lambda meter: meter.curve(), ())

    @property
    def norm(self) -> float | None:
        """See `GainMeter`; None after an error."""
        return self._ask(lambda meter: meter.norm, None)

    @property
    def seconds(self) -> float:
        """See `GainMeter`; 0 after an error."""
        return self._ask(lambda meter: meter.seconds, 0.0)

    def _ask(self, question: Callable[[GainMeter], T], otherwise: T) -> T:
        if self._meter is None:
            return otherwise
        with self._telemetry.optional("gains", self._step):
            return question(self._meter)
        self._meter = None
        return otherwise

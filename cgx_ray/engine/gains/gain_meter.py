"""Measures, in one step, the gain that candidate codecs would have on the gradients of this rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from cgx_ray.codecs import Codec
from cgx_ray.codecs.codec import HOST
from cgx_ray.codecs.gain import (
    CURVE_SAMPLE_NUMEL,
    GainCurve,
    Ranges,
    histogram,
    lost_energy,
    sample_blocks,
    squared_ranges,
)
from cgx_ray.codecs.shadow import settles
from cgx_ray.engine.gains.gain_history import GradientHistory
from cgx_ray.engine.telemetry import Telemetry
from cgx_ray.monitors.sample import CURVE_DENSITIES, LayerError
from cgx_ray.plan import NONE
from cgx_ray.runtime_ext.streams import DeviceNumbers, Reading

T = TypeVar("T")
# Elements of a layer on which errors are measured: with four blocks, those of an embedding were off by up to 6x.
LAYER_SAMPLE_NUMEL = 1 << 15
# A converted piece of this size stays in the cache.
_PIECE_NUMEL = 1 << 18


class GroupGradients(NamedTuple):
    """The gradients of a group.

    fresh    as backward made it
    fed      with the residual of the codec in use; `fresh` if there is none
    layers   views of `fresh` by layer; empty if it has residuals of an earlier plan's codec in it
    """

    fresh: Tensor
    fed: Tensor
    layers: Mapping[str, Tensor]


@dataclass(slots=True, kw_only=True)
class _GroupGains:
    """Energies |g|^2, the kept share by codec, the gains at CURVE_DENSITIES, and what options in use really kept."""

    fresh: float
    fed: float
    kept: dict[str, float]
    curve: list[float]
    in_use: dict[str, float]


@dataclass(slots=True, kw_only=True)
class _GroupNumbers:
    """Numbers of a group that its device computes.

    sample, lost  energy of a sample, and what each codec loses of it; `lost` lacks codecs that lose nothing
    fresh, fed    norms of the pieces of the gradient
    counts        histogram of a sample
    left          norm of what the option in use left
    """

    sample: Reading
    lost: dict[str, Reading]
    fresh: Reading
    fed: Reading
    counts: Reading
    left: dict[str, Reading] = field(default_factory=dict)


class _RangeNumbers(NamedTuple):
    """`Ranges`, to be read."""

    squares: Reading
    rest: tuple[Reading, ...]
    num_rest: int

    @classmethod
    def of(cls, ranges: Ranges, add: Callable[[Tensor], Reading]) -> _RangeNumbers:
        return cls(add(ranges.squares), tuple(map(add, ranges.rest)), ranges.num_rest)


class _LayerNumbers(NamedTuple):
    """Norms of the pieces of a layer's gradient, ranges of it and of a sample, and what a codec loses of the sample.

    top  as in `LayerError`, None for 0
    """

    norms: Reading
    whole: _RangeNumbers
    part: _RangeNumbers
    lost: Reading
    top: Reading | None


class GainMeter:
    """Gains of candidate codecs, measured on samples of the groups of one step. `seconds`: time spent so far.

    A device computes the numbers of all groups before the host asks for one. Then all are read together.

    Codecs with a residual keep less of a gradient once they have one, so their gains are predicted by `history`
    for the time when error feedback has settled. Others are tried on the fresh gradients.
    """

    def __init__(
        self,
        candidates: Mapping[str, Codec],
        history: GradientHistory,
        key: int,
        by_layer: Codec | None = None,
        device: torch.device = HOST,
        *,
        sums_layers: bool = False,
    ) -> None:
        """`candidates`: codecs by `str(CodecSpec)`. `key` seeds their random numbers.

        by_layer     codec whose error is measured by layer
        device       where the gradients are
        sums_layers  as in `GainSchedule`
        """
        self._by_layer, self._sums_layers = by_layer, sums_layers
        self._candidates = candidates
        self._history = history
        self._key = key
        self._readings = DeviceNumbers(device)
        self._numbers: dict[int, _GroupNumbers] = {}
        self._of_layers: dict[str, _LayerNumbers] = {}
        # Layers with the elements of each, and their samples.
        self._samples: list[tuple[dict[str, int], Reading]] = []
        # On the host CPU time of this thread, since the time that other programs take is not the cost of measuring. On
        # a device the thread also waits.
        self._now_s = time.thread_time if device == HOST else time.perf_counter
        self.seconds = 0.0

    def measure(self, group: int, gradients: GroupGradients) -> None:
        """Measure the group with this index. Its gradients may change afterwards."""
        start_s, add = self._now_s(), self._readings.add
        sample_N = sample_blocks(gradients.fresh).float()
        tried = {name: codec for name, codec in self._tried.items() if codec.spec != NONE}
        lost = {name: add(lost_energy(codec, sample_N, self._key)) for name, codec in tried.items()}
        if gradients.layers:
            samples_N, numels = self._history.sample(gradients.layers)
            self._samples.append((dict(zip(gradients.layers, numels, strict=True)), add(samples_N)))
        if self._by_layer is not None:
            self._measure_layers(self._by_layer, gradients.layers)
        fresh = add(_norms(gradients.fresh))
        self._numbers[group] = _GroupNumbers(
            sample=add(sample_N.double().square().sum()),
            lost=lost,
            fresh=fresh,
            fed=fresh if gradients.fed is gradients.fresh else add(_norms(gradients.fed)),
            counts=add(histogram(sample_blocks(gradients.fed, CURVE_SAMPLE_NUMEL))),
        )
        self.seconds += self._now_s() - start_s

    @property
    def _tried(self) -> dict[str, Codec]:
        return {name: codec for name, codec in self._candidates.items() if not settles(codec)}

    @cached_property
    def _groups(self) -> dict[int, _GroupGains]:
        """Gains by group. Nothing is measured afterwards."""
        self._readings.read()
        return {group: self._gains_of(numbers) for group, numbers in self._numbers.items()}

    def _gains_of(self, numbers: _GroupNumbers) -> _GroupGains:
        number = self._readings.number
        sample, fed = number(numbers.sample), self._energy(numbers.fed)
        lost = {name: number(found) for name, found in numbers.lost.items()}
        return _GroupGains(
            fresh=self._energy(numbers.fresh),
            fed=fed,
            kept={name: (sample - lost[name]) / sample if name in lost and sample else 1.0 for name in self._tried},
            curve=GainCurve.of_counts(self._readings.host(numbers.counts)).gain(CURVE_DENSITIES),
            in_use={option: 1 - number(left) ** 2 / fed for option, left in numbers.left.items() if fed > 0},
        )

    def _energy(self, norms: Reading) -> float:
        """Return |g|^2 from the norms of its pieces."""
        pieces: list[float] = self._readings.host(norms).tolist()
        return sum(norm**2 for norm in pieces)

    @property
    def bits(self) -> int | None:
        """Bits of `by_layer`."""
        return self._by_layer.spec.bits if self._by_layer is not None else None

    def layer_errors(self) -> dict[str, LayerError]:
        """Return what is known of each layer, its lost share under `by_layer`."""
        _ = self._groups  # reads all numbers
        errors = {}
        for name, found in self._of_layers.items():
            energy, whole, part = self._energy(found.norms), self._ranges(found.whole), self._ranges(found.part)
            if 0 < energy < math.inf and 0 < part < math.inf:
                lost = self._readings.number(found.lost) * whole / part
                top = self._readings.number(found.top) if found.top is not None else 0.0
                errors[name] = LayerError(energy, lost / energy, top)
        return errors

    def _ranges(self, found: _RangeNumbers) -> float:
        assert self._by_layer is not None
        assert self._by_layer.spec.bucket_size is not None
        squares, *rest = (self._readings.number(one) for one in (found.squares, *found.rest))
        return squared_ranges(squares, rest, found.num_rest, self._by_layer.spec.bucket_size)

    def _measure_layers(self, codec: Codec, layers: Mapping[str, Tensor]) -> None:
        """Measure the error of each layer on a sample, and scale it by squared ranges to the whole layer.

        Ranges in the rows of an embedding differ by orders of magnitude, so a few rows show neither the energy of the
        layer nor its error. They do show the error for a range.
        """
        add, bucket_size = self._readings.add, codec.spec.bucket_size
        assert bucket_size is not None
        for name, grad_N in layers.items():
            sample_N = sample_blocks(grad_N, LAYER_SAMPLE_NUMEL, self._key).float()
            whole, part = (Ranges.of(one_N, bucket_size) for one_N in (grad_N, sample_N))
            self._of_layers[name] = _LayerNumbers(
                norms=add(_norms(grad_N)),
                whole=_RangeNumbers.of(whole, add),
                part=_RangeNumbers.of(part, add),
                lost=add(lost_energy(codec, sample_N, self._key)),
                top=add(self._history.add_to_sum(name, grad_N)) if self._sums_layers else None,
            )

    def correct(self, group: int, option: str, left_N: Tensor) -> None:
        """Note what the exchange of a measured group really left, by the option in use."""
        self._numbers[group].left[option] = self._readings.add(left_N.norm())

    def gains(self) -> dict[str, float]:
        """Return the gains of all candidates by `str(CodecSpec)`, and by `str(Option)` where schemes differ.

        Groups are weighted by energy. Empty if the energy is 0 or not finite. Adds the step to the history, so call it
        once.
        """
        start_s = self._now_s()
        total = self._fresh_energy
        if not 0 < total < math.inf:
            return {}
        groups = self._groups.values()
        tried = {name: sum(group.fresh * group.kept[name] for group in groups) / total for name in self._tried}
        self._history.add_samples(
            {name: sample_N for numels, found in self._samples for name, sample_N in self._parts(numels, found)}
        )
        settled = self._history.gains(self._candidates.values(), self._key)
        self.seconds += self._now_s() - start_s
        return tried | settled

    def _parts(self, numels: Mapping[str, int], samples: Reading) -> Iterator[tuple[str, Tensor]]:
        """Yield layers with their parts of joined samples, float32."""
        parts = self._readings.host(samples).float().split([*numels.values()])
        return zip(numels, parts, strict=True)

    def kept(self) -> dict[str, float]:
        """Return what was really kept, by `str(Option)` of the options in use; groups are weighted by energy."""
        names = {name for group in self._groups.values() for name in group.in_use}
        found = {}
        for name in names:
            used = [group for group in self._groups.values() if name in group.in_use]
            found[name] = sum(group.fed * group.in_use[name] for group in used) / sum(group.fed for group in used)
        return found

    def residual_norm(self) -> float | None:
        """Return |residual| that the step leaves in the measured groups; None if their codecs have none."""
        left = [group.fed * (1 - kept) for group in self._groups.values() for kept in group.in_use.values()]
        return math.sqrt(sum(left)) if left else None

    def curve(self) -> tuple[float, ...]:
        """Return the gains of top-k at CURVE_DENSITIES on the fed gradients, weighted in the same way."""
        total = sum(group.fed for group in self._groups.values())
        if not 0 < total < math.inf:
            return ()
        weighted = [[group.fed * gain for gain in group.curve] for group in self._groups.values()]
        return tuple(sum(column) / total for column in zip(*weighted, strict=True))

    @property
    def norm(self) -> float:
        """|g| of the groups that were measured, fresh."""
        return math.sqrt(self._fresh_energy)

    @property
    def _fresh_energy(self) -> float:
        return sum(group.fresh for group in self._groups.values())


class StepMeter:
    """The GainMeter of one step. After an error the step has no gains: those of its other groups would mislead.

    gains  `GainMeter.gains`; empty before `finish` and after an error
    """

    def __init__(self, meter: GainMeter, telemetry: Telemetry, step: int) -> None:
        self._meter: GainMeter | None = meter
        self._telemetry = telemetry
        self._step = step
        self.gains: dict[str, float] = {}

    def measure(self, group: int, gradients: Callable[[], GroupGradients]) -> None:
        """Call `GainMeter.measure` with the result of `gradients`. Do nothing after an error."""
        self._ask(lambda meter: meter.measure(group, gradients()), None)

    def correct(self, group: int, option: str, left_N: Tensor) -> None:
        """Call `GainMeter.correct`. Do nothing after an error."""
        self._ask(lambda meter: meter.correct(group, option, left_N), None)

    def finish(self) -> float:
        """Read all numbers and compute `gains`, when all groups are measured.

        Return the seconds: some milliseconds per codec.
        """
        before_s = self.seconds
        self.gains = self._ask(lambda meter: meter.gains(), {})
        return max(self.seconds - before_s, 0.0)

    def kept(self) -> dict[str, float]:
        """Return `GainMeter.kept`; empty after an error."""
        return self._ask(lambda meter: meter.kept(), {})

    def residual_norm(self) -> float | None:
        """Return `GainMeter.residual_norm`; None after an error."""
        return self._ask(lambda meter: meter.residual_norm(), None)

    def curve(self) -> tuple[float, ...]:
        """Return `GainMeter.curve`; empty after an error."""
        return self._ask(lambda meter: meter.curve(), ())

    def layer_errors(self) -> dict[str, LayerError]:
        """Return `GainMeter.layer_errors`; empty after an error."""
        return self._ask(lambda meter: meter.layer_errors(), {})

    @property
    def bits(self) -> int | None:
        """`GainMeter.bits`; None after an error."""
        return self._ask(lambda meter: meter.bits, None)

    @property
    def norm(self) -> float | None:
        """`GainMeter.norm`; None after an error."""
        return self._ask(lambda meter: meter.norm, None)

    @property
    def seconds(self) -> float:
        """`GainMeter.seconds`; 0 after an error."""
        return self._ask(lambda meter: meter.seconds, 0.0)

    def _ask(self, question: Callable[[GainMeter], T], otherwise: T) -> T:
        if self._meter is None:
            return otherwise
        with self._telemetry.optional("gains", self._step):
            return question(self._meter)
        self._meter = None
        return otherwise


def _norms(grad_N: Tensor) -> Tensor:
    """Return |g| of each piece, float32. A CPU converts other types in pieces; a GPU converts what it reads."""
    if not grad_N.is_cpu:
        norm: Tensor = torch.linalg.vector_norm(grad_N, dtype=torch.float32)
        return norm
    pieces = (grad_N,) if grad_N.dtype == torch.float32 else grad_N.split(_PIECE_NUMEL)
    return torch.stack([piece.float().norm() for piece in pieces])

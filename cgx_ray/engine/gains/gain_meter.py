"""Measures, in one step, the gain that candidate codecs would have on the gradients of this rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from cgx_ray.codecs import Codec
from cgx_ray.codecs.gain import CURVE_SAMPLE_NUMEL, GainCurve, kept_energy, sample_blocks, squared_error, squared_ranges
from cgx_ray.codecs.shadow import settles
from cgx_ray.engine.gains.gain_history import GradientHistory
from cgx_ray.engine.telemetry import Telemetry
from cgx_ray.monitors.sample import CURVE_DENSITIES, LayerError
from cgx_ray.plan import NONE

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
    in_use: dict[str, float] = field(default_factory=dict)


class GainMeter:
    """Gains of candidate codecs, measured on samples of the groups of one step. `seconds`: CPU time spent so far.

    Codecs with a residual keep less of a gradient once they have one, so their gains are predicted by `history`
    for the time when error feedback has settled. Others are tried on the fresh gradients.
    """

    def __init__(
        self, candidates: Mapping[str, Codec], history: GradientHistory, key: int, by_layer: Codec | None = None
    ) -> None:
        """`candidates`: codecs by `str(CodecSpec)`. `key` seeds their random numbers.

        by_layer  codec whose error is measured by layer
        """
        self._by_layer = by_layer
        self._layer_errors: dict[str, LayerError] = {}
        self._candidates = candidates
        self._history = history
        self._key = key
        self._groups: dict[int, _GroupGains] = {}
        self._samples: dict[str, Tensor] = {}
        self.seconds = 0.0

    def measure(self, group: int, gradients: GroupGradients) -> float:
        """Measure the group with this index. Return the energy of the whole group, fed."""
        # CPU time of this thread, since the time that other programs take is not the cost of measuring.
        start_s = time.thread_time()
        sample_N = sample_blocks(gradients.fresh).float()
        energy = float(sample_N.double().square().sum())
        tried = {name: codec for name, codec in self._candidates.items() if not settles(codec)}
        kept = {
            name: 1.0 if codec.spec == NONE or not energy else kept_energy(codec, sample_N, self._key) / energy
            for name, codec in tried.items()
        }
        self._samples |= self._history.sample(gradients.layers)
        if self._by_layer is not None:
            self._measure_layers(self._by_layer, gradients.layers)
        fresh = fed = _energy(gradients.fresh)
        if gradients.fed is not gradients.fresh:
            fed = _energy(gradients.fed)
        curve = GainCurve(sample_blocks(gradients.fed, CURVE_SAMPLE_NUMEL)).gain(CURVE_DENSITIES)
        self._groups[group] = _GroupGains(fresh=fresh, fed=fed, kept=kept, curve=curve)
        self.seconds += time.thread_time() - start_s
        return fed

    @property
    def bits(self) -> int | None:
        """Bits of `by_layer`."""
        return self._by_layer.spec.bits if self._by_layer is not None else None

    def layer_errors(self) -> dict[str, LayerError]:
        """Return energy and lost share under `by_layer`, by layer."""
        return self._layer_errors

    def _measure_layers(self, codec: Codec, layers: Mapping[str, Tensor]) -> None:
        """Measure the error of each layer on a sample, and scale it by squared ranges to the whole layer.

        Ranges in the rows of an embedding differ by orders of magnitude, so a few rows show neither the energy of the
        layer nor its error. They do show the error for a range.
        """
        assert codec.spec.bucket_size is not None
        for name, grad_N in layers.items():
            sample_N = sample_blocks(grad_N, LAYER_SAMPLE_NUMEL, self._key).float()
            energy = _energy(grad_N)
            whole, part = (squared_ranges(one_N, codec.spec.bucket_size) for one_N in (grad_N, sample_N))
            if 0 < energy < math.inf and 0 < part < math.inf:
                lost = squared_error(codec, sample_N, self._key) * whole / part
                self._layer_errors[name] = LayerError(energy, lost / energy)

    def correct(self, group: int, option: str, kept: float) -> None:
        """Note the share that the exchange of a measured group really kept, by the option in use."""
        self._groups[group].in_use[option] = kept

    def gains(self) -> dict[str, float]:
        """Return the gains of all candidates by `str(CodecSpec)`, and by `str(Option)` where schemes differ.

        Groups are weighted by energy. Empty if the energy is 0 or not finite. Adds the step to the history, so call it
        once.
        """
        total = self._fresh_energy
        if not 0 < total < math.inf:
            return {}
        start_s = time.thread_time()
        groups = self._groups.values()
        names = [name for name, codec in self._candidates.items() if not settles(codec)]
        tried = {name: sum(group.fresh * group.kept[name] for group in groups) / total for name in names}
        self._history.add_samples(self._samples)
        settled = self._history.gains(self._candidates.values(), self._key)
        self.seconds += time.thread_time() - start_s
        return tried | settled

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

    def measure(self, group: int, gradients: Callable[[], GroupGradients]) -> float:
        """Call `GainMeter.measure` with the result of `gradients`. Return 0 after an error."""
        return self._ask(lambda meter: meter.measure(group, gradients()), 0.0)

    def correct(self, group: int, option: str, kept: Callable[[], float]) -> None:
        """Call `GainMeter.correct` with the result of `kept`. Do nothing after an error."""
        self._ask(lambda meter: meter.correct(group, option, kept()), None)

    def finish(self) -> float:
        """Compute `gains`, when all groups are measured. Return the seconds: some milliseconds per codec."""
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


def _energy(grad_N: Tensor) -> float:
    """Return |g|^2, as of float32. A CPU converts other types in pieces; a GPU converts what it reads."""
    if grad_N.is_cuda:
        return float(torch.linalg.vector_norm(grad_N, dtype=torch.float32)) ** 2
    pieces = (grad_N,) if grad_N.dtype == torch.float32 else grad_N.split(_PIECE_NUMEL)
    return sum(float(piece.float().norm()) ** 2 for piece in pieces)

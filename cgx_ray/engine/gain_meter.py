"""Measures, in one step, the gain that candidate codecs would have on the gradients of this rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from cgx_ray.codecs import Codec
from cgx_ray.codecs.gain import CURVE_SAMPLE_NUMEL, GainCurve, kept_energy, sample_blocks
from cgx_ray.engine.telemetry import Telemetry
from cgx_ray.monitors.sample import CURVE_DENSITIES
from cgx_ray.plan import NONE

T = TypeVar("T")


class GainMeter:
    """Gains of candidate codecs, measured on samples of the groups of one step. `seconds`: CPU time spent so far."""

    def __init__(self, candidates: Mapping[str, Codec], key: int) -> None:
        """`candidates`: codecs by `str(CodecSpec)`. `key` seeds their random numbers."""
        self._candidates = candidates
        self._key = key
        # By group: its energy |g|^2, the kept share of the energy by codec, and the gains at CURVE_DENSITIES.
        self._groups: dict[int, tuple[float, dict[str, float], list[float]]] = {}
        self.seconds = 0.0

    def measure(self, group: int, grad_N: Tensor) -> float:
        """Try all candidates on a sample of the group with this index. Return the energy |g|^2 of the whole group."""
        # CPU time of this thread, since the time that other programs take is not the cost of measuring.
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
        self._groups[group] = energy, kept, curve.gain(CURVE_DENSITIES)
        self.seconds += time.thread_time() - start_s
        return energy

    def correct(self, group: int, name: str, kept: float) -> None:
        """Set the gain of the codec in use, for a measured group, to the share that its exchange really kept.

        AR-Topk keeps less than the top-k of each rank, since it sends the indices that another rank has chosen.
        """
        self._groups[group][1][name] = kept

    def gains(self) -> dict[str, float]:
        """Return the gains by `str(CodecSpec)`, groups weighted by energy. Empty if the energy is 0 or not finite."""
        total = self._energy
        if not 0 < total < math.inf:
            return {}
        return {
            name: sum(energy * kept.get(name, 0.0) for energy, kept, _ in self._groups.values()) / total
            for name in self._candidates
        }

    def curve(self) -> tuple[float, ...]:
        """Return the gains of top-k at CURVE_DENSITIES, weighted in the same way. Empty if `gains` is."""
        total = self._energy
        if not 0 < total < math.inf:
            return ()
        weighted = [[energy * gain for gain in gains] for energy, _, gains in self._groups.values()]
        return tuple(sum(column) / total for column in zip(*weighted, strict=True))

    @property
    def norm(self) -> float:
        """|g| of the groups that were measured."""
        return math.sqrt(self._energy)

    @property
    def _energy(self) -> float:
        return sum(energy for energy, _, _ in self._groups.values())


class StepMeter:
    """The GainMeter of one step. After an error the step has no gains: those of its other groups would mislead."""

    def __init__(self, meter: GainMeter, telemetry: Telemetry, step: int) -> None:
        self._meter: GainMeter | None = meter
        self._telemetry = telemetry
        self._step = step

    def measure(self, group: int, fed: Callable[[], Tensor]) -> float:
        """Call `GainMeter.measure` with the result of `fed`. Return 0 after an error."""
        return self._ask(lambda meter: meter.measure(group, fed()), 0.0)

    def correct(self, group: int, name: str, kept: Callable[[], float]) -> None:
        """Call `GainMeter.correct` with the result of `kept`. Do nothing after an error."""
        self._ask(lambda meter: meter.correct(group, name, kept()), None)

    def gains(self) -> dict[str, float]:
        """Return `GainMeter.gains`; empty after an error."""
        return self._ask(lambda meter: meter.gains(), {})

    def curve(self) -> tuple[float, ...]:
        """Return `GainMeter.curve`; empty after an error."""
        return self._ask(lambda meter: meter.curve(), ())

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

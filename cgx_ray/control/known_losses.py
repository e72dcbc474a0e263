"""Inputs of the papers' policies: errors of each layer by number of bits, and the gain curve of top-k.

Rounding to 2^b - 1 equal steps loses energy as 1 / (2^b - 1)^2; on gradients of byte-GPT that holds within 9 %. So each
layer has one level, the lost share times (2^b - 1)^2, and a ratio to it for each number of bits. Ranks measure one
number of bits per measurement, in turn: each of them renews the level, so no number of bits is behind the others while
gradients change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cgx_ray.control.joined_steps import JoinedStep
from cgx_ray.monitors.sample import CURVE_DENSITIES
from cgx_ray.plan import Layer
from cgx_ray.planner.bits import QSGD, WIDTHS, LayerErrors

# Weight of the newest measurement: that of about three. A single one is off by 3 to 20 % with small batches, and early
# in training gradients change within some tens of steps.
NEWEST = 0.5


class KnownLosses:
    """Means of the last measurements of one worker group."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._numels = {layer.name: layer.numel for layer in layers}
        self._energy: dict[str, float] = {}
        # By layer; the ratios by layer and bits.
        self._level: dict[str, float] = {}
        self._ratio: dict[str, dict[int, float]] = {}
        self._curve: tuple[float, ...] = ()

    def add(self, step: JoinedStep) -> None:
        """Add what a step measured, if it did."""
        if step.gain_curve and all(0 < gain < math.inf for gain in step.gain_curve):
            self._curve = tuple(map(_mean, self._curve or step.gain_curve, step.gain_curve))
        if step.error_bits is None:
            return
        for name, (energy, lost) in step.layer_errors.items():
            ratios, level = self._ratio.setdefault(name, {}), lost_share({step.error_bits: lost}, 1)
            before = ratios.get(step.error_bits, 1.0)
            self._level[name] = _mean(self._level.get(name, level / before), level / before)
            if self._level[name] > 0:
                ratios[step.error_bits] = _mean(before, level / self._level[name])
            self._energy[name] = _mean(self._energy.get(name, energy), energy)

    @property
    def gain_curve(self) -> dict[float, float]:
        """Gain of top-k by density; empty before it is measured."""
        return dict(zip(CURVE_DENSITIES, self._curve, strict=True)) if self._curve else {}

    @property
    def gain(self) -> dict[str, float]:
        """Gain of qsgd by `str(CodecSpec)`, for each number of bits whose gain is above 0."""
        energy = math.fsum(self._energy.values())
        kept = {
            str(replace(QSGD, bits=bits)): 1
            - math.fsum(self._energy[name] * self._lost(name, bits) for name in self._level) / energy
            for bits in WIDTHS
            if energy > 0
        }
        return {codec: gain for codec, gain in kept.items() if gain > 0}

    @property
    def layer_errors(self) -> dict[str, LayerErrors]:
        """Errors by layer, for `bits.BitsProblem`; without layers that were never measured."""
        return {
            name: LayerErrors(
                numel=self._numels[name],
                norm=math.sqrt(self._energy[name]),
                squared_errors={bits: self._energy[name] * self._lost(name, bits) for bits in WIDTHS},
            )
            for name in self._level
        }

    def _lost(self, name: str, bits: int) -> float:
        return self._ratio[name].get(bits, 1.0) * lost_share({1: self._level[name]}, bits)


def lost_share(known: Mapping[int, float], bits: int) -> float:
    """Return the lost share with `bits` bits, from those of the numbers of bits that are known."""
    nearest = min(known, key=lambda other: (abs(other - bits), other))
    steps, others = (float((1 << number) - 1) for number in (bits, nearest))
    return known[nearest] * (others / steps) ** 2


def _mean(before: float, newest: float) -> float:
    return before + NEWEST * (newest - before)

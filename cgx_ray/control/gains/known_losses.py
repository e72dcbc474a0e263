"""Errors of each layer by number of bits: inputs of plans and of policy "cgx".

Rounding to 2^b - 1 equal steps loses energy as 1 / (2^b - 1)^2; on gradients of byte-GPT that holds within 9 %. So each
layer has one level, the lost share times (2^b - 1)^2, and a ratio to it for each number of bits. Ranks measure one
number of bits per measurement, in turn: each of them renews the level, so no number of bits is behind the others while
gradients change.

Gradients of the steps to come are others than those that bits were chosen on. So each measurement under a plan with
bits by layer also shows by how much the error of these bits exceeds what was expected of them, both over that of 4
bits. The next bits are chosen for an error that is smaller by that factor, and at once if those in force lose too much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from cgx_ray.control.joined_steps import JoinedStep
from cgx_ray.control.policies.policy import MIN_IMPROVEMENT
from cgx_ray.plan import CodecSpec, Layer
from cgx_ray.planner.bits import QSGD, STATIC_BITS, LayerErrors

# Weights of the newest measurement. A layer's error is measured within some 5 %, and changes within some tens of steps:
# smaller weights cost more than they save. Excesses are noisy.
NEWEST_ERROR, NEWEST = 0.8, 0.5
# Least ratio of a measured error to the expected one: a layer that loses nothing with some bits has no smaller level.
LEAST_RATIO = 1e-6
# Numbers of bits that errors are computed for.
ALL_BITS = range(1, 9)


class KnownLosses:
    """Means of the last measurements of one worker group.

    squared_errors  by number of bits and layer, to 4 digits: they are known within some 5 %, and each decision of the
                    journal has them
    """

    def __init__(self, layers: Sequence[Layer], bits: Sequence[int] = (), codec: CodecSpec = QSGD) -> None:
        """`bits`: numbers of bits for `squared_errors`. `codec`: qsgd that is measured, with any of ALL_BITS."""
        self.squared_errors: dict[int, dict[str, float]] = {}
        self._known_bits, self._codec = tuple(bits), codec
        self._numels = {layer.name: layer.numel for layer in layers}
        self._energy: dict[str, float] = {}
        self._top: dict[str, float] = {}
        # By layer; the ratios by layer and bits.
        self._level: dict[str, float] = {}
        self._ratio: dict[str, dict[int, float]] = {}
        self._excess = 1.0

    def add_step(self, step: JoinedStep, bits: Mapping[str, int] = MappingProxyType({})) -> None:
        """Add what a step measured, if it did. `bits`: of the layers that were encoded with qsgd."""
        if step.error_bits is None:
            return
        expected, newest = self._unit_errors(), {}
        for name, (energy, lost, top) in step.layer_errors.items():
            ratios, level = self._ratio.setdefault(name, {}), lost_share({step.error_bits: lost}, 1)
            before = ratios.get(step.error_bits, 1.0)
            newest[name] = energy * level / before
            self._level[name] = _mean(self._level.get(name, level / before), level / before)
            if self._level[name] > 0:
                ratios[step.error_bits] = max(_mean(before, level / self._level[name]), LEAST_RATIO)
            self._energy[name] = _mean(self._energy.get(name, energy), energy)
            self._top[name] = _mean(self._top.get(name, top), top)
        then, now = self._over_static(expected, bits), self._over_static(newest, bits)
        # Errors of layers that lose nothing become 0.
        if then and now is not None:
            self._excess = _mean(self._excess, now / then, NEWEST)
        self.squared_errors = {
            number: {name: float(f"{self._energy[name] * self._lost(name, number):.4g}") for name in newest}
            for number in self._known_bits
            if newest
        }

    @property
    def error_excess(self) -> float:
        """Error of bits in force over what was expected of them, at least 1."""
        return math.sqrt(max(1.0, self._excess))

    def too_large_error(self, bits: Mapping[str, int], allowed: float) -> str | None:
        """Return in words by how much the error of `bits` exceeds `allowed` times that of 4 bits, or None.

        None too up to MIN_IMPROVEMENT, since errors scatter.
        """
        square = self._over_static(self._unit_errors(), bits)
        if square is None or math.sqrt(square) <= allowed * (1 + MIN_IMPROVEMENT):
            return None
        return f"the error of the bits is {math.sqrt(square):.2f} times that of 4 bits, allowed {allowed:g}"

    @property
    def gain(self) -> dict[str, float]:
        """Gain of qsgd by `str(CodecSpec)`, for each number of bits whose gain is above 0."""
        energy = math.fsum(self._energy.values())
        kept = {
            str(self._codec.replace(bits=bits)): 1
            - math.fsum(self._energy[name] * self._lost(name, bits) for name in self._level) / energy
            for bits in ALL_BITS
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
                top_norm=self._top[name],
                squared_errors={bits: self._energy[name] * self._lost(name, bits) for bits in ALL_BITS},
            )
            for name in self._level
        }

    def _unit_errors(self) -> dict[str, float]:
        """Return the squared error of each layer with one bit, as it follows from those with more."""
        return {name: self._energy[name] * level for name, level in self._level.items()}

    def _over_static(self, unit_errors: Mapping[str, float], bits: Mapping[str, int]) -> float | None:
        """Return the squared error with `bits` over that with 4 bits; None if no error of these layers is known."""
        known = {name: error for name, error in unit_errors.items() if name in bits and error > 0}
        if not known:
            return None

        def total(bits_of: Mapping[str, int]) -> float:
            return math.fsum(
                error * self._ratio[name].get(bits_of[name], 1.0) * lost_share({1: 1.0}, bits_of[name])
                for name, error in known.items()
            )

        static = total(dict.fromkeys(known, STATIC_BITS))
        return total(bits) / static if static > 0 else None

    def _lost(self, name: str, bits: int) -> float:
        return self._ratio[name].get(bits, 1.0) * lost_share({1: self._level[name]}, bits)


def lost_share(known: Mapping[int, float], bits: int) -> float:
    """Return the lost share with `bits` bits, from those of the numbers of bits that are known."""
    nearest = min(known, key=lambda other: (abs(other - bits), other))
    steps, others = (float((1 << number) - 1) for number in (bits, nearest))
    return known[nearest] * (others / steps) ** 2


def _mean(before: float, newest: float, weight: float = NEWEST_ERROR) -> float:
    return before + weight * (newest - before)

"""Bits per layer with the fewest wire bytes at a bounded error of the gradient: the problem of CGX, section 5.

Minimise the wire bytes of all layers subject to |error| <= alpha E_4. Both are l2 norms over all layers, and E_4 is the
error of 4 bits in every layer. Errors are measured on recorded gradients (`codecs.gain.squared_error`). `dp` finds
the optimum, `papers.cgx` has CGX's own algorithms, and `make_plan(..., bits=...)` runs the answer.

Shapes: L layers, W widths to choose from
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec

QSGD = CodecSpec(name="qsgd")
STATIC_BITS = 4
# Error of chosen bits over that of 4 bits everywhere. CGX uses 1.5 to 3.
ALPHA = 2.0
# Bits that policies choose from during training: with one bit 128 elements have two levels, and the error explodes.
WIDTHS = tuple(range(2, 9))
# Largest relative difference of sums in another order; a bound that is exceeded by less holds.
ROUNDING = 1e-12
# Partial choices; below this number the answer is the optimum, above it has a proven gap.
MAX_LABELS = 1 << 14

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def bits_of(codecs: Iterable[CodecSpec]) -> tuple[int, ...]:
    """Return the numbers of bits of the qsgd codecs among `codecs`, ascending."""
    return tuple(sorted({codec.bits for codec in codecs if codec.name == QSGD.name and codec.bits is not None}))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerErrors:
    """Measured errors of one layer.

    norm            l2 norm of its gradient; over several steps, the root of the summed squares
    top_norm        l2 norm of the `codecs.gain.NUM_TOP` largest elements of the sum of these gradients
    squared_errors  by bits, |g - decode(encode(g))|^2 over the same steps
    """

    numel: int
    norm: float
    top_norm: float
    squared_errors: Mapping[int, float]

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise ConfigError(f"a layer has {self.numel} elements; leave out layers without any")
        errors = ((f"error at {bits} bits", error) for bits, error in self.squared_errors.items())
        for name, value in (("norm", self.norm), ("top_norm", self.top_norm), *errors):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value!r}; measure it on finite gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsProblem:
    """Layers, and limits for their bits.

    alpha   largest allowed error, as a multiple of that of 4 bits everywhere; CGX uses 1.5 to 3
    widths  bits to choose from, ascending
    codec   qsgd with the bucket size and grid that count the bytes
    """

    layers: tuple[LayerErrors, ...]
    alpha: float = 1.0
    widths: tuple[int, ...] = tuple(range(1, 9))
    codec: CodecSpec = QSGD

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("no layers to choose bits for; give at least one")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"alpha {self.alpha!r} is not allowed; give a finite number above 0, such as 2")
        if not self.widths or list(self.widths) != sorted(set(self.widths)):
            raise ConfigError(f"widths {self.widths!r} are not allowed; give bits of qsgd in ascending order")
        if self.codec.bits is None:
            raise ConfigError(f"codec {self.codec} has no bits to choose; give qsgd")
        for index, layer in enumerate(self.layers):
            missing = {*self.widths, STATIC_BITS} - layer.squared_errors.keys()
            if missing:
                raise ConfigError(f"layer {index} has no error measured at {sorted(missing)} bits; measure these too")
        if float(self._squared_errors().min(axis=1).sum()) > self._budget:
            raise ConfigError(
                f"no choice of {self.widths} bits has an error of at most {self.alpha} times that of 4 bits; give a "
                "larger alpha or more bits"
            )

    @property
    def static_bytes(self) -> int:
        """Wire bytes of 4 bits everywhere."""
        return int(self._bytes_of(STATIC_BITS).sum())

    def answer(self, choice_L: Ints, bound_bytes: int) -> BitsChoice:
        """Return the choice with the widths at the indices `choice_L`."""
        layers = np.arange(len(self.layers))
        static = self._static_squared_error
        squared_error = float(self._squared_errors()[layers, choice_L].sum())
        return BitsChoice(
            bits=tuple(self.widths[choice] for choice in choice_L.tolist()),
            wire_bytes=int(self._bytes()[layers, choice_L].sum()),
            relative_error=math.sqrt(squared_error / static) if static > 0 else 0.0,
            bound_bytes=bound_bytes,
        )

    def tables(self) -> tuple[Ints, Floats]:
        """Return (L, W) wire bytes, and squared errors as shares of the allowed one: a choice may have 1 in total.

        If no error is allowed, the share of any error is infinite.
        """
        error_LW = self._squared_errors()
        share_LW = error_LW / self._budget if self._budget > 0 else np.where(error_LW > 0, math.inf, 0.0)
        return self._bytes(), share_LW

    def _bytes_of(self, bits: int) -> Ints:
        codec = self.codec.replace(bits=bits)
        return np.array([codec.payload_bytes(layer.numel) for layer in self.layers], dtype=np.int64)

    def _bytes(self) -> Ints:
        return np.stack([self._bytes_of(bits) for bits in self.widths], axis=1)

    def _squared_errors(self) -> Floats:
        return np.array([[layer.squared_errors[bits] for bits in self.widths] for layer in self.layers])

    @property
    def _static_squared_error(self) -> float:
        return math.fsum(layer.squared_errors[STATIC_BITS] for layer in self.layers)

    @property
    def _budget(self) -> float:
        return self.alpha**2 * self._static_squared_error * (1 + ROUNDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsChoice:
    """Bits of every layer.

    relative_error  error over that of 4 bits everywhere, at most alpha
    bound_bytes     lower bound: no choice within the error takes fewer wire bytes
    """

    bits: tuple[int, ...]
    wire_bytes: int
    relative_error: float
    bound_bytes: int

    @property
    def gap(self) -> float:
        """Largest share of `wire_bytes` that a better choice could save; 0 if this is the optimum."""
        return 1 - self.bound_bytes / self.wire_bytes


def dp(problem: BitsProblem, *, max_labels: int = MAX_LABELS) -> BitsChoice:
    """Return the optimum, or the best choice with its proven gap if `max_labels` partial choices are not enough.

    This is the multiple-choice knapsack of L-GreCo (Alimohammadi et al. 2023), whose dynamic program rounds errors to a
    grid. Departure: nothing is rounded. A label (bytes, error) of the first layers is dropped if

    1. another label is as good in both, or
    2. it cannot become better than the best known choice. Its bytes in the end are at least bytes + m error - m + the
       sum over the layers left of min (bytes + m error), with m the multiplier of the Lagrangian dual.
    """
    bytes_LW, error_LW = problem.tables()
    multiplier, dual_bytes, best_L = dual(bytes_LW, error_LW)
    best = int(total(bytes_LW, best_L))
    rounding = ROUNDING * (best + multiplier)
    cost_LW = bytes_LW + multiplier * error_LW
    # Layers with the widest range of cost come first, so that labels stay few for long.
    order = np.argsort(-np.ptp(cost_LW, axis=1), kind="stable")
    left_cost, left_error, left_bytes = (_left(table_LW, order) for table_LW in (cost_LW, error_LW, bytes_LW))
    num_bytes, error = np.zeros(1, dtype=np.int64), np.zeros(1)
    trail: list[tuple[Ints, Ints]] = []
    lost = math.inf
    for step, layer in enumerate(order):
        num_bytes = (num_bytes[:, None] + bytes_LW[layer]).ravel()
        error = (error[:, None] + error_LW[layer]).ravel()
        bound = np.maximum(num_bytes + multiplier * (error - 1) + left_cost[step], num_bytes + left_bytes[step])
        # A better choice takes at least one byte less.
        kept = np.flatnonzero((error + left_error[step] <= 1) & (bound <= best - 1 + rounding))
        kept = kept[np.lexsort((error[kept], num_bytes[kept]))]
        least = np.minimum.accumulate(np.append(math.inf, error[kept]))
        kept = kept[error[kept] < least[:-1]]
        if len(kept) > max_labels:
            kept = kept[np.argsort(bound[kept], kind="stable")]
            lost = min(lost, float(bound[kept[max_labels]]))
            kept = kept[:max_labels]
        trail.append((kept // bytes_LW.shape[1], kept % bytes_LW.shape[1]))
        num_bytes, error = num_bytes[kept], error[kept]
    if len(num_bytes):
        best, label = int(num_bytes.min()), int(num_bytes.argmin())
        best_L = np.empty(len(order), dtype=np.int64)
        for layer, (parent, choice) in zip(order[::-1], reversed(trail), strict=True):
            best_L[layer], label = choice[label], parent[label]
    bound_bytes = best if lost == math.inf else min(best, max(dual_bytes, math.ceil(lost - rounding)))
    return problem.answer(best_L, bound_bytes)


def _left(table_LW: Ints | Floats, order: Ints) -> Floats:
    """Return, for each layer in `order`, the least that the layers after it add."""
    least_L = table_LW.min(axis=1)[order].astype(np.float64)
    return np.asarray(np.append(least_L[::-1].cumsum()[::-1][1:], 0.0))


def dual(bytes_LW: Ints, error_LW: Floats) -> tuple[float, int, Ints]:
    """Return the multiplier of the error, the lower bound in bytes that it proves, and a choice within the error."""
    best_L = least_error(bytes_LW, error_LW)
    # Any multiplier proves a bound, but with much larger ones rounding would hide the bytes.
    low, high = -40.0, math.log2(total(bytes_LW, best_L)) + 10
    bound = 0
    # After 50 halvings the logarithm is as fine as a double.
    for _ in range(50):
        exponent = (low + high) / 2
        multiplier = 2.0**exponent
        cost_LW = bytes_LW + multiplier * error_LW
        choice_L = cost_LW.argmin(axis=1)
        least = float(cost_LW.min(axis=1).sum())
        bound = max(bound, math.ceil(least - multiplier - ROUNDING * (least + multiplier)))
        if total(error_LW, choice_L) <= 1:
            best_L, high = choice_L, exponent
        else:
            low = exponent
    return 2.0**high, bound, _fill(bytes_LW, error_LW, best_L)


def _fill(bytes_LW: Ints, error_LW: Floats, choice_L: Ints) -> Ints:
    """Spend the error that `choice_L` leaves: repeat the change of one layer that saves the most bytes."""
    choice_L, layers = choice_L.copy(), np.arange(len(choice_L))
    while True:
        saved_LW = bytes_LW[layers, choice_L][:, None] - bytes_LW
        more_LW = error_LW - error_LW[layers, choice_L][:, None]
        saved_LW[more_LW > 1 - total(error_LW, choice_L)] = 0
        layer, choice = np.unravel_index(saved_LW.argmax(), saved_LW.shape)
        if saved_LW[layer, choice] <= 0:
            return choice_L
        choice_L[layer] = choice


def least_error(bytes_LW: Ints, error_LW: Floats) -> Ints:
    """Return the choice with the least error, with the fewest bytes among equals."""
    tie_LW = error_LW == error_LW.min(axis=1, keepdims=True)
    return np.asarray(np.where(tie_LW, bytes_LW, np.iinfo(np.int64).max).argmin(axis=1))


def total(table_LW: Ints | Floats, choice_L: Ints) -> float:
    """Return the sum over all layers; it is exact for bytes."""
    return float(table_LW[np.arange(len(choice_L)), choice_L].sum())

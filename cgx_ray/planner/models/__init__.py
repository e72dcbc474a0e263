"""Models to plan for: nine public architectures in files of `generate`; your own, from `cgx-ray profile-model`."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cgx_ray.errors import ConfigError, unknown
from cgx_ray.plan import Layer
from cgx_ray.planner.cost import check_seconds
from cgx_ray.untrusted import read_table

_FOLDER = Path(__file__).parent
# Elements or multiply-adds of a layer: all whole numbers below it are exact as floats too.
MAX_COUNT = 2**53
MODEL_NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("*.csv")))


class MeasuredLayer(NamedTuple):
    """Parameter of a model that ran. `ready_s`: seconds from the start of forward until its gradient was ready."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    ready_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Parameters in registration order, and their multiply-adds or measured times.

    forward_macs  by layer, multiply-adds of one sample's forward pass; empty if the model was measured
    ready_s       by layer, seconds from the start of forward until its gradient was ready; empty if it was not measured
    """

    name: str
    layers: tuple[Layer, ...]
    forward_macs: tuple[int, ...] = ()
    ready_s: tuple[float, ...] = ()

    @property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @property
    def measured_s(self) -> float | None:
        """Measured seconds of forward and backward of a step, if any."""
        return max(self.ready_s) if self.ready_s else None

    def backward_s(self, total_s: float) -> tuple[float, ...]:
        """Return the seconds of each layer in backward order, the reverse of registration; they sum to `total_s`.

        If the model was measured, the time of a layer is the time since all gradients before it were ready, and the
        first includes forward. Else shares are those of the multiply-adds, an estimate: backward costs two forwards in
        every layer. Kernels that move memory (normalisation, embeddings) and small ones take longer than that.
        """
        check_seconds("total_s", total_s)
        shares: Sequence[float] = self.forward_macs[::-1]
        if self.ready_s:
            ready_s = [0.0, *itertools.accumulate(reversed(self.ready_s), max)]
            shares = [after - before for before, after in itertools.pairwise(ready_s)]
        whole = sum(shares)
        return tuple(total_s * share / whole for share in shares)

    def step_s(self, compute_s: float | None = None) -> tuple[float, ...]:
        """Return `backward_s` with forward added to the first layer; the sum is `compute_s`, by default as measured.

        If the model was not measured, forward counts as a third.
        """
        if self.measured_s is not None:
            return self.backward_s(self.measured_s if compute_s is None else compute_s)
        if compute_s is None:
            raise ConfigError(f"model {self.name} has no measured times; give the compute time of a step")
        first, *others = self.backward_s(compute_s * 2 / 3)
        return (first + compute_s / 3, *others)


def _file_of(name: str | Path) -> Path:
    path = _FOLDER / f"{name}.csv" if name in MODEL_NAMES else Path(name)
    if not path.is_file():
        raise ConfigError(
            f"{unknown('model', str(name), MODEL_NAMES)}; or give a CSV file, as `cgx-ray profile-model` writes them"
        )
    if path.suffix == ".py":
        raise ConfigError(
            f"{path} is Python; `cgx-ray profile-model {path}:FUNCTION` makes a file of the model that FUNCTION returns"
        )
    return path


def load_model(name: str | Path) -> ModelDescription:
    """Read a model of `MODEL_NAMES`, or a CSV file.

    Its columns are name, shape (`"64x3x7x7"`), forward_macs or ready_s, and dtype unless that is float32. Raises
    ConfigError if there is no such file, it is not text, or a line is not of this form.
    """
    path = _file_of(name)
    layers, macs, ready_s = [], [], []
    line_of: dict[str, int] = {}
    rows = read_table(path)
    is_measured = bool(rows) and "ready_s" in rows[0]
    for number, row in enumerate(rows, start=2):
        try:
            shape = [int(size) for size in row["shape"].split("x")]
            if is_measured:
                ready_s.append(float(row["ready_s"]))
            else:
                macs.append(int(row["forward_macs"]))
            dtype = row.get("dtype") or "float32"
            layer = Layer(name=row["name"], numel=math.prod(shape), ndim=len(shape), dtype=dtype)
            layer.dense_bytes  # noqa: B018  raises KeyError for an unknown dtype
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error!r}; give name, shape (64x3x7x7), and forward_macs or ready_s"
            ) from error
        if not (min(shape) >= 0 and layer.numel < MAX_COUNT and 0 <= min(macs[-1:], default=0) < MAX_COUNT):
            raise ConfigError(f"{path}, line {number}: sizes and multiply-adds are 0 or more, both less than 2^53")
        if ready_s:
            check_seconds(f"{path}, line {number}: ready_s", ready_s[-1])
        if not layer.name:
            raise ConfigError(f"{path}, line {number}: the name is empty; give each layer a name of its own")
        if layer.name in line_of:
            raise ConfigError(
                f"{path}, line {number}: line {line_of[layer.name]} is {layer.name!r} too; give each layer a name of "
                "its own"
            )
        line_of[layer.name] = number
        layers.append(layer)
    # A parameter without elements is no layer: there is nothing to send.
    has_elements = [layer.numel > 0 for layer in layers]
    layers = list(itertools.compress(layers, has_elements))
    macs, ready_s = list(itertools.compress(macs, has_elements)), list(itertools.compress(ready_s, has_elements))
    if not layers or not any((*macs, *ready_s)):
        measure = "seconds" if is_measured else "multiply-adds"
        raise ConfigError(f"{path} has {len(layers)} layers and {sum(macs)} {measure}; give some of both")
    return ModelDescription(name=path.stem, layers=tuple(layers), forward_macs=tuple(macs), ready_s=tuple(ready_s))


def write_model(layers: Sequence[MeasuredLayer], path: Path) -> None:
    """Write a file for `load_model`; `layers` in registration order."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(MeasuredLayer._fields)
        for layer in layers:
            shape = "x".join(map(str, layer.shape or (1,)))
            writer.writerow((layer.name, shape, layer.dtype, f"{layer.ready_s:.9f}"))

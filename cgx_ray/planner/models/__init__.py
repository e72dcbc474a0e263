"""Models to plan for without having them: the parameters of public architectures, in files that `generate` writes."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from cgx_ray.errors import ConfigError
from cgx_ray.plan import Layer

_FOLDER = Path(__file__).parent
MODEL_NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("*.csv")))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Parameters in registration order and the multiply-adds of one sample's forward pass that belong to each."""

    name: str
    layers: tuple[Layer, ...]
    forward_macs: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    def backward_s(self, total_s: float) -> tuple[float, ...]:
        """Seconds of each layer in backward order, the reverse of registration, `total_s` together.

        An estimate: backward costs two forwards in every layer, so shares are those of the multiply-adds. Kernels that
        move memory instead (normalisation, embeddings) take longer than that, and so do small ones. Measure with a
        profiler where it matters.
        """
        if not (math.isfinite(total_s) and total_s >= 0):
            raise ConfigError(f"total_s {total_s!r} is not allowed; give finite seconds, 0 or more")
        all_macs = sum(self.forward_macs)
        return tuple(total_s * macs / all_macs for macs in reversed(self.forward_macs))


def load_model(name: str | Path) -> ModelDescription:
    """A model of `MODEL_NAMES`, or of a CSV file with the columns name, shape (`"64x3x7x7"`) and forward_macs.

    Raises ConfigError if there is no such file or a line of it is not like that.
    """
    path = _FOLDER / f"{name}.csv" if name in MODEL_NAMES else Path(name)
    if not path.is_file():
        raise ConfigError(f"no model {str(name)!r}; known: {', '.join(MODEL_NAMES)}; or give a CSV file")
    layers, macs = [], []
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                shape = [int(size) for size in row["shape"].split("x")]
                macs.append(int(row["forward_macs"]))
                layer = Layer(name=row["name"], numel=math.prod(shape), ndim=len(shape))
            except (KeyError, ValueError, AttributeError) as error:
                raise ConfigError(
                    f"{path}, line {number}: {error!r}; give name, shape (64x3x7x7), forward_macs"
                ) from error
            if min(shape) < 1 or macs[-1] < 0:
                raise ConfigError(f"{path}, line {number}: sizes are 1 or more and multiply-adds 0 or more")
            layers.append(layer)
    if not layers or not any(macs):
        raise ConfigError(f"{path} has {len(layers)} layers and {sum(macs)} multiply-adds; give some of both")
    return ModelDescription(name=path.stem, layers=tuple(layers), forward_macs=tuple(macs))

"""Work of one step of `bench step`: layers, when DDP hands them over, bytes on the wire, limit, prediction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from bench.step.cases import POWERSGD_RANK, StepWay
from cgx_ray.errors import ConfigError
from cgx_ray.plan import NONE, CodecSpec, Layer, Plan, Scheme
from cgx_ray.planner import models
from cgx_ray.planner.candidates import CodecCost, codec_options
from cgx_ray.planner.cost import Link, Network, terms
from cgx_ray.planner.fidelity import USUAL_MIN_GAIN
from cgx_ray.planner.joint import best_plan
from cgx_ray.planner.prediction import Measured, groups_of, predict
from cgx_ray.planner.scenario import typical_gains
from cgx_ray.untrusted import read_table

_MB = 1 << 20
# Of the codecs that `CGXConfig` and `cgx-ray plan` choose from by default.
GAINS = typical_gains()
# Copies of the gradients on a rank: the fixed ones, DDP's buckets, groups, the memory of codecs; measured.
_COPIES = 8
# DDP's defaults, bytes.
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = _MB, 25 * _MB
# torch's hook sends a matrix as it is unless its factors are smaller by more than this.
_POWERSGD_MIN_RATE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model whose gradients `num_ranks` ranks average.

    layers      in registration order, with names that torch allows
    shapes      of `layers`
    backward_s  of each layer, in the order of backward, the reverse of `layers`
    """

    layers: tuple[Layer, ...]
    shapes: tuple[tuple[int, ...], ...]
    backward_s: tuple[float, ...]
    num_ranks: int

    @classmethod
    def load(cls, model: str, *, backward_s: float, num_ranks: int) -> Workload:
        """Read a model file; its layers share `backward_s` as their multiply-adds or measured times do."""
        description = models.load_model(model)
        if odd := [layer for layer in description.layers if layer.dtype != "float32"]:
            raise ConfigError(
                f"layer {odd[0].name!r} of model {model} is {odd[0].dtype}; give a model of float32 layers"
            )
        return cls(
            # Torch allows no dots in the names of one module's parameters.
            layers=tuple(replace(layer, name=layer.name.replace(".", "/")) for layer in description.layers),
            shapes=_shapes_of(model),
            backward_s=description.backward_s(backward_s),
            num_ranks=num_ranks,
        )

    @property
    def dense_bytes(self) -> int:
        return sum(layer.dense_bytes for layer in self.layers)

    def check_memory(self) -> None:
        """Raise ConfigError if this machine has too little memory left for all ranks."""
        needed, free = _COPIES * self.dense_bytes * self.num_ranks, psutil.virtual_memory().available
        if needed > free:
            raise ConfigError(
                f"{self.num_ranks} ranks need some {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are "
                "free; give a smaller model or fewer ranks"
            )

    def bucket_backward_s(self, bucket_cap_mb: int | None) -> tuple[float, ...]:
        """Return `backward_s` with all of a bucket's time at its first layer: DDP hands its layers over together.

        Buckets as DDP makes them after the first step, in the order of backward. A bucket ends with the layer that
        fills it.
        """
        cap = _FIRST_BUCKET_BYTES if bucket_cap_mb is None else bucket_cap_mb * _MB
        seconds, first, filled = [0.0] * len(self.layers), 0, 0
        for index, layer in enumerate(reversed(self.layers)):
            seconds[first] += self.backward_s[index]
            filled += layer.dense_bytes
            if filled >= cap:
                first, filled = index + 1, 0
                cap = _BUCKET_BYTES if bucket_cap_mb is None else cap
        return tuple(seconds)

    def first_ready_s(self, bucket_cap_mb: int | None, plan: Plan | None = None) -> float:
        """Return when the first bucket is ready; with a plan, the first group, whose layers do not wait for buckets."""
        if plan is None:
            return self.bucket_backward_s(bucket_cap_mb)[0]
        ready_s = itertools.accumulate(self.backward_s)
        by_name = dict(zip((layer.name for layer in reversed(self.layers)), ready_s, strict=True))
        return min(max(by_name[name] for name in group.layers) for group in plan.groups)

    def link_bytes(self, way: StepWay, plan: Plan | None = None) -> float:
        """Return the bytes that one rank's link carries in a step, one direction. `plan`: of a way of the engine."""
        if plan is not None:
            return (
                1
                / plan.period
                * sum(
                    terms(
                        group.option.scheme,
                        self.num_ranks,
                        group.dense_bytes,
                        group.wire_bytes,
                        group.option.codec.index_bytes(group.numel),
                    )[1]
                    for group in groups_of(plan, self.layers)
                )
            )
        summed = {
            "noop": 0.0,
            "ddp": self.dense_bytes,
            "fp16_hook": self.dense_bytes / 2,
            "bf16_hook": self.dense_bytes / 2,
            "powersgd_hook": sum(map(_powersgd_bytes, self.shapes)),
        }[way.kind]
        return terms(Scheme.DENSE, self.num_ranks, summed, summed)[1]

    def limit_s(self, way: StepWay, *, noop_s: float, link: Link, plan: Plan | None = None) -> float:
        """Return a lower bound of a step: no exchange at all, or the network busy from the first group to the end.

        noop_s  measured, with the same buckets
        """
        num_bytes = self.link_bytes(way, plan)
        if plan is not None and plan.period > 1:
            return noop_s + link.seconds(1 / plan.period, num_bytes)
        return max(noop_s, self.first_ready_s(way.bucket_cap_mb, plan) + link.seconds(1, num_bytes))

    def measured(self, *, link: Link, codec_costs: Mapping[str, CodecCost], compute_s: float) -> Measured:
        """Return the input of the planner.

        compute_s  seconds of a step without exchange; what they are more than backward is added to its first layer
        """
        first, *others = self.backward_s
        return Measured(
            layers=self.layers,
            backward_s=(first + max(0.0, compute_s - sum(self.backward_s)), *others),
            network=Network.flat(self.num_ranks, link),
            codec_costs=codec_costs,
            gain=GAINS,
        )


def joint_plan(measured: Measured, num_ranks: int) -> Plan:
    """Return the planner's best plan over all schemes and over the codecs that `cgx-ray plan` considers."""
    answer = best_plan(measured, codec_options((NONE, *map(CodecSpec.parse, GAINS))), min_gain=USUAL_MIN_GAIN)
    return answer.best.plan(version=0, world_size=num_ranks)


def predicted_s(measured: Measured, plan: Plan) -> float:
    """Return the planner's prediction of a step under `plan`."""
    return predict(measured, groups_of(plan, measured.layers)).step_s


def _shapes_of(model: str) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a model that `load_model` has read."""
    path = Path(models.__file__).parent / f"{model}.csv" if model in models.MODEL_NAMES else Path(model)
    return tuple(tuple(map(int, row["shape"].split("x"))) for row in read_table(path))


def _powersgd_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes that torch's PowerSGD hook sums for one layer: two factors, or all if it is small."""
    numel = math.prod(shape)
    rows, columns = shape[0], numel // shape[0]
    rank = min(rows, columns, POWERSGD_RANK)
    factors = (rows + columns) * rank
    return 4 * (factors if factors * _POWERSGD_MIN_RATE < numel else numel)

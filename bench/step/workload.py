"""Work of one step of `bench step`: layers, when DDP hands them over, bytes on the wire, limit, prediction."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from bench.step.cases import StepWay
from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec, Layer, Plan, Scheme
from cgx_ray.planner import models
from cgx_ray.planner.candidates import CodecCosts
from cgx_ray.planner.cost import Link, Network, terms
from cgx_ray.planner.planned_group import groups_of
from cgx_ray.planner.prediction import Measured, predict
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
    divisor     layers have so many times fewer elements than the model's; DDP's buckets are as much smaller
    """

    layers: tuple[Layer, ...]
    shapes: tuple[tuple[int, ...], ...]
    backward_s: tuple[float, ...]
    num_ranks: int
    divisor: float = 1.0

    @classmethod
    def load(cls, model: str, *, backward_s: float, num_ranks: int, divisor: float = 1.0) -> Workload:
        """Read a model file; its layers share `backward_s` as their multiply-adds or measured times do.

        With a `divisor` of more than 1, tensors of any rank become matrices.
        """
        description = models.load_model(model)
        if odd := [layer for layer in description.layers if layer.dtype != "float32"]:
            raise ConfigError(
                f"layer {odd[0].name!r} of model {model} is {odd[0].dtype}; give a model of float32 layers"
            )
        # Torch allows no dots in the names of one module's parameters.
        layers = [replace(layer, name=layer.name.replace(".", "/")) for layer in description.layers]
        shapes = _shapes_of(model)
        if divisor > 1:
            shapes = tuple(_divided(shape, divisor) for shape in shapes)
            layers = [
                replace(layer, numel=math.prod(shape), num_rows=shape[0] if layer.num_rows is not None else None)
                for layer, shape in zip(layers, shapes, strict=True)
            ]
        return cls(
            layers=tuple(layers),
            shapes=shapes,
            backward_s=description.backward_s(backward_s),
            num_ranks=num_ranks,
            divisor=divisor,
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

    def bucket_cap_mb(self, way: StepWay) -> float | None:
        """Return DDP's argument. With a divisor, the first bucket is as large as the others: so it is for all sizes."""
        if self.divisor == 1:
            return way.bucket_cap_mb
        return (way.bucket_cap_mb or _BUCKET_BYTES / _MB) / self.divisor

    def bucket_backward_s(self, bucket_cap_mb: float | None) -> tuple[float, ...]:
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

    def first_ready_s(self, bucket_cap_mb: float | None, plan: Plan | None = None) -> float:
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
        scheme, num_bytes = Scheme.DENSE, float(self.dense_bytes)
        match way.kind:
            case "noop":
                num_bytes = 0.0
            case "fp16_hook" | "bf16_hook":
                num_bytes /= 2
            case "powersgd_hook":
                rank = CodecSpec.parse(way.codec).rank
                assert rank is not None
                num_bytes = sum(_powersgd_bytes(shape, rank) for shape in self.shapes)
            case "truncated":
                num_bytes *= way.share_sent
            case "grace":
                codec = CodecSpec.parse(way.codec)
                scheme, num_bytes = Scheme.ALLGATHER, sum(codec.payload_bytes(layer.numel) for layer in self.layers)
        return terms(scheme, self.num_ranks, num_bytes, num_bytes)[1] / way.period

    def limit_s(self, way: StepWay, *, noop_s: float, link: Link, plan: Plan | None = None) -> float:
        """Return a lower bound of a step: no exchange at all, or the network busy from the first group to the end.

        noop_s  measured, with the same buckets
        """
        num_bytes = self.link_bytes(way, plan)
        if way.sends_after_backward:
            return noop_s + link.seconds(1 / way.period, num_bytes)
        return max(noop_s, self.first_ready_s(self.bucket_cap_mb(way), plan) + link.seconds(1, num_bytes))

    def measured(self, *, link: Link, codec_costs: CodecCosts, compute_s: float) -> Measured:
        """Return the input of the planner.

        compute_s  seconds of a step without exchange; what they are more than backward is added to its first layer
        """
        first, *others = self.backward_s
        # Other bits and densities take about as long, such as those of layers under "cgx".
        codec_costs = {CodecSpec.parse(codec).name: cost for codec, cost in codec_costs.items()} | dict(codec_costs)
        return Measured(
            layers=self.layers,
            backward_s=(first + max(0.0, compute_s - sum(self.backward_s)), *others),
            network=Network.flat(self.num_ranks, link),
            codec_costs=codec_costs,
            gain=GAINS,
        )


def predicted_s(measured: Measured, plan: Plan) -> float:
    """Return the planner's prediction of a step under `plan`."""
    return predict(measured, groups_of(plan, measured.layers)).step_s


def _shapes_of(model: str) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a model that `load_model` has read."""
    path = Path(models.__file__).parent / f"{model}.csv" if model in models.MODEL_NAMES else Path(model)
    return tuple(tuple(map(int, row["shape"].split("x"))) for row in read_table(path))


def _divided(shape: tuple[int, ...], divisor: float) -> tuple[int, ...]:
    """Return a shape with as many times fewer elements, as nearly as whole numbers allow: of a matrix, both sides."""
    numel = max(1, round(math.prod(shape) / divisor))
    if len(shape) == 1:
        return (numel,)
    rows = min(max(1, round(shape[0] / math.sqrt(divisor))), numel)
    return rows, max(1, round(numel / rows))


def _powersgd_bytes(shape: tuple[int, ...], rank: int) -> int:
    """Return the bytes that torch's PowerSGD hook sums for one layer: two factors, or all if it is small."""
    numel = math.prod(shape)
    rows, columns = shape[0], numel // shape[0]
    rank = min(rows, columns, rank)
    factors = (rows + columns) * rank
    return 4 * (factors if factors * _POWERSGD_MIN_RATE < numel else numel)

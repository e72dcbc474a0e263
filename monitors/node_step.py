"""Samples of the ranks of one node, gathered to one record per step: the controller must not get one per rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cgx_ray.monitors.sample import LayerError, LayerSum, NodeStep, StepSample, Sum, slowest_link


def node_steps(samples: Iterable[StepSample]) -> tuple[NodeStep, ...]:
    """Return the records of the steps in `samples`, oldest first. The samples of each rank must be in order.

    Steps that ranks train again, from a checkpoint, are in records of their own, after those of the first pass.
    """
    newest: dict[int, int] = {}
    num_passes: Counter[int] = Counter()
    found: dict[tuple[int, int, int], list[StepSample]] = {}
    for sample in samples:
        num_passes[sample.rank] += sample.step <= newest.get(sample.rank, -1)
        newest[sample.rank] = sample.step
        found.setdefault((num_passes[sample.rank], sample.step, sample.plan_version), []).append(sample)
    return tuple(_gather(sorted(found[key], key=lambda sample: sample.rank)) for key in sorted(found))


def _gather(samples: Sequence[StepSample]) -> NodeStep:
    """Return the record of one step of several ranks under one plan."""
    return NodeStep(
        step=samples[0].step,
        plan_version=samples[0].plan_version,
        ranks=tuple(one.rank for one in samples),
        step_s=tuple(one.step_s for one in samples),
        between_s=tuple(one.between_s for one in samples),
        compute_s=tuple(one.compute_s for one in samples),
        encode_s=tuple(one.encode_s for one in samples),
        exchange_s=tuple(one.exchange_s for one in samples),
        decode_s=tuple(one.decode_s for one in samples),
        wire_bytes=tuple(one.wire_bytes for one in samples),
        dense_bytes=tuple(one.dense_bytes for one in samples),
        ready_s=tuple(max(times) for times in zip(*(one.ready_s for one in samples), strict=True)),
        transfers=tuple(
            min(transfers, key=lambda transfer: transfer.seconds)
            for transfers in zip(*(one.transfers for one in samples), strict=True)
        ),
        bursts={one.rank: one.bursts for one in samples if one.bursts},
        rate_from={(peer, one.rank): rate for one in samples for peer, rate in one.rate_from.items() if rate > 0},
        lag_s={(one.rank, peer): lag_s for one in samples for peer, lag_s in one.lag_s.items()},
        norms=tuple(one.norm for one in samples if one.norm is not None),
        losses=tuple(one.loss for one in samples if one.loss is not None and math.isfinite(one.loss)),
        lrs=tuple(one.lr for one in samples if one.lr is not None),
        gain=_sums([one.gain for one in samples]),
        kept=_sums([one.kept for one in samples]),
        gain_curve=tuple(
            Sum(math.fsum(gains), len(gains))
            for gains in zip(*filter(None, (one.gain_curve for one in samples)), strict=True)
        ),
        layer_errors=_layer_sums([one.layer_errors for one in samples]),
        error_bits=next((one.error_bits for one in samples if one.layer_errors), None),
        num_local=samples[0].num_local if len({one.num_local for one in samples}) == 1 else 1,
        # The same on all ranks.
        weight_drift=samples[0].weight_drift,
        inside=slowest_link(one.inside for one in samples),
    )


def _sums(measured: Sequence[Mapping[str, float]]) -> dict[str, Sum]:
    """Return the sum of each name over the ranks that measured it."""
    names = dict.fromkeys(name for gain in measured for name in gain)
    found = {name: [gain[name] for gain in measured if name in gain] for name in names}
    return {name: Sum(math.fsum(values), len(values)) for name, values in found.items()}


def _layer_sums(measured: Sequence[Mapping[str, LayerError]]) -> dict[str, LayerSum]:
    """Return the sums of each layer over the ranks that measured it."""
    names = dict.fromkeys(name for errors in measured for name in errors)
    found = {name: [errors[name] for errors in measured if name in errors] for name in names}
    return {
        name: LayerSum(
            math.fsum(one.energy for one in errors), math.fsum(one.energy * one.lost for one in errors), len(errors)
        )
        for name, errors in found.items()
    }

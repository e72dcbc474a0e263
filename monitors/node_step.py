"""Samples of the ranks of one node, gathered to one record per step: the controller must not get one per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cgx_ray.monitors.sample import NodeStep, StepSample, reduce_ranks


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
        ranks=tuple(one.rank for one in samples),
        error_bits=next((one.error_bits for one in samples if one.layer_errors), None),
        **reduce_ranks(samples),
    )

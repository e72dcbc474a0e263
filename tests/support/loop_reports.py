"""Reports of a training that keeps its first plan, as values that a controller can be given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from cgx_ray.monitors.sample import NodeSample, node_steps
from cgx_ray.plan import make_plan
from support.control_runs import LAYERS, QUIET, WORLD, FakeTraining

FIRST = make_plan(LAYERS, version=0, world_size=WORLD)


def reports() -> Iterator[NodeSample]:
    """Yield the reports of a training under `FIRST`, one per step."""
    loop: Any = SimpleNamespace(plans=[FIRST])
    run = FakeTraining(loop)
    for step in itertools.count(1):
        run.step = step
        samples = node_steps(map(run.sample, range(WORLD)))
        yield NodeSample(node_id="node", time_s=float(step), steps=samples, latency_s={"other": 1e-4}, host=QUIET)

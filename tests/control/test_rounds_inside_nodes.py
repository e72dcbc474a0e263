"""Rounds between nodes that sum inside in each step. Ranks count these sums as compute, predictions do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.control_runs import LAYERS, WORLD, start

from cgx_ray.control.journal.lines import start_entry
from cgx_ray.control.policies.policy import Static
from cgx_ray.plan import make_plan
from cgx_ray.planner.cost import Link


@pytest.mark.parametrize(("intra", "period"), [("dense", 4), ("flat", 4), ("dense", 1)])
def test_sums_inside_nodes_are_no_compute_of_a_round(tmp_path: Path, intra: str, period: int) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(5)
    state = run.loop._state
    assert state is not None
    assert state.decided is not None
    network = replace(
        state.decided.network,
        num_nodes=WORLD // 2,
        ranks_per_node=2,
        inside=Link.from_rates(bandwidth_gbps=1, latency_ms=0.1),
    )
    state.decided = replace(state.decided, network=network)
    state.steps.plan = make_plan(
        LAYERS, version=100, world_size=WORLD, codec="qsgd:bits=4", scheme="sra", intra=intra, period=period
    )
    state._versions = {100}
    step = replace(state._recent[-1], plan_version=100, num_steps=period, step_s=5.0, compute_s=1.0)
    assert state.add_step(step, 100.0)
    inside_s = state.decided.inside_sum_s if (intra, period) == ("dense", 4) else 0.0
    assert state.decided.inside_sum_s > 0.05
    assert state._recent[-1].compute_s == pytest.approx(1.0 - inside_s)


@pytest.mark.parametrize(
    ("num_addresses", "on_one_node", "expected"),
    [(1, True, "dense, dense inside nodes"), (1, False, ""), (2, False, ""), (0, False, "")],
)
def test_a_plan_uses_no_codec_where_ranks_share_a_node(num_addresses: int, on_one_node: bool, expected: str) -> None:
    plan = make_plan(LAYERS, version=0, world_size=WORLD, codec="qsgd", intra="dense", period=4)
    nodes = [f"10.0.0.{rank % num_addresses}" for rank in range(WORLD)] if num_addresses else []
    more = {"nodes": nodes, "link": "network", "on_one_node": on_one_node}
    entry = start_entry(Static(), LAYERS, plan, {}, "backward", **more, time_s=0.0)
    said = entry["plan"]
    assert said["plan"] == (f"{expected}, every 4 steps" if expected else plan.describe())
    assert (said["expected_loss"] == 1.0) == on_one_node

"""`python -m bench scale`: its numbers are complete and consistent. Tests do not judge speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.__main__ import bench
from bench.scale import measure
from bench.scale.measure import ScaleNumbers, ScaleOptions
from bench.shared.simulated_cluster import GBPS, LATER_GBPS, OPTIONS, LargeCluster, Reports
from cgx_ray.control.history import Registration
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive

NAMES = [
    "controller",
    "longest_decision",
    "decisions",
    "longest_report_in_loop",
    "observe_p50",
    "observe_p99",
    "memory",
    "agreement",
]


@pytest.mark.slow
def test_a_quick_run_measures_a_real_controller_and_processes_that_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "QUICK", replace(measure.QUICK, seconds=2.0, num_agreeing=4))
    path = tmp_path / "scale.json"
    done = CliRunner().invoke(bench, ["scale", "--quick", "--json", str(path)])
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == NAMES
    assert rows["decisions"]["met"], "the loop has decided nothing"
    assert all(rows[name]["value"] > 0 for name in NAMES), rows
    assert rows["agreement"]["baseline"] > 0
    assert "40 ranks on 20 nodes" in done.output


def test_goals_are_for_the_whole_run_and_memory_for_two_minutes() -> None:
    numbers = ScaleNumbers(
        cores=0.4, decision_s=[0.2, 1.5], longest_s=1.5, observe_s=[0.01] * 98 + [0.2] * 2, memory=[100.0] * 9,
        agreement=(0.5, 5.0),
    )  # fmt: skip
    met = {row.name: row.met for row in numbers.rows(ScaleOptions(seconds=600.0))}
    assert met == dict.fromkeys(NAMES, True) | dict.fromkeys(["longest_report_in_loop", "observe_p50"]) | {
        "longest_decision": False,
        "observe_p99": False,
    }
    assert [row.name for row in numbers.rows(ScaleOptions(has_goals=False)) if row.goal] == ["decisions"]


def test_the_loop_finds_the_link_of_the_simulated_nodes_and_decides_when_it_changes(tmp_path: Path) -> None:
    cluster = LargeCluster(8, 4)
    reports, plan = Reports(cluster), cluster.first_plan()
    loop = ControlLoop(Adaptive(candidates=OPTIONS), Journal(tmp_path / "decisions.jsonl"))
    loop.register(Registration(layers=tuple(cluster.truth(GBPS).layers), first_plan=plan, codec_costs=cluster.costs))
    found = []
    for step in range(40):
        gbps, plan = (GBPS, LATER_GBPS)[step >= 20], loop.plans[-1]
        for node in range(8):
            loop.observe(reports.make(node, step, plan, gbps, float(step)), step + node / 8)
        rate = loop.facts().bandwidth_bits_per_s
        found.append(rate / 1e9 if rate else 0.0)
    assert 0.8 * GBPS < found[19] < 1.2 * GBPS, found
    assert 0.8 * LATER_GBPS < found[39] < 1.2 * LATER_GBPS, found
    causes = {cause for _, cause in loop.facts().num_decisions}
    assert {"first_measurements", "network"} <= causes, causes

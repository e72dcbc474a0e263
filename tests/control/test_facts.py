"""Facts that the controller publishes, at every step of a run in which plans change."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from support.control_runs import LAYERS, WORLD, journal, registration, start

from cgx_ray.control.journal.facts import CAUSE_KINDS, LoopFacts
from cgx_ray.monitors.export import LABELS
from cgx_ray.plan import make_plan


def test_facts_are_known_at_every_step_also_between_a_decision_and_its_first_step(tmp_path: Path) -> None:
    run = start(tmp_path)
    # One group, so that the plans after it have more.
    first = make_plan(LAYERS, version=0, world_size=WORLD, group_bytes=1 << 30, first_bytes=1 << 30)
    run.loop.plans.clear()
    run.loop.register(registration(first_plan=first))
    facts: list[LoopFacts] = []
    for gbps in (1.0, 0.05, 1.0):
        run.gbps = gbps
        for _ in range(30):
            run.run(1)
            facts.append(run.loop.facts())
    decisions = [entry for entry in journal(tmp_path) if entry["event"] == "decision"]
    kinds = Counter(kind for kind, _ in facts[-1].num_decisions.elements())  # type: ignore[attr-defined]
    assert kinds == Counter(entry["kind"] for entry in decisions)
    assert {cause for _, cause in facts[-1].num_decisions} >= {"first_measurements", "network"}
    assert max(facts[-1].newest_decision_s.values()) == decisions[-1]["time"]
    assert len({len(plan.groups) for plan in run.loop.plans}) > 1
    versions = [one.plan_version for one in facts]
    assert versions == sorted(versions)
    assert versions[-1] > versions[0]
    # At 1 Gbit/s and at 50 Mbit/s, steps take as long as the model says.
    assert facts[29].prediction_error == pytest.approx(0, abs=0.05)
    slow = facts[59]
    assert slow.dense_step_s is not None
    assert slow.measured_step_s is not None
    assert slow.dense_step_s > 2 * slow.measured_step_s
    assert all(one.report_age_s == {"node": 0.0} for one in facts)


@pytest.mark.parametrize("guess_gbps", [0.1, 0.4])
def test_a_dense_step_counts_as_measured_while_only_a_guess_says_that_the_link_has_changed(
    guess_gbps: float, tmp_path: Path
) -> None:
    run = start(tmp_path)
    # Exchanges on the mesh are a guess. Those of qsgd are shorter, and look slower or faster on the same link.
    run.has_mesh, run.gbps = True, 0.2
    run.run(3)
    dense_s = run.loop.facts().dense_step_s
    run.gbps = guess_gbps
    run.run(20)
    facts = run.loop.facts()
    assert facts.bandwidth_bits_per_s == pytest.approx(guess_gbps * 1e9)
    assert (facts.is_link_known, facts.num_link_changes) == (False, 0)
    assert facts.is_dense_measured
    assert facts.dense_step_s == pytest.approx(dense_s, rel=0.01)
    run.loop.end(1e6)
    assert "predicted" not in run.loop.history().totals.verdict()


def test_a_plan_that_is_taken_back_is_counted(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.slowdown = 30.0
    run.run(30)
    num_disabled = sum(entry.get("kind") == "disable" for entry in journal(tmp_path))
    assert num_disabled > 0
    assert run.loop.facts().num_reverts == {"slower_than_dense": num_disabled}


def test_every_kind_of_cause_is_in_the_metrics_help() -> None:
    listed = re.sub(r" \([^)]*\)", "", LABELS["cause"].partition(": ")[2])
    named = listed.replace(" or ", ", ").split(", ")
    assert set(named) == set(CAUSE_KINDS)

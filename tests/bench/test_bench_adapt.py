"""`bench adapt`: the simulated cluster is what it says, the numbers are complete, and the loop answers changes.

The simulation has no clock and fixed seeds, so its numbers are the same on every machine.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from bench.__main__ import bench
from bench.adapt.cases import CASES
from bench.adapt.measure import measure_adapt
from bench.adapt.papers import compare_papers, paper_rows
from bench.shared.simulated_cluster import WORLD, ClusterErrors, ClusterState, SimulatedCluster
from cgx_ray.control.policies.paper_policies import ByteComp, Cupcake
from cgx_ray.plan import DENSE, make_plan
from cgx_ray.planner.planned_group import groups_of
from cgx_ray.planner.prediction import predict

NO_ERRORS = ClusterErrors(step_noise=0.0, switch_s=0.0)


def test_without_errors_a_step_takes_what_the_planner_predicts() -> None:
    case, state = CASES[0], ClusterState(gbps=0.5)
    cluster = SimulatedCluster(case.model, case.costs, case.gain, NO_ERRORS, seed=0)
    plan = make_plan(case.model.layers, version=0, world_size=WORLD, codec="qsgd:bits=4,bucket_size=128")
    samples, took_s = cluster.step(1, plan, state, is_new=True)
    predicted = predict(cluster.truth(state), groups_of(plan, case.model.layers))
    assert took_s == pytest.approx(predicted.step_s)
    assert [sample.rank for sample in samples] == list(range(WORLD))
    assert samples[0].encode_s + samples[0].decode_s == pytest.approx(predicted.codec_s)
    assert len(samples[0].ready_s) == len(plan.groups)


def test_a_bias_of_dense_lengthens_dense_steps_by_as_much() -> None:
    case, state = CASES[0], ClusterState(gbps=0.5)
    errors = ClusterErrors(step_noise=0.0, bias={DENSE: 1.5})
    plan = make_plan(case.model.layers, version=0, world_size=WORLD)
    usual, biased = (
        SimulatedCluster(case.model, case.costs, case.gain, one, seed=0).step(1, plan, state, is_new=False)[1]
        for one in (NO_ERRORS, errors)
    )
    assert biased == pytest.approx(1.5 * usual)


def test_drawn_errors_are_fixed_per_plan_and_make_most_plans_but_dense_10_to_60_percent_longer() -> None:
    case, state = CASES[0], ClusterState(gbps=0.5)
    dense, *plans = [
        groups_of(
            make_plan(case.model.layers, version=0, world_size=WORLD, codec=codec, scheme=scheme), case.model.layers
        )
        for codec, scheme in (("none", "dense"), *itertools.product(("bf16", "qsgd"), ("sra", "allgather")))
    ]
    factors = []
    for seed in range(30):
        one, other = (
            SimulatedCluster(case.model, case.costs, case.gain, ClusterErrors(unknown=0.25), seed) for _ in range(2)
        )
        assert one.bias(dense, state) == 1.0
        factors += [one.bias(plan, state) for plan in plans]
        assert factors[-len(plans) :] == [other.bias(plan, state) for plan in plans]
        # A network has an error of its own.
        assert one.bias(plans[0], state) != one.bias(plans[0], replace(state, gbps=5.0))
    assert len(set(factors)) == len(factors)
    assert sum(1.1 <= factor <= 1.6 for factor in factors) > 0.6 * len(factors)


def test_a_run_writes_rows_table_and_picture(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "adapt.png"
    argv = ["adapt", "drop", "--quick", "--json", str(out), "--plot", str(plot)]
    result = CliRunner().invoke(bench, argv, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["bench"] == "adapt"
    rows = {row["name"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"])
    assert rows["drop_answer"]["goal"] == "<= 1"
    assert rows["drop_answer"]["ratio"] == min(
        rows["drop_answer"]["value"] / 5, rows["drop_answer_steps"]["value"] / 10
    )
    assert rows["drop_regret"]["value"] > 0
    assert "drop" in result.output
    assert [row for row in rows.values() if row["met"] is False] == []
    assert imread(plot).shape[2] == 4


def test_an_unknown_case_is_refused_with_the_known_ones() -> None:
    result = CliRunner().invoke(bench, ["adapt", "rain"])
    assert result.exit_code == 2
    assert "'flapping'" in result.output


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("bad_plan", "recovery")]


@pytest.mark.parametrize("name", ["less_compute", *SLOW])
def test_the_loop_answers_what_changes_in_the_simulated_cluster(name: str) -> None:
    rows = measure_adapt(True, [name], lambda part, share: None).rows
    missed = [(row.name, row.value, row.goal) for row in rows if row.met is False]
    assert any(row.met for row in rows)
    assert missed == []


def test_papers_are_compared_on_the_same_schedule_and_the_reasons_multiply_to_the_result() -> None:
    case = replace(CASES[0], seconds=12.0)
    runs = compare_papers(case)
    assert [run.policy for run in runs] == ["adaptive", "cgx", "flexible", "cupcake", "bytecomp"]
    values = {row.name: row.value for row in paper_rows("drop", runs)}
    for name in ("cgx", "flexible", "cupcake", "bytecomp"):
        ratio, step, progress = (values[f"drop_{name}_over_ours{part}"] for part in ("", "_step", "_progress"))
        assert ratio is not None
        assert step is not None
        assert progress is not None
        assert ratio == pytest.approx(step / progress)


@pytest.mark.parametrize("policy", [Cupcake(), ByteComp()])
def test_searched_groups_of_papers_hold_every_layer_once(policy: Cupcake | ByteComp) -> None:
    case = CASES[0]
    truth = SimulatedCluster(case.model, case.costs, case.gain, NO_ERRORS, seed=0).truth(ClusterState(gbps=0.2))
    plan = predict(truth, policy.groups(truth)).plan(version=1, world_size=WORLD)
    plan.check(case.model.layers, WORLD)
    assert any(group.option.codec.name == "qsgd" for group in plan.groups)

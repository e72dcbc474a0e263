"""`python -m bench adapt --lab`: progress, oracle and schedules as values, and one small run. No test judges speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from bench.__main__ import bench
from bench.adapt.lab import AdaptLabNumbers, GridPoint, PlanTime, lab_rows
from bench.adapt.lab_cases import (
    ADAPTIVE,
    DDP,
    LAB_WAYS,
    QUICK,
    STATIC_WAYS,
    AdaptLabOptions,
    LabPhase,
    candidate_specs,
    phases_of,
)
from bench.adapt.progress import WeightedStep, progress_in, schedule_panel, score_schedule, weighted_steps
from bench.step.cases import StepNetwork
from bench.step.workload import GAINS
from cgx_ray.demo.gpt import GPT
from cgx_ray.lab.namespaces import Lab
from cgx_ray.lab.schedule import Schedule
from cgx_ray.plan import Lease, make_plan
from cgx_ray.planner.candidates import FREE
from cgx_ray.planner.cost import Link
from cgx_ray.planner.fidelity import RESERVE, Fidelity
from cgx_ray.planner.prediction import Measured

NO_LAB = Lab.available(rates_only=False)
FAST, SLOW = StepNetwork(rate_bit_per_s=1e9, latency_s=1e-3), StepNetwork(rate_bit_per_s=4e7, latency_s=1e-3)
WORKLOAD = QUICK.workload()


def measured() -> Measured:
    costs = dict.fromkeys(("bf16", "qsgd"), FREE)
    measured = WORKLOAD.measured(link=Link(alpha_s=1e-3, beta_s_per_byte=8e-9), codec_costs=costs, compute_s=0.15)
    return replace(measured, gain=GAINS)


def test_schedules_are_the_papers_with_rates_divided_and_latencies_kept() -> None:
    phases = phases_of(Schedule.read("c1"), epoch_s=2.0, rate_divisor=25.0)
    assert [(phase.begin_s, phase.end_s) for phase in phases] == [(0, 24), (24, 48), (48, 72), (72, 100)]
    assert [phase.network.name for phase in phases] == ["1gbit_1ms", "40mbit_1ms", "40mbit_50ms", "1gbit_50ms"]
    names = {network.name for network in AdaptLabOptions(drawn_seed=None).networks()}
    assert names == {"1gbit_1ms", "40mbit_1ms", "40mbit_50ms", "1gbit_50ms", "200mbit_10ms"}


def test_the_grid_has_16_networks_and_static_plans_are_those_that_the_loop_may_choose() -> None:
    options = AdaptLabOptions()
    assert len(set(options.grid)) == 16
    # The loop chooses the reserve only once a loss has fallen, which the lab's does not.
    assert {way.codec for way in STATIC_WAYS} == {"none", *map(str, candidate_specs(Fidelity.STRICT))} - {str(RESERVE)}
    assert all(LAB_WAYS[way.name] is way for way in ADAPTIVE.values())
    assert [way.has_rounds for way in ADAPTIVE.values()] == [False, True, True]


def test_the_model_has_the_layers_of_the_demo_and_all_of_the_compute() -> None:
    workload = AdaptLabOptions().workload()
    assert sum(layer.numel for layer in workload.layers) == GPT().num_parameters
    assert sum(workload.backward_s) == pytest.approx(0.15)
    DDP.plan(workload.layers, 4).check(workload.layers, 4)


def test_a_step_across_a_change_belongs_to_both_sides_by_time() -> None:
    steps = [WeightedStep(0.0, 1.0, 1.0), WeightedStep(1.0, 3.0, 0.5)]
    assert progress_in(steps, 0.0, 3.0) == pytest.approx(1.5)
    assert progress_in(steps, 0.0, 2.0) == pytest.approx(1.25)
    assert progress_in(steps, 2.0, 9.0) == pytest.approx(0.25)
    assert steps[1].pace_s == pytest.approx(4.0)


def test_steps_weigh_what_their_plan_keeps_and_the_first_one_does_not_count() -> None:
    layers = WORKLOAD.layers
    dense = make_plan(layers, version=0, world_size=2)
    trial = make_plan(layers, version=1, world_size=2, codec="qsgd:bits=4,bucket_size=128")
    trial = replace(trial, lease=Lease(last_step=9, fallback=replace(dense, version=2)))
    steps = weighted_steps([10.0, 11.0, 12.0, 13.0, 14.0], {0: 0, 1: 1, 3: 2}, [dense, trial], measured())
    assert [step.began_s for step in steps] == [11.0, 12.0, 13.0]
    # Step 2 has no sample and counts as step 1 does; step 3 runs under the fallback of the lease, which is dense.
    assert 0.9 < steps[0].efficiency < 1
    assert steps[1].efficiency == steps[0].efficiency
    assert steps[2].efficiency == 1


def test_the_oracle_takes_the_best_plan_of_each_phase() -> None:
    phases = [LabPhase(begin_s=0, end_s=10, network=FAST), LabPhase(begin_s=10, end_s=30, network=SLOW)]
    pace_s = {FAST: {"ddp": 0.5, "qsgd4": 1.0}, SLOW: {"ddp": 10.0, "qsgd4": 2.0}}
    # Half a second per step on the fast network; two, then four on the slow one.
    steps = [WeightedStep(0.5 * index, 0.5 * index + 0.5, 1.0) for index in range(20)]
    steps += [
        WeightedStep(10, 12, 1.0),
        WeightedStep(12, 14, 1.0),
        *(WeightedStep(i, i + 4, 1.0) for i in (14, 18, 22)),
    ]
    steps += [WeightedStep(26, 31, 1.0)]
    score = score_schedule(phases, pace_s, steps)
    assert score.oracle == pytest.approx(20 + 10)
    assert score.static == pytest.approx({"ddp": 20 + 2, "qsgd4": 10 + 10})
    assert score.adaptive == pytest.approx(20 + 2 + 3 + 0.8)
    assert score.over_oracle == pytest.approx(30 / 25.8)
    assert score.over_best_static == pytest.approx(22 / 25.8)
    drawn = {line.label: (list(line.x), list(line.y)) for line in schedule_panel("c1", score).lines}
    assert drawn["plain DDP"] == ([0, 10, 10, 30], [0.5, 0.5, 10, 10])
    assert drawn["best plan"] == ([0, 10, 10, 30], [0.5, 0.5, 2, 2])
    assert drawn["adaptive"][1] == [0.5] * 20 + [2, 2, 4, 4, 4, 5]


def test_goals_judge_ratios_within_one_run() -> None:
    phases = [LabPhase(begin_s=0, end_s=10, network=FAST)]
    times = [PlanTime(way="ddp", network=FAST, step_s=1.0, predicted_s=1.08, processor_s=0.0, efficiency=1.0)]
    times += [PlanTime(way="qsgd4", network=FAST, step_s=0.4, predicted_s=0.31, processor_s=0.04, efficiency=0.8)]
    numbers = AdaptLabNumbers(times=times, num_switches={"c1": 3}, seconds=90.0)
    numbers.scores["c1"] = score_schedule(phases, numbers.pace_s, [WeightedStep(0, 10, 19.0)])
    numbers.grid = [GridPoint(network=FAST, ddp_s=1.0, pace_s=1.02)]
    rows = {row.name: row for row in lab_rows(numbers, has_goals=True)}
    assert rows["c1_over_oracle"].value == pytest.approx(20 / 19)
    assert (rows["c1_over_oracle"].met, rows["c1_over_best_static"].met) == (True, False)
    assert rows["c1_ddp_over_oracle"].value == pytest.approx(2.0)
    assert (rows["1gbit_1ms_over_dense"].ratio, rows["1gbit_1ms_over_dense"].met) == (pytest.approx(1.02), True)
    assert (rows["simulated_ddp_1gbit_1ms"].met, rows["simulated_qsgd4_1gbit_1ms"].met) == (True, False)
    assert (rows["c1_switches"].value, rows["lab_minutes"].value) == (3.0, 1.5)
    assert (rows["processors_qsgd4"].value, rows["simulated_qsgd4_1gbit_1ms"].value) == (0.04, pytest.approx(0.35))
    assert {row.goal for row in lab_rows(numbers, has_goals=False)} == {None}


def test_cases_are_simulated_and_not_for_the_lab() -> None:
    result = CliRunner().invoke(bench, ["adapt", "drop", "--lab"])
    assert result.exit_code != 0
    assert "case drop is simulated; leave it out with --lab" in result.output


@pytest.mark.slow
@pytest.mark.skipif(NO_LAB is not None, reason=NO_LAB or "")
def test_a_quick_run_trains_real_ranks_and_writes_rows_and_picture(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "adapt.png"
    argv = ["adapt", "--lab", "--quick", "--json", str(out), "--plot", str(plot)]
    result = CliRunner().invoke(bench, argv, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["bench"] == "adapt"
    rows = {row["name"]: row for row in written["rows"]}
    assert {row["goal"] for row in rows.values()} == {None}
    for network in QUICK.networks():
        for way in QUICK.ways:
            row = rows[f"simulated_{way.name}_{network.name}"]
            # A step takes at least its compute, and the simulator knows that.
            assert row["baseline"] > 0.149, row
            assert row["value"] - rows[f"processors_{way.name}"]["value"] > 0.149, row
    assert rows["c1_over_oracle"]["value"] >= rows["c1_over_best_static"]["value"] > 0
    assert rows["200mbit_1ms_over_dense"]["ratio"] > 0
    assert "2 ranks" in result.output
    assert imread(plot).shape[2] == 4

"""Decisions of the control loop, stepped over made-up samples: no Ray, no clock, no network."""

from __future__ import annotations

import logging
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from support.control_runs import DENSITIES, LAYERS, WORLD, FakeTraining, journal, registration, start

from cgx_ray.control.history import SNAPSHOT_FORMAT, History, Snapshot
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.learned.evidence import MAX_STEPS
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.network.estimate import FEW
from cgx_ray.control.network.known_network import KnownNetwork
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.policy import REVIEW_S, Static
from cgx_ray.control.trial.outcome import WARM_UP_STEPS
from cgx_ray.plan import CodecSpec, Intra, Plan, make_plan
from cgx_ray.planner.candidates import candidate_options
from cgx_ray.planner.cost import Link


def test_first_decision_comes_after_three_steps_and_leaves_dense_on_a_slow_network(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    decisions = run.run(FEW)
    assert [decision.kind for decision in decisions] == ["replace"]
    assert run.loop.plans[-1].describe() == "qsgd 4-bit over sra"
    assert decisions[0].reason == (
        "first measurements: qsgd 4-bit over sra (2 groups), dense over sra (1 group); predicted 620 ms per step "
        "(dense 2.7 s), expected loss 1.005 ± 0.006 of dense; topk 10 %: a step counts as 70.0% of a dense one, "
        "and min_gain allows 81.0% or more; topk 1 %: a step counts as 30.0% of a dense one, and min_gain allows 81.0% "
        "or more"
    )


@pytest.mark.parametrize(("gbps", "num_steps"), [(0.08, 1), (0.1, FEW)])
def test_one_step_is_enough_for_the_first_decision_if_it_exchanges_for_long(
    tmp_path: Path, gbps: float, num_steps: int
) -> None:
    run = start(tmp_path)
    run.gbps = gbps  # 20 MB among 4 ranks: 3.0 and 2.4 s
    assert run.run(num_steps - 1) == []
    assert [decision.kind for decision in run.run(1)] == ["replace"]
    assert run.loop.plans[-1].describe() == "qsgd 4-bit over sra"


def test_a_fast_network_keeps_dense(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 1000
    decisions = run.run(5)
    assert [decision.kind for decision in decisions] == ["keep"]
    assert "nothing beats dense" in decisions[0].reason or "less than 5%" in decisions[0].reason


@pytest.mark.parametrize("late_rank_s", [0.0, 2.0])
def test_a_slower_network_is_noticed_within_three_steps_even_if_a_rank_is_late(
    tmp_path: Path, late_rank_s: float
) -> None:
    run = start(tmp_path)
    run.late_rank_s = late_rank_s
    run.run(20)
    run.gbps = 0.1
    decisions = run.run(3)
    assert len(decisions) == 1
    assert "bandwidth fell from 1.00 Gbit/s to 100 Mbit/s" in decisions[0].reason


def test_an_unchanged_network_causes_no_decision_until_the_review(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.run(10)
    assert run.run(50) == []
    assert len(run.run(20)) == 1


def test_every_decision_is_journalled_with_its_prediction_and_then_its_outcome(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(FEW + WARM_UP_STEPS + FEW)
    decision, outcome, *_ = journal(tmp_path)
    assert decision["event"] == "decision"
    whole = {"groups": 2, "layers": 3, "numel": 5_001_000, "dense_bytes": 20_004_000, "wire_bytes": 20_004_000}
    dense = {"text": "dense", "codec": "none", "scheme": "dense", "density": 1.0}
    assert decision["old"] == {
        "version": 0,
        "plan": "dense",
        "expected_loss": 1.0,
        "options": {"dense": {**whole, **dense}},
    }
    qsgd = "qsgd:bits=4,bucket_size=128 over sra"
    assert (decision["new"]["version"], decision["new"]["plan"]) == (1, "qsgd 4-bit over sra")
    options = {name: (one["groups"], one["layers"], one["numel"]) for name, one in decision["new"]["options"].items()}
    assert options == {qsgd: (2, 2, 5_000_000), "none over sra": (1, 1, 1_000)}
    quantized = decision["new"]["options"][qsgd]
    assert quantized["dense_bytes"] == 20_000_000
    assert quantized["wire_bytes"] == CodecSpec.parse("qsgd").payload_bytes(5_000_000)
    assert decision["inputs"]["bandwidth_gbps"] == pytest.approx(0.1)
    assert decision["predicted_dense_s"] == pytest.approx(0.3 + 2 * 3 / 4 * 20.004e6 * 8 / 1e8, rel=0.01)
    assert outcome["event"] == "outcome"
    assert outcome["version"] == 1
    assert outcome["predicted_step_s"] == decision["predicted_step_s"]
    assert outcome["measured_step_s"] == pytest.approx(outcome["predicted_step_s"], rel=0.05)


def test_a_codec_whose_gain_rises_is_taken_at_the_next_review(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.02
    run.run(130)
    assert run.loop.plans[-1].describe() == "qsgd 4-bit over sra"
    run.gain["topk:density=0.01"] = 0.9
    assert any(decision.reason.startswith("regular review: ") for decision in run.run(120))
    assert "topk 1 %" in run.loop.plans[-1].describe()


def test_compute_times_that_scatter_by_a_fifth_flip_no_plan(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps, run.jitter = 0.2, 0.2
    first, *later = run.run(500)
    assert first.kind == "replace"
    assert len(later) >= 4
    assert {decision.kind for decision in later} == {"keep"}, [decision.reason for decision in later]


def test_where_some_ranks_share_memory_nodes_sum_before_they_exchange(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps, run.num_local = 0.1, 2
    (decision,) = run.run(FEW)
    assert journal(tmp_path)[0]["inputs"]["ranks_per_node"] == 2
    assert "inside nodes" in decision.reason, decision.reason
    assert Intra.FLAT not in {group.option.intra for group in run.loop.plans[-1].groups}


@pytest.mark.parametrize("num_steps", [FEW - 1, 10])
def test_one_step_shows_that_the_rate_fell_tenfold_also_just_after_a_switch(tmp_path: Path, num_steps: int) -> None:
    run = start(tmp_path)
    run.gbps, run.compute_s = 0.5, 0.05
    (first,) = run.run(FEW)
    assert first.kind == "replace"
    assert {one.kind for one in run.run(num_steps)} <= {"keep"}
    run.gbps = 0.05
    (decision,) = run.run(1)
    assert "bandwidth fell from 500 Mbit/s to 50 Mbit/s" in decision.reason


def test_a_tenfold_latency_is_a_cause(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.run(20)
    run.latency_s = 0.02
    decisions = run.run(3)
    assert "latency rose from 0.1 to 20.0 ms" in decisions[0].reason


def test_codecs_that_keep_too_little_are_not_chosen(tmp_path: Path) -> None:
    run = start(tmp_path, min_gain=0.999)
    run.gbps = 0.01
    run.run(5)
    assert run.loop.plans[-1].describe() == "bf16 over allreduce"


def test_a_static_policy_never_decides(tmp_path: Path) -> None:
    loop = ControlLoop(Static(), Journal(tmp_path / "decisions.jsonl"))
    loop.register(registration())
    run = FakeTraining(loop, step=1)
    assert run.run(150) == []
    assert journal(tmp_path) == []


def test_a_restart_goes_on_with_the_plan(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(5)
    on_trial = run.loop.plans[-1]
    assert on_trial.lease is not None
    assert run.loop.register(registration()) == on_trial.lease.fallback
    run.run(40)
    in_force = run.loop.plans[-1]
    assert (in_force.describe(), in_force.lease) == (on_trial.describe(), None)
    assert run.loop.register(registration()) == in_force


def test_other_layers_start_dense(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(40)
    in_force = run.loop.plans[-1]
    fewer = run.loop.register(registration(LAYERS[1:]))
    assert (fewer.describe(), fewer.version) == ("dense", in_force.version + 1)


def test_the_first_plan_after_a_resize_is_the_planners_from_what_is_known_under_a_lease(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(40)
    in_force = run.loop.plans[-1]
    dense = make_plan(LAYERS, version=0, world_size=3)
    first = run.loop.register(registration(first_plan=dense, step=41), now_s=50.0, time_s=51.0)
    assert first.describe() == in_force.describe()
    assert first.lease is not None
    assert first.lease.fallback == replace(dense, version=first.version + 1)
    assert first.lease.last_step > 41 + MAX_STEPS
    line = journal(tmp_path)[-1]
    assert line["reason"].startswith("4 workers became 3: qsgd")
    assert (line["step"], line["time"], line["inputs"]["world_size"]) == (41, 51.0, 3)
    assert line["inputs"]["bandwidth_gbps"] == pytest.approx(0.1, rel=0.05)


def test_bans_errors_and_gains_go_on_over_a_restart_and_a_resize(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps, run.slowdown_of = 0.5, {"qsgd": 3.5}
    run.run(40)
    assert run.loop.plans[-1].describe() == "bf16 over allreduce"
    learned = run.loop.history().learned
    assert learned is not None
    for world_size in (WORLD, 3, WORLD):
        plan = run.loop.register(
            registration(
                first_plan=make_plan(LAYERS, version=0, world_size=world_size),
                step=41,
            ),
            now_s=42.0,
        )
        assert plan.describe() == "bf16 over allreduce"
        now = run.loop.history().learned
        assert now is not None
        assert now.errors is learned.errors
        assert now.bans is learned.bans
        assert now.measured.gain == learned.measured.gain
        assert now.measured.network.num_workers == world_size


def test_a_controller_that_crashed_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(FEW)
    just_decided = run.loop.history()
    assert just_decided.learned is not None
    assert just_decided.plans[-1] == run.loop.plans[-1]
    run.run(40)
    snapshot = Snapshot(tmp_path / "private" / "controller")
    assert snapshot.read() is None
    snapshot.write(run.loop.history())
    assert [path.name for path in snapshot.path.parent.iterdir()] == ["controller"]
    again = ControlLoop(Adaptive(candidates=candidate_options(DENSITIES)), run.loop._journal, snapshot.read())
    again.resume()
    plan = run.loop.plans[-1]
    assert again.plans[-1] == plan
    run.loop = again
    # Ranks measure gains later.
    run.gain = {}
    (kept,) = run.run(FEW)
    assert kept.kind == "keep"
    assert kept.reason.startswith("the controller was started again: ")
    assert run.run(5) == []
    run.gbps = 100.0
    assert "bandwidth rose" in run.run(5)[0].reason


def test_a_damaged_snapshot_is_none_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshot = Snapshot(tmp_path / "controller")
    snapshot.write(History())
    whole = snapshot.path.read_bytes()
    for damaged in (b"", whole[:-5], b"x" + whole, b"\x80\x05cos\nnothing\n."):
        snapshot.path.write_bytes(damaged)
        caplog.clear()
        assert snapshot.read() is None
        assert "is damaged" in caplog.text


def test_a_snapshot_that_cannot_be_written_leaves_none_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = Snapshot(tmp_path / "controller")
    snapshot.write(History())
    assert snapshot.read() == History()
    (tmp_path / "controller.new").mkdir()
    snapshot.write(History())
    snapshot.write(History())
    assert snapshot.read() is None
    assert [record.message.count("if it crashes, ranks keep their plan for good") for record in caplog.records] == [1]


def test_a_snapshot_of_another_version_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "controller").write_bytes(pickle.dumps(0) + b"no history")
    assert Snapshot(tmp_path / "controller").read() is None
    assert f"has format 0, this version reads {SNAPSHOT_FORMAT}" in caplog.text


def test_a_plan_is_on_trial_until_its_outcome_is_known(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    (decision,) = run.run(FEW)
    dense, on_trial = run.loop.plans
    assert on_trial.lease is not None
    assert on_trial.lease.fallback == replace(dense, version=2)
    # 60 s are more than 40 steps of 0.6 s.
    assert on_trial.lease.last_step == FEW + math.ceil(REVIEW_S / decision.step_s) > FEW + MAX_STEPS
    run.run(WARM_UP_STEPS + FEW)
    assert run.loop.plans[2:] == [replace(on_trial, version=3, lease=None)]


def test_ranks_that_have_returned_from_a_trial_get_another_plan(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(FEW)
    run.returns = True
    (decision,) = run.run(FEW)
    assert decision.kind == "replace"
    assert decision.reason.startswith("the lease of plan 1 has ended: qsgd"), decision.reason
    assert decision.plan.version == 3


def test_decisions_go_on_without_a_silent_rank_which_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(tmp_path)
    run.run(20)
    run.gbps, run.silent = 0.1, {2}
    decisions = run.run(10)
    assert "bandwidth fell from 1.00 Gbit/s to 100 Mbit/s" in decisions[0].reason
    assert run.loop.facts().silent_ranks == {2}
    for silent in (set(), {2}, set()):
        run.silent = silent
        run.run(10)
    assert run.loop.facts().silent_ranks == frozenset()
    assert [line["silent_ranks"] for line in journal(tmp_path, "silence")] == [[2], [], [2], []]
    assert [record.message.partition(":")[0] for record in caplog.records] == ["no samples of ranks 2 for 3 s"]


def test_a_full_disk_costs_lines_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "blocked").write_text("")
    log = Journal(tmp_path / "blocked" / "decisions.jsonl")
    with caplog.at_level(logging.WARNING):
        log.write({"event": "end"})
        log.write({"event": "end"})
    assert log.num_errors == 2
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text


def test_a_plan_survives_json() -> None:
    plan = make_plan(LAYERS, version=3, world_size=WORLD)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_guess_of_the_bandwidth_is_no_cause_unless_a_change_was_noticed_but_a_latency_is(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(FEW)
    state = run.loop._state
    assert state is not None
    state.network = KnownNetwork()
    state._num_changes = 0
    link = Link.from_rates(bandwidth_gbps=0.1, latency_ms=1)
    known = state.known()
    slower, later = (
        replace(known, network=replace(known.network, between=one))
        for one in (replace(link.slowed(3), alpha_s=link.alpha_s), replace(link, alpha_s=0.02))
    )
    assert not state.network.is_known
    assert state._link_cause(link, slower, 0.0) is None
    assert state._link_cause(link, later, 0.0) == "latency rose from 1.0 to 20.0 ms"
    state.network.num_changes += 1
    assert state._link_cause(link, slower, 0.0) == "bandwidth fell from 100 Mbit/s to 33 Mbit/s"

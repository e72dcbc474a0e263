"""Offload in the control loop: chosen where a GPU's codec is slow, learned by itself, written down and read back."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import jsonschema
import pytest
import torch
from support.control_runs import COST, COSTS, LAYERS, FakeTraining, journal, registration, start

from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.journal.recorded import read_groups, read_layers, read_policy, read_situation, situation_fields
from cgx_ray.control.learned.learned_errors import LearnedErrors
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.trial.bans import Bans
from cgx_ray.plan import CodecSpec, Option, Scheme
from cgx_ray.planner.candidates import candidate_options, host_name
from cgx_ray.planner.cost import Link
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.report.journal_schema import JOURNAL_SCHEMA
from cgx_ray.session.calibrate import may_offload, measure_bus
from cgx_ray.session.settings import Settings

BUS = Link.from_rates(bandwidth_gbps=200, latency_ms=0.02)
SRA = Option(codec=CodecSpec(name="qsgd"), scheme=Scheme.SRA)
# A GPU whose codecs are 100 times as slow as the host's.
GPU_COSTS = {name: cost.slowed(100) for name, cost in COSTS.items()} | {
    host_name(name): cost for name, cost in COSTS.items()
}


def start_on_gpu(tmp_path: Path) -> FakeTraining:
    policy = Adaptive(candidates=candidate_options((0.1, 0.01)))
    loop = ControlLoop(policy, Journal(tmp_path / "decisions.jsonl"))
    loop.register(registration(codec_costs=GPU_COSTS, bus=BUS))
    run = FakeTraining(loop)
    run.step = 1
    return run


def test_a_run_on_gpus_with_slow_codecs_offloads_and_its_decisions_can_be_made_again(tmp_path: Path) -> None:
    run = start_on_gpu(tmp_path)
    run.run(60)
    options = {group.option for group in run.loop.plans[-1].groups}
    assert any(option.device == "cpu" for option in options), options
    (first,) = journal(tmp_path, "start")
    layers, policy = read_layers(first), read_policy(first)
    asked = [line for line in journal(tmp_path, "decision") if line["made_by"] == "policy"]
    assert asked
    schema = jsonschema.Draft202012Validator(json.loads(JOURNAL_SCHEMA.read_text()))
    for line in asked:
        schema.validate(line)
        situation = read_situation(line["situation"], layers)
        assert situation.planner_input.now.bus == BUS
        assert situation_fields(situation) == line["situation"]
        decision = policy.decide(situation)
        assert decision is not None
        assert (decision.reason, decision.step_s) == (line["reason"], line["predicted_step_s"])
    assert any("on cpu" in line["reason"] for line in asked)


def test_without_a_gpu_no_option_is_offloaded(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.run(60)
    assert "on cpu" not in (tmp_path / "decisions.jsonl").read_text()
    groups = [group for line in journal(tmp_path, "decision") for group in line["situation"]["groups"]]
    assert {group["device"] for group in groups} == {"auto"}
    # Journals of earlier versions have no bus.
    (first, *_) = journal(tmp_path, "decision")
    assert first["situation"].pop("bus") is None
    assert read_situation(first["situation"], LAYERS).planner_input.now.bus is None


def test_the_bus_and_what_was_learned_go_on_over_a_restart(tmp_path: Path) -> None:
    run = start_on_gpu(tmp_path)
    run.run(60)
    history = pickle.loads(pickle.dumps(run.loop.history()))
    assert history.registration.bus == history.learned.measured.bus == BUS
    again = ControlLoop(Adaptive(candidates=candidate_options((0.1,))), Journal(tmp_path / "2.jsonl"), history)
    again.resume()
    assert again.plans[-1] == run.loop.plans[-1]


def test_groups_of_earlier_journals_have_their_device_beside_the_option() -> None:
    fields = [{"layers": [0], "option": str(SRA), "device": "cpu"}, {"layers": [1], "option": "dense", "device": "cpu"}]
    first, second = read_groups(fields, LAYERS)
    assert (str(first.option), str(second.option)) == (f"{SRA} on cpu", "dense")


def test_an_offloaded_option_has_an_error_and_codec_times_of_its_own() -> None:
    errors, on_host = LearnedErrors(), SRA.on("cpu")
    errors.learn_step((PlannedGroup.of(LAYERS, SRA),), math.log(3), 0.0)
    assert errors.option_factor(SRA) == pytest.approx(3, rel=0.01)
    assert errors.option_factor(on_host) == 1.0
    assert LearnedErrors.read(errors.recorded()).option_factor(SRA) == errors.option_factor(SRA)
    errors.learn_step((PlannedGroup.of(LAYERS, on_host),), math.log(1.5), 0.0)
    assert errors.option_factor(on_host) == pytest.approx(1.5, rel=0.01)
    assert errors.option_factor(SRA) == pytest.approx(3, rel=0.01)
    calibrated = {str(SRA.codec): COST, host_name(SRA.codec): COST}
    errors.learn_codecs([host_name(SRA.codec)], 4.0)
    corrected = errors.corrected(calibrated)
    assert corrected[host_name(SRA.codec)].encode_a_s == pytest.approx(4 * COST.encode_a_s)
    assert corrected[str(SRA.codec)] == COST


def test_a_ban_holds_on_both_devices() -> None:
    bans = Bans()
    bans.add([SRA.on("cpu")], 0.0)
    assert bans.banned(1.0) == {SRA}


def test_the_bus_is_measured_with_the_engines_own_copies() -> None:
    """On a CPU the copies are those of memory: the function runs, the numbers are of no bus."""
    bus = measure_bus(torch.device("cpu"))
    assert 0 < bus.alpha_s < 1
    assert 0.01 < bus.bandwidth_gbps < 1e5


def test_nothing_is_measured_for_offload_where_the_host_holds_the_gradients_or_the_policy_never_offloads() -> None:
    assert not may_offload(Settings(), torch.device("cpu"))
    for policy in ("static", "cgx", "flexible"):
        assert not may_offload(Settings(policy=policy), torch.device("cuda"))

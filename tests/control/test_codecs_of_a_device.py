"""Where a GPU encodes no step times a codec: times stay as calibrated, and what backward loses is learned."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import jsonschema
import pytest
from support.control_runs import COSTS, FakeTraining, journal, registration

from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.journal.recorded import read_layers, read_policy, read_situation, situation_fields
from cgx_ray.control.learned.measured import is_dense
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.plan import DEVICE_PIECE_BYTES
from cgx_ray.planner.candidates import CodecCost, candidate_options
from cgx_ray.planner.engine_cost import HOST_ENGINE, EngineCost
from cgx_ray.report.journal_schema import JOURNAL_SCHEMA

ENGINE = EngineCost(
    thread_s=2e-4, message_s=5e-5, piece_bytes=DEVICE_PIECE_BYTES, codes_rows=True, vendor_window_bytes=None
)
# A hundredth of what steps say that codecs take: the host's time in them.
KERNELS = {
    name: CodecCost(
        encode_a_s=1e-6,
        encode_b_s_per_element=1e-12,
        decode_a_s=1e-6,
        decode_b_s_per_element=1e-12,
        encode_row_s=1e-7,
        decode_row_s=1e-7,
    )
    for name in COSTS
}


def start_on_gpu(tmp_path: Path) -> FakeTraining:
    loop = ControlLoop(Adaptive(candidates=candidate_options((0.1, 0.01))), Journal(tmp_path / "decisions.jsonl"))
    loop.register(registration(codec_costs=KERNELS, encodes_on="device", engine=ENGINE))
    run = FakeTraining(loop)
    run.step = 1
    return run


def test_the_hosts_seconds_correct_no_codec_of_a_gpu_and_none_is_tried_for_its_time(tmp_path: Path) -> None:
    run = start_on_gpu(tmp_path)
    run.gbps = 0.5
    run.run(120)
    assert not is_dense(run.loop.plans[-1])
    for line in journal(tmp_path, "decision"):
        assert line["situation"]["errors"]["codecs"] == {}
        assert "is timed" not in line["reason"]
        assert line["situation"]["codec_s"] == {name: cost.known() for name, cost in KERNELS.items()}


@pytest.mark.parametrize("slowdown", [1.0, 1.3])
def test_what_codecs_take_from_backward_is_learned_from_steps(slowdown: float, tmp_path: Path) -> None:
    run = start_on_gpu(tmp_path)
    run.gbps, run.compute_slowdown = 0.5, slowdown
    run.run(120)
    assert not is_dense(run.loop.plans[-1])
    history = run.loop.history()
    assert history.learned is not None
    options = frozenset(group.option for group in run.loop.plans[-1].groups)
    found = history.learned.errors.compute_slowdown.under(options).mean
    assert math.exp(found) == pytest.approx(slowdown, rel=0.02)
    # Compute of dense steps, whatever it is beside codecs.
    assert history.learned.measured.compute_s == pytest.approx(run.compute_s, rel=0.05)


def test_a_gpu_whose_backward_loses_more_than_the_network_saves_goes_back_to_dense(tmp_path: Path) -> None:
    run = start_on_gpu(tmp_path)
    run.gbps, run.compute_slowdown = 2.0, 2.0
    run.run(150)
    assert is_dense(run.loop.plans[-1]), journal(tmp_path, "decision")[-1]["reason"]


def test_decisions_have_the_engines_costs_and_can_be_made_again_and_earlier_ones_have_none(tmp_path: Path) -> None:
    run = start_on_gpu(tmp_path)
    run.gbps = 0.5
    run.run(60)
    (first,) = journal(tmp_path, "start")
    layers, policy = read_layers(first), read_policy(first)
    asked = [line for line in journal(tmp_path, "decision") if line["made_by"] == "policy"]
    assert asked
    schema = jsonschema.Draft202012Validator(json.loads(JOURNAL_SCHEMA.read_text()))
    for line in (first, *asked):
        schema.validate(line)
    for line in asked:
        situation = read_situation(line["situation"], layers)
        assert situation.planner_input.now.engine == ENGINE
        assert situation_fields(situation) == line["situation"]
        decision = policy.decide(situation)
        assert decision is not None
        assert (decision.reason, decision.step_s) == (line["reason"], line["predicted_step_s"])
    earlier = {name: value for name, value in asked[0]["situation"].items() if name != "engine"}
    assert read_situation(earlier, layers).planner_input.now.engine == HOST_ENGINE
    earlier["codec_s"] = {codec: list(times.values()) for codec, times in earlier["codec_s"].items()}
    schema.validate({**asked[0], "situation": earlier})
    assert read_situation(earlier, layers).planner_input.now.codec_costs == situation.planner_input.now.codec_costs
    history = pickle.loads(pickle.dumps(run.loop.history()))
    assert history.registration.engine == history.learned.measured.engine == ENGINE

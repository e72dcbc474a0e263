"""Layer rules of a user: every plan that is made keeps them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.control_runs import COSTS, GAIN, LAYERS, WORLD, FakeTraining, registration

from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.journal.recorded import read_situation
from cgx_ray.control.learned.measured import is_dense
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.trial.measuring_steps import trial_of
from cgx_ray.errors import ConfigError, PlanError
from cgx_ray.plan import DENSE, CodecSpec, Layer, Option, Plan, Scheme
from cgx_ray.planner.candidates import candidate_options
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.joint import best_plan
from cgx_ray.planner.planned_group import groups_of
from cgx_ray.planner.prediction import Measured, predict
from cgx_ray.session.settings import Settings

QSGD8 = Option(codec=CodecSpec(name="qsgd", bits=8), scheme=Scheme.SRA)
RULES: dict[str, Any] = {"overrides": {"head*": "qsgd:bits=8"}, "exclude": ("emb*", "bias")}


def start_with_rules(folder: Path, **rules: Any) -> FakeTraining:
    settings = Settings(**rules)
    loop = ControlLoop(Adaptive(candidates=candidate_options((0.1,))), Journal(folder / "decisions.jsonl"))
    costs = COSTS | {str(codec): COSTS["bf16"] for codec in settings.timed_codecs()}
    loop.register(registration(first_plan=settings.first_plan(LAYERS, WORLD, 1 << 40), codec_costs=costs))
    run = FakeTraining(loop)
    run.step = 1
    return run


def options_by_layer(plan: Plan) -> dict[str, Option]:
    return {name: group.option for group in plan.groups for name in group.layers}


@pytest.mark.parametrize("slowdown", [1.0, 3.0])
def test_every_plan_of_a_run_keeps_the_rules(tmp_path: Path, slowdown: float) -> None:
    """With a slowdown of 3 plans fail, so dense plans and measuring steps are among them."""
    run = start_with_rules(tmp_path, overrides={"head": "qsgd:bits=8"})
    run.slowdown = slowdown
    for gbps in (0.1, 10.0, 0.3):
        run.gbps = gbps
        run.run(60)
    plans = [*run.loop.plans, *(plan.lease.fallback for plan in run.loop.plans if plan.lease is not None)]
    assert len(plans) > 1
    assert {options_by_layer(plan)["head"] for plan in plans} == {QSGD8}
    assert {options_by_layer(plan)["embed"] for plan in plans} > {DENSE}


def test_a_situation_that_is_read_again_has_the_fixed_groups_in_the_same_order(tmp_path: Path) -> None:
    run = start_with_rules(tmp_path, overrides={"head": "qsgd:bits=8"}, exclude=("bias",))
    run.run(30)
    state = run.loop._state
    assert state is not None
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    situations = [line["situation"] for line in lines if line["event"] == "decision"]
    fixed = state.known().fixed
    assert len(fixed) == 2
    for situation in situations:
        for fields in (situation, situation | {"groups": situation["groups"][::-1]}):
            assert read_situation(fields, LAYERS).planner_input.now.fixed == fixed


def test_an_excluded_layer_is_never_compressed_and_the_others_are(tmp_path: Path) -> None:
    run = start_with_rules(tmp_path, exclude=("emb*", "bias"))
    run.gbps = 0.1
    run.run(30)
    by_layer = options_by_layer(run.loop.plans[-1])
    assert by_layer["head"].codec.name == "qsgd"
    assert by_layer["embed"] == DENSE
    assert by_layer["bias"].codec.name == "none"


def test_with_rules_for_all_layers_nothing_is_left_to_decide(tmp_path: Path) -> None:
    run = start_with_rules(tmp_path, **RULES)
    first = run.loop.plans[-1]
    assert is_dense(first)
    run.gbps = 0.1
    run.run(80)
    assert [replace(plan, version=0, lease=None) for plan in run.loop.plans] == [first]


def test_the_best_plan_with_rules_is_the_best_of_the_layers_left() -> None:
    layers = tuple(Layer(name=f"layer{i}", numel=300_000 + 1_000 * i, ndim=2) for i in range(6))
    settings = Settings(overrides={"layer5": "none", "layer2": ("topk:density=0.01", "allgather")})
    assert Settings(overrides={"layer5": "dense", "layer2": "topk:density=0.01 over allgather"}) == settings
    first = settings.first_plan(layers, 4, 1 << 40)
    measured = Measured(
        layers=layers,
        backward_s=(0.01,) * 6,
        network=Network.flat(4, Link.from_rates(bandwidth_gbps=0.2, latency_ms=0.1)),
        codec_costs=COSTS,
        gain=GAIN,
        fixed=tuple(group for group in groups_of(first, layers) if group.is_fixed),
    )
    found = best_plan(measured, candidate_options((0.1,)), min_gain=0.8)
    plan = found.best.plan(version=1, world_size=4)
    plan.check(layers, 4)
    assert Plan.from_json(plan.to_json()) == plan
    by_layer = options_by_layer(plan)
    assert by_layer["layer5"] == DENSE
    assert str(by_layer["layer2"]) == "topk:density=0.01 over allgather"
    assert {by_layer[name].codec.name for name in ("layer0", "layer1", "layer3", "layer4")} == {"qsgd"}
    # layer5 is ready first, so it is sent first.
    assert plan.groups[0].layers == ("layer5",)
    # What the rule for layer2 loses is not judged.
    assert found.best.efficiency == pytest.approx(1 - (1 - 1 / 1.0046) * 4 / 6, rel=0.01)
    assert 0 <= found.gap < 1
    free = best_plan(replace(measured, fixed=()), candidate_options((0.1,)), min_gain=0.8)
    assert predict(measured, found.best.groups).score >= free.best.score * 0.9


def test_a_codec_is_timed_in_no_layer_of_a_rule() -> None:
    settings = Settings(exclude=("head",))
    first = settings.first_plan(LAYERS, WORLD, 1 << 40)
    groups = groups_of(first, LAYERS)
    measured = Measured(
        layers=LAYERS,
        backward_s=(0.1,) * 3,
        network=Network.flat(4, Link.from_rates(bandwidth_gbps=1, latency_ms=0.1)),
        codec_costs=COSTS,
        gain=GAIN,
        fixed=tuple(group for group in groups if group.is_fixed),
    )
    trial = trial_of(CodecSpec.parse("qsgd"), measured, predict(measured, groups))
    assert trial is not None
    assert [group.layers for group in trial.groups if group.option.codec.name == "qsgd"] == [("embed",)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overrides": {"head": ("topk", "sra")}}, "scheme sra cannot carry codec topk.*topk goes with allgather"),
        ({"overrides": {"head": "zip"}}, "unknown codec 'zip'; known"),
        ({"overrides": ["head"]}, "give codecs by pattern"),
        ({"overrides": {"head": "none"}, "exclude": ("head",)}, "in overrides and in exclude; give it in one"),
        ({"exclude": "head"}, "give patterns of layers"),
        ({"overrides": {"head": ("qsgd", "sra", "dense")}, "shared_memory": False}, "needs ranks that share memory"),
    ],
)
def test_a_rule_that_cannot_hold_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**given)


@pytest.mark.parametrize("policy", ["adaptive", "static"])
def test_a_rule_that_matches_nothing_is_refused_with_a_name_that_exists(policy: str) -> None:
    for rules in ({"overrides": {"lm_head*": "none"}}, {"exclude": ("lm_head*",)}):
        settings = Settings(policy=policy, **rules)  # type: ignore[arg-type]
        pattern = r"pattern 'lm_head\*' of exclude or overrides"
        with pytest.raises(PlanError, match=rf"{pattern} matches none of 3 layers; .* such as 'embed' \(frozen"):
            settings.first_plan(LAYERS, WORLD, 1 << 40)


def test_static_plans_keep_rules_too_and_small_excluded_layers_share_a_group() -> None:
    layers = (*LAYERS, Layer(name="norm", numel=100, ndim=1))
    settings = Settings(policy="static", codec="bf16", scheme="allreduce", exclude=("bias", "norm"))
    plan = settings.first_plan(layers, WORLD, 1 << 40)
    fixed = [group for group in plan.groups if group.is_fixed]
    assert [group.layers for group in fixed] == [("norm", "bias")]
    assert fixed[0].option.codec.name == "none"

"""Plans by hand: others must beat them clearly, in `cgx-ray plan` as in a run."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest

from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.policy import PlannerInput, Situation
from cgx_ray.errors import ConfigError
from cgx_ray.plan import DENSE, NUM_GROUPS, CodecSpec, GroupPlan, Option, Plan, Scheme, make_plan
from cgx_ray.planner.by_hand import BY_HAND, LEAST_SAVING, MIXTURE_SAVING, plans_by_hand, unless_by_hand
from cgx_ray.planner.candidates import codec_options
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.joint import BestPlan
from cgx_ray.planner.models import load_model
from cgx_ray.planner.planned_group import PlannedGroup, groups_of
from cgx_ray.planner.prediction import Measured, predict
from cgx_ray.planner.profile import load_profile
from cgx_ray.planner.scenario import MIN_SAVING, TYPICAL_PROFILE, Scenario, typical_gains
from cgx_ray.session.settings import Settings

MODEL = load_model("resnet50")
QSGD, BF16 = CodecSpec.parse("qsgd:bits=4"), CodecSpec.parse("bf16")
OPTIONS = codec_options((QSGD, BF16))


def scenario(gbps: float, latency_ms: float) -> Scenario:
    return Scenario(
        model=MODEL,
        network=Network.flat(4, Link.from_rates(bandwidth_gbps=gbps, latency_ms=latency_ms)),
        compute_s=0.1,
        codec_costs=load_profile(TYPICAL_PROFILE).codec_costs,
        gain=typical_gains(),
        min_gain=0.8,
    )


def measured() -> Measured:
    asked = scenario(1.0, 1.0)
    return Measured(
        layers=MODEL.layers,
        backward_s=MODEL.step_s(0.1),
        network=asked.network,
        codec_costs=asked.codec_costs,
        gain=asked.gain,
    )


def test_a_scheme_among_the_candidates_is_refused_with_the_pair_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"candidate 'allgather' is a scheme; .* \('qsgd:bits=4', 'allgather'\)"):
        Adaptive(candidates=("qsgd:bits=4", "allgather"))
    Adaptive(candidates=(("qsgd:bits=4", "allgather"), "dense"))


@pytest.mark.parametrize("gbps", [0.05, 0.2, 1.0, 5.0])
@pytest.mark.parametrize("latency_ms", [0.1, 10.0])
def test_plan_and_run_choose_alike(gbps: float, latency_ms: float) -> None:
    asked = scenario(gbps, latency_ms)
    now = replace(measured(), network=asked.network)
    first = make_plan(MODEL.layers, version=0, world_size=4)
    situation = Situation(cause="", plan=first, planner_input=PlannerInput(now=now, states=[now]))
    chosen = groups_of(Adaptive().decide(situation).plan, MODEL.layers)
    planned = asked.solve()
    if planned.best.is_dense:
        assert predict(now, chosen).score > (1 - MIN_SAVING) * planned.dense.score or planned.is_compute_bound
    else:
        assert planned.best.groups == chosen


def groups_under(*options: Option) -> tuple[PlannedGroup, ...]:
    """Return the layers in as many groups as there are options, backward's first layers first."""
    layers, num = MODEL.layers[::-1], len(options)
    bounds = [len(layers) * place // num for place in range(num + 1)]
    return tuple(
        PlannedGroup.of(layers[bounds[place] : bounds[place + 1]], option) for place, option in enumerate(options)
    )


@pytest.mark.parametrize(("more", "stays"), [(0.001, True), (-0.001, False), (-0.2, False)])
@pytest.mark.parametrize(
    ("others", "share"),
    [((), LEAST_SAVING), ((DENSE,), MIXTURE_SAVING), ((Option(codec=BF16, scheme=Scheme.ALLREDUCE),), MIXTURE_SAVING)],
)
def test_plans_must_save_their_share(more: float, stays: bool, others: tuple[Option, ...], share: float) -> None:
    now, saved, dense = measured(), share + more, groups_under(DENSE)
    own = groups_under(Option(codec=QSGD, scheme=Scheme.SRA), *others)
    found = BestPlan(best=predict(now, own), dense=predict(now, dense), gap=0.0)
    scores = defaultdict(lambda: 1.0, {own: 1 - saved, dense: 2.0})
    chosen = unless_by_hand(found, now, OPTIONS, scores.__getitem__)
    assert (chosen is found) is stays
    if not stays:
        assert chosen.best.groups in plans_by_hand(now, OPTIONS)
        assert chosen.gap == pytest.approx(max(0.0, saved))


def test_dense_gives_way_only_to_what_is_clearly_better() -> None:
    now = measured()
    dense = groups_under(DENSE)
    found = BestPlan(best=predict(now, dense), dense=predict(now, dense), gap=0.0)
    for own, stays in ((1.04, True), (1.06, False)):
        scores = defaultdict(lambda: 1.0, {dense: own})
        chosen = unless_by_hand(found, now, OPTIONS, scores.__getitem__)
        assert (chosen is found) is stays


def test_a_mixture_gives_way_to_dense_where_no_plan_by_hand_is_worth_it() -> None:
    now, dense = measured(), groups_under(DENSE)
    own = groups_under(Option(codec=QSGD, scheme=Scheme.SRA), Option(codec=BF16, scheme=Scheme.ALLREDUCE))
    found = BestPlan(best=predict(now, own), dense=predict(now, dense), gap=0.0)
    scores = defaultdict(lambda: 1.04, {own: 0.9, dense: 1.0})
    assert unless_by_hand(found, now, OPTIONS, scores.__getitem__).best.groups == dense


@pytest.mark.parametrize(("model", "most"), [("resnet18", 12 << 20), ("resnet50", 25 << 20), ("vgg16", 25 << 20)])
def test_groups_of_a_plan_by_hand_are_a_quarter_of_a_small_gradient(model: str, most: int) -> None:
    now = replace(measured(), layers=load_model(model).layers, backward_s=load_model(model).step_s(0.1))
    num_bytes = {layer.name: layer.dense_bytes for layer in now.layers}
    for groups in plans_by_hand(now, OPTIONS):
        assert len(groups) >= NUM_GROUPS
        # The layer that fills a group is its last one.
        assert max(group.dense_bytes - num_bytes[group.layers[-1]] for group in groups) < most


def test_a_plan_has_the_name_of_the_option_of_most_elements() -> None:
    bf16, qsgd = (Option(codec=CodecSpec.parse(codec), scheme=Scheme.SRA) for codec in ("bf16", "qsgd:bits=4"))
    every = "qsgd 4-bit over sra"
    for numel, says in (
        ({bf16: (10, 10), qsgd: (9_980,)}, every),
        ({bf16: (100, 100), qsgd: (9_800,)}, f"{every} and 1 other"),
        ({bf16: (20,), qsgd: (10,), DENSE: (9_970,)}, "dense"),
        ({bf16: (200,), qsgd: (100,), DENSE: (9_700,)}, "dense and 2 others"),
        # Of unknown sizes most of the compressed groups count.
        ({bf16: (0,), qsgd: (0, 0), DENSE: (0, 0, 0)}, f"{every} and 1 other"),
    ):
        groups = [
            GroupPlan(layers=(f"{option} {index}",), option=option, numel=size)
            for option, sizes in numel.items()
            for index, size in enumerate(sizes)
        ]
        plan = Plan(version=0, world_size=4, groups=tuple(groups))
        assert plan.describe() == Plan.from_json(plan.to_json()).describe() == says


def test_a_static_policy_sends_the_groups_of_the_plan_by_hand_and_dense_those_of_ddp() -> None:
    now = measured()
    plan = Settings(codec="qsgd:bits=4").first_plan(MODEL.layers, now.network.num_workers, bucket_bytes=25 << 20)
    assert groups_of(plan, MODEL.layers) in plans_by_hand(now, OPTIONS)
    dense = Settings(codec="none").first_plan(MODEL.layers, now.network.num_workers, bucket_bytes=25 << 20)
    assert len(dense.groups) <= 1 + math.ceil(sum(layer.dense_bytes for layer in MODEL.layers) / (25 << 20))


def test_only_allowed_options_are_taken_and_none_where_some_layers_are_fixed() -> None:
    now = measured()
    taken = {group.option for groups in plans_by_hand(now, OPTIONS) for group in groups}
    large = {(option.codec, option.scheme) for option in taken} - {(CodecSpec.parse("none"), Scheme.SRA)}
    assert {*large} <= {*BY_HAND}
    assert CodecSpec.parse("qsgd:bits=3") not in {codec for codec, _ in large}
    fixed = replace(
        now, fixed=(PlannedGroup.of(MODEL.layers[:1], Option(codec=QSGD, scheme=Scheme.SRA), is_fixed=True),)
    )
    assert plans_by_hand(fixed, OPTIONS) == []

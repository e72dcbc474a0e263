"""The papers' policies in the control loop, stepped over made-up samples."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.control_runs import COST, LAYERS, WORLD, MeteredTraining, registration

from cgx_ray.control.gains.known_losses import KnownLosses, lost_share
from cgx_ray.control.joined_steps import JoinedStep, join
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.paper_policies import ByteComp, Cgx, Cupcake, Flexible, PaperPolicy
from cgx_ray.errors import ConfigError
from cgx_ray.monitors.sample import LayerError, node_steps
from cgx_ray.plan import DENSE, CodecSpec, Plan
from cgx_ray.planner.bits import WIDTHS, BitsProblem, LayerErrors
from cgx_ray.planner.candidates import CodecCost, host_name
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.papers import flexible
from cgx_ray.planner.papers.cgx import METHODS, layer_bits
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.planner.prediction import Measured
from cgx_ray.session.settings import Settings, make_policy

COSTS = {"qsgd": COST, "topk": COST}
GAIN = {str(CodecSpec(name="topk", density=density)): density**0.3 for density in CANDIDATE_DENSITIES}


def start(folder: Path, policy: PaperPolicy, **rules: Any) -> MeteredTraining:
    loop = ControlLoop(policy, Journal(folder / "decisions.jsonl"))
    loop.register(registration(first_plan=Settings(**rules).first_plan(LAYERS, WORLD, 1 << 40), codec_costs=COSTS))
    run = MeteredTraining(loop)
    run.step = 1
    run.gain = dict(GAIN)
    run.error = {"embed": 0.02, "head": 0.02}
    return run


def codecs(plan: Plan) -> dict[str, CodecSpec]:
    return {name: group.option.codec for group in plan.groups for name in group.layers}


@pytest.mark.parametrize("method", METHODS)
def test_cgx_gives_few_bits_where_errors_are_small_and_chooses_again_every_period(tmp_path: Path, method: str) -> None:
    """The error of 4 bits may double, so 4 * (0.04 + 0.0001) of squared error is allowed.

    3 bits of the layer with 0.04 have (15 / 7)^2 * 0.04, which is too much, and 4 bits leave room for 2 bits of the
    other, (15 / 3)^2 * 0.0001. "kmeans" and "linear" rank layers by size and norm instead: the large head never gets
    more bits than embed.
    """
    run = start(tmp_path, Cgx(method=method, review_s=30.0))
    run.error = {"embed": 0.04, "head": 0.0001}
    run.run(5)
    before = codecs(run.loop.plans[-1])
    assert before["bias"].name == "none"
    assert {name: before[name].bits for name in run.error} == {"embed": 4, "head": 2}
    run.error = {"embed": 0.0001, "head": 0.04}
    run.run(200)
    after = codecs(run.loop.plans[-1])
    fewest = 2 if method in ("dp", "bayes") else 4
    assert {name: after[name].bits for name in run.error} == {"embed": fewest, "head": 4}


def test_cgx_chooses_among_the_bits_and_with_the_bucket_size_that_it_is_given(tmp_path: Path) -> None:
    settings = Settings(policy="cgx", method="dp", bits=(5, 2), bucket_size=64)
    assert settings.chosen_policy == Cgx(method="dp", bits=(2, 5), bucket_size=64)
    assert list(map(str, settings.codecs_by_layer())) == [f"qsgd:bits={bits},bucket_size=64" for bits in (2, 4, 5)]
    run = start(tmp_path, Cgx(method="dp", bits=(2, 5), bucket_size=64))
    run.error = {"embed": 0.04, "head": 0.0001}
    run.run(60)
    chosen = codecs(run.loop.plans[-1])
    assert {name: str(chosen[name]) for name in run.error} == {
        "embed": "qsgd:bits=5,bucket_size=64",
        "head": "qsgd:bits=2,bucket_size=64",
    }
    for bits, says in {(2, 3): "4 or more", (): "such as", 4: "such as", (4, 9): "bits 9", ("4",): "bits '4'"}.items():
        with pytest.raises(ConfigError, match=says):
            Cgx(bits=bits)  # type: ignore[arg-type]


def test_errors_of_bits_that_were_not_measured_yet_follow_from_the_nearest() -> None:
    losses = KnownLosses(LAYERS)
    layer_errors = losses.layer_errors
    assert layer_errors == {}
    assert lost_share({4: 0.1}, 5) == pytest.approx(0.1 * (15 / 31) ** 2)
    assert lost_share({4: 0.1, 5: 0.9}, 5) == 0.9


def test_a_layer_error_is_the_mean_over_ranks_weighted_by_energy(tmp_path: Path) -> None:
    run = start(tmp_path, Cgx(method="dp"))
    samples = [
        replace(run.sample(rank), error_bits=4, layer_errors={"head": LayerError(energy, lost)})
        for rank, (energy, lost) in enumerate([(1.0, 0.1), (3.0, 0.5)])
    ]
    step = join(node_steps(samples), WORLD)
    assert step.error_bits == 4
    assert step.layer_errors["head"] == LayerError(2.0, pytest.approx(0.4))
    losses = KnownLosses(LAYERS)
    losses.add_step(step)
    assert losses.layer_errors["head"].squared_errors[4] == pytest.approx(0.8)
    assert losses.gain["qsgd:bits=4,bucket_size=128"] == pytest.approx(0.6)


def test_bits_keep_the_error_within_alpha_times_that_of_4_bits() -> None:
    errors = {
        f"layer{i}": LayerErrors(
            numel=10_000 * (1 + i % 7),
            norm=1.0 + i % 5,
            top_norm=1.0 + i % 5,
            squared_errors={bits: (1 + i % 5) ** 2 * lost_share({4: 0.01 * (1 + i % 3)}, bits) for bits in WIDTHS},
        )
        for i in range(30)
    }
    for method in METHODS:
        bits = layer_bits(errors, method, alpha=2.0)
        chosen = sum(errors[name].squared_errors[bits[name]] for name in errors)
        assert chosen <= 4 * sum(one.squared_errors[4] for one in errors.values()) * (1 + 1e-9)
    best = layer_bits(errors, "dp")
    problem = BitsProblem(layers=tuple(errors.values()), widths=WIDTHS, alpha=2.0)
    best_bytes = sum(CodecSpec(name="qsgd", bits=best[name]).payload_bytes(one.numel) for name, one in errors.items())
    assert best_bytes < 0.8 * problem.static_bytes


def _measured(run: MeteredTraining, energies: dict[str, float], bits: int = 4) -> JoinedStep:
    errors = {name: LayerError(energy, lost_share({4: 0.01}, bits)) for name, energy in energies.items()}
    samples = [replace(run.sample(rank), error_bits=bits, layer_errors=errors) for rank in range(WORLD)]
    return join(node_steps(samples), WORLD)


def test_a_layer_that_loses_nothing_any_more_is_no_error(tmp_path: Path) -> None:
    run, losses = start(tmp_path, Cgx(method="dp")), KnownLosses(LAYERS)
    losses.add_step(_measured(run, {"head": 1.0}))
    samples = [replace(run.sample(0), error_bits=4, layer_errors={"head": LayerError(1.0, 0.0)})]
    for _ in range(1000):
        losses.add_step(join(node_steps(samples), WORLD), {"head": 4})
    assert losses.layer_errors["head"].squared_errors[4] == 0
    assert losses.error_excess == 1.0


def test_the_error_of_bits_in_force_is_compared_with_what_was_expected_of_them(tmp_path: Path) -> None:
    run, losses, bits = start(tmp_path, Cgx(method="dp")), KnownLosses(LAYERS), {"embed": 2, "head": 4}
    losses.add_step(_measured(run, {"embed": 1.0, "head": 99.0}))
    # (25 * 1 + 99) / 100 is the square of 1.11.
    assert losses.too_large_error(bits, 2.0) is None
    assert losses.error_excess == 1
    for _ in range(4):
        losses.add_step(_measured(run, {"embed": 50.0, "head": 50.0}), bits)
    said = losses.too_large_error(bits, 2.0)
    assert said is not None
    assert said.endswith("times that of 4 bits, allowed 2")
    assert losses.too_large_error({"embed": 4, "head": 4}, 2.0) is None
    after_surprise = losses.error_excess
    assert after_surprise > 1.2
    for _ in range(10):
        losses.add_step(_measured(run, {"embed": 50.0, "head": 50.0}), bits)
    assert 1 <= losses.error_excess < 1.05 < after_surprise, "what stays the same is expected"


def test_bits_are_chosen_again_at_once_if_those_in_force_lose_too_much(tmp_path: Path) -> None:
    run = start(tmp_path, Cgx(method="dp", review_s=1e6))
    run.error = {"embed": 0.04, "head": 0.0001}
    run.run(60)
    before = codecs(run.loop.plans[-1])
    assert before["head"].bits == 2
    run.error = {"embed": 0.0001, "head": 0.04}
    run.run(200)
    after = codecs(run.loop.plans[-1])
    assert after["head"].bits is not None
    assert after["head"].bits >= 3
    assert any("the error of the bits is" in str(decision) for decision in journal_reasons(tmp_path))


def journal_reasons(folder: Path) -> list[str]:
    lines = map(json.loads, (folder / "decisions.jsonl").read_text().splitlines())
    return [line["reason"] for line in lines if "reason" in line]


@pytest.mark.parametrize("num_workers", [2, 4, 8, 16])
@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6, 1e8])
def test_equations_5_choose_the_collective_with_the_least_cost(num_workers: int, ratio: float) -> None:
    link = Link(alpha_s=1e-4, beta_s_per_byte=1e-4 / ratio)
    value_bytes = 1e6
    costs = {one: flexible.paper_exchange_s(one, num_workers, value_bytes, link) for one in flexible.SCHEMES}
    chosen = flexible.collective(num_workers, value_bytes, link)
    assert costs[chosen] == pytest.approx(min(costs.values()), rel=1e-9)


def test_flexible_takes_the_knee_and_stays_until_a_trigger_fires(tmp_path: Path) -> None:
    run = start(tmp_path, Flexible(method="knee"))
    run.gbps = 0.1
    run.run(60)
    (first,) = {codec for codec in codecs(run.loop.plans[-1]).values() if codec.name != "none"}
    assert first.name == "topk"
    assert "flexible (knee, priced as it runs) chooses topk" in journal_reasons(tmp_path)[0]
    num_plans = len(run.loop.plans)
    run.run(60)
    assert len(run.loop.plans) == num_plans
    run.gain = dict.fromkeys(GAIN, 0.9)
    run.run(120)
    (after,) = {codec for codec in codecs(run.loop.plans[-1]).values() if codec.name != "none"}
    assert after != first


def test_flexible_chooses_by_the_first_gains_also_if_the_next_ones_are_far_from_them(tmp_path: Path) -> None:
    run = start(tmp_path, Flexible())
    for step in range(60):
        run.gain = {name: gain * (0.5 if step % 40 < 20 else 1.0) for name, gain in GAIN.items()}
        run.run(1)
        if step == 6:
            assert run.loop.plans[-1].describe().startswith("topk"), "it waits for gains that agree"
    assert run.loop.plans[-1].describe().startswith("topk")


def test_papers_keep_layer_rules(tmp_path: Path) -> None:
    for policy in (Cgx(method="dp"), Flexible(method="knee")):
        run = start(tmp_path, policy, exclude=("head",))
        run.run(80)
        assert {codecs(plan)["head"].name for plan in run.loop.plans} == {"none"}
        assert codecs(run.loop.plans[-1])["embed"].name in ("qsgd", "topk")


def test_with_nsga2_the_knee_is_near_that_of_a_fine_grid() -> None:
    pytest.importorskip("pymoo")
    measured = Measured(
        layers=LAYERS,
        backward_s=(0.1,) * 3,
        network=Network.flat(4, Link.from_rates(bandwidth_gbps=0.1, latency_ms=0.1)),
        codec_costs=COSTS,
        gain=GAIN,
    )
    gain = flexible.known_gain(measured, CANDIDATE_DENSITIES)
    assert gain is not None
    found = flexible.choose(measured, gain, "nsga2")
    coarse = flexible.choose(measured, gain)
    assert found.codec.density is not None
    assert coarse.codec.density is not None
    assert 0.001 <= found.codec.density <= 0.1
    assert 1 / 5 < found.codec.density / coarse.codec.density < 5


def test_settings_name_the_method_and_make_a_policy_that_ray_can_send() -> None:
    for policy, methods in {"cgx": ["kmeans", "linear", "bayes", "dp"], "flexible": ["knee", "nsga2"]}.items():
        for method in methods:
            made = make_policy(Settings(policy=policy, method=method))
            assert pickle.loads(pickle.dumps(made)) == made
        with pytest.raises(ConfigError, match=f"unknown method 'best'; known: {', '.join(methods)}"):
            Settings(policy=policy, method="best")
        with pytest.raises(ConfigError, match=f"is not allowed with policy '{policy}', which takes method"):
            Settings(policy=policy, candidates=("topk",))
    with pytest.raises(ConfigError, match=r"method 'dp' is not allowed with policy 'adaptive', .* policy='cgx' or"):
        Settings(method="dp")
    with pytest.raises(ConfigError, match=r"alpha 0.5 is not allowed; give 1 or more"):
        Cgx(alpha=0.5)
    with pytest.raises(ConfigError, match=r"densities \(\) is not allowed; give a tuple"):
        Flexible(densities=())
    with pytest.raises(ConfigError, match="unknown prices 'low'; known: run, paper"):
        Settings(policy="flexible", prices="low")
    assert make_policy(Settings(policy="flexible", prices="paper")) == Flexible(prices="paper")
    assert make_policy(Settings(policy="cgx", review_s=5.0)).review_s == 5.0
    with pytest.raises(ConfigError, match=r"review_s 5.0 is not allowed with policy 'flexible', which takes method"):
        Settings(policy="flexible", review_s=5.0)
    with pytest.raises(ConfigError, match="review_s -1 is not allowed"):
        Settings(review_s=-1)
    assert len(Settings(policy="cgx").codecs_by_layer()) == 7
    assert [str(codec) for codec in Cgx().gain_codecs] == ["qsgd:bits=4,bucket_size=128"]


@pytest.mark.parametrize("policy", [Cupcake(), ByteComp()], ids=lambda policy: policy.title)
def test_searched_groups_are_put_in_force_once_and_keep_layer_rules(policy: PaperPolicy, tmp_path: Path) -> None:
    run = start(tmp_path, policy, exclude=("head",))
    run.gain = {"qsgd:bits=4,bucket_size=128": 0.98}
    run.gbps = 0.1
    run.run(40)
    first = run.loop.plans[-1]
    assert codecs(first)["head"].name == "none"
    assert str(codecs(first)["embed"]) == "qsgd:bits=4,bucket_size=128"
    assert f"first measurements: {policy.title} chooses " in journal_reasons(tmp_path)[0]
    run.gbps = 10.0
    run.run(120)
    assert run.loop.plans[-1].groups == first.groups


def test_cupcake_fuses_layers_and_bytecomp_sends_each_by_itself_in_one_dtype_and_offloads_where_it_can() -> None:
    layers = tuple(replace(layer, dtype="bfloat16" if layer.name == "head" else "float32") for layer in LAYERS)
    slow = CodecCost(encode_a_s=1e-2, encode_b_s_per_element=1e-8, decode_a_s=1e-2, decode_b_s_per_element=1e-8)
    late = CodecCost(encode_a_s=1e-2, encode_b_s_per_element=1e-12, decode_a_s=1e-2, decode_b_s_per_element=1e-12)
    qsgd = "qsgd:bits=4,bucket_size=128"
    known = Measured(
        layers=layers,
        backward_s=(0.1,) * 3,
        network=Network.flat(4, Link.from_rates(bandwidth_gbps=0.1, latency_ms=0.1)),
        codec_costs={"none": slow, qsgd: COST},
        gain={},
    )
    at_once = replace(known, layers=LAYERS, backward_s=(0.1, 0.0, 0.0), codec_costs={qsgd: late})
    (fused,) = Cupcake().groups(at_once)
    assert (fused.layers, str(fused.option)) == (("head", "bias", "embed"), f"{qsgd} over sra")
    assert [group.layers for group in Cupcake().groups(replace(at_once, layers=layers))] == [
        ("head",),
        ("bias", "embed"),
    ]
    alone = ByteComp().groups(known)
    assert [group.layers for group in alone] == [("head",), ("bias",), ("embed",)]
    assert {str(group.option.codec) for group in alone if "bias" not in group.layers} == {qsgd}
    gpu = replace(
        known, codec_costs={qsgd: slow, host_name(qsgd): COST}, bus=Link.from_rates(bandwidth_gbps=100, latency_ms=0.01)
    )
    assert {group.option.device for group in ByteComp().groups(gpu) if group.option != DENSE} == {"cpu"}


def test_policies_that_search_groups_take_a_codec_that_encodes() -> None:
    assert Settings(policy="cupcake", codec="bf16").chosen_policy == Cupcake(codec="bf16", scheme="sra")
    assert Settings(policy="bytecomp").chosen_policy == ByteComp(codec=CodecSpec(name="qsgd", bits=4))
    for policy in (Cupcake(codec="topk"), ByteComp(codec="topk:density=0.1")):
        assert pickle.loads(pickle.dumps(policy)) == policy
        assert {str(option.scheme) for option in policy.options} == {"allgather"}
    with pytest.raises(ConfigError, match="codec 'none' encodes nothing; give one that does"):
        ByteComp(codec="none")
    with pytest.raises(ConfigError, match="scheme sra cannot carry codec topk"):
        Cupcake(codec="topk", scheme="sra")

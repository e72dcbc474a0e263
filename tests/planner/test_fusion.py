"""Fusion under one option: against brute force, Cupcake's search and the joint search, which share no code with it."""

from __future__ import annotations

import random

import pytest

from cgx_ray.bench.planner_cases import earliest_finish_s, random_pipeline
from cgx_ray.errors import ConfigError
from cgx_ray.plan import DENSE, CodecSpec, Option, Scheme
from cgx_ray.planner.cost import Link, Network, exchange_s
from cgx_ray.planner.fusion import fuse
from cgx_ray.planner.options import FREE, CodecCost
from cgx_ray.planner.papers.cupcake import cupcake
from cgx_ray.planner.pipeline import GroupCost, GroupEnd, Pipeline, group_cost
from cgx_ray.planner.search import search

# Sums of a few hundred doubles, added up in another order.
ROUNDING = 1e-12
LAN = Link.from_rates(bandwidth_gbps=1, latency_ms=0.5)


def test_fusion_equals_brute_force_in_1000_cases_of_up_to_14_layers() -> None:
    rng = random.Random(0)
    for case in range(1000):
        pipeline = random_pipeline(rng, rng.randint(1, 14), 1)
        groups, finish_s = fuse(pipeline)
        assert finish_s == pytest.approx(earliest_finish_s(pipeline), rel=ROUNDING), (case, pipeline)
        assert pipeline.finish_s(groups) == pytest.approx(finish_s, rel=ROUNDING), (case, pipeline)


def test_cupcakes_search_and_fusion_find_the_same_finish() -> None:
    rng = random.Random(1)
    for case in range(300):
        pipeline = random_pipeline(rng, rng.randint(1, 14), 1)
        found_s = pipeline.finish_s(cupcake(pipeline, 0))
        assert found_s == pytest.approx(fuse(pipeline)[1], rel=ROUNDING), (case, pipeline)


def test_fusion_and_the_joint_search_agree_on_one_option_and_314_layers() -> None:
    rng = random.Random(2)
    for case in range(5):
        pipeline = random_pipeline(rng, 314, 1)
        joint = search(pipeline)
        assert fuse(pipeline)[1] == pytest.approx(joint.finish_s, rel=max(ROUNDING, joint.gap)), case
        assert fuse(pipeline)[1] >= joint.bound_s * (1 - ROUNDING), case


def test_what_costs_nothing_a_group_is_sent_layer_by_layer_and_what_costs_all_in_one() -> None:
    layers = {"backward_s": (1.0,) * 6, "numel": (10,) * 6}

    def cost(network_a_s: float) -> GroupCost:
        return GroupCost(compute_a_s=0, compute_b_s_per_element=0, network_a_s=network_a_s, network_b_s_per_element=0.1)

    groups, finish_s = fuse(Pipeline(**layers, costs=(cost(0),)))
    assert (len(groups), finish_s) == (6, 7)
    groups, finish_s = fuse(Pipeline(**layers, costs=(cost(100),)))
    assert (groups, finish_s) == ((GroupEnd(6, 0),), 112)


def test_pipeline_by_hand() -> None:
    """Compute: 1 + 2 + 0.5 (encode) = 3.5, then 3 + 0.5 = 7. Network: 3.5 + 10 = 13.5, then at once 13.5 + 5."""
    cost = GroupCost(compute_a_s=0.5, compute_b_s_per_element=0, network_a_s=2, network_b_s_per_element=1)
    pipeline = Pipeline(backward_s=(1, 2, 3), numel=(4, 4, 3), costs=(cost,))
    assert pipeline.finish_s([GroupEnd(2, 0), GroupEnd(3, 0)]) == 18.5


@pytest.mark.parametrize("ends", [(), (2,), (4,), (2, 2, 3), (3, 2)])
def test_groups_that_leave_a_layer_out_or_hold_it_twice_are_refused(ends: tuple[int, ...]) -> None:
    pipeline = random_pipeline(random.Random(3), 3, 1)
    with pytest.raises(ConfigError, match="rising ends"):
        pipeline.finish_s([GroupEnd(end, 0) for end in ends])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"numel": (), "backward_s": ()}, "0 backward times and 0 layers"),
        ({"backward_s": (1.0,)}, "1 backward times and 2 layers"),
        ({"backward_s": (1.0, -1.0)}, r"backward_s of layer 1 -1\.0"),
        ({"numel": (1, 0)}, "layer 1 has 0 elements"),
        ({"costs": ()}, "no option"),
    ],
)
def test_impossible_pipelines_are_refused(changes: dict[str, object], message: str) -> None:
    cost = GroupCost(compute_a_s=0, compute_b_s_per_element=0, network_a_s=0, network_b_s_per_element=1)
    with pytest.raises(ConfigError, match=message):
        Pipeline(**{"backward_s": (1.0, 1.0), "numel": (1, 1), "costs": (cost,), **changes})
    with pytest.raises(ConfigError, match="network_a_s -1"):
        GroupCost(compute_a_s=0, compute_b_s_per_element=0, network_a_s=-1, network_b_s_per_element=0)


# What a group costs under an option.

CODEC = CodecCost(encode_a_s=1e-4, encode_b_s_per_element=2e-9, decode_a_s=3e-5, decode_b_s_per_element=1e-9)
QSGD = Option(codec=CodecSpec(name="qsgd"), scheme=Scheme.SRA)
TOPK = Option(codec=CodecSpec(name="topk", density=0.01), scheme=Scheme.ARTOPK_RING)


def test_a_dense_group_costs_what_the_cost_model_says_at_any_size() -> None:
    cost = group_cost(DENSE, network=Network.flat(4, LAN), codec_cost=FREE)
    for numel in (1, 1000, 1 << 26):
        expected_s = exchange_s(Scheme.DENSE, num_workers=4, dense_bytes=4 * numel, wire_bytes=4 * numel, link=LAN)
        assert cost.network_s(numel) == pytest.approx(expected_s)
        assert cost.compute_s(numel) == 0


def test_encoding_holds_up_backward_or_the_network_but_not_both() -> None:
    held, free = (
        group_cost(TOPK, network=Network.flat(4, LAN), codec_cost=CODEC, encodes_on=where)
        for where in ("backward", "thread")
    )
    assert held.compute_s(10**6) == pytest.approx(1e-4 + 2e-3)
    assert free.compute_s(10**6) == 0
    assert held.compute_s(10**6) + held.network_s(10**6) == pytest.approx(free.network_s(10**6))


def test_of_an_overlapped_codec_and_network_the_slower_one_counts() -> None:
    """qsgd over sra, 4 workers: 0.53125 byte an element, 1.5 times, 8 ns a byte. Codec: 2 + 1.75 ns an element."""
    slow_link = group_cost(QSGD, network=Network.flat(4, LAN), codec_cost=CODEC)
    assert slow_link.network_b_s_per_element == pytest.approx(1.5 * 0.53125 * 8e-9)
    fast = Link.from_rates(bandwidth_gbps=100, latency_ms=0.5)
    fast_link = group_cost(QSGD, network=Network.flat(4, fast), codec_cost=CODEC)
    assert fast_link.network_b_s_per_element == pytest.approx(3.75e-9)
    assert fast_link.network_a_s == pytest.approx(2 * 5e-4 + 4 * 1e-4 + 7 * 3e-5)


def test_one_worker_sends_and_encodes_nothing() -> None:
    cost = group_cost(TOPK, network=Network.flat(1, LAN), codec_cost=CODEC, encodes_on="backward")
    assert cost.compute_s(10**6) == cost.network_s(10**6) == 0

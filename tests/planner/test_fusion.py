"""Fusion under one option, against brute force, Cupcake's search and the joint search, which share no code with it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bench.planner.cases import earliest_finish_s, random_pipeline
from bench.planner.fusion import fuse
from cgx_ray.errors import ConfigError
from cgx_ray.plan import DENSE, CodecSpec, Intra, Option, Scheme
from cgx_ray.planner.candidates import FREE, CodecCost
from cgx_ray.planner.cost import Link, Network, exchange_s
from cgx_ray.planner.engine_cost import HOST_ENGINE
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


# Terms that the paper has.
PAPER = ("compute_a_s", "compute_b_s_per_element", "network_a_s", "network_b_s_per_element")


def test_cupcakes_search_and_fusion_find_the_same_finish_without_leads_and_tails() -> None:
    rng = random.Random(1)
    for case in range(300):
        pipeline = random_pipeline(rng, rng.randint(1, 14), 1)
        (cost,) = pipeline.costs
        pipeline = replace(pipeline, costs=(GroupCost(**{name: getattr(cost, name) for name in PAPER}),))
        # Each insight spares work, and none changes what is found; without both small problems only end.
        for insights in ((1, 2), (1,), (2,), ())[: 4 if pipeline.num_layers <= 8 else 1]:
            groups, has_ended = cupcake(pipeline, 0, insights=insights)
            assert has_ended
            assert pipeline.finish_s(groups) == pytest.approx(fuse(pipeline)[1], rel=ROUNDING), (
                case,
                insights,
                pipeline,
            )


def test_fusion_and_the_joint_search_agree_on_one_option_and_314_layers() -> None:
    rng = random.Random(2)
    for case in range(5):
        pipeline = random_pipeline(rng, 314, 1)
        joint = search(pipeline)
        assert fuse(pipeline)[1] == pytest.approx(joint.finish_s, rel=max(ROUNDING, joint.gap)), case
        assert fuse(pipeline)[1] >= joint.bound_s * (1 - ROUNDING), case


def test_layers_go_one_by_one_if_a_group_costs_nothing_and_together_if_it_costs_much() -> None:
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
    groups = [GroupEnd(2, 0), GroupEnd(3, 0)]
    assert pipeline.finish_s(groups) == 18.5


@pytest.mark.parametrize(
    ("edges", "after_s", "finish_s"),
    [
        # The second group is done 0.5 x 3 later; the first one 8 after 13.5.
        ({"tail_b_s_per_element": 0.5}, 0, 20),
        ({"tail_b_s_per_element": 1}, 0, 21.5),
        ({"tail_b_s_per_element": 0.5}, 7, 25.5),
        # The network starts with the first group at 3.5 + 8, and is busy when the second one is ready.
        ({"lead_b_s_per_element": 1}, 0, 26.5),
        # By itself the first group takes 8 + 10 + 8 - 8 after 3.5, and then the network is done with it too. The second
        # one begins on the network at 21.5 and takes 5 + 3.
        ({f"{edge}_b_s_per_element": 1 for edge in ("lead", "tail", "gap")}, 0, 29.5),
    ],
)
def test_a_step_ends_when_all_groups_are_done_and_the_network_with_what_follows(
    edges: dict[str, float], after_s: float, finish_s: float
) -> None:
    """As above: ready at 3.5 and 7, and 10 and 5 s on the network."""
    cost = GroupCost(compute_a_s=0.5, compute_b_s_per_element=0, network_a_s=2, network_b_s_per_element=1, **edges)
    pipeline = Pipeline(backward_s=(1, 2, 3), numel=(4, 4, 3), costs=(cost,), after_s=after_s)
    assert pipeline.finish_s([GroupEnd(2, 0), GroupEnd(3, 0)]) == finish_s


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
        ({"after_s": -1.0}, r"after_s -1\.0"),
    ],
)
def test_impossible_pipelines_are_refused(changes: dict[str, object], message: str) -> None:
    cost = GroupCost(compute_a_s=0, compute_b_s_per_element=0, network_a_s=0, network_b_s_per_element=1)
    with pytest.raises(ConfigError, match=message):
        Pipeline(**{"backward_s": (1.0, 1.0), "numel": (1, 1), "costs": (cost,), **changes})
    with pytest.raises(ConfigError, match="network_a_s -1"):
        GroupCost(compute_a_s=0, compute_b_s_per_element=0, network_a_s=-1, network_b_s_per_element=0)


# What a group costs under an option.

THREAD_S, MESSAGE_S = HOST_ENGINE.thread_s, HOST_ENGINE.message_s
CODEC = CodecCost(encode_a_s=1e-4, encode_b_s_per_element=2e-9, decode_a_s=3e-5, decode_b_s_per_element=1e-9)
QSGD = Option(codec=CodecSpec(name="qsgd"), scheme=Scheme.SRA)
TOPK = Option(codec=CodecSpec(name="topk", density=0.01), scheme=Scheme.ARTOPK_RING)


def test_a_dense_group_costs_what_the_cost_model_says_at_any_size() -> None:
    cost = group_cost(DENSE, network=Network.flat(4, LAN), codec_cost=FREE)
    for numel in (1, 1000, 1 << 26):
        expected_s = exchange_s(Scheme.DENSE, num_workers=4, dense_bytes=4 * numel, wire_bytes=4 * numel, link=LAN)
        assert cost.alone_s(numel) == pytest.approx(THREAD_S + expected_s)
        assert (cost.lead_s(numel), cost.tail_s(numel)) == pytest.approx((0, 6 * 5e-4))
        assert cost.compute_s(numel) == 0


def test_encoding_holds_up_backward_or_the_network_but_not_both() -> None:
    held, free = (
        group_cost(TOPK, network=Network.flat(4, LAN), codec_cost=CODEC, encodes_on=where)
        for where in ("backward", "thread")
    )
    codec_s = 1e-4 + 2e-3 + 3e-5 + 1e-3
    assert held.compute_s(10**6) == pytest.approx(codec_s)
    assert free.compute_s(10**6) == 0
    assert held.compute_s(10**6) + held.alone_s(10**6) == pytest.approx(free.alone_s(10**6))
    # TOPK hides nothing of a single group. Of many, the longest of codec and link counts: here the codec, which waits
    # for the link after it has encoded.
    hops_s, thread_s = held.tail_s(10**6), THREAD_S + MESSAGE_S
    link_s = held.alone_s(10**6) - thread_s - hops_s
    assert 0 < link_s < codec_s
    assert held.network_s(10**6) == pytest.approx(thread_s + link_s)
    assert free.network_s(10**6) == pytest.approx(thread_s + codec_s)
    assert (free.lead_s(10**6), free.tail_s(10**6)) == pytest.approx((link_s + hops_s, link_s + hops_s))


def test_of_a_slow_link_encoding_is_the_lead_and_decoding_the_tail() -> None:
    """Most bytes of TOPK over a link of 10 Mbit/s take longer than the codec."""
    slow = Link.from_rates(bandwidth_gbps=0.01, latency_ms=0.5)
    cost = group_cost(TOPK, network=Network.flat(4, slow), codec_cost=CODEC)
    assert (cost.lead_a_s, cost.lead_b_s_per_element) == (0, pytest.approx(2e-9))
    assert cost.tail_b_s_per_element == pytest.approx(1e-9)
    assert cost.network_a_s == pytest.approx(THREAD_S + MESSAGE_S + 1e-4 + 3e-5)
    assert cost.gap_b_s_per_element == pytest.approx(0, abs=1e-18)


def test_of_an_overlapped_codec_and_network_the_slower_one_counts() -> None:
    """qsgd over sra, 4 workers: 0.53125 byte per element, 1.5 times, 8 ns per byte. Codec: 2 + 1.75 ns per element."""
    slow_link = group_cost(QSGD, network=Network.flat(4, LAN), codec_cost=CODEC)
    assert slow_link.network_b_s_per_element == pytest.approx(1.5 * 0.53125 * 8e-9)
    fast = Link.from_rates(bandwidth_gbps=100, latency_ms=0.5)
    fast_link = group_cost(QSGD, network=Network.flat(4, fast), codec_cost=CODEC)
    assert fast_link.network_b_s_per_element == pytest.approx(3.75e-9)
    assert fast_link.network_a_s == pytest.approx(THREAD_S + 4 * 1e-4 + 7 * (MESSAGE_S + 3e-5))
    assert (fast_link.lead_a_s, fast_link.lead_b_s_per_element) == pytest.approx((0, 0), abs=1e-15)
    assert (fast_link.tail_a_s, fast_link.tail_b_s_per_element) == pytest.approx((2 * 5e-4, 0), abs=1e-15)


def test_links_inside_and_between_nodes_carry_different_groups_at_once() -> None:
    """2 nodes of 4: inside 2 x 3/4 x 4 bytes per element and hops of 2 x 10 us; between nodes 4 bytes, 2 x 0.5 ms."""
    option = Option(codec=DENSE.codec, scheme=Scheme.DENSE, intra=Intra.DENSE)

    def cost(inside_gbps: float) -> GroupCost:
        inside = Link.from_rates(bandwidth_gbps=inside_gbps, latency_ms=0.01)
        network = Network(num_nodes=2, ranks_per_node=4, between=LAN, inside=inside)
        return group_cost(option, network=network, codec_cost=FREE)

    fast = cost(inside_gbps=100)
    assert (fast.network_a_s, fast.network_b_s_per_element) == pytest.approx((THREAD_S, 4 * 8e-9))
    assert (fast.lead_a_s, fast.lead_b_s_per_element) == pytest.approx((1e-5, 3 * 0.08e-9))
    assert (fast.tail_a_s, fast.tail_b_s_per_element) == pytest.approx((1e-3 + 1e-5, 3 * 0.08e-9))
    assert (fast.gap_a_s, fast.gap_b_s_per_element) == (0, pytest.approx(0, abs=1e-15))
    # The link inside waits while the group is between nodes.
    slow = cost(inside_gbps=0.5)
    assert (slow.network_a_s, slow.network_b_s_per_element) == pytest.approx((THREAD_S, 6 * 16e-9))
    assert (slow.gap_a_s, slow.gap_b_s_per_element) == pytest.approx((1e-5 + 1e-3, 4 * 8e-9))
    assert (slow.lead_a_s, slow.lead_b_s_per_element) == pytest.approx((1e-5 + 1e-3, 4 * 8e-9))
    assert (slow.tail_a_s, slow.tail_b_s_per_element) == pytest.approx((2e-5 + 1e-3, 4 * 8e-9))


def test_groups_that_share_no_time_take_all_theirs_one_after_the_other_except_hops() -> None:
    for option in (DENSE, QSGD, TOPK):
        network = Network.flat(4, LAN)
        shared, serial = (
            group_cost(option, network=network, codec_cost=CODEC, shares_time=shares) for shares in (True, False)
        )
        assert serial.alone_s(10**6) == pytest.approx(shared.alone_s(10**6))
        assert serial.tail_s(10**6) == pytest.approx(shared.tail_a_s - shared.gap_a_s + shared.lead_a_s)
        assert serial.network_s(10**6) == pytest.approx(serial.alone_s(10**6) - serial.tail_s(10**6))
        assert serial.lead_s(10**6) == pytest.approx(0, abs=1e-12)


def test_one_worker_sends_and_encodes_nothing() -> None:
    cost = group_cost(TOPK, network=Network.flat(1, LAN), codec_cost=CODEC, encodes_on="backward")
    assert cost.compute_s(10**6) == cost.network_s(10**6) == cost.tail_s(10**6) == 0

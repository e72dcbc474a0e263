"""Simulated steps on several resources: by hand, and against models with only one or two of them."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.planner.cases import random_pipeline
from cgx_ray.errors import ConfigError
from cgx_ray.plan import DENSE, PIECE_BYTES, CodecSpec, Option, Scheme
from cgx_ray.planner.candidates import FREE, CodecCost, candidate_options
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.engine_cost import HOST_ENGINE
from cgx_ray.planner.legs import Leg, exchange_stages, legs, thread_s
from cgx_ray.planner.pipeline import GroupEnd
from cgx_ray.planner.scheme_costs import Overlap
from cgx_ray.planner.timeline import Resource, Stage, Timeline, simulate

# A busy machine would miss hypothesis's deadline of 200 ms per example.
UNTIMED = settings(deadline=None)


def stage(name: str, latency_s: float = 0.0, *, overlaps: bool = False, **busy_s: float) -> Stage:
    return Stage(
        name=name,
        busy_s={Resource(resource): seconds for resource, seconds in busy_s.items()},
        latency_s=latency_s,
        overlaps=overlaps,
    )


def times_of(played: Timeline) -> dict[tuple[int, str], tuple[float, float]]:
    return {(span.group, span.stage.name): (span.start_s, span.end_s) for span in played.spans}


def alone_s(stages: tuple[Stage, ...] | list[Stage]) -> float:
    return simulate([0.0], [stages]).finish_s


def groups_on(resources: list[Resource]) -> st.SearchStrategy[list[tuple[float, list[Stage]]]]:
    """Return backward seconds and stages of up to six groups, in whole seconds, so that sums are exact."""
    stages = st.builds(
        lambda taken, work_s, latency_s, overlaps: Stage(
            name="stage", busy_s=dict.fromkeys(taken, float(work_s)), latency_s=float(latency_s), overlaps=overlaps
        ),
        st.lists(st.sampled_from(resources), max_size=2, unique=True),
        st.integers(0, 9),
        st.integers(0, 5),
        st.booleans(),
    )
    # The first stage needs all of the group's gradients.
    chains = st.lists(stages, min_size=1, max_size=4).map(lambda own: [replace(own[0], overlaps=False), *own[1:]])
    return st.lists(st.tuples(st.integers(0, 9).map(float), chains), min_size=1, max_size=6)


THREAD_S, MESSAGE_S = HOST_ENGINE.thread_s, HOST_ENGINE.message_s
GROUPS = groups_on(list(Resource))
GROUPS_BESIDE_BACKWARD = groups_on([Resource.CODEC, Resource.INTRA, Resource.INTER])


def test_a_group_that_waits_for_a_hop_holds_up_no_other_group() -> None:
    """Ready at 1 and 2. The link carries 1 to 6 and 6 to 11; the last hop takes 3 more. One by one it would be 17."""
    way = (stage("exchange", 3, inter=5),)
    played = simulate([1, 1], [way, way])
    assert times_of(played) == {
        (0, "backward"): (0, 1),
        (1, "backward"): (1, 2),
        (0, "exchange"): (1, 9),
        (1, "exchange"): (6, 14),
    }
    assert played.parts_s == {"compute": 1, "codec": 0, "bandwidth": 10, "latency": 3}
    assert [span.group for span in played.critical] == [0, 0, 1]


def test_the_thread_encodes_one_group_while_the_link_carries_another() -> None:
    way = (stage("encode", codec=2), stage("exchange", 1, inter=3), stage("decode", codec=2))
    played = simulate([0, 0], [way, way])
    assert times_of(played) == {
        (0, "backward"): (0, 0),
        (1, "backward"): (0, 0),
        (0, "encode"): (0, 2),
        (0, "exchange"): (2, 6),
        (1, "encode"): (2, 4),
        (1, "exchange"): (5, 9),
        (0, "decode"): (6, 8),
        (1, "decode"): (9, 11),
    }
    assert played.parts_s == {"compute": 0, "codec": 4, "bandwidth": 6, "latency": 1}


def test_the_thread_takes_the_oldest_group_that_can_go_on() -> None:
    """At 4 the messages of group 0 are there since 3, and group 2 waits to be encoded since 0."""
    way = (stage("encode", codec=2), stage("exchange", inter=1), stage("decode", codec=2))
    times = times_of(simulate([0, 0, 0], [way, way, way]))
    coded = sorted((start_s, group, name) for (group, name), (start_s, _) in times.items() if name[2:] == "code")
    assert coded == [
        (0, 0, "encode"),
        (2, 1, "encode"),
        (4, 0, "decode"),
        (6, 1, "decode"),
        (8, 2, "encode"),
        (11, 2, "decode"),
    ]


def test_a_stage_that_overlaps_starts_as_soon_as_it_need_not_wait_for_pieces_and_ends_no_earlier() -> None:
    """Group 0 has codec 3 and link 10, group 1 codec 12 and link 4, and each one piece of 1 at the end.

    The last 2 of the link's 10 are enough to decode group 0. Until then the codec encodes group 1.
    """
    slow = (stage("encode", codec=1), *overlapped(link_s=10, decode_s=2))
    coded = (stage("encode", codec=6), *overlapped(link_s=4, decode_s=6))
    assert (alone_s(slow), alone_s(coded)) == (11, 13)
    assert times_of(simulate([0, 0], [slow, coded])) == {
        (0, "backward"): (0, 0),
        (1, "backward"): (0, 0),
        (0, "encode"): (0, 1),
        (0, "exchange"): (0, 10),
        (1, "encode"): (1, 7),
        (0, "decode"): (8, 11),
        (1, "exchange"): (10, 14),
        (1, "decode"): (10, 17),
    }
    # Group 0 needs the codec until 12, and its link from 2, as late as it can without waiting at the end.
    played = simulate([0, 0], [coded, slow])
    times = times_of(played)
    assert (times[0, "exchange"], times[0, "decode"], times[1, "exchange"]) == ((2, 6), (6, 13), (12, 22))
    assert played.finish_s == 23
    assert played.parts_s == {"compute": 0, "codec": 12, "bandwidth": 10, "latency": 1}
    assert [(span.group, span.stage.name) for span in played.critical] == [
        (0, "backward"), (0, "encode"), (0, "decode"), (1, "exchange"), (1, "decode"),
    ]  # fmt: skip


def overlapped(*, link_s: float, decode_s: float) -> tuple[Stage, Stage]:
    return stage("exchange", overlaps=True, inter=link_s), stage("decode", 1, overlaps=True, codec=decode_s)


def test_a_stage_on_two_resources_starts_on_both_and_gives_each_back_when_it_is_done_there() -> None:
    way = (stage("work", codec=2, compute=4), stage("exchange", inter=1))
    times = times_of(simulate([1, 1], [way, way]))
    assert times[0, "work"] == (1, 5)
    assert times[1, "backward"] == (5, 6)
    assert times[0, "exchange"] == (5, 6)
    assert times[1, "work"] == (6, 10)


def tick_by_tick(backward_s: list[float], stages: list[list[Stage]]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return start and end of each stage (group, index), backward first, in whole seconds, second by second."""
    chains = [[stage("backward", compute=s), *own] for s, own in zip(backward_s, stages, strict=True)]
    times: dict[tuple[int, int], tuple[int, int]] = {}
    free = dict.fromkeys(Resource, 0)

    def can_start(group: int, index: int, now: int) -> bool:
        own = chains[group][index]
        if index == 0:
            before = times.get((group - 1, 0), (0, 0) if group == 0 else None)
        else:
            before = times.get((group, index - 1))
        if before is None:
            return False
        work_s = int(max(own.busy_s.values(), default=0.0))
        from_s = max(before[0], before[1] - work_s) if own.overlaps else before[1]
        return from_s <= now and all(free[resource] <= now for resource in own.busy_s)

    for now in itertools.count():
        while True:
            left = [key for key in itertools.product(range(len(chains)), range(5)) if key[1] < len(chains[key[0]])]
            left = [key for key in left if key not in times]
            if not left:
                return times
            (group, index), *_ = [key for key in left if can_start(*key, now)] or [(-1, 0)]
            if group < 0:
                break
            own = chains[group][index]
            free.update({resource: now + int(seconds) for resource, seconds in own.busy_s.items()})
            done = now + int(max(own.busy_s.values(), default=0.0))
            done = max(done, times[group, index - 1][1]) if own.overlaps else done
            times[group, index] = (now, done + int(own.latency_s))
    raise AssertionError("unreachable")


@UNTIMED
@given(groups=GROUPS)
def test_simulation_is_that_of_a_clock_that_starts_the_oldest_stage_that_can(
    groups: list[tuple[float, list[Stage]]],
) -> None:
    backward_s, stages = (list(part) for part in zip(*groups, strict=True))
    played, expected = simulate(backward_s, stages), tick_by_tick(backward_s, stages)
    found: dict[int, list[tuple[float, float]]] = {}
    for span in played.spans:
        found.setdefault(span.group, []).append((span.start_s, span.end_s))
    assert found == {group: [expected[group, i] for i in range(len(own) + 1)] for group, own in enumerate(stages)}


@UNTIMED
@given(groups=GROUPS)
def test_a_step_is_no_shorter_than_the_work_of_a_resource_and_no_longer_than_all_work_and_waiting(
    groups: list[tuple[float, list[Stage]]],
) -> None:
    backward_s, stages = (list(part) for part in zip(*groups, strict=True))
    finish_s = simulate(backward_s, stages).finish_s
    for resource in Resource:
        work_s = sum(own.busy_s.get(resource, 0.0) for chain in stages for own in chain)
        assert finish_s >= work_s + (sum(backward_s) if resource is Resource.COMPUTE else 0.0), resource
    assert finish_s <= sum(backward_s) + sum(map(alone_s, stages))


@UNTIMED
@given(groups=GROUPS_BESIDE_BACKWARD)
def test_side_by_side_is_never_longer_than_one_group_after_the_other(
    groups: list[tuple[float, list[Stage]]],
) -> None:
    """One after the other: each group starts when its layers are ready and the group before it is done."""
    ready_s = serial_s = 0.0
    finish_s = simulate(*zip(*groups, strict=True)).finish_s
    for seconds, chain in groups:
        ready_s += seconds
        serial_s = max(serial_s, ready_s) + alone_s(chain)
        assert finish_s >= ready_s + alone_s(chain)
    assert finish_s <= serial_s


def test_encoding_on_compute_and_one_network_is_the_pipeline_of_the_search() -> None:
    rng = random.Random(1)
    for case in range(200):
        pipeline = random_pipeline(rng, rng.randint(1, 12), 3)
        # With a lead the link could take a later group first.
        edges = {f"{edge}_{term}": 0.0 for edge in ("lead", "gap") for term in ("a_s", "b_s_per_element")}
        pipeline = replace(pipeline, costs=tuple(replace(cost, **edges) for cost in pipeline.costs))
        ends = sorted({pipeline.num_layers, *rng.sample(range(1, 13), 4)} & set(range(1, pipeline.num_layers + 1)))
        groups = [GroupEnd(end, rng.randrange(3)) for end in ends]
        backward_s, stages, start = [], [], 0
        for group in groups:
            cost, numel = pipeline.costs[group.option], sum(pipeline.numel[start : group.end])
            backward_s.append(sum(pipeline.backward_s[start : group.end]))
            exchange = stage("exchange", cost.tail_s(numel), inter=cost.network_s(numel))
            stages.append((stage("encode", compute=cost.compute_s(numel)), exchange))
            start = group.end
        after = stage("after", inter=pipeline.after_s)
        finish_s = simulate([*backward_s, 0.0], [*stages, (after,)]).finish_s
        assert finish_s == pytest.approx(pipeline.finish_s(groups), rel=1e-12), (case, groups)


@UNTIMED
@given(groups=GROUPS)
def test_critical_path_has_no_gap_and_its_parts_are_the_step(groups: list[tuple[float, list[Stage]]]) -> None:
    backward_s, stages = (list(part) for part in zip(*groups, strict=True))
    played = simulate(backward_s, stages)
    path = played.critical
    assert math.fsum(played.parts_s.values()) == played.finish_s == max(span.end_s for span in played.spans)
    assert len(played.spans) == len(groups) + sum(map(len, stages))
    assert path[-1].end_s == played.finish_s
    assert path[0].start_s == 0
    for before, after in itertools.pairwise(path):
        goes_on_s = {before.end_s, *(before.start_s + seconds for seconds in before.stage.busy_s.values())}
        # It takes pieces of the stage before it, or ends with that one.
        overlaps = after.stage.overlaps and (
            before.start_s <= after.start_s <= before.end_s or after.end_s - after.stage.latency_s == before.end_s
        )
        assert after.start_s in goes_on_s or overlaps, (before, after)


def test_links_inside_and_between_nodes_work_on_two_groups_at_once() -> None:
    """Group 1 is summed inside (4 to 8) while group 0 crosses (4 to 9); it crosses at 9, and gathers at 14."""
    way = (stage("reduce", intra=3), stage("exchange", inter=5), stage("gather", intra=1))
    played = simulate([1, 1], [way, (stage("reduce", intra=4), *way[1:])])
    times = {(span.group, span.stage.name): (span.start_s, span.end_s) for span in played.spans}
    assert times == {
        (0, "backward"): (0, 1),
        (1, "backward"): (1, 2),
        (0, "reduce"): (1, 4),
        (1, "reduce"): (4, 8),
        (0, "exchange"): (4, 9),
        (0, "gather"): (9, 10),
        (1, "exchange"): (9, 14),
        (1, "gather"): (14, 15),
    }
    assert [span.stage.name for span in played.critical] == ["backward", "reduce", "exchange", "exchange", "gather"]


@pytest.mark.parametrize(
    ("backward_s", "stages", "bound_by"),
    [
        ((50, 50), (stage("exchange", 1, inter=10),), "compute"),
        ((1, 1), (stage("exchange", 1, inter=10),), "bandwidth"),
        ((1, 1), (stage("exchange", 1, intra=10),), "bandwidth"),
        ((1, 1), (stage("exchange", 20, inter=9),), "latency"),
        ((1, 1), (stage("encode", codec=9), stage("exchange", 1, inter=2)), "codec"),
        ((1, 1), (stage("encode", compute=9), stage("exchange", 1, inter=2)), "codec"),
        ((1, 1), (stage("exchange", 1, codec=9, inter=2),), "codec"),
    ],
)
def test_bound_by_is_what_most_of_the_critical_path_is_spent_on(
    backward_s: tuple[float, ...], stages: tuple[Stage, ...], bound_by: str
) -> None:
    assert simulate(backward_s, [stages, stages]).bound_by == bound_by


@pytest.mark.parametrize(("backward_s", "stages"), [((), ()), ((1,), ()), ((1,), ((),))])
def test_impossible_steps_are_refused(backward_s: tuple[float, ...], stages: tuple[tuple[Stage, ...], ...]) -> None:
    with pytest.raises(ConfigError, match="every group a stage"):
        simulate(backward_s, stages)


# Stages of an option: 4 workers, 4 ns per byte, 1 ms per hop; encoding takes 1 us and 1 ns per element, decoding half.

PIECE_NUMEL = PIECE_BYTES // 2  # of bf16
COST = CodecCost(encode_a_s=1e-6, encode_b_s_per_element=1e-9, decode_a_s=5e-7, decode_b_s_per_element=5e-10)


FLAT = Network.flat(4, Link.from_rates(bandwidth_gbps=2, latency_ms=1))


def stages_of(option: Option, numel: int, network: Network = FLAT) -> tuple[Stage, ...]:
    return exchange_stages(option, network, COST if option != DENSE else FREE, numel)


def busy_s(stages: tuple[Stage, ...], resource: Resource) -> float:
    return sum(own.busy_s.get(resource, 0.0) for own in stages)


def test_sra_lasts_as_long_as_codec_or_network_and_a_piece_more() -> None:
    """bf16: 1.5 x 2 bytes per element cross."""
    numel = 1 << 24
    stages = stages_of(Option(codec=CodecSpec(name="bf16"), scheme=Scheme.SRA), numel)
    assert [(own.name, own.overlaps) for own in stages] == [("encode", False), ("exchange", True), ("decode", True)]
    assert busy_s(stages, Resource.INTER) == pytest.approx(numel * 3 * 4e-9)
    codec_s = 4e-6 + numel * 1e-9 + 7 * 5e-7 + 1.75 * numel * 5e-10
    assert busy_s(stages, Resource.CODEC) == pytest.approx(THREAD_S + 7 * MESSAGE_S + codec_s)
    piece_s = 1e-6 + PIECE_NUMEL * 1e-9 + 5e-7 + PIECE_NUMEL * 5e-10
    assert alone_s(stages) == pytest.approx(numel * 3 * 4e-9 + 2e-3 + piece_s)


def test_artopk_by_tree_takes_in_the_trees_messages_and_by_ring_only_the_indices() -> None:
    """With 4 ranks a tree halves and doubles 4 chunks: 3 come on the way down, 4 on the way up."""
    topk = CodecSpec(name="topk", density=0.01)
    for scheme, num_messages in ((Scheme.ARTOPK_RING, 1), (Scheme.ARTOPK_TREE, 1 + 7)):
        parts = legs(Option(codec=topk, scheme=scheme), FLAT, 1 << 20)
        assert thread_s(parts) == pytest.approx(THREAD_S + num_messages * MESSAGE_S)


def test_the_vendors_sums_have_one_window_of_bytes_per_round_trip_and_our_messages_the_whole_link() -> None:
    """At 1 Gbit/s a byte takes 8 ns. With 25 ms one way and windows of 2 MiB it takes the vendor 24."""
    network = Network.flat(4, Link.from_rates(bandwidth_gbps=1, latency_ms=25))
    seconds_per_byte = {}
    for scheme in (Scheme.ALLREDUCE, Scheme.SRA):
        (leg,) = legs(Option(codec=CodecSpec(name="bf16"), scheme=scheme), network, 1 << 20)
        seconds_per_byte[scheme] = leg.link.beta_s_per_byte
    assert seconds_per_byte == pytest.approx({Scheme.ALLREDUCE: 0.05 / 2**21, Scheme.SRA: 8e-9})


def test_allgather_decodes_all_but_the_last_message_while_they_come() -> None:
    numel = 1 << 20
    stages = stages_of(Option(codec=CodecSpec(name="topk", density=0.01), scheme=Scheme.ALLGATHER), numel)
    assert [(own.name, own.overlaps) for own in stages] == [("encode", False), ("exchange", False), ("decode", True)]
    encode_s, decode_s = THREAD_S + 4 * MESSAGE_S + 1e-6 + numel * 1e-9, 4 * (5e-7 + numel * 5e-10)
    assert (stages[0].duration_s, stages[2].busy_s[Resource.CODEC]) == pytest.approx((encode_s, decode_s))
    assert busy_s(stages, Resource.INTER) < decode_s
    assert alone_s(stages) == pytest.approx(encode_s + decode_s + 1e-3 + decode_s / 4)


@pytest.mark.parametrize(
    ("scheme", "num_chunks", "crossed_bytes", "hops"),
    [(Scheme.RING, 4, 3, 6), (Scheme.TREE, 4, 3, 4), (Scheme.BROADCAST, 1, 12, 2)],
)
def test_schemes_of_hops_hide_all_but_a_piece_of_the_shorter_of_codec_and_network(
    scheme: Scheme, num_chunks: int, crossed_bytes: int, hops: int
) -> None:
    """bf16, of each chunk 8 pieces, and as many bytes per element cross; then one piece, where nothing overlaps."""
    option = Option(codec=CodecSpec(name="bf16"), scheme=scheme)
    for num_pieces in (8, 1):
        numel = num_chunks * num_pieces * PIECE_NUMEL
        stages = stages_of(option, numel)
        own_s = thread_s(legs(option, FLAT, numel))
        network_s, codec_s = busy_s(stages, Resource.INTER), busy_s(stages, Resource.CODEC) - own_s
        assert network_s == pytest.approx(numel * crossed_bytes * 4e-9)
        assert 0 < codec_s < network_s
        assert alone_s(stages) == pytest.approx(network_s + codec_s / num_pieces + hops * 1e-3)


def test_one_worker_and_dense_groups_overlap_nothing() -> None:
    stages = stages_of(DENSE, 1000)
    assert [(own.name, own.overlaps) for own in stages] == [("encode", False), ("exchange", False), ("decode", False)]
    alone = stages_of(Option(codec=CodecSpec(name="bf16"), scheme=Scheme.SRA), 1000, Network.flat(1, FLAT.between))
    assert [stage.duration_s for stage in alone] == [0, 0, 0]


# Two nodes of four: hierarchical options have three legs.
NODES = Network(
    num_nodes=2,
    ranks_per_node=4,
    between=Link.from_rates(bandwidth_gbps=2, latency_ms=1),
    inside=Link.from_rates(bandwidth_gbps=20, latency_ms=0.05),
)


def leg_s(leg: Leg) -> float:
    """Return the seconds of a leg of a single group, as in the formulas of `exchange_stages`."""
    encode_s, decode_s, n = leg.encode_s(COST), leg.decode_s(COST), leg.numel
    codec_s, network_s = encode_s + decode_s, leg.num_bytes * leg.link.beta_s_per_byte
    hops_s = leg.hops * leg.link.alpha_s
    if leg.overlap is Overlap.CODING:
        piece = min(n / leg.num_ranks, PIECE_BYTES * n / leg.wire_bytes)
        return max(codec_s, network_s) + hops_s + COST.encode_s(1, piece) + COST.decode_s(1, piece)
    if leg.overlap is Overlap.DECODING:
        return encode_s + max(decode_s, network_s) + hops_s + COST.decode_s(1, n)
    if leg.overlap is Overlap.PIECES:
        num_pieces = math.ceil(leg.wire_bytes / leg.cost.num_chunks(leg.num_ranks) / PIECE_BYTES)
        return max(codec_s, network_s) + hops_s + min(codec_s, network_s) / num_pieces
    return encode_s + network_s + hops_s + decode_s


@pytest.mark.parametrize("option", candidate_options([0.01]), ids=str)
def test_a_single_group_takes_as_long_as_its_legs_and_at_most_the_threads_work_more(option: Option) -> None:
    for numel in (1_000, 1_000_000, 50_000_000):
        played_s = alone_s(exchange_stages(option, NODES, COST, numel))
        parts = legs(option, NODES, numel)
        expected_s = sum(map(leg_s, parts))
        assert expected_s * (1 - 1e-9) <= played_s <= (expected_s + thread_s(parts)) * (1 + 1e-9), (
            played_s,
            expected_s,
        )


@pytest.mark.parametrize("option", candidate_options([0.01]), ids=str)
def test_many_equal_groups_take_the_busiest_resource_and_what_nothing_hides_of_one(option: Option) -> None:
    for numel in (10_000, 1_000_000):
        stages = exchange_stages(option, NODES, COST, numel)
        busiest_s = 30 * max(busy_s(stages, resource) for resource in Resource)
        played_s = simulate([0.0] * 30, [stages] * 30).finish_s
        assert busiest_s * (1 - 1e-9) <= played_s <= (busiest_s + alone_s(stages)) * (1 + 1e-9)


def test_encoding_where_backward_runs_takes_compute_too() -> None:
    option = Option(codec=CodecSpec(name="bf16"), scheme=Scheme.SRA)
    beside, held = (exchange_stages(option, FLAT, COST, 1 << 20, encodes_on=where) for where in ("thread", "backward"))
    assert busy_s(beside, Resource.COMPUTE) == 0
    assert busy_s(held, Resource.COMPUTE) == pytest.approx(busy_s(held, Resource.CODEC) - THREAD_S - 7 * MESSAGE_S)
    assert busy_s(held, Resource.CODEC) == busy_s(beside, Resource.CODEC)
    dense = exchange_stages(DENSE, FLAT, FREE, 1 << 20, encodes_on="backward")
    assert all(Resource.COMPUTE not in own.busy_s for own in dense)

"""Steps played through over several resources: by hand, and against the models that need only one or two of them."""

from __future__ import annotations

import math
import random

import pytest

from cgx_ray.bench.planner_cases import random_pipeline
from cgx_ray.errors import ConfigError
from cgx_ray.plan import DENSE, PIECE_BYTES, CodecSpec, Option, Scheme
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.legs import exchange_stages
from cgx_ray.planner.options import FREE, CodecCost
from cgx_ray.planner.pipeline import GroupEnd
from cgx_ray.planner.timeline import Resource, Stage, simulate


def stage(name: str, latency_s: float = 0.0, **busy_s: float) -> Stage:
    return Stage(
        name=name, busy_s={Resource(resource): seconds for resource, seconds in busy_s.items()}, latency_s=latency_s
    )


def test_one_group_at_a_time_is_what_the_engines_thread_does() -> None:
    """A group starts when it is ready and the one before it is decoded. Whole numbers: sums are exact."""
    rng = random.Random(0)
    for case in range(300):
        num_groups = rng.randint(1, 8)
        backward_s, encode_s, exchange_s, decode_s = (
            [float(rng.randint(0, 20)) for _ in range(num_groups)] for _ in range(4)
        )
        stages = [
            (stage("encode", codec=encode), stage("exchange", inter=exchange), stage("decode", codec=decode))
            for encode, exchange, decode in zip(encode_s, exchange_s, decode_s, strict=True)
        ]
        played = simulate(backward_s, stages, one_group_at_a_time=True)
        ends = {(span.group, span.stage.name): span.end_s for span in played.spans}
        ready_s = free_s = 0.0
        for index in range(num_groups):
            ready_s += backward_s[index]
            encoded_s = max(ready_s, free_s) + encode_s[index]
            exchanged_s = encoded_s + exchange_s[index]
            free_s = exchanged_s + decode_s[index]
            found = [ends[index, name] for name in ("backward", "encode", "exchange", "decode")]
            assert found == [ready_s, encoded_s, exchanged_s, free_s], (case, index)
        assert played.finish_s == free_s, (case, played)


def test_encoding_on_compute_and_one_network_is_the_pipeline_of_the_search() -> None:
    rng = random.Random(1)
    for case in range(200):
        pipeline = random_pipeline(rng, rng.randint(1, 12), 3)
        ends = sorted({pipeline.num_layers, *rng.sample(range(1, 13), 4)} & set(range(1, pipeline.num_layers + 1)))
        groups = [GroupEnd(end, rng.randrange(3)) for end in ends]
        backward_s, stages, start = [], [], 0
        for group in groups:
            cost, numel = pipeline.costs[group.option], sum(pipeline.numel[start : group.end])
            backward_s.append(sum(pipeline.backward_s[start : group.end]))
            stages.append(
                (stage("encode", compute=cost.compute_s(numel)), stage("exchange", inter=cost.network_s(numel)))
            )
            start = group.end
        finish_s = simulate(backward_s, stages).finish_s
        assert finish_s == pytest.approx(pipeline.finish_s(groups), rel=1e-12), (case, groups)


def test_critical_path_has_no_gap_and_its_parts_are_the_step() -> None:
    rng = random.Random(2)
    for case in range(200):
        num_groups = rng.randint(1, 6)
        stages = [
            tuple(
                stage(
                    f"stage {index}", rng.random(), **{rng.choice(("compute", "codec", "intra", "inter")): rng.random()}
                )
                for index in range(rng.randint(1, 4))
            )
            for _ in range(num_groups)
        ]
        for alone in (False, True):
            played = simulate([rng.random() for _ in stages], stages, one_group_at_a_time=alone)
            path = played.critical
            starts = [0.0, *(span.end_s for span in path[:-1])]
            assert [span.start_s for span in path] == starts, (case, alone, path)
            assert path[-1].end_s == played.finish_s == max(span.end_s for span in played.spans)
            assert math.fsum(played.parts_s.values()) == pytest.approx(played.finish_s, rel=1e-12)
            assert len(played.spans) == num_groups + sum(map(len, stages))


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
        ((1, 1), (stage("exchange", 20, inter=10),), "latency"),
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


# Stages of an option: 4 workers, 4 ns a byte, 1 ms a hop; 1 us and 1 ns an element to encode, half of it to decode.

PIECE_NUMEL = PIECE_BYTES // 2  # of bf16
COST = CodecCost(encode_a_s=1e-6, encode_b_s_per_element=1e-9, decode_a_s=5e-7, decode_b_s_per_element=5e-10)


def stages_of(option: Option, numel: int, world_size: int = 4) -> tuple[Stage, ...]:
    network = Network.flat(world_size, Link.from_rates(bandwidth_gbps=2, latency_ms=1))
    return exchange_stages(option, network, COST if option != DENSE else FREE, numel)


def test_sra_lasts_as_long_as_codec_or_network_and_a_piece_more() -> None:
    """bf16: 1.5 x 2 bytes an element cross."""
    numel = 1 << 24
    (exchange,) = stages_of(Option(codec=CodecSpec(name="bf16"), scheme=Scheme.SRA), numel)
    assert exchange.busy_s[Resource.INTER] == pytest.approx(numel * 3 * 4e-9)
    assert exchange.busy_s[Resource.CODEC] == pytest.approx(4e-6 + numel * 1e-9 + 7 * 5e-7 + 1.75 * numel * 5e-10)
    piece_s = 1e-6 + PIECE_NUMEL * 1e-9 + 5e-7 + PIECE_NUMEL * 5e-10
    assert exchange.latency_s == pytest.approx(2e-3 + piece_s)
    assert exchange.duration_s == pytest.approx(numel * 3 * 4e-9 + 2e-3 + piece_s)


def test_allgather_decodes_all_but_the_last_message_while_they_come() -> None:
    numel = 1 << 20
    encode, exchange = stages_of(Option(codec=CodecSpec(name="topk", density=0.01), scheme=Scheme.ALLGATHER), numel)
    assert encode.duration_s == pytest.approx(1e-6 + numel * 1e-9)
    assert exchange.busy_s[Resource.CODEC] == pytest.approx(4 * (5e-7 + numel * 5e-10))
    assert exchange.latency_s == pytest.approx(1e-3 + 5e-7 + numel * 5e-10)


@pytest.mark.parametrize(
    ("scheme", "num_chunks", "crossed_bytes", "hops"),
    [(Scheme.RING, 4, 3, 6), (Scheme.TREE, 4, 3, 4), (Scheme.BROADCAST, 1, 12, 2)],
)
def test_schemes_of_hops_hide_all_but_a_piece_of_the_shorter_of_codec_and_network(
    scheme: Scheme, num_chunks: int, crossed_bytes: int, hops: int
) -> None:
    """bf16, of each chunk 8 pieces, and as many bytes an element cross; then one piece, where nothing overlaps."""
    option = Option(codec=CodecSpec(name="bf16"), scheme=scheme)
    for num_pieces in (8, 1):
        numel = num_chunks * num_pieces * PIECE_NUMEL
        (exchange,) = stages_of(option, numel)
        network_s, codec_s = exchange.busy_s[Resource.INTER], exchange.busy_s[Resource.CODEC]
        assert network_s == pytest.approx(numel * crossed_bytes * 4e-9)
        assert 0 < codec_s < network_s
        assert exchange.duration_s == pytest.approx(network_s + codec_s / num_pieces + hops * 1e-3)


def test_one_worker_and_dense_groups_overlap_nothing() -> None:
    names = [stage.name for stage in stages_of(DENSE, 1000)]
    assert names == ["encode", "exchange", "decode"]
    alone = stages_of(Option(codec=CodecSpec(name="bf16"), scheme=Scheme.SRA), 1000, world_size=1)
    assert [stage.duration_s for stage in alone] == [0, 0, 0]

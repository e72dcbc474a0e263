"""ByteComp's decision tree: the number of its paths, the paths that the engine has, and their costs."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from cgx_ray.plan import CodecSpec, Intra, Scheme
from cgx_ray.planner.candidates import FREE, CodecCost
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.legs import legs, thread_s
from cgx_ray.planner.papers.bytecomp import (
    CodecDevice,
    CodecTask,
    Move,
    MovePart,
    MoveScope,
    TreePath,
    option_of,
    path_cost,
    paths,
)
from cgx_ray.planner.pipeline import group_cost

PATHS = tuple(paths())
QSGD = CodecSpec(name="qsgd")
COST = CodecCost(encode_a_s=1e-4, encode_b_s_per_element=2e-9, decode_a_s=3e-5, decode_b_s_per_element=1e-9)
SLOWER = CodecCost(encode_a_s=1e-3, encode_b_s_per_element=2e-8, decode_a_s=3e-4, decode_b_s_per_element=1e-8)
NETWORKS = (
    Network.flat(4, Link.from_rates(bandwidth_gbps=1, latency_ms=0.5)),
    Network(
        num_nodes=3,
        ranks_per_node=4,
        between=Link.from_rates(bandwidth_gbps=1, latency_ms=0.5),
        inside=Link.from_rates(bandwidth_gbps=50, latency_ms=0.01),
    ),
)


def named(path: TreePath) -> str:
    return " ".join(task.task if isinstance(task, CodecTask) else task.routine for task in path)


def test_tree_has_the_4341_paths_of_the_paper_and_each_once() -> None:
    assert len(PATHS) == len(set(PATHS)) == 4341


def test_paths_by_pattern_are_as_counted_by_hand() -> None:
    """c: compress, d: decompress, two devices each. Into a move: 1 or c; between: 1, c, d, 1 + dc; out: 1 or d.

    That is 1 + 4 for one move, 29 for two, 169 for three, 985 for four; times the pairs of routines of each.
    """
    found = Counter(
        (any(move.scope is MoveScope.INSIDE for move in moves), len(moves))
        for moves in ([task for task in path if isinstance(task, Move)] for path in PATHS)
    )
    assert found == {(False, 1): 5, (False, 2): 2 * 29, (True, 3): 2 * 169, (True, 4): 4 * 985}


def test_every_path_starts_and_ends_uncompressed_and_each_move_gets_what_it_takes() -> None:
    for path in PATHS:
        is_compressed = False
        for task in path:
            if isinstance(task, CodecTask):
                assert is_compressed == (task.task == "decompress"), path
                is_compressed = task.task == "compress"
            else:
                assert is_compressed == task.is_compressed, path
        assert not is_compressed, path


def test_first_and_second_moves_pair_as_in_table_2() -> None:
    pairs = {
        ("reduce_scatter", "allgather"),
        ("reduce", "broadcast"),
        ("alltoall", "allgather"),
        ("gather", "broadcast"),
    }
    pairs |= {("reduce_scatter", "allgather"), ("reduce", "broadcast")}
    for path in PATHS:
        open_moves: list[Move] = []
        for move in (task for task in path if isinstance(task, Move)):
            if move.part is MovePart.FIRST:
                open_moves.append(move)
            elif move.part is MovePart.SECOND:
                first = open_moves.pop()
                assert (first.scope, first.is_rooted) == (move.scope, move.is_rooted), path
                assert (first.routine, move.routine) in pairs, path
        assert not open_moves, path


def test_engine_has_a_path_for_each_of_18_options_and_two_for_those_that_nccl_sums_inside_nodes() -> None:
    """Flat: 3 without a codec, 3 with one on either device. Hierarchical: all 6 after dense sums, and 3 compressed."""
    found = {path: option for path in PATHS if (option := option_of(path, QSGD)) is not None}
    options = set(found.values())
    assert len(options) == 3 + 3 * 2 + 6 + 3
    twice = [option for option in options if sum(one == option for one in found.values()) > 1]
    assert {str(option) for option in twice} == {
        f"{QSGD} over {scheme}, dense inside nodes" for scheme in (Scheme.SRA, Scheme.ALLGATHER, Scheme.BROADCAST)
    }
    assert len(found) == len(options) + len(twice)
    assert {str(option) for option in options if option.intra is Intra.FLAT} == {
        "dense", "none over sra", "none over broadcast",
        *(f"{QSGD} over {scheme}" for scheme in (Scheme.ALLGATHER, Scheme.SRA, Scheme.BROADCAST)),
        *(f"{QSGD} over {scheme} on cpu" for scheme in (Scheme.ALLGATHER, Scheme.SRA, Scheme.BROADCAST)),
    }  # fmt: skip
    assert {(option.codec.name, option.scheme) for option in options if option.intra is Intra.COMPRESSED} == {
        ("qsgd", scheme) for scheme in (Scheme.ALLGATHER, Scheme.SRA, Scheme.BROADCAST)
    }
    assert sum(option.intra is Intra.DENSE for option in options) == 6


@pytest.mark.parametrize("network", NETWORKS)
def test_moves_of_the_engines_paths_cost_what_the_cost_model_has_for_its_option(network: Network) -> None:
    numel = 1 << 24
    free = dict.fromkeys(CodecDevice, FREE)
    for path in PATHS:
        option = option_of(path, QSGD)
        if option is None:
            continue
        ours = group_cost(option, network=network, codec_cost=FREE)
        tree = path_cost(path, network, QSGD, free)
        own_s = thread_s(legs(option, network, numel))
        # In the tree each move, hops included, holds up the next tensor.
        assert tree.network_a_s == pytest.approx(ours.alone_s(0) - own_s), named(path)
        assert tree.network_s(numel) == pytest.approx(ours.alone_s(numel) - own_s), named(path)


def test_codec_work_of_sra_is_the_engines_but_for_a_ranks_own_chunk() -> None:
    N = 4
    network = Network.flat(N, Link(alpha_s=0, beta_s_per_byte=1e-30))
    (path,) = [path for path in PATHS if (option := option_of(path, QSGD)) and str(option) == f"{QSGD} over sra on cpu"]
    cost = path_cost(path, network, QSGD, dict.fromkeys(CodecDevice, COST))
    assert cost.compute_s(1000) == 0
    assert cost.network_a_s == pytest.approx((N + 1) * 1e-4 + 2 * N * 3e-5)
    assert cost.network_b_s_per_element == pytest.approx((1 + 1 / N) * 2e-9 + 2 * 1e-9)


def test_only_what_the_gpu_encodes_before_the_first_move_holds_up_backward() -> None:
    costs = {CodecDevice.GPU: COST, CodecDevice.CPU: SLOWER}
    for path in itertools.islice(PATHS, 0, None, 7):
        cost = path_cost(path, NETWORKS[1], QSGD, costs)
        holds = isinstance(path[0], CodecTask) and path[0].device is CodecDevice.GPU
        assert (cost.compute_b_s_per_element > 0) == holds, named(path)

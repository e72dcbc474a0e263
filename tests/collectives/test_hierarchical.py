"""Hierarchical exchanges on real processes: every codec over every scheme, with nodes of equal and unequal sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from support.nodes import CASES, NUMEL, Nodes, connect, make, run
from support.ranks import run_ranks
from support.scheme_cases import noise

import cgx_ray
from cgx_ray.codecs.codec import Memory, is_finite
from cgx_ray.codecs.qsgd import Qsgd
from cgx_ray.collectives.dense import Dense
from cgx_ray.collectives.pieces import chunk_bounds
from cgx_ray.collectives.sra import Sra
from cgx_ray.errors import WireError
from cgx_ray.plan import CodecSpec

NUM_STEPS = 3
Run = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]


def _averages(rank: int, nodes: Nodes, inside: str) -> list[Run]:
    """Return for each case the averages by step, the sum of this rank's gradients, and its residual at the end."""
    transport = connect(nodes, inside)
    runs: list[Run] = []
    for text, scheme, intra in CASES:
        # With momentum a gradient is sent more than once.
        codec = text.replace("dgc:", "dgc:momentum=0,")
        exchange, memory = make((codec, scheme, intra), transport)
        averages, given_N = [], torch.zeros(NUMEL, dtype=torch.float64)
        for step in range(NUM_STEPS):
            (grad_1N,) = noise(rank, (1, NUMEL), step=step)
            given_N += grad_1N[0]
            run(exchange, grad_1N[0], memory, codec, step)
            averages.append(grad_1N[0])
            if memory is not None:
                memory.commit()
        runs.append((averages, given_N, memory.residual_N if memory is not None else None))
    dist.barrier()
    transport.close()
    return runs


@pytest.mark.parametrize(
    ("nodes", "inside"),
    [
        ((0, 0, 1, 1), "shm"),
        ((0, 1, 0, 1), "tcp"),
        ((0, 0, 0), "shm"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (((0, 1, 0, 2), "gloo"), ((0, 1, 2, 1, 0, 0, 0), "shm"))
        ),
    ],
)
def test_all_ranks_hold_the_average_and_owe_what_it_lacks(nodes: Nodes, inside: str) -> None:
    results = run_ranks(len(nodes), _averages, nodes, inside)
    for index, case in enumerate(CASES):
        of_ranks: list[Run] = [result[index] for result in results]
        averages, _, first_owed_N = of_ranks[0]
        for others, *_ in of_ranks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(averages, others, strict=True)), f"{case}: ranks differ"
        given_N = torch.stack([given_N for _, given_N, _ in of_ranks]).mean(0)
        if first_owed_N is not None and "clip" not in case[0]:
            owed_N = torch.stack([owed_N for _, _, owed_N in of_ranks if owed_N is not None]).double().mean(0)
            error = float((torch.stack(averages).double().sum(0) + owed_N - given_N).abs().max())
            # As for flat schemes: sums of up to N float32 numbers under 40 in size.
            assert error <= 40 * NUM_STEPS * (2 * len(nodes) + 4) * 2**-24, (case, error)
        elif first_owed_N is None:
            _check_error(case, averages, nodes)


def _check_error(case: tuple[str, str, str], averages: list[torch.Tensor], nodes: Nodes) -> None:
    """Assert that each average is as close to a float64 mean as the codec's roundings allow."""
    spec, num_nodes = CodecSpec.parse(case[0]), len(set(nodes))
    for step, average_N in enumerate(averages):
        inputs_RN = torch.stack([noise(rank, (1, NUMEL), step=step)[0][0] for rank in range(len(nodes))]).double()
        mean_N, largest = inputs_RN.mean(0), float(inputs_RN.abs().max())
        if spec.name == "prefix" and num_nodes > 1:
            # The first elements of each chunk are sent, and between nodes those of each chunk of a chunk.
            sent_N = average_N != 0
            assert NUMEL // 4 <= int(sent_N.sum()) <= NUMEL // 4 + len(nodes) ** 2, (case, int(sent_N.sum()))
            mean_N = mean_N * sent_N
        # The error of one rounding, as in test_schemes: relative to the largest magnitude, with ends rounded outwards.
        root = spec.bucket_size**0.5 if spec.bucket_size is not None and spec.grid == "l2" else 1
        levels = 2 ** (spec.bits or 2) - (1 if spec.grid == "max_min" else 2)
        unit = {"fp16": 2**-11, "bf16": 2**-8, "terngrad": 1 + 2**-7, "qsgd": 2 * root * (1 + 2**-6) / levels}
        # Between nodes at most three roundings: parts, quotients, average; ring and tree also round partial sums.
        # Compressed inside, two more: parts and average. Each may make a number 2^-7 larger.
        roundings = max(3, (num_nodes + 1) / 2) + (2 if case[2] == "compressed" else 0)
        growth = (1 + 2**-7) ** (num_nodes + 2)
        error = float((average_N.double() - mean_N).abs().max())
        limit = roundings * growth * unit.get(spec.name, 0) * largest + (len(nodes) + 2) * 2**-23 * largest
        assert error <= limit, (case, step, error, limit)


LAYOUTS: list[Nodes] = [
    (0,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 0, 1, 1, 2), (0, 1, 2, 2, 1, 0),
    (0, 0, 0, 1, 1, 2, 3), (0, 1, 2, 3, 0, 1, 2, 3), (0, 0, 0, 0, 1, 1, 1, 1),
]  # fmt: skip
# For `make test-faults`: eight ranks, and layouts between others.
SLOW_LAYOUTS = (LAYOUTS[0], LAYOUTS[3], LAYOUTS[6], *LAYOUTS[-2:])
EXACT_NUMELS = (1, 5, 1031)
EXACT_SCHEMES = ("dense", "sra", "ring", "tree", "broadcast", "allgather")


def _sum_integers(rank: int, nodes: Nodes, inside: str) -> list[tuple[str, int, torch.dtype, torch.Tensor]]:
    """Average with element i = ((i mod 3) + 1) (rank + 1) N, numbers that float16 can represent."""
    transport = connect(nodes, inside)
    results = []
    for scheme, numel in itertools.product(EXACT_SCHEMES, EXACT_NUMELS):
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float32) if scheme == "dense" else (None,):
            grad_N = ((torch.arange(numel) % 3 + 1.0) * (rank + 1) * len(nodes)).to(dtype or torch.float32)
            exchange, _ = make(("none", scheme, "dense"), transport, numel)
            run(exchange, grad_N, None, "none")
            results.append((scheme, numel, grad_N.dtype, grad_N))
    dist.barrier()
    transport.close()
    return results


@pytest.mark.parametrize(
    ("nodes", "inside"),
    [
        pytest.param(nodes, inside, marks=pytest.mark.slow if nodes in SLOW_LAYOUTS else ())
        for nodes, inside in zip(LAYOUTS, itertools.cycle(["shm", "tcp"]), strict=False)
    ],
    ids=str,
)
def test_integers_are_averaged_exactly(nodes: Nodes, inside: str) -> None:
    for results in run_ranks(len(nodes), _sum_integers, nodes, inside):
        for scheme, numel, dtype, average_N in results:
            expected_N = (torch.arange(numel) % 3 + 1.0) * (len(nodes) * (len(nodes) + 1) // 2)
            assert torch.equal(average_N, expected_N.to(dtype)), (scheme, numel, dtype, average_N)


def _large(rank: int, nodes: Nodes) -> list[tuple[str, torch.Tensor]]:
    transport = connect(nodes, "shm")
    results = []
    for scheme, intra in itertools.product(("sra", "allgather", "allreduce", "tree"), ("dense", "compressed")):
        grad_N = torch.full((300,), 60000.0)
        run(make(("fp16", scheme, intra), transport, 300)[0], grad_N, None, "fp16")
        results.append((f"{scheme} {intra}", grad_N))
    grad_N = torch.full((300,), 60000.0, dtype=torch.float16)
    run(make(("none", "dense", "dense"), transport, 300)[0], grad_N, None, "none")
    dist.barrier()
    transport.close()
    return [*results, ("dense", grad_N)]


def test_sums_of_what_fp16_can_hold_do_not_overflow() -> None:
    for results in run_ranks(4, _large, (0, 0, 1, 1)):
        for case, average_N in results:
            # 60000 and its quarters are float16 numbers; three quarters of it would be rounded.
            assert torch.equal(average_N.float(), torch.full((300,), 60000.0)), (case, average_N)


def _one_nan(rank: int, nodes: Nodes) -> list[tuple[bool, bool]]:
    """Return for each case if an average with one NaN or Inf is finite, and if the memory is unchanged."""
    transport = connect(nodes, "shm")
    outcomes = []
    for index, case in enumerate(CASES):
        exchange, memory = make(case, transport)
        run(exchange, noise(rank, (1, NUMEL))[0][0], memory, case[0])
        before = {}
        if memory is not None:
            memory.commit()
            before = {kind: value.clone() for kind, value in memory.now.items()}
        grad_N = noise(rank, (1, NUMEL), step=1)[0][0]
        if rank == 1:
            grad_N[37 * index % NUMEL] = float("nan" if index % 2 else "inf")
        run(exchange, grad_N, memory, case[0], 1)
        same = memory is None or all(torch.equal(value, memory.now[kind]) for kind, value in before.items())
        outcomes.append((is_finite(grad_N), same))
    dist.barrier()
    transport.close()
    return outcomes


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0), (0, 0)], ids=str)
def test_a_single_nan_arrives_everywhere_and_leaves_no_trace(nodes: Nodes) -> None:
    for outcomes in run_ranks(len(nodes), _one_nan, nodes):
        wrong = [case for case, outcome in zip(CASES, outcomes, strict=True) if outcome != (False, True)]
        assert wrong == []


# Under 2,048 elements dgc samples all of them, so its threshold is exact.
DENSITY, MOMENTUM, DGC_NUMEL = 0.05, 0.9, 1801


def _dgc(rank: int, nodes: Nodes, inside: str) -> list[torch.Tensor]:
    """Run two steps of flat dgc, then four of hierarchical dgc; return the averages."""
    transport = connect(nodes, inside)
    text = f"dgc:density={DENSITY},momentum={MOMENTUM}"
    _, memory = make((text, "allgather", "flat"), transport, DGC_NUMEL)
    assert memory is not None
    averages = []
    for step in range(6):
        if step in (0, 2):
            exchange, _ = make((text, "allgather", "dense" if step else "flat"), transport, DGC_NUMEL)
        grad_N = noise(rank, (1, DGC_NUMEL), step=step)[0][0]
        run(exchange, grad_N, memory, text, step)
        memory.commit()
        averages.append(grad_N)
    dist.barrier()
    transport.close()
    return averages


@pytest.mark.parametrize(("nodes", "inside"), [((0, 0, 1, 1), "shm"), ((0, 1, 1, 0), "tcp")])
def test_dgc_goes_on_with_the_sum_of_its_nodes_momenta_and_residuals(nodes: Nodes, inside: str) -> None:
    """Lin et al. 2018, Algorithm 4, for 4 workers and then for 2 with twice the gradient, chunk by chunk."""
    results = run_ranks(4, _dgc, nodes, inside)
    spec = CodecSpec(name="dgc", density=DENSITY)
    u_RN, v_RN, workers = torch.zeros(4, DGC_NUMEL), torch.zeros(4, DGC_NUMEL), [[0], [1], [2], [3]]
    for step in range(6):
        if step == 2:
            workers = [[rank for rank in range(4) if nodes[rank] == node] for node in (0, 1)]
            u_RN, v_RN = (torch.stack([value[ranks].sum(0) for ranks in workers]) for value in (u_RN, v_RN))
        sent_RN = torch.zeros_like(u_RN)
        for w, ranks in enumerate(workers):
            u_RN[w] = MOMENTUM * u_RN[w] + sum(noise(rank, (1, DGC_NUMEL), step=step)[0][0] for rank in ranks)
            v_RN[w] += u_RN[w]
            for start, stop in chunk_bounds(DGC_NUMEL, len(ranks), 1):
                index_K = start + v_RN[w, start:stop].abs().topk(spec.num_kept(stop - start)).indices
                sent_RN[w, index_K] = v_RN[w, index_K]
                u_RN[w, index_K] = 0
                v_RN[w, index_K] = 0
        for result in results:
            torch.testing.assert_close(result[step], sent_RN.sum(0) / 4, rtol=1e-5, atol=2e-6)


def _meet_another_step(rank: int, nodes: Nodes, intra: str) -> str:
    transport = connect(nodes, "shm")
    exchange, memory = make(("qsgd", "sra", intra), transport)
    try:
        run(exchange, torch.ones(NUMEL), memory, "qsgd", step=7 if rank == 3 else 6)
    except (WireError, cgx_ray.TransportError) as error:
        transport.close()
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(("nodes", "intra", "peer"), [((0, 0, 1, 1), "dense", 1), ((0, 1, 1, 1), "compressed", 1)])
def test_errors_name_ranks_of_the_run(nodes: Nodes, intra: str, peer: int) -> None:
    """Rank 3 is rank 1 between its node and the other, and rank 2 of its node."""
    outcomes = run_ranks(4, _meet_another_step, nodes, intra)
    assert "step 6, group 1: message of rank 3 does not fit: step is 7, expected 6" in outcomes[peer]
    # A rank that fails hangs up, so no rank waits for ever.
    assert all(outcome.startswith(("WireError", "TransportError: rank")) for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    ("scheme", "nodes", "expected"), [("dense", (0, 0), Dense), ("sra", (0, 1), Sra), ("dense", (0, 1), Dense)]
)
def test_where_nothing_is_to_be_done_inside_or_between_the_flat_scheme_runs(
    scheme: str, nodes: Nodes, expected: type
) -> None:
    assert run_ranks(2, _is_a, scheme, nodes, expected) == [True, True]


def _is_a(rank: int, scheme: str, nodes: Nodes, expected: type) -> bool:
    transport = connect(nodes, "shm")
    exchange, _ = make(("none", scheme, "dense"), transport)
    transport.close()
    return type(exchange) is expected


def _on_one_node(rank: int) -> tuple[torch.Tensor, float]:
    transport = connect((0, 0, 0), "shm")
    text = "topk:density=0.05"
    exchange, memory = make((text, "allgather", "flat"), transport)
    assert memory is not None
    total_N = torch.zeros(NUMEL)
    for step in range(3):
        if step == 2:
            exchange, _ = make((text, "allgather", "dense"), transport)
        grad_N = noise(rank, (1, NUMEL), step=step)[0][0]
        run(exchange, grad_N, memory, text, step)
        memory.commit()
        total_N += grad_N
    dist.barrier()
    transport.close()
    assert memory.residual_N is not None
    return total_N, float(memory.residual_N.abs().max())


def test_on_one_node_with_dense_inside_nothing_stays_owed() -> None:
    given_N = torch.stack([noise(rank, (1, NUMEL), step=step)[0][0] for rank in range(3) for step in range(3)]).sum(0)
    for total_N, owed in run_ranks(3, _on_one_node):
        assert owed == 0
        torch.testing.assert_close(total_N, given_N / 3, rtol=0, atol=40 * 3 * 10 * 2**-24)


def _keys(rank: int, nodes: Nodes, intra: str) -> list[int]:
    """Return the keys of the random numbers that this rank draws in a step."""
    transport = connect(nodes, "shm")
    exchange, memory = make(("qsgd", "sra", intra), transport)
    keys = []
    encode = Qsgd.encode

    def recording(
        self: Qsgd, grad_N: torch.Tensor, payload: torch.Tensor, key: int, memory: Memory | None = None
    ) -> None:
        keys.append(key)
        encode(self, grad_N, payload, key, memory)

    Qsgd.encode = recording  # type: ignore[method-assign]
    run(exchange, torch.ones(NUMEL), memory, "qsgd")
    dist.barrier()
    transport.close()
    return keys


@pytest.mark.parametrize(("intra", "num_keys", "num_different"), [("dense", 2, 8), ("compressed", 4, 14)])
def test_no_two_messages_share_random_numbers_but_those_that_must_be_alike(
    intra: str, num_keys: int, num_different: int
) -> None:
    """A rank encodes twice between nodes and, if compressed, twice inside: the average with the other node's key."""
    keys = run_ranks(4, _keys, (0, 0, 1, 1), intra)
    assert [len(of_rank) for of_rank in keys] == [num_keys] * 4
    assert len(set().union(*keys)) == num_different, keys
    assert [keys[0][-1], keys[1][-1]] == [keys[2][-1], keys[3][-1]] or intra == "dense"

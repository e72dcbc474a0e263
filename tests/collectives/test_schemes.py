"""Every scheme with every codec that it carries, on real processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, train
from support.nodes import Counting
from support.ranks import run_cases, run_ranks
from support.scheme_cases import FED_BACK, PAIRS, SHAPES, TEXTS, UNBIASED, averages, noise, run_codecs
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.codecs import make_codec
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Phases, make_exchange
from cgx_ray.plan import CODECS_OF_SCHEME, NONE, CodecSpec, Scheme


def _train_pair(
    rank: int, codec: str, scheme: str, dtypes: Sequence[torch.dtype] = (torch.float32,)
) -> list[tuple[list[str], int]]:
    results = []
    for dtype in dtypes:
        model = DistributedDataParallel(Branches().to(dtype))
        attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
        hashes = train(model, rank, range(6))
        assert attachment.last_step is not None
        results.append((hashes, attachment.last_step.step))
        attachment.close()
    return results


@pytest.mark.parametrize("scheme", dict.fromkeys(scheme for _, scheme in PAIRS))
def test_ranks_hold_identical_weights_after_every_step(scheme: str) -> None:
    for codec, results in run_codecs(3, _train_pair, PAIRS, scheme).items():
        assert results[0] == results[1] == results[2], codec
        for hashes, step in results[0]:
            assert len(set(hashes)) == 6, f"{codec}: weights did not move"
            assert step == 5, codec


MORE_RANKS = [
    ("randomk", "allreduce"),
    ("powersgd", "allreduce"),
    ("onebit", "sra"),
    ("onebit", "ring"),
    ("qsgd", "tree"),
    ("onebit", "tree"),
    ("qsgd", "broadcast"),
    ("dgc", "artopk_ring"),
    ("topk:density=0.05", "artopk_tree_var"),
]


@pytest.mark.parametrize(
    ("world_size", "dtypes"),
    [
        (4, (torch.bfloat16,)),
        (5, (torch.float32,)),
        *(pytest.param(n, (torch.float32, torch.bfloat16), marks=pytest.mark.slow) for n in (4, 5)),
    ],
    ids=["4 of bfloat16", "5", "4 of both", "5 of both"],
)
def test_more_ranks_hold_identical_weights_too(world_size: int, dtypes: Sequence[torch.dtype]) -> None:
    cases = [partial(_train_pair, codec=codec, scheme=scheme, dtypes=dtypes) for codec, scheme in MORE_RANKS]
    for pair, (first, *others) in zip(MORE_RANKS, run_cases(world_size, cases), strict=True):
        assert isinstance(first, list), (pair, first)
        assert others == [first] * (world_size - 1), pair


NUMELS = (1, 7, 129, 5000)


def _average_once(rank: int, codec: str, scheme: str) -> list[torch.Tensor]:
    gradients = noise(rank, *((1, numel) for numel in NUMELS))
    return list(averages(codec, scheme, [gradients], one_group=False)[0][0].split(NUMELS))


@pytest.mark.parametrize("scheme", dict.fromkeys(scheme for _, scheme in UNBIASED))
def test_averages_of_3_are_within_the_codecs_error_of_a_float64_sum(scheme: str) -> None:
    for codec, results in run_codecs(3, _average_once, UNBIASED, scheme).items():
        _check_average(codec, scheme, results)


@pytest.mark.parametrize("scheme", ["sra", "ring", "tree", "broadcast"])
def test_averages_of_6_are_within_the_codecs_error_of_a_float64_sum(scheme: str) -> None:
    _check_average("qsgd", scheme, run_ranks(6, _average_once, "qsgd", scheme))


def _check_average(codec: str, scheme: str, results: Sequence[list[torch.Tensor]]) -> None:
    world_size = len(results)
    spec = CodecSpec.parse(codec)
    given = [[grad[0] for grad in noise(rank, *((1, numel) for numel in NUMELS))] for rank in range(world_size)]
    for numel, inputs, *of_ranks in zip(NUMELS, zip(*given, strict=True), *results, strict=True):
        inputs_RN = torch.stack(inputs).double()
        assert all(torch.equal(of_ranks[0], other) for other in of_ranks)
        mean_N, largest = inputs_RN.mean(0), float(inputs_RN.abs().max())
        if spec.name == "prefix":
            # Schemes with chunks send the first elements of each chunk, so they are not one run.
            sent_N = of_ranks[0] != 0
            chunks = {"sra": 3, "ring": 3, "tree": 2}.get(scheme, 1)
            assert numel // 4 <= int(sent_N.sum()) <= spec.num_prefix(numel) + chunks
            mean_N = mean_N * sent_N
        # The largest error of one rounding, relative to the largest magnitude: 2^-11 for fp16, 2^-8 for bf16. For qsgd
        # it is a step of the grid, whose bf16 ends make it 2^-7 wider on both sides, and up to sqrt(bucket) times that
        # for l2. sra rounds twice, the parts and their average; an all-reduce casts, divides and adds twice a third.
        root = spec.bucket_size**0.5 if spec.bucket_size is not None and spec.grid == "l2" else 1
        step = {
            "none": 2**-23,
            "prefix": 2**-23,
            "fp16": 2**-11,
            "bf16": 2**-8,
            "terngrad": 1 + 2**-7,
            "qsgd": 2 * root * (1 + 2**-6) / (2 ** (spec.bits or 2) - (1 if spec.grid == "max_min" else 2)),
        }[spec.name]
        roundings = 2.0
        if scheme in ("ring", "tree"):
            # A ring rounds sums of 1, 2, ... N of the N parts of an average: (1 + 2 + ... + N) / N roundings in all.
            # A tree rounds no larger sums. Each rounding may make a sum 2^-7 larger, since its grid is wider.
            roundings = (world_size + 1) / 2 * (1 + 2**-7) ** (world_size - 1)
        error = float((of_ranks[0].double() - mean_N).abs().max())
        assert error <= roundings * step * largest + world_size * 2**-23 * largest, (codec, numel, error, step)


def _average_of_large(rank: int, scheme: str) -> torch.Tensor:
    return averages("fp16", scheme, [[torch.full((1, 300), 60000.0)]])[0][0]


@pytest.mark.parametrize("scheme", [scheme for scheme, names in CODECS_OF_SCHEME.items() if "fp16" in names], ids=str)
def test_sums_of_what_fp16_can_hold_do_not_overflow(scheme: str) -> None:
    for average_N in run_ranks(4, _average_of_large, scheme):
        # 60000 and its quarters are float16 numbers; three quarters of it are rounded once.
        torch.testing.assert_close(average_N, torch.full((300,), 60000.0), rtol=2**-11, atol=0)


EXACT_NUMELS = (1, 2, 5, 97, 1031)


def _sum_integers(rank: int, schemes: Sequence[str]) -> dict[str, torch.Tensor]:
    gradients = [grad for numel in EXACT_NUMELS for grad in integers(rank, numel)]
    return {scheme: averages("none", scheme, [gradients], one_group=False)[0][0] for scheme in schemes}


def integers(rank: int, numel: int) -> list[torch.Tensor]:
    """Return a gradient with element i = (i + 1) (rank + 1) N: the average over ranks is (i + 1) N (N + 1) / 2."""
    return [torch.arange(1.0, numel + 1)[None] * (rank + 1) * dist.get_world_size()]


# Powers of two and numbers beside them. Those left out are between them, with no other shape of tree or ring.
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_integers_are_averaged_exactly(world_size: int) -> None:
    """All numbers are under 2^24, and multiples of the number of ranks, which divides them before they are summed."""
    for averages_of in run_ranks(world_size, _sum_integers, ("sra", "ring", "tree", "broadcast")):
        for scheme, average in averages_of.items():
            for numel, average_N in zip(EXACT_NUMELS, average.split(EXACT_NUMELS), strict=True):
                expected_N = torch.arange(1.0, numel + 1) * (world_size * (world_size + 1) // 2)
                assert torch.equal(average_N, expected_N), (scheme, numel, average_N)


# Codecs that keep small integers exactly, with every scheme that carries them.
LOSSLESS = [
    (text, str(scheme))
    for scheme, names in CODECS_OF_SCHEME.items()
    for text in ("none", "fp16", "bf16", "prefix:ratio=1.0", *(f"{name}:density=1.0" for name in TEXTS))
    if text.partition(":")[0] in names
]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _average_small_integers(rank: int) -> list[tuple[str, str, str]]:
    """Return the cases whose average of (0 to 3) (rank + 1) N is not exact."""
    world_size, wrong = dist.get_world_size(), []
    pattern_N = torch.arange(1031.0) % 4
    # One layer and one group of each dtype.
    given = [(pattern_N * (rank + 1) * world_size).to(dtype)[None] for dtype in DTYPES]
    expected_N = pattern_N * (world_size * (world_size + 1) // 2)
    for codec, scheme in LOSSLESS:
        found = averages(codec, scheme, [given], one_group=False)[0][0].split([len(pattern_N)] * len(DTYPES))
        for dtype, average_N in zip(DTYPES, found, strict=True):
            if not torch.equal(average_N, expected_N.to(average_N.dtype)):
                wrong.append((codec, scheme, str(dtype)))
    return wrong


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_small_integers_are_averaged_exactly_in_every_scheme_and_type(world_size: int) -> None:
    """All numbers and partial sums are under 2^8, where bfloat16 has every integer."""
    assert run_ranks(world_size, _average_small_integers) == [[]] * world_size


NUM_STEPS = 7


def _accumulated(rank: int, codec: str, scheme: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sums of averages and of gradients over some steps, and the residual at the end."""
    steps = [noise(rank, *SHAPES, step=step) for step in range(NUM_STEPS)]
    results, memory = averages(codec, scheme, steps)
    given_N = torch.stack([torch.cat([grad.view(-1) for grad in gradients]) for gradients in steps]).double().sum(0)
    owed_N = torch.cat([value.view(-1) for value in memory["residuals"].values()])
    return torch.stack(results).double().sum(0), given_N, owed_N.double()


# With momentum a gradient is sent more than once, with clipping less than once.
SENT_ONCE = [(codec.replace("dgc:", "dgc:momentum=0,"), scheme) for codec, scheme in FED_BACK if "clip" not in codec]


@pytest.mark.parametrize("scheme", dict.fromkeys(scheme for _, scheme in SENT_ONCE))
def test_what_3_ranks_did_not_send_is_in_the_residuals(scheme: str) -> None:
    for codec, results in run_codecs(3, _accumulated, SENT_ONCE, scheme).items():
        _check_residuals(codec, results)


@pytest.mark.parametrize("scheme", ["ring", "tree", "broadcast"])
def test_what_6_ranks_did_not_send_is_in_the_residuals(scheme: str) -> None:
    _check_residuals("onebit", run_ranks(6, _accumulated, "onebit", scheme))


def _check_residuals(codec: str, results: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    world_size = len(results)
    sent_N = results[0][0]
    given_N, owed_N = (torch.stack([result[i] for result in results]).mean(0) for i in (1, 2))
    # A step adds the residual, subtracts the sent part and adds all ranks' shares: float32 numbers under 40 in size,
    # and for PowerSGD products of rank 4 of them. The error of encoding an average counts once for every rank.
    tolerance = 40 * NUM_STEPS * (2 * world_size + 4) * 2**-24
    torch.testing.assert_close(sent_N + owed_N, given_N, rtol=0, atol=tolerance, msg=lambda text: f"{codec}: {text}")
    assert float(owed_N.norm()) > 0, codec
    assert torch.equal(results[1][0], sent_N), codec


def _same_gradient(rank: int, scheme: str) -> torch.Tensor:
    return averages("qsgd", scheme, [noise(0, (100, 256))])[0][0]


@pytest.mark.parametrize(("scheme", "limit"), [("allgather", 0.5), ("sra", 1.375)])
def test_ranks_round_independently_so_that_their_noise_averages_out(scheme: str, limit: float) -> None:
    # v is the variance of one rounding. With 4 ranks and independent noise allgather has v / 4; sra has 3 v / 16 from
    # three messages and v from rounding the average. With the same noise on all ranks: v, and 9 v / 16 + v.
    (grad,) = noise(0, (100, 256))
    codec = make_codec(CodecSpec(name="qsgd"))
    payload, decoded_N = torch.empty(codec.payload_bytes(grad.numel()), dtype=torch.uint8), torch.empty(grad.numel())
    codec.encode(grad.view(-1), payload, 99)
    codec.decode(payload, decoded_N, add=False)
    one = float((decoded_N - grad.view(-1)).square().mean())
    average_N = run_ranks(4, _same_gradient, scheme)[0]
    ratio = float((average_N - grad.view(-1)).square().mean()) / one
    assert ratio < limit, f"error is {ratio} of one rounding's, limit {limit}"


def _topk_averages(rank: int, scheme: str) -> torch.Tensor:
    return averages("topk:density=0.05", scheme, [_unequal(rank)])[0][0]


def _unequal(rank: int) -> list[torch.Tensor]:
    """Return gradients of three ranks: rank 1 has the largest top-k elements, rank 2 the largest norm of all."""
    if rank < 2:
        return [(1 + rank) * grad for grad in noise(rank, *SHAPES)]
    return [grad.sign() * 2.5 + 0.01 * grad for grad in noise(rank, *SHAPES)]


@pytest.mark.parametrize("scheme", ["allgather", "artopk_ring", "artopk_ring_var", "artopk_tree", "artopk_tree_var"])
def test_topk_averages_the_largest_elements(scheme: str) -> None:
    inputs_RN = torch.stack([torch.cat([g.view(-1) for g in _unequal(rank)]) for rank in range(3)]).double()
    num_kept = CodecSpec(name="topk", density=0.05).num_kept(inputs_RN.shape[1])
    kept_RN = torch.zeros_like(inputs_RN)
    for rank, input_N in enumerate(inputs_RN):
        # At step 0 AR-Topk uses the indices of rank 0, with VAR those of the largest elements.
        chosen = input_N if scheme == "allgather" else inputs_RN[1 if scheme.endswith("var") else 0]
        index_K = chosen.abs().topk(num_kept).indices
        kept_RN[rank, index_K] = input_N[index_K]
    for average_N in run_ranks(3, _topk_averages, scheme):
        # One division per rank, two additions of numbers under 10.
        torch.testing.assert_close(average_N.double(), kept_RN.mean(0), rtol=0, atol=10 * 3 * 2**-24)


DIRECT_NUMELS = (1, 3, 100_003)


def _exchange_directly(rank: int, scheme: str) -> list[tuple[int, int, bool]]:
    """Return the bytes that the exchange says it sends, those that it sent, and True if integers are exact."""
    outcomes = []
    world_size = dist.get_world_size()
    for numel in DIRECT_NUMELS:
        transport = Counting(dist.group.WORLD)
        exchange = make_exchange(make_codec(NONE), Scheme(scheme), numel, 4, transport)
        grad_N = integers(rank, numel)[0].view(-1)
        exchange.run(grad_N, None, Stamp(plan_version=0, step=3, group=1, codec="none"), 0, Phases())
        expected_N = torch.arange(1.0, numel + 1) * (world_size * (world_size + 1) // 2)
        outcomes.append((exchange.sent_bytes, transport.num_sent, torch.equal(grad_N, expected_N)))
    return outcomes


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("scheme", ["sra", "ring", "tree", "broadcast"])
def test_schemes_send_what_they_say(scheme: str, world_size: int) -> None:
    results = run_ranks(world_size, _exchange_directly, scheme)
    for said, sent, is_exact in (outcome for result in results for outcome in result):
        assert said == sent
        assert is_exact
    group_bytes, num_places = 4 * DIRECT_NUMELS[-1], 1 << (world_size.bit_length() - 1)
    most = {
        "sra": 2 * (world_size - 1) / world_size,
        "ring": 2 * (world_size - 1) / world_size,
        "tree": 2 * (num_places - 1) / num_places + (num_places < world_size),
        "broadcast": world_size - 1,
    }[scheme] * group_bytes
    # At most three messages per rank and chunk, each with a header of 32 bytes and up to one element more.
    sent = max(result[-1][1] for result in results)
    assert abs(sent - most) <= 3 * world_size * (32 + 4), (sent, most)


def _dgc_averages(rank: int, text: str) -> list[torch.Tensor]:
    return averages(text, "allgather", [noise(rank, (40, 45), step=step) for step in range(6)])[0]


@pytest.mark.parametrize("clip", [0.0, 20.0])
def test_dgc_is_the_papers_algorithm(clip: float) -> None:
    """Lin et al. 2018, Algorithm 4 with two workers; under 2,048 elements dgc samples all of them, so it is exact."""
    density, momentum, numel = 0.05, 0.9, 40 * 45
    results = run_ranks(2, _dgc_averages, f"dgc:density={density},momentum={momentum},clip={clip}")
    u_RN, v_RN = torch.zeros(2, numel), torch.zeros(2, numel)
    for step in range(6):
        sent_RN = torch.zeros(2, numel)
        for rank in range(2):
            grad_N = noise(rank, (40, 45), step=step)[0].view(-1)
            limit = clip / 2**0.5
            if clip and grad_N.norm() > limit:
                grad_N = grad_N * (limit / grad_N.norm())
            u_RN[rank] = momentum * u_RN[rank] + grad_N
            v_RN[rank] += u_RN[rank]
            threshold = v_RN[rank].abs().topk(CodecSpec(name="dgc", density=density).num_kept(numel)).values[-1]
            mask_N = v_RN[rank].abs() >= threshold
            sent_RN[rank][mask_N] = v_RN[rank][mask_N]
            u_RN[rank][mask_N] = 0
            v_RN[rank][mask_N] = 0
        for result in results:
            torch.testing.assert_close(result[step], sent_RN.mean(0), rtol=1e-5, atol=1e-6)


def _owed_of_scaled(rank: int) -> Any:
    """Exchange signs over sra with elements of one magnitude: nothing is lost, so there may be no residual."""
    grad = torch.where(noise(0, (64, 64))[0] > 0, 1.0, -1.0)
    results, memory = averages("ef_signsgd", "sra", [[grad]] * 3)
    return [torch.equal(result, grad.view(-1)) for result in results], float(
        memory["residuals"]["layers.0"].abs().max()
    )


def test_signs_of_one_magnitude_lose_nothing_over_sra() -> None:
    for exact, owed in run_ranks(2, _owed_of_scaled):
        assert exact == [True, True, True]
        assert owed == 0

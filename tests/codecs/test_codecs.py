"""Codecs without collectives: their errors, their sizes and the messages they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codec_cases import KEY, SPARSE, SPECS, decoded, encoded, noise
from torch.utils._python_dispatch import TorchDispatchMode

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import MOMENTUM, is_finite, nan_if_not_finite
from cgx_ray.codecs.powersgd import PowerSgd
from cgx_ray.codecs.selectors import LwTopK, stage_ratios
from cgx_ray.codecs.sparse import Selection
from cgx_ray.errors import WireError
from cgx_ray.plan import CodecSpec, Layer
from cgx_ray.runtime_ext import sparse

# A busy machine would miss hypothesis's deadline of 200 ms per example.
UNTIMED = settings(deadline=None)


def allowed_error(spec: CodecSpec, grad_N: torch.Tensor) -> torch.Tensor:
    """Return (N,) float64: the largest allowed error per element, for a codec that sends every element."""
    x_N = grad_N.double()
    if spec.name in ("none", "fp16", "bf16"):
        # Half a unit in the last place, of 11 and of 8 bits of precision. The smallest fp16 is 2^-24.
        return {"none": 0, "fp16": 2**-11, "bf16": 2**-8}[spec.name] * x_N.abs() + (
            2**-25 if spec.name == "fp16" else 0
        )
    bucket_size = spec.bucket_size
    assert bucket_size is not None
    errors = []
    for bucket in x_N.split(bucket_size):
        largest = float(bucket.abs().max())
        if spec.grid == "max_min":
            # lo and scale are rounded outwards to bfloat16, by at most 2^-7 of their size.
            step = (float(bucket.max() - bucket.min()) + largest * 2**-7) / (2 ** (spec.bits or 2) - 1)
        else:
            norm = float(bucket.norm()) if spec.grid == "l2" else largest
            step = norm / (2 ** ((spec.bits or 2) - 1) - 1)
        half = 0.5 if spec.rounding == "nearest" else 1
        # 2^-22 for the float32 arithmetic of level, product and sum.
        errors.append(torch.full_like(bucket, half * step * (1 + 2**-7) + largest * 2**-22))
    return torch.cat(errors)


@pytest.mark.parametrize("numel", [1, 100, 1000, 5003])
@pytest.mark.parametrize("spec", [s for s in SPECS if s.name in ("none", "fp16", "bf16", "qsgd", "terngrad")], ids=str)
def test_dense_codecs_err_by_no_more_than_a_rounding_step(spec: CodecSpec, numel: int) -> None:
    codec, grad_N = make_codec(spec), noise(numel)
    error_N = (decoded(codec, encoded(codec, grad_N), numel).double() - grad_N.double()).abs()
    excess_N = error_N - allowed_error(spec, grad_N)
    assert float(excess_N.max()) <= 0, (float(error_N.max()), float(excess_N.max()))


@pytest.mark.parametrize("numel", [1, 100, 5003])
@pytest.mark.parametrize("spec", [s for s in SPECS if s.density is not None and s.value_bits in (32, None)], ids=str)
def test_sparse_codecs_send_elements_as_they_are_and_no_more_than_k(spec: CodecSpec, numel: int) -> None:
    codec, grad_N = make_codec(spec), noise(numel)
    sent_N = decoded(codec, encoded(codec, grad_N), numel)
    is_sent_N = sent_N != 0
    assert torch.equal(sent_N[is_sent_N], grad_N[is_sent_N])
    num_sent, num_kept = int(is_sent_N.sum()), spec.num_kept(numel)
    assert num_sent <= num_kept
    if spec.name in ("topk", "lwtopk", "mstopk", "randomk"):
        assert num_sent == num_kept
    if spec.name in ("topk", "lwtopk", "mstopk", "dgc", "sidco") and numel > num_sent > 0:
        # Exact top-k never sends a smaller element than it leaves. The others choose freely near the threshold, but
        # only if more elements pass it than may be sent.
        smallest, largest_lost = float(grad_N[is_sent_N].abs().min()), float(grad_N[~is_sent_N].abs().max())
        if num_sent < num_kept or spec.name in ("topk", "lwtopk"):
            assert smallest >= largest_lost


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_codecs_keep_close_to_their_budget(name: str) -> None:
    """On a Laplace distribution, which SIDCo's exponential fit assumes. SIDCo's authors allow an error of 20 %."""
    uniform_N = torch.rand(200_000, generator=torch.Generator().manual_seed(3)) - 0.5
    grad_N = -uniform_N.sign() * (1 - 2 * uniform_N.abs()).log()
    codec = make_codec(CodecSpec(name=name, density=0.01))
    num_sent = int((decoded(codec, encoded(codec, grad_N), grad_N.numel()) != 0).sum())
    assert 0.8 * 2000 <= num_sent <= 2000
    lost = float((grad_N - decoded(codec, encoded(codec, grad_N), grad_N.numel())).square().sum())
    best = float(grad_N.abs().sort().values[:-num_sent].square().sum())
    # The lost energy is at most a tenth more than with exact top-k of the same number of elements.
    assert lost <= 1.1 * best


@pytest.mark.parametrize(("value_bits", "relative"), [(16, 2**-11), (8, 2 / 255), (4, 2 / 15)])
def test_values_of_topk_are_off_by_their_own_format(value_bits: int, relative: float) -> None:
    codec, exact = (make_codec(CodecSpec(name="topk", density=0.1, value_bits=bits)) for bits in (value_bits, 32))
    grad_N = noise(5003)
    error_N = decoded(codec, encoded(codec, grad_N), 5003) - decoded(exact, encoded(exact, grad_N), 5003)
    # One step of the max-min grid, whose ends are rounded outwards by at most 2^-7.
    assert 0 < float(error_N.abs().max()) <= relative * (1 + 2**-6) * float(grad_N.abs().max())


@pytest.mark.parametrize("spec", [s for s in SPECS if s.name in ("ef_signsgd", "onebit")], ids=str)
def test_signs_keep_the_energy_of_their_means(spec: CodecSpec) -> None:
    codec, grad_N = make_codec(spec), noise(5003)
    sent_N = decoded(codec, encoded(codec, grad_N), 5003)
    assert torch.equal(sent_N > 0, grad_N > 0)
    # The means are least-squares fits, so the error is orthogonal to the decoded gradient, up to float32 rounding.
    error_N = grad_N.double() - sent_N.double()
    assert abs(float(error_N @ sent_N.double())) <= 5003 * 2**-20
    assert float(error_N.square().sum()) == pytest.approx(
        float(grad_N.double().square().sum() - sent_N.double().square().sum()), rel=1e-5
    )


def test_prefix_sends_the_first_elements_only() -> None:
    codec, grad_N = make_codec(CodecSpec(name="prefix", ratio=3)), noise(100)
    assert torch.equal(decoded(codec, encoded(codec, grad_N), 100), torch.cat([grad_N[:34], torch.zeros(66)]))


@UNTIMED
@given(spec=st.sampled_from(SPECS), numel=st.integers(0, 3000))
def test_decode_add_equals_decode_then_add_and_fills_all_bytes(spec: CodecSpec, numel: int) -> None:
    codec = make_codec(spec)
    payload = encoded(codec, noise(numel))
    assert payload.numel() == spec.payload_bytes(numel)
    out_N, sum_N = decoded(codec, payload, numel), torch.full((numel,), 0.5)
    codec.decode(payload, sum_N, add=True, key=KEY)
    if spec.name == "powersgd":  # the matrix product itself adds, with other roundings
        torch.testing.assert_close(sum_N, out_N + 0.5, rtol=2**-20, atol=2**-20)
    else:
        assert torch.equal(sum_N, out_N + 0.5)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_decode_add_of_many_elements_is_exact(spec: CodecSpec) -> None:
    """Enough elements that casts add them in more than one piece."""
    numel = (1 << 18) + 5
    codec = make_codec(spec)
    payload = encoded(codec, noise(numel))
    sum_N = torch.full((numel,), 0.5)
    codec.decode(payload, sum_N, add=True, key=KEY)
    torch.testing.assert_close(sum_N, decoded(codec, payload, numel) + 0.5, rtol=0, atol=2**-20)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_one_non_finite_element_arrives_wherever_it_is(spec: CodecSpec, value: float) -> None:
    codec = make_codec(spec)
    for position in range(0, 5003, 251):
        grad_N = noise(5003)
        grad_N[position] = value
        for memory in (None, codec.new_memory(5003)):
            if memory is not None or not codec.needs_feedback:
                payload = encoded(codec, grad_N, key=position, memory=memory)
                assert not is_finite(decoded(codec, payload, 5003, key=position)), position


def test_nan_if_not_finite_is_zero_for_numbers_and_nan_for_the_others() -> None:
    assert float(nan_if_not_finite(noise(100))) == 0
    assert float(nan_if_not_finite(torch.empty(0))) == 0
    assert float(nan_if_not_finite(torch.tensor([3.4e38, -3.4e38]))) == 0
    for value in (math.nan, math.inf, -math.inf):
        assert math.isnan(float(nan_if_not_finite(torch.tensor([1.0, value]))))


def test_dgc_corrects_momentum_and_clears_it_where_it_sends() -> None:
    codec = make_codec(CodecSpec(name="dgc", density=0.25, momentum=0.5))
    memory = codec.new_memory(4)
    assert memory is not None
    grad_N = torch.tensor([8.0, 1.0, 2.0, -3.0])
    assert torch.equal(decoded(codec, encoded(codec, grad_N, memory=memory), 4), torch.tensor([8.0, 0, 0, 0]))
    memory.commit()
    assert torch.equal(memory.now[MOMENTUM], torch.tensor([0.0, 1.0, 2.0, -3.0]))
    # u = 0.5 u + g, v = v + u: [8, 1.5, 3, -4.5] and [8, 2.5, 5, -7.5].
    assert torch.equal(decoded(codec, encoded(codec, grad_N, memory=memory), 4), torch.tensor([8.0, 0, 0, 0]))
    memory.commit()
    assert memory.residual_N is not None
    assert torch.equal(memory.residual_N, torch.tensor([0, 2.5, 5.0, -7.5]))
    zero_N = torch.zeros(4)
    # Without a gradient, v still moves by the rest of u: -7.5 - 2.25.
    assert torch.equal(decoded(codec, encoded(codec, zero_N, memory=memory), 4), torch.tensor([0, 0, 0, -9.75]))


def test_dgc_clips_by_the_root_of_the_world_size() -> None:
    spec = CodecSpec(name="dgc", density=1.0, clip=2.0)
    for world_size, limit in ((1, 2.0), (4, 1.0)):
        codec = make_codec(spec, world_size=world_size)
        for scale in (0.1, 10.0, 1e30):
            grad_N = scale * torch.tensor([0.6, 0.8])
            sent_N = decoded(codec, encoded(codec, grad_N, memory=codec.new_memory(2)), 2)
            assert float(sent_N.norm()) == pytest.approx(min(scale, limit), rel=1e-6)


@pytest.mark.parametrize("density", [0.01, 0.1, 0.37, 1.0])
def test_lwtopk_keeps_the_same_share_of_every_layer(density: float) -> None:
    layers = [Layer(name=str(numel), numel=numel, ndim=2) for numel in (1000, 1, 333, 4096, 70)]
    codec = make_codec(CodecSpec(name="lwtopk", density=density), layers)
    grad_N = noise(5500)
    grad_N[:1000] *= 100  # top-k over the whole group would send almost only these
    sent_N = decoded(codec, encoded(codec, grad_N, memory=codec.new_memory(5500)), 5500)
    assert isinstance(codec, LwTopK)
    assert int((sent_N != 0).sum()) == codec.num_kept(5500)
    end = 0
    for layer in layers:
        start, end = end, end + layer.numel
        part, kept = grad_N[start:end], max(math.ceil(density * end) - math.ceil(density * start), 1)
        assert abs(kept - density * layer.numel) < 1
        largest = part.abs().topk(kept).indices.sort().values
        assert torch.equal(sent_N[start:end].nonzero().view(-1), largest)


def test_randomk_sends_the_elements_that_the_key_says() -> None:
    codec, grad_N = make_codec(CodecSpec(name="randomk", density=0.1)), noise(1000)
    index_K = torch.empty(100, dtype=torch.int32)
    sparse.random_indices(1000, index_K, key=5)
    payload = encoded(codec, grad_N, key=5)
    assert torch.equal(payload.view(torch.float32), grad_N[index_K.long()])
    assert torch.equal(decoded(codec, payload, 1000, key=5).nonzero().view(-1), index_K.long())
    assert not torch.equal(encoded(codec, grad_N, key=6), payload)


MATRICES = [Layer(name="a", numel=600, ndim=2, num_rows=20), Layer(name="b", numel=91, ndim=1)]


def test_powersgd_repeats_a_matrix_of_its_rank_and_its_p_is_orthonormal() -> None:
    codec = make_codec(CodecSpec(name="powersgd", rank=3), MATRICES)
    assert isinstance(codec, PowerSgd)
    first = (noise(60, 1).view(20, 3) @ noise(90, 2).view(3, 30)).view(-1)
    # b is taken as 10 rows of 10, where the last 9 elements are padding.
    padded = torch.nn.functional.pad(torch.outer(noise(9, 3), noise(10, 4)), (0, 0, 0, 1)).view(-1)[:91]
    grad_N = torch.cat([first, padded])
    payload = encoded(codec, grad_N)
    assert payload.numel() == codec.payload_bytes(691) == 4 * (3 * (20 + 30) + 3 * (10 + 10))
    # Sums of 30 products of numbers under 10, through two products of matrices.
    torch.testing.assert_close(decoded(codec, payload, 691), grad_N, rtol=0, atol=2 * 30 * 100 * 2**-24)
    p_M, _ = codec.split(payload, 691)
    p = p_M[:60].view(3, 20)
    torch.testing.assert_close(p @ p.t(), torch.eye(3), rtol=0, atol=20 * 2**-23)


def test_powersgd_comes_closer_to_a_constant_matrix_with_every_step() -> None:
    """Power iteration that starts from the last Q, without feedback, finds the best approximation of rank 2."""
    codec = make_codec(CodecSpec(name="powersgd", rank=2), [Layer(name="w", numel=1600, ndim=2, num_rows=40)])
    u, s, v = torch.linalg.svd(noise(1600).view(40, 40))
    grad = u @ torch.diag(s * torch.logspace(0, -3, 40)) @ v
    singular = torch.linalg.svdvals(grad)
    best = float(singular[2:].norm())
    memory = codec.new_memory(1600)
    assert memory is not None
    errors = []
    for _ in range(12):
        payload = encoded(codec, grad.view(-1), memory=memory)
        memory.commit()
        assert memory.residual_N is not None
        memory.residual_N.zero_()
        errors.append(float((grad.view(-1) - decoded(codec, payload, 1600)).norm()))
    assert errors[0] > 1.05 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_powersgd_survives_a_gradient_of_zeros() -> None:
    codec = make_codec(CodecSpec(name="powersgd", rank=2), [Layer(name="w", numel=100, ndim=2, num_rows=10)])
    memory = codec.new_memory(100)
    assert memory is not None
    payload = encoded(codec, torch.zeros(100), memory=memory)
    memory.commit()
    assert torch.equal(decoded(codec, payload, 100), torch.zeros(100))
    payload = encoded(codec, noise(100), memory=memory)
    assert float(decoded(codec, payload, 100).norm()) > 0


@pytest.mark.parametrize(
    ("density", "shares"),
    [(1.0, [1.0]), (0.25, [0.25]), (0.1, [0.25, 0.4]), (0.0625, [0.25, 0.25]), (0.01, [0.25, 0.25, 0.16])],
)
def test_stages_of_sidco_multiply_to_the_density(density: float, shares: list[float]) -> None:
    assert [math.exp(-ratio) for ratio in stage_ratios(density)] == pytest.approx(shares)


@pytest.mark.parametrize("count", [-1, 4, 51, 1 << 30])
def test_a_sparse_message_with_another_count_is_refused(count: int) -> None:
    codec = make_codec(CodecSpec(name="topk", density=0.05))
    payload = encoded(codec, noise(1000))
    payload[:4].view(torch.int32).fill_(count)
    with pytest.raises(WireError, match="a message of 50 of 1000 elements is broken"):
        decoded(codec, payload, 1000)


@UNTIMED
@given(seed=st.integers(0, 1 << 30))
def test_a_sparse_message_of_random_bytes_is_refused_or_adds_to_distinct_elements(seed: int) -> None:
    codec = make_codec(CodecSpec(name="topk", density=0.05))
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(256, (codec.payload_bytes(400),), dtype=torch.uint8, generator=generator)
    payload[:4].view(torch.int32).fill_(seed % 21)
    payload[-80:].view(torch.float32).fill_(1.0)
    out_N = torch.zeros(400)
    try:
        codec.decode(payload, out_N, add=True)
    except WireError:
        assert torch.equal(out_N, torch.zeros(400))
    else:
        assert float(out_N.sum()) == float(out_N.count_nonzero()) == seed % 21


def test_a_selection_packs_fewer_elements_than_it_has_room_for() -> None:
    selection = Selection(10, torch.device("cpu"))
    selection.index_K[:3] = torch.tensor([2, 40, 99])
    selection.count_1.fill_(3)
    message = torch.empty(CodecSpec(name="topk", density=0.1).index_bytes(100), dtype=torch.uint8)
    selection.pack(100, message)
    other = Selection(10, torch.device("cpu"))
    other.unpack(100, message)
    assert int(other.count_1) == 3
    assert other.index_K.tolist() == [2, 40, 99, 0, 0, 0, 0, 0, 0, 0]


class _Calls(TorchDispatchMode):
    """Notes the names of torch's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "num_calls"), [("meta", 1), ("cpu", 4)])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_casts_add_in_pieces_on_a_cpu_only(name: str, device: str, num_calls: int) -> None:
    """A piece that stays in the CPU's cache is one launch more on a GPU."""
    numel = 1 << 20
    codec = make_codec(CodecSpec(name=name), device=torch.device(device))
    out_N = torch.zeros(numel, device=device)
    payload = torch.zeros(codec.payload_bytes(numel), dtype=torch.uint8, device=device)
    with _Calls() as calls:
        codec.decode(payload, out_N, add=True)
    assert calls.names.count("aten::add_") == num_calls

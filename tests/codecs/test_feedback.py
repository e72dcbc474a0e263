"""Memory of codecs: residuals keep every gradient, uncommitted steps leave no trace, checkpoints restore everything."""

from __future__ import annotations

import math

import pytest
import torch
from support.codec_cases import FED_BACK, decoded, encoded, noise

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.feedback import Memories
from cgx_ray.codecs.gain import GainCurve, kept_energy, sample_blocks
from cgx_ray.errors import StateError
from cgx_ray.plan import CodecSpec, Layer


@pytest.mark.parametrize("spec", [s for s in FED_BACK if s.name != "dgc"], ids=str)
def test_what_was_sent_and_what_is_owed_make_up_all_gradients(spec: CodecSpec) -> None:
    numel, num_steps = 5003, 9
    codec = make_codec(spec)
    memory = codec.new_memory(numel)
    assert memory is not None
    sent_N, given_N = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(num_steps):
        grad_N = noise(numel, seed=step)
        payload = encoded(codec, grad_N, key=step, memory=memory)
        memory.commit()
        sent_N += decoded(codec, payload, numel, key=step)
        given_N += grad_N
    assert memory.residual_N is not None
    # Each step adds the residual and subtracts what is sent: two roundings of float32 numbers under 40, and four more
    # for products of rank 2.
    error_N = (sent_N + memory.residual_N - given_N).abs()
    assert float(error_N.max()) <= 40 * 6 * num_steps * 2**-24, float(error_N.max())
    assert float(memory.residual_N.abs().max()) > 0


@pytest.mark.parametrize("spec", FED_BACK, ids=str)
def test_a_step_that_is_not_committed_leaves_no_trace(spec: CodecSpec) -> None:
    codec = make_codec(spec)
    memory = codec.new_memory(2000)
    assert memory is not None
    first = encoded(codec, noise(2000), memory=memory)
    memory.commit()
    before = {kind: value.clone() for kind, value in memory.now.items()}
    second = encoded(codec, noise(2000, seed=2), memory=memory)
    encoded(codec, torch.full((2000,), math.nan), memory=memory)
    assert all(torch.equal(memory.now[kind], value) for kind, value in before.items())
    assert torch.equal(encoded(codec, noise(2000, seed=2), memory=memory), second)
    assert not torch.equal(first, second)


def layer(name: str, numel: int, num_rows: int | None = None) -> Layer:
    return Layer(name=name, numel=numel, ndim=2, num_rows=num_rows)


def test_residuals_follow_their_layers_into_other_groups_through_a_commit() -> None:
    memories = Memories()
    topk = CodecSpec(name="topk")
    memory = memories.of_group(make_codec(topk, [layer("a", 2), layer("b", 3)]))
    assert memory is not None
    memory.next_N.copy_(torch.arange(5))
    memory.commit()
    moved = memories.of_group(make_codec(topk, [layer("b", 3), layer("c", 1)]))
    assert moved is not None
    assert moved.residual_N is not None
    assert torch.equal(moved.residual_N, torch.tensor([2.0, 3.0, 4.0, 0.0]))
    assert memories.state()["residuals"].keys() == {"a", "b", "c"}
    residual = memories.residual("a")
    assert residual is not None
    assert torch.equal(residual, torch.tensor([0.0, 1.0]))
    memories.forget("a")
    assert memories.residual("a") is None
    with pytest.raises(StateError, match="residuals of 'b' has 3 elements, the layer has 7"):
        memories.of_group(make_codec(topk, [layer("b", 7)]))


@pytest.mark.parametrize("text", ["dgc:density=0.1", "powersgd:rank=2", "ef_signsgd"])
def test_a_checkpoint_brings_back_every_kind_of_memory(text: str) -> None:
    codec = make_codec(CodecSpec.parse(text), [layer("a", 600, 20), layer("b", 400, 40)])
    memories = Memories()
    memory = memories.of_group(codec)
    assert memory is not None
    for step in range(3):
        encoded(codec, noise(1000, seed=step), memory=memory)
        memory.commit()
    state = memories.state()
    expected = encoded(codec, noise(1000, seed=9), memory=memory)
    restored = Memories()
    restored.load(state)
    assert all(torch.equal(restored.state()[kind][name], state[kind][name]) for kind in state for name in state[kind])
    assert torch.equal(encoded(codec, noise(1000, seed=9), memory=restored.of_group(codec)), expected)


def test_a_checkpoint_holds_copies() -> None:
    codec = make_codec(CodecSpec(name="topk"), [layer("a", 100)])
    memories = Memories()
    memory = memories.of_group(codec)
    assert memory is not None
    before = memories.state()
    for _ in range(2):
        encoded(codec, noise(100), memory=memory)
        memory.commit()
    assert float(before["residuals"]["a"].abs().max()) == 0
    assert float(memories.state()["residuals"]["a"].abs().max()) > 0


def test_momentum_and_q_are_forgotten_by_codecs_that_have_none_and_q_by_another_rank() -> None:
    memories = Memories()
    for text, kinds in (
        ("dgc", {"residuals", "momentum"}),
        ("powersgd:rank=2", {"residuals", "powersgd_q"}),
        ("powersgd:rank=3", {"residuals", "powersgd_q"}),
        ("none", {"residuals"}),
    ):
        memory = memories.of_group(make_codec(CodecSpec.parse(text), [layer("a", 100, 10)]))
        assert {kind for kind, entries in memories.state().items() if entries} == kinds
        assert (memory is None) == (text == "none")


def test_kept_energy_of_topk_is_the_energy_of_what_it_keeps() -> None:
    grad_N = torch.tensor([3.0, -1.0, 0.5, 4.0, 0.0])
    assert kept_energy(make_codec(CodecSpec(name="topk", density=0.4)), grad_N, key=0) == pytest.approx(25.0)
    assert kept_energy(make_codec(CodecSpec(name="none")), grad_N, key=0) == pytest.approx(26.25)
    # The key gives the elements that randomk sends. Decoding with another key would keep nothing.
    assert 0 < kept_energy(make_codec(CodecSpec(name="randomk", density=0.5)), noise(1000), key=3) < 1000


def test_a_sample_is_made_of_whole_evenly_spaced_blocks() -> None:
    grad_N = torch.arange(1 << 20)
    sample = sample_blocks(grad_N)
    assert sample.numel() == 1 << 16
    blocks = sample.view(-1, 1024)
    assert torch.equal(blocks[:, 0] % 1024, torch.zeros(64, dtype=torch.int64))
    assert torch.equal(blocks - blocks[:, :1], torch.arange(1024).expand(64, 1024))
    assert sample_blocks(grad_N[:100]).numel() == 100


@pytest.mark.parametrize("tail", [0, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_histogram_gives_the_gain_of_exact_topk_at_every_density_within_1_percent(
    tail: int, dtype: torch.dtype
) -> None:
    grad_N = (noise(200_000) * torch.rand(200_000, generator=torch.Generator().manual_seed(1)) ** tail).to(dtype)
    densities = [0.0005, 0.001, 0.004, 0.011, 0.033, 0.1, 0.5, 1.0]
    square_N = grad_N.double().square().sort(descending=True).values
    exact = [float(square_N[: round(density * 200_000)].sum() / square_N.sum()) for density in densities]
    assert GainCurve(grad_N).gain(densities) == pytest.approx(exact, rel=0.01)


def test_a_gain_curve_of_nothing_of_equal_elements_and_of_nan() -> None:
    assert GainCurve(torch.zeros(1000)).gain([0.001, 1.0]) == [1.0, 1.0]
    assert GainCurve(torch.full((1000,), -3.0)).gain([0.25, 1.0]) == pytest.approx([0.25, 1.0])
    for value in (float("nan"), float("inf")):
        assert all(math.isnan(gain) for gain in GainCurve(torch.tensor([1.0, value])).gain([0.5, 1.0]))

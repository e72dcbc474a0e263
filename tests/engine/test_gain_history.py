"""The sample of measured gradients from which gains of error feedback are predicted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.gain import NUM_TOP
from cgx_ray.engine.gains.gain_history import (
    HISTORY_BLOCK,
    HISTORY_NUMEL,
    KEPT_OF_SUM,
    MAX_POOLS,
    NUM_GRADIENTS,
    SUM_NUMEL,
    GradientHistory,
)
from cgx_ray.plan import CodecSpec, Layer

TOPK = make_codec(CodecSpec(name="topk", density=0.1))
LAYERS = (
    Layer(name="first", numel=4096, ndim=2),
    Layer(name="bias", numel=4096, ndim=1),
    Layer(name="last", numel=6000, ndim=2),
)


def gradient(seed: int, layers: tuple[Layer, ...] = LAYERS) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {layer.name: torch.randn(layer.numel, generator=random) ** 3 for layer in layers if not layer.is_small}


def samples_of(history: GradientHistory, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    if not gradients:
        return {}
    joined_N, numels = history.sample(gradients)
    return dict(zip(gradients, joined_N.split(numels), strict=True))


def gains_after(*gradients: dict[str, Tensor]) -> dict[str, float]:
    history = GradientHistory(LAYERS)
    for one in gradients:
        history.add_samples(samples_of(history, one))
    return history.gains([TOPK], key=1)


def test_a_large_model_is_sampled_in_whole_blocks_and_every_layer_is_in_the_sample() -> None:
    layers = tuple(Layer(name=str(index), numel=1 << 20 >> index, ndim=2) for index in range(8))
    samples = samples_of(GradientHistory(layers), gradient(0, layers))
    numels = [len(sample_N) for sample_N in samples.values()]
    assert all(numel and numel % HISTORY_BLOCK == 0 for numel in numels), numels
    assert HISTORY_NUMEL / 2 < sum(numels) < 2 * HISTORY_NUMEL
    again = samples_of(GradientHistory(layers), gradient(0, layers))
    assert all(torch.equal(again[name], sample_N) for name, sample_N in samples.items())


def test_sums_of_gradients_forget_old_ones_and_have_the_norm_of_their_largest_elements() -> None:
    history, parts = GradientHistory(LAYERS), [gradient(seed)["first"] for seed in range(2)]
    history.add_to_sum("first", parts[0])
    found = history.add_to_sum("first", parts[1].clone().index_fill_(0, torch.tensor([7]), math.inf))
    sum_N = KEPT_OF_SUM * parts[0] + parts[1]
    sum_N[7] = KEPT_OF_SUM * parts[0][7]
    assert float(found) == pytest.approx(float(sum_N.abs().topk(NUM_TOP).values.norm()))
    # Of a large layer a sample is summed, whose few largest elements stand for NUM_TOP.
    assert float(history.add_to_sum("large", torch.full((8 * SUM_NUMEL,), -2.0))) == pytest.approx(2 * NUM_TOP**0.5)
    assert float(history.add_to_sum("tiny", torch.full((4,), 3.0))) == pytest.approx(6)


def test_gains_are_predicted_by_codec_and_for_artopk_by_option_whatever_the_scale() -> None:
    gains = gains_after(*(gradient(seed) for seed in range(3)))
    scaled = gains_after(*({name: 64.0 * grad_N for name, grad_N in gradient(seed).items()} for seed in range(3)))
    assert gains == pytest.approx(scaled, rel=1e-5)
    star, var = (gains[f"{TOPK.spec} over artopk_tree{choice}"] for choice in ("", "_var"))
    assert star == gains[f"{TOPK.spec} over artopk_ring"]
    assert gains[f"{TOPK.spec} over artopk_ring_auto"] == max(star, var)
    assert 0 < star < gains[str(TOPK.spec)] < 1
    assert len(gains) == 7


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_gradients_that_are_zero_not_finite_or_incomplete_are_left_out(value: float) -> None:
    good = gradient(0)
    bad = {**good, "last": torch.full((6000,), value)} if value else {name: 0 * grad_N for name, grad_N in good.items()}
    assert gains_after(bad) == gains_after({"first": good["first"]}) == {}
    assert gains_after(good, bad) == gains_after(good)


def test_the_oldest_gradients_are_forgotten() -> None:
    recent = [gradient(seed) for seed in range(1, NUM_GRADIENTS + 1)]
    assert gains_after(gradient(0), *recent) == gains_after(*recent)


def test_a_model_has_few_pools_however_many_layers() -> None:
    layers = tuple(Layer(name=str(index), numel=1 << 20, ndim=2) for index in range(100))
    pools = GradientHistory(layers)._pools
    assert len(pools) == MAX_POOLS
    assert [name for pool in pools for name in pool] == [layer.name for layer in layers]

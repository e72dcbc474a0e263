"""Gains predicted before a codec is used, against full-size error feedback on the same kind of gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.shadow import settled_artopk_gains, settled_gain, settles
from cgx_ray.plan import CodecSpec

NUMEL = 1 << 15
SAMPLE = slice(None, None, 4)
NUM_GRADIENTS = 8
SLOW = pytest.mark.slow


def gradients(steady: float, seed: int) -> Iterator[Tensor]:
    """Yield gradients whose elements have scales of their own, with the energy `steady` in a mean that persists."""
    shared = torch.Generator().manual_seed(0)
    # Neighbours have similar scales, as the elements of a layer do.
    scale_N = (0.7 * torch.randn(NUMEL // 256, generator=shared)).exp().repeat_interleave(256)
    scale_N *= (0.7 * torch.randn(NUMEL, generator=shared)).exp()
    mean_N = math.sqrt(steady) * scale_N * torch.randn(NUMEL, generator=shared)
    own = torch.Generator().manual_seed(seed)
    while True:
        yield mean_N + math.sqrt(1 - steady) * scale_N * torch.randn(NUMEL, generator=own)


def measured(steady: float) -> Tensor:
    source = gradients(steady, seed=99)
    return torch.stack([next(source)[SAMPLE] for _ in range(NUM_GRADIENTS)])


def run_feedback(spec: CodecSpec, steady: float, num_ranks: int, choice: str) -> float:
    """Return the mean gain of a run with error feedback that has settled. `choice`: "own" elements, "star" or "var"."""
    sources = [gradients(steady, seed=rank + 1) for rank in range(num_ranks)]
    residual_RN = torch.zeros(num_ranks, NUMEL)
    num_kept, num_steps = spec.num_kept(NUMEL), math.ceil(4 / (spec.density or 1))
    gains = []
    for step in range(num_steps):
        residual_RN += torch.stack([next(source) for source in sources])
        before_R = residual_RN.double().square().sum(1)
        top_R = residual_RN.abs().topk(num_kept, dim=1).values.square().sum(1)
        root = step % num_ranks if choice == "star" else int(top_R.argmax())
        for rank, own_N in enumerate(residual_RN):
            if choice == "own":
                own_N[own_N.abs().topk(num_kept).indices] = 0
            elif rank == root:
                residual_RN[:, own_N.abs().topk(num_kept).indices] = 0
        if step >= num_steps / 2:
            gains.append(float((1 - residual_RN.double().square().sum(1) / before_R).mean()))
    return math.fsum(gains) / len(gains)


@pytest.mark.parametrize("steady", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("density", [0.1, 0.033, 0.011])
def test_the_predicted_gain_is_that_of_error_feedback_once_it_has_settled(density: float, steady: float) -> None:
    spec = CodecSpec(name="topk", density=density)
    predicted = settled_gain(spec, measured(steady), key=1)
    assert predicted == pytest.approx(run_feedback(spec, steady, 1, "own"), abs=0.1)


@pytest.mark.parametrize(
    ("density", "steady"),
    [(0.1, 0.0), pytest.param(0.1, 0.5, marks=SLOW), pytest.param(0.033, 0.0, marks=SLOW), (0.033, 0.5)],
)
def test_the_predicted_gain_of_artopk_is_that_at_the_indices_of_other_ranks(density: float, steady: float) -> None:
    spec = CodecSpec(name="topk", density=density)
    predicted = settled_artopk_gains(spec, measured(steady), key=1)
    for choice, gain in predicted._asdict().items():
        assert gain == pytest.approx(run_feedback(spec, steady, 4, choice), abs=0.1), choice
    own = settled_gain(spec, measured(steady), key=1)
    assert predicted.star < own + 0.01


@pytest.mark.parametrize("density", [0.1, 0.011])
def test_a_residual_lowers_the_gain_of_a_gradient_that_owes_nothing(density: float) -> None:
    spec = CodecSpec(name="topk", density=density)
    grad_N = measured(0.05)[0]
    unused = float(grad_N.abs().topk(spec.num_kept(len(grad_N))).values.square().sum() / grad_N.square().sum())
    assert settled_gain(spec, measured(0.05), key=1) < 0.8 * unused


def test_gains_are_predicted_for_codecs_whose_only_memory_is_a_residual() -> None:
    names = ("topk", "lwtopk", "randomk", "ef_signsgd", "onebit", "dgc", "powersgd", "qsgd", "bf16")
    assert [name for name in names if settles(make_codec(CodecSpec.parse(name)))] == list(names[:5])
    assert 0 < settled_gain(CodecSpec(name="ef_signsgd"), measured(0.05), key=1) < 1
    assert settled_gain(CodecSpec(name="randomk", density=0.1), measured(0.0), key=1) == pytest.approx(0.1, abs=0.02)

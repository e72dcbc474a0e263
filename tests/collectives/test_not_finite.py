"""NaN and Inf in gradients: every scheme passes them on to all ranks, and no memory keeps them."""

from __future__ import annotations

import pytest
import torch
from support.branches import Branches, batch, train, weights_hash
from support.ranks import run_ranks
from support.scheme_cases import FED_BACK, PAIRS, SHAPES, averages, noise, run_codecs
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.codecs.codec import KINDS


def _poisoned(rank: int, codec: str, scheme: str) -> list[tuple[bool, bool]]:
    """Return, for NaN and then Inf in a gradient of rank 1, if the average is finite and if the memory is unchanged."""
    outcomes = []
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
    train(model, rank, range(3))
    for value in (float("nan"), float("inf")):
        before = attachment.state_dict()
        model.zero_grad()
        x_BD = batch(rank, 3)
        if rank == 1:
            x_BD[0, 0] = value
        model(x_BD).square().mean().backward()
        # top-k sends a share of a group that is NaN everywhere, so the group arrives non-finite, but not each layer.
        grads = [p.grad for p in model.parameters() if p.ndim > 1 and p.grad is not None]
        finite = all(bool(torch.isfinite(grad).all()) for grad in grads)
        after = attachment.state_dict()
        untouched = all(torch.equal(before[kind][name], after[kind][name]) for kind in KINDS for name in before[kind])
        outcomes.append((finite, untouched))
        train(model, rank, range(4, 6))
    attachment.close()
    return outcomes


@pytest.mark.fault(
    "NaN or Inf on one rank, for every codec and scheme", "the average is not finite on any rank; no memory changes"
)
@pytest.mark.parametrize("scheme", dict.fromkeys(scheme for _, scheme in PAIRS))
def test_a_non_finite_gradient_is_non_finite_on_all_ranks_and_leaves_no_trace(scheme: str) -> None:
    for codec, results in run_codecs(2, _poisoned, PAIRS, scheme).items():
        for outcomes in results:
            assert outcomes == [(False, True), (False, True)], codec


def _skipped(rank: int, codec: str, scheme: str) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Return the memory after one good step, and after one more in which a layer of rank 1 is not finite."""
    good, bad = noise(rank, *SHAPES), noise(rank, *SHAPES, step=1)
    if rank == 1:
        bad[1][0, 0] = float("inf")
    return [averages(codec, scheme, steps, one_group=False)[1] for steps in ([good], [good, bad])]


@pytest.mark.parametrize("scheme", dict.fromkeys(scheme for _, scheme in FED_BACK))
def test_a_step_that_will_be_skipped_changes_the_memory_of_no_group(scheme: str) -> None:
    for codec, results in run_codecs(2, _skipped, FED_BACK, scheme).items():
        for before, after in results:
            for kind in KINDS:
                assert before[kind].keys() == after[kind].keys()
                for name, value in before[kind].items():
                    assert torch.equal(after[kind][name], value), f"{codec}: {kind} of {name} changed"


def _one_nan(rank: int, codec: str, scheme: str) -> list[bool]:
    """Return by step if the average is finite, with one NaN in another place at each step."""
    steps = []
    for step in range(6):
        (grad,) = noise(rank, (60, 50), step=step)
        if rank == 1:
            grad.view(-1)[503 * step] = float("nan")
        steps.append([grad])
    return [bool(torch.isfinite(average).all()) for average in averages(codec, scheme, steps)[0]]


@pytest.mark.parametrize("scheme", dict.fromkeys(scheme for _, scheme in PAIRS))
def test_a_single_nan_is_never_left_out(scheme: str) -> None:
    for codec, results in run_codecs(2, _one_nan, PAIRS, scheme).items():
        assert not any(finite for result in results for finite in result), codec


def _train_scaled(rank: int, codec: str, scheme: str) -> tuple[list[str], list[float]]:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    hashes, scales = [], []
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x_BD = batch(rank, step)
            if step == 4 and rank == 1:
                x_BD[0, 0] = float("inf")
            loss = (model(x_BD) - x_BD.nan_to_num(posinf=0)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        hashes.append(weights_hash(model))
        scales.append(scaler.get_scale())
    attachment.close()
    return hashes, scales


@pytest.mark.fault("the same with GradScaler", "all ranks skip the same step")
@pytest.mark.parametrize(
    ("codec", "scheme"),
    [
        ("qsgd", "sra"),
        ("ef_signsgd", "sra"),
        ("onebit", "ring"),
        ("ef_signsgd", "tree"),
        ("onebit", "broadcast"),
        ("topk:density=0.05", "allgather"),
        ("topk:density=0.05", "artopk_ring"),
        ("topk:density=0.05", "artopk_tree_var"),
        ("dgc:density=0.05", "artopk_ring"),
        ("randomk:density=0.05", "allreduce"),
        ("powersgd", "allreduce"),
    ],
)
def test_gradscaler_skips_the_same_step_on_all_ranks(codec: str, scheme: str) -> None:
    (first, scales), (second, other_scales) = run_ranks(2, _train_scaled, codec, scheme)
    assert first == second
    assert scales == other_scales
    assert first[4] == first[3], "the overflowing step was not skipped"
    assert scales[4] < scales[3]
    assert first[5] != first[4]

"""Ranks that train alone between rounds, on real processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support.ranks import run_cases, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.plan import STEPS_TOGETHER

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """A training of `num_steps` steps; optimizers by name, see `_OPTIMIZERS`."""

    codec: str = "none"
    scheme: str | None = None
    period: int = 4
    optimizer: str = "sgd"
    num_steps: int = STEPS_TOGETHER + 12
    dtype: torch.dtype = torch.float32


_OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 40), nn.Linear(40, 1)).to(
        dtype
    )


def _batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x_BI = torch.randn(16, 24, generator=generator)
    return x_BI.to(dtype), x_BI[:, :3].sum(1, keepdim=True).to(dtype)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, dtype: torch.dtype) -> float:
    x_BI, y_B1 = _batch(rank, step, dtype)
    optimizer.zero_grad()
    loss = (model(x_BI) - y_B1).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def _flat(model: nn.Module) -> list[float]:
    return torch.cat([one.detach().double().flatten() for one in model.parameters()]).tolist()


def _train(rank: int, case: Case) -> tuple[list[list[float]], list[float]]:
    """Return the parameters after each step, and the learning rates that the user sees."""
    model = DistributedDataParallel(_model(case.dtype))
    attachment = cgx_ray.attach(model, codec=case.codec, scheme=case.scheme, period=case.period)
    optimizer = _OPTIMIZERS[case.optimizer](model.parameters())
    parameters, rates = [], []
    for step in range(case.num_steps):
        _step(model, optimizer, rank, step, case.dtype)
        parameters.append(_flat(model))
        rates.append(optimizer.param_groups[0]["lr"])
    attachment.close()
    return parameters, rates


CASES = [
    Case(),
    Case(optimizer="momentum"),
    Case(optimizer="adamw", codec="qsgd:bits=4", scheme="sra"),
    Case(codec="topk:density=0.1", scheme="allgather"),
    Case(codec="topk:density=0.1", scheme="artopk_ring"),
    Case(optimizer="adamw", dtype=torch.bfloat16),
    Case(dtype=torch.float64),
    Case(period=1, optimizer="adamw"),
]


@pytest.mark.parametrize("num_ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_are_alike_after_each_round_and_only_then(num_ranks: int) -> None:
    for case, results in zip(CASES, run_cases(num_ranks, [partial(_train, case=case) for case in CASES]), strict=True):
        for result in results:
            assert not isinstance(result, Exception), (case, result)
        by_step = zip(*(parameters for parameters, _ in results), strict=True)
        alike = [step for step, of_ranks in enumerate(by_step) if all(one == of_ranks[0] for one in of_ranks)]
        rounds = range(STEPS_TOGETHER + case.period - 1, case.num_steps, case.period)
        assert alike == [*range(STEPS_TOGETHER), *rounds], case
        assert len({rate for _, rates in results for rate in rates}) == 1


def _expected(num_ranks: int, num_alone: int) -> Tensor:
    """Return parameters in float64: SGD with the ranks' mean gradients, then alone, then their mean."""
    models = [_model(torch.float64) for _ in range(num_ranks)]
    for step in range(STEPS_TOGETHER + num_alone):
        gradients = []
        for rank, model in enumerate(models):
            x_BI, y_B1 = _batch(rank, step, torch.float64)
            loss = (model(x_BI) - y_B1).square().mean()
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        means = [torch.stack(same).mean(0) for same in zip(*gradients, strict=True)]
        for model, own in zip(models, gradients, strict=True):
            for parameter, gradient in zip(model.parameters(), means if step < STEPS_TOGETHER else own, strict=True):
                parameter.data -= 0.05 * gradient
    return torch.tensor([_flat(model) for model in models], dtype=torch.float64).mean(0)


SCHEMES = ("dense", "sra", "allgather", "ring", "tree", "broadcast")


@pytest.mark.parametrize("num_ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5))])
def test_a_round_gives_the_mean_of_what_ranks_make_alone(num_ranks: int) -> None:
    cases = [Case(scheme=scheme, period=3, num_steps=STEPS_TOGETHER + 3) for scheme in SCHEMES]
    expected_N = _expected(num_ranks, 3)
    for case, results in zip(cases, run_cases(num_ranks, [partial(_train, case=c) for c in cases]), strict=True):
        assert not isinstance(results[0], Exception), (case, results[0])
        found_N = torch.tensor(results[0][0][-1], dtype=torch.float64)
        torch.testing.assert_close(found_N, expected_N, rtol=0, atol=2e-5)


def _norms(rank: int) -> tuple[list[list[float]], bool]:
    """Return the running means after each step of a round, and whether DDP is as it was after a return to period 1."""
    model = DistributedDataParallel(_model())
    attachment = cgx_ray.attach(model, codec="none", scheme="sra", period=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    means = []
    for step in range(STEPS_TOGETHER + 8):
        if step == STEPS_TOGETHER + 4:
            plan = cgx_ray.make_plan(cgx_ray.layers_of(model), version=1, world_size=2, codec="none")
            attachment.hold(plan)
        _step(model, optimizer, rank, step, torch.float32)
        means.append(model.module[2].running_mean.tolist())
    model(_batch(rank, 0)[0])
    attachment.close()
    return means[STEPS_TOGETHER : STEPS_TOGETHER + 4], model.broadcast_buffers


def test_running_statistics_are_averaged_at_the_end_of_a_round() -> None:
    (first, is_as_before), (second, _) = run_ranks(2, _norms)
    assert [one == other for one, other in zip(first, second, strict=True)] == [False, False, False, True]
    assert is_as_before


def _resumed(rank: int, states: list[tuple[Any, Any, Any]] | None, steps: range, period: int) -> tuple[Any, ...]:
    """Train from a checkpoint of this rank, or from the start. Return the next checkpoint and the parameters."""
    model = DistributedDataParallel(_model())
    attachment = cgx_ray.attach(model, codec="topk:density=0.2", scheme="allgather", period=period)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if states is not None:
        weights, moments, state = states[rank]
        model.module.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        attachment.load_state_dict(state)
    for step in steps:
        _step(model, optimizer, rank, step, torch.float32)
    # These are the tensors that the training goes on with.
    state = copy.deepcopy((model.module.state_dict(), optimizer.state_dict(), attachment.state_dict()))
    attachment.close()
    return state, _flat(model)


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(STEPS_TOGETHER - 3, id="before", marks=pytest.mark.slow),
        pytest.param(STEPS_TOGETHER + 2, id="within"),
        pytest.param(STEPS_TOGETHER + 4, id="after", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_within_a_round_goes_on_bit_for_bit(stop: int) -> None:
    end = STEPS_TOGETHER + 9
    whole = run_ranks(2, _resumed, None, range(end), 4)
    first = run_ranks(2, _resumed, None, range(stop), 4)
    rest = run_ranks(2, _resumed, [state for state, _ in first], range(stop, end), 4)
    assert [parameters for _, parameters in rest] == [parameters for _, parameters in whole]
    # Within a round, ranks hold other parameters: nothing was averaged to save them.
    assert (whole[0][1] == whole[1][1]) == ((end - STEPS_TOGETHER) % 4 == 0)


# Steps in which gradients of one rank are not finite. In the first, ranks begin to train alone.
OVERFLOWS = (47, 48, 53)


def _switched(rank: int, scale: float | None) -> tuple[list[list[float]], list[int], int]:
    """Hold plans of several periods. Return parameters and plan versions by step, and how many residuals are left.

    scale  first one of a GradScaler that doubles it in every 10th step; None: without. With one, OVERFLOWS are skipped
    """
    model = DistributedDataParallel(nn.Linear(2000, 1, bias=False))
    with torch.no_grad():
        model.module.weight.zero_()
    layers = cgx_ray.layers_of(model)
    attachment = cgx_ray.attach(model, codec="topk:density=0.1", scheme="allgather")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=10, enabled=scale is not None)
    x_1N = torch.randn(1, 2000, generator=torch.Generator().manual_seed(rank))
    plans = {45: ("topk:density=0.1", 4), 70: ("none", 1), 80: ("topk:density=0.05", 8), 110: ("none", 1)}
    parameters, versions = [], []
    for step in range(140):
        if step in plans:
            codec, period = plans[step]
            version = 1 + list(plans).index(step)
            attachment.hold(cgx_ray.make_plan(layers, version=version, world_size=2, codec=codec, period=period))
        optimizer.zero_grad()
        has_overflow = scale is not None and step in OVERFLOWS and rank == 1
        scaler.scale(model(x_1N).sum() * (float("inf") if has_overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        parameters.append(_flat(model))
        assert attachment.plan is not None
        versions.append(attachment.plan.version)
    state = attachment.state_dict()
    attachment.close()
    return parameters, versions, len(state["residuals"]) + len(state["changes"]["residuals"])


@pytest.mark.parametrize("scale", [None, 4.0])
def test_nothing_is_lost_when_the_period_changes(scale: float | None) -> None:
    (first, versions, num_left), (second, others, _) = run_ranks(2, _switched, scale)
    assert versions == others
    assert sorted(set(versions)) == [0, 1, 2, 3, 4]
    assert first[-1] == second[-1]
    assert num_left == 0
    x_RN = torch.stack([torch.randn(2000, generator=torch.Generator().manual_seed(rank)) for rank in range(2)])
    # Each step's gradient is the same, so it must have come through 140 times, whatever the plan was.
    num_steps = 140 if scale is None else 140 - len(OVERFLOWS)
    torch.testing.assert_close(torch.tensor(first[-1]).float(), -0.5 * num_steps * x_RN.mean(0), rtol=1e-4, atol=1e-3)
    assert versions[OVERFLOWS[0] - 1] == 1, "the first overflow was not in the first step of rounds"

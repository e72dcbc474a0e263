"""The estimate of rho, and optimizers while ranks train alone, without processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cgx_ray.engine.period.local_optimizers import LocalOptimizers
from cgx_ray.engine.period.rho import MAX_FOLDED, MAX_STEPS, NUM_SUMS, Fold, Rho

HOST = torch.device("cpu")


def _gradients(num_ranks: int, signal: float, numel: int, step: int) -> list[Tensor]:
    """Return gradients of ranks: the same signal, and noise of norm 1 each."""
    generator = torch.Generator().manual_seed(step)
    common_N = torch.randn(numel, generator=generator) * signal / numel**0.5
    return [common_N + torch.randn(numel, generator=generator) / numel**0.5 for _ in range(num_ranks)]


@pytest.mark.parametrize(
    ("signal", "num_ranks", "numel"),
    [(0.0, 2, 20_000), (0.3, 8, 20_000), (1.0, 8, 20_000), (10.0, 2, 20_000), (1.0, 2, MAX_FOLDED + 100)],
)
def test_rho_is_found_within_ten_percent(signal: float, num_ranks: int, numel: int) -> None:
    folds = [Fold({"a": numel - 7, "b": 7}, HOST) for _ in range(num_ranks)]
    rho = Rho(num_ranks)
    true = []
    for step in range(12):
        gradients = _gradients(num_ranks, signal, numel, step)
        messages = []
        for fold, gradient_N in zip(folds, gradients, strict=True):
            for name, part in zip("ab", gradient_N.split([numel - 7, 7]), strict=True):
                fold.add(name, part)
            messages.append(Rho.message(fold.take()[None]))
        rho.add(torch.stack(messages).mean(0))
        mean_N = torch.stack(gradients).mean(0)
        true.append(float(mean_N.square().sum()) * num_ranks / sum(float(one.square().sum()) for one in gradients))
    expected = (sum(true) / len(true)) ** 0.5
    assert rho.value == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("num_steps", [1, 8, 9, 64])
def test_a_long_round_sends_the_folds_of_some_steps(num_steps: int) -> None:
    folds_SK = torch.arange(num_steps, dtype=torch.float32)[:, None].expand(num_steps, NUM_SUMS)
    message = Rho.message(folds_SK)
    num_sent = min(num_steps, MAX_STEPS)
    assert message.shape == (num_sent * (NUM_SUMS + 1),)
    sent = message[: num_sent * NUM_SUMS : NUM_SUMS].tolist()
    assert sent == sorted(set(sent)), "each once"
    assert sent[-1] == num_steps - 1
    assert message[-num_sent:].tolist() == [NUM_SUMS * step**2 for step in sent]


def test_before_any_step_rho_is_that_of_noise_and_steps_that_say_nothing_change_nothing() -> None:
    rho = Rho(4)
    assert rho.value == 0.5
    for square in (0.0, float("nan"), float("inf")):
        rho.add(torch.tensor([square**0.5] * NUM_SUMS + [square * NUM_SUMS], dtype=torch.float64))
    assert rho.value == 0.5
    rho.add(torch.tensor([1.0] * NUM_SUMS + [NUM_SUMS], dtype=torch.float64))
    assert rho.value == 1.0
    again = Rho(4)
    again.load(rho.state(), 4)
    assert again.value == 1.0


@settings(deadline=None, max_examples=30)
@given(numels=st.lists(st.integers(1, 3 * NUM_SUMS), min_size=1, max_size=4), seed=st.integers(0, 9))
def test_a_fold_is_linear_and_takes_any_size_and_layout(numels: list[int], seed: int) -> None:
    named = {str(place): numel for place, numel in enumerate(numels)}
    generator = torch.Generator().manual_seed(seed)
    both = [{name: torch.randn(numel, 2, generator=generator)[:, 0] for name, numel in named.items()} for _ in range(2)]
    folds = []
    for gradients in (*both, {name: both[0][name] + 2 * both[1][name] for name in named}):
        fold = Fold(named, HOST)
        for name, gradient in gradients.items():
            fold.add(name, gradient)
        folds.append(fold.take())
        assert not fold.take().any()
    torch.testing.assert_close(folds[0] + 2 * folds[1], folds[2], rtol=1e-4, atol=1e-4)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.0, eps=0.0),
    "amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True, eps=0.0),
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1, eps=0.0),
}


def _stepped(make: Callable[[Any], torch.optim.Optimizer], rho: float | None, num_steps: int) -> Tensor:
    """Return a parameter after steps with gradients that are multiplied by `rho`, None for none."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 50))
    optimizer = make([parameter])
    followed = LocalOptimizers({"a": parameter}, lambda: None) if rho is not None else None
    if followed is not None:
        assert rho is not None
        followed.rho = rho
    for step in range(num_steps):
        gradient_N = torch.randn(50, generator=torch.Generator().manual_seed(step))
        parameter.grad = gradient_N * (rho if rho is not None else 1.0)
        optimizer.step()
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0].get("maximize")) == (0.1, False)
    if followed is not None:
        followed.close()
    return parameter.detach()


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov"])
def test_rho_changes_no_step_of_sgd(name: str) -> None:
    torch.testing.assert_close(_stepped(OPTIMIZERS[name], 0.5, 9), _stepped(OPTIMIZERS[name], None, 9))


@pytest.mark.parametrize("name", ["adam", "amsgrad"])
def test_rho_lengthens_steps_of_adam_which_divides_by_the_size_of_gradients(name: str) -> None:
    start = torch.linspace(-1, 1, 50)
    alone, usual = (_stepped(OPTIMIZERS[name], rho, 9) - start for rho in (0.5, None))
    torch.testing.assert_close(alone, 2 * usual)


def test_adamw_decays_as_usual() -> None:
    def decayed(rho: float | None) -> Tensor:
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5)
        followed = LocalOptimizers({"a": parameter}, lambda: None)
        followed.rho = rho or 1.0
        parameter.grad = torch.zeros(3)
        optimizer.step()
        followed.close()
        return parameter.detach()

    torch.testing.assert_close(decayed(0.25), decayed(None))


def test_a_step_that_raises_leaves_the_users_learning_rate() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    followed = LocalOptimizers({"a": parameter}, lambda: None)
    followed.rho = 0.5

    def fails() -> float:
        raise ValueError("closure")

    for _ in range(2):
        with pytest.raises(ValueError, match="closure"):
            optimizer.step(fails)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    followed.close()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_first_moment_is_that_of_gradients_times_rho_also_when_rho_changes(name: str) -> None:
    """With constant gradients, no step is longer or shorter because rho has changed."""
    parameter = nn.Parameter(torch.zeros(4))
    make = {"momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "adam": OPTIMIZERS["adam"]}[name]
    optimizer = make([parameter])
    gradient_N = torch.tensor([1.0, 2.0, 0.5, 3.0])
    moved = []

    def step(rho: float) -> None:
        before_N = parameter.detach().clone()
        parameter.grad = gradient_N * rho
        optimizer.step()
        moved.append(parameter.detach() - before_N)

    for _ in range(200):
        step(1.0)
    followed = LocalOptimizers({"a": parameter}, lambda: None)
    for rho in (0.5, 0.5, 0.25, 0.25):
        followed.rho = rho
        step(rho)
    assert followed.moments_rho == 0.25
    followed.close()
    step(1.0)
    *alone, after = moved[-5:]
    # Adam's second moment keeps the size of mean gradients, which those of one rank times rho have.
    for index, change_N in enumerate(alone if name == "momentum" else alone[:1]):
        torch.testing.assert_close(change_N, moved[199], rtol=5e-3, atol=0, msg=str(index))
    if name == "momentum":
        torch.testing.assert_close(after, moved[199], rtol=1e-3, atol=0)


def test_a_wrapper_that_shares_groups_scales_a_rate_once() -> None:
    parameter = nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([parameter], lr=0.1)
    seen = []

    class Wrapper(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([parameter], {"lr": 0.1})
            self.param_groups = inner.param_groups

        def step(self, closure: Any = None) -> None:
            seen.append(self.param_groups[0]["lr"])
            inner.step()

    followed = LocalOptimizers({"a": parameter}, lambda: seen.append(inner.param_groups[0]["lr"]))
    followed.rho = 0.5
    parameter.grad = torch.ones(3)
    Wrapper().step()
    followed.close()
    assert seen == [pytest.approx(0.2), pytest.approx(0.2), pytest.approx(0.1)]
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.8))

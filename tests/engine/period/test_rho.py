"""The estimate of rho, and optimizers while ranks train alone, without processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cgx_ray.engine.period.local_optimizers import LocalOptimizers
from cgx_ray.engine.period.rho import LEVEL, MAX_FOLDED, MAX_NUMBERS, MAX_STEPS, MOST_SUMS, Fold, Rho, num_sums

HOST = torch.device("cpu")


def _gradients(num_ranks: int, signal: float, numel: int, step: int, layer: str = "") -> list[Tensor]:
    """Return gradients of ranks: the same signal, and noise of norm 1 each."""
    generator = torch.Generator().manual_seed(step + 1000 * len(layer))
    common_N = torch.randn(numel, generator=generator) * signal / numel**0.5
    return [common_N + torch.randn(numel, generator=generator) / numel**0.5 for _ in range(num_ranks)]


@pytest.mark.parametrize(
    ("signal", "num_ranks", "numel"),
    [(0.0, 2, 20_000), (0.3, 8, 20_000), (1.0, 8, 20_000), (10.0, 2, 20_000), (1.0, 2, MAX_FOLDED + 100)],
)
def test_rho_of_each_layer_is_found_within_fifteen_percent(signal: float, num_ranks: int, numel: int) -> None:
    signals = {"a": signal, "bb": 2 * signal + 0.1}
    folds = [Fold(dict.fromkeys(signals, numel), HOST) for _ in range(num_ranks)]
    rho, true = Rho(num_ranks, list(signals)), dict.fromkeys(signals, 0.0)
    for step in range(12):
        for name, own in signals.items():
            gradients = _gradients(num_ranks, own, numel, step, name)
            for fold, gradient_N in zip(folds, gradients, strict=True):
                fold.add(name, gradient_N)
            mean_N = torch.stack(gradients).mean(0)
            squares = sum(float(one.square().sum()) for one in gradients) / num_ranks
            true[name] += float(mean_N.square().sum()) / squares / 12
        rho.add(torch.stack([Rho.message(fold.take()[None]) for fold in folds]).mean(0))
    # Estimates err by a tenth, and are rounded to levels.
    assert rho.by_layer == {name: pytest.approx(square**0.5, rel=0.15) for name, square in true.items()}
    assert min(rho.by_layer.values()) <= rho.whole["a"] * LEVEL
    assert rho.whole["a"] == rho.whole["bb"] <= max(rho.by_layer.values()) * LEVEL


def test_layers_of_less_than_a_line_in_a_large_model_are_known_too() -> None:
    numels = {"w": 2 * MAX_FOLDED, "bias": 10}
    rho = Rho(4, list(numels))
    fold, generator = Fold(numels, HOST), torch.Generator().manual_seed(0)
    for _ in range(20):
        for name, numel in numels.items():
            fold.add(name, torch.randn(numel, generator=generator))
        # All ranks have the same.
        rho.add(Rho.message(fold.take()[None]))
    assert rho.by_layer == {"w": 1.0, "bias": 1.0}


def test_first_estimates_of_many_layers_are_near_the_later_ones() -> None:
    """With few sums a single step says little, so it does not replace what is assumed before."""
    names = [str(place) for place in range(300)]
    folds = [Fold(dict.fromkeys(names, 64), HOST) for _ in range(4)]
    rho, generator = Rho(4, names), torch.Generator().manual_seed(0)
    for fold in folds:
        for name in names:
            fold.add(name, torch.randn(64, generator=generator))
    rho.add(torch.stack([Rho.message(fold.take()[None]) for fold in folds]).mean(0))
    values = sorted(rho.by_layer.values())
    assert values[285] <= 0.5 * 1.25
    assert rho.whole["0"] == pytest.approx(0.5, rel=0.05)


def test_many_layers_have_few_levels_of_rho() -> None:
    names = [str(place) for place in range(300)]
    rho = Rho(16, names)
    rho.load([*(place / 300 for place in range(301)), *[10.0] * 301], 16)
    assert max(rho.by_layer.values()) == 1
    assert min(rho.by_layer.values()) == 1 / 4
    assert len(set(rho.by_layer.values())) <= 2 + math.log(4) / math.log(LEVEL)
    assert all(abs(rho.by_layer[name] / max((int(name) / 300) ** 0.5, 0.25) - 1) < LEVEL - 1 for name in names)


@pytest.mark.parametrize("num_layers", [1, 5, 100, 500])
@pytest.mark.parametrize("num_steps", [1, 8, 9, 64])
def test_a_long_round_sends_the_folds_of_some_steps(num_steps: int, num_layers: int) -> None:
    shape = num_steps, num_layers, num_sums(num_layers)
    folds_SLK = torch.arange(num_steps, dtype=torch.float32)[:, None, None].expand(shape)
    message_MLK = Rho.message(folds_SLK).view(-1, num_layers, shape[2] + 1)
    assert message_MLK.numel() <= max(MAX_NUMBERS, num_layers * (shape[2] + 1))
    assert len(message_MLK) <= min(num_steps, MAX_STEPS)
    sent = message_MLK[:, 0, 0].tolist()
    assert sent == sorted(set(sent)), "each once"
    assert sent[-1] == num_steps - 1
    assert message_MLK[:, -1, -1].tolist() == [shape[2] * step**2 for step in sent]


def test_before_any_step_rho_is_that_of_noise_and_steps_that_say_nothing_change_nothing() -> None:
    rho, num = Rho(4, ["a", "b"]), num_sums(2)

    def add(a: float, b: float) -> None:
        rho.add(torch.tensor([one for square in (a, b) for one in [square**0.5] * num + [square * num]]).double())

    assert rho.by_layer == rho.whole == {"a": 0.5, "b": 0.5}
    for square in (0.0, float("nan"), float("inf")):
        add(square, square)
    assert rho.by_layer == rho.whole == {"a": 0.5, "b": 0.5}
    assert rho.state() is None
    for _ in range(50):
        add(0.0, 1.0)
    assert rho.by_layer == {"a": 0.5, "b": 1.0}
    again = Rho(4, ["a", "b"])
    again.load(rho.state(), 4)
    assert (again.by_layer, again.whole) == (rho.by_layer, rho.whole)
    # A checkpoint of an earlier version has one for all, and that of other layers says nothing.
    again.load(1.0, 4)
    assert again.by_layer == again.whole == {"a": 1.0, "b": 1.0}
    other = Rho(4, ["a"])
    other.load(rho.state(), 4)
    assert other.by_layer == {"a": 0.5}


@settings(deadline=None, max_examples=30)
@given(numels=st.lists(st.integers(1, 3 * MOST_SUMS), min_size=1, max_size=4), seed=st.integers(0, 9))
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
        followed.rho = {"a": rho}
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
        followed.rho = {"a": rho or 1.0}
        parameter.grad = torch.zeros(3)
        optimizer.step()
        followed.close()
        return parameter.detach()

    torch.testing.assert_close(decayed(0.25), decayed(None))


def test_a_step_that_raises_leaves_the_users_learning_rate() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    followed = LocalOptimizers({"a": parameter}, lambda: None)
    followed.rho = {"a": 0.5}

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
        followed.rho = {"a": rho}
        step(rho)
    assert followed.moments_rho == {"a": 0.25}
    followed.close()
    step(1.0)
    *alone, after = moved[-5:]
    # Adam's second moment keeps the size of mean gradients, which those of one rank times rho have.
    for index, change_N in enumerate(alone if name == "momentum" else alone[:1]):
        torch.testing.assert_close(change_N, moved[199], rtol=5e-3, atol=0, msg=str(index))
    if name == "momentum":
        torch.testing.assert_close(after, moved[199], rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_layers_of_one_group_step_by_their_own_rho_and_the_group_stays_the_users(name: str) -> None:
    """As in groups of their own; with another parameter, which is not the model's."""
    gradients = [torch.randn(3, 20, generator=torch.Generator().manual_seed(step)) for step in range(6)]
    rhos = [{"a": 0.5, "b": 1.0}, {"a": 0.5, "b": 0.7}, {"a": 0.7, "b": 0.7}]

    def trained(num_groups: int) -> tuple[list[Tensor], list[dict[str, Any]]]:
        parameters = [nn.Parameter(torch.linspace(-1, 1, 20)) for _ in range(3)]
        groups = [parameters] if num_groups == 1 else [[one] for one in parameters]
        optimizer = OPTIMIZERS[name]([{"params": group} for group in groups])
        before, shared = [dict(group) for group in optimizer.param_groups], list(optimizer.param_groups)
        followed = LocalOptimizers(dict(zip("ab", parameters, strict=False)), lambda: None)
        for step, gradient_PN in enumerate(gradients):
            followed.rho = rhos[step // 2]
            for parameter, own, layer in zip(parameters, gradient_PN, "abc", strict=True):
                parameter.grad = own * followed.rho.get(layer, 1.0)
            optimizer.step()
            assert all(one is other for one, other in zip(optimizer.param_groups, shared, strict=True))
            assert [dict(group) for group in optimizer.param_groups] == before
        followed.close()
        return [one.detach() for one in parameters], optimizer.param_groups

    together, apart = trained(1), trained(3)
    torch.testing.assert_close(together[0], apart[0])
    assert len(together[1]) == 1


@pytest.mark.parametrize("is_list_shared", [False, True])
def test_a_wrapper_of_a_group_whose_layers_differ_scales_rates_once(is_list_shared: bool) -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    inner = torch.optim.SGD(parameters, lr=0.1)

    class Wrapper(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(parameters, {"lr": 0.1})
            self.param_groups = inner.param_groups if is_list_shared else list(inner.param_groups)

        def step(self, closure: Any = None) -> None:
            inner.step()

    followed = LocalOptimizers(dict(zip("ab", parameters, strict=True)), lambda: None)
    followed.rho = {"a": 0.5, "b": 0.25}
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    Wrapper().step()
    followed.close()
    # One that is not torch's bears no other groups, so that its layers have one rho until the round's end.
    assert [float(parameter[0].detach()) for parameter in parameters] == [pytest.approx(0.8), pytest.approx(0.8)]
    assert [group["lr"] for group in inner.param_groups] == [0.1]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_step_that_raises_leaves_a_state_with_the_users_groups(is_loaded: bool) -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    saved = optimizer.state_dict()
    followed = LocalOptimizers(dict(zip("ab", parameters, strict=True)), lambda: None)
    followed.rho = {"a": 0.5, "b": 0.25}

    def fails() -> float:
        raise ValueError("closure")

    with pytest.raises(ValueError, match="closure"):
        optimizer.step(fails)
    assert len(optimizer.param_groups) == 2
    if is_loaded:
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == saved["param_groups"]
    followed.close()
    (group,) = optimizer.param_groups
    assert (group["lr"], group["params"]) == (0.1, parameters)


def test_rho_differs_by_layer_only_under_optimizers_of_torch_that_take_any_groups() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]

    class Own(torch.optim.SGD):
        """Counts in its groups, maybe."""

    def may_differ(*optimizers: torch.optim.Optimizer) -> list[bool]:
        followed, found = LocalOptimizers(dict(zip("ab", parameters, strict=True)), lambda: None), []
        for optimizer in optimizers:
            found.append(followed.may_differ)
            optimizer.step(lambda: 0.0)
        followed.close()
        return [*found, followed.may_differ]

    adam, sgd, own = (make(parameters, lr=0.1) for make in (torch.optim.Adam, torch.optim.SGD, Own))
    lbfgs = torch.optim.LBFGS(parameters[:1], lr=0.1)
    parameters[0].grad = parameters[1].grad = torch.ones(3)
    assert may_differ(adam, sgd, adam) == [False, True, True, True]
    assert may_differ(own, adam) == [False, False, False]
    assert may_differ(adam, own, adam) == [False, True, False, False]
    assert may_differ(adam) == [False, True]
    followed = LocalOptimizers({"a": parameters[0]}, lambda: None)
    lbfgs.step(lambda: float(parameters[0].detach().sum()))
    assert not followed.may_differ
    followed.close()


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
    followed.rho = {"a": 0.5}
    parameter.grad = torch.ones(3)
    Wrapper().step()
    followed.close()
    assert seen == [pytest.approx(0.2), pytest.approx(0.2), pytest.approx(0.1)]
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.8))

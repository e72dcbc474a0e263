"""Ranks that have trained alone, and exchange gradients again: their optimizers go on alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, are_alike, batch
from support.ranks import run_cases
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.plan import STEPS_TOGETHER

# Period from a step on, and codec.
PLANS = {50: (4, "qsgd:bits=4"), 67: (1, "qsgd:bits=4"), 85: (8, "none"), 114: (1, "none"), 131: (2, "none")}
NUM_STEPS = 145

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Counting(torch.optim.SGD):
    """Keeps whole numbers, as optimizers of 8 bits do: means of them would mean nothing."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    signs = self.state[parameter].setdefault("signs", torch.zeros_like(parameter, dtype=torch.int8))
                    signs.add_(parameter.grad.sign().to(torch.int8)).clamp_(-9, 9)
                    parameter.add_(signs, alpha=-group["lr"])


class _Wrapper(torch.optim.Optimizer):
    """Calls AdamW and follows the weights, as Lookahead does."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.inner = torch.optim.AdamW(parameters, lr=0.01)
        super().__init__(parameters, {})
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                parameter.copy_(slow.lerp_(parameter, 0.5))


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.001, momentum=0.9),
    "whole numbers": partial(Counting, lr=1e-4),
}


def _train(
    rank: int, make: MakeOptimizer, *, ddp: dict[str, bool], two: bool = False, has_closure: bool = False
) -> list[tuple[int, bool]]:
    """Return for each step its period, and whether the ranks' parameters are alike in its backward pass."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), **ddp)
    attachment = cgx_ray.attach(model, codec="none", scheme="sra")
    layers, world_size = cgx_ray.layers_of(model), dist.get_world_size()
    *most, last = model.parameters()
    optimizers = [make(most), make([last])] if two else [make(list(model.parameters()))]
    found = []
    for step in range(NUM_STEPS):
        if step in PLANS:
            period, codec = PLANS[step]
            version = 1 + list(PLANS).index(step)
            plan = cgx_ray.make_plan(layers, version=version, world_size=world_size, codec=codec, period=period)
            attachment.hold(plan)

        def closure() -> float:
            model.zero_grad()
            # Most ranks do not use the layer `right` in later steps, so that its optimizer leaves it out there.
            uses_right = "find_unused_parameters" not in ddp or rank == 1 or step < 60  # noqa: B023
            model(batch(rank, step), use_right=uses_right).square().mean().backward()  # noqa: B023
            assert attachment.plan is not None
            found.append((attachment.plan.period, are_alike(model)))
            return 0.0

        if has_closure:
            optimizers[0].step(closure)
        else:
            closure()
            for place, optimizer in enumerate(optimizers):
                # The second one steps in some steps only, and then maybe after a round's end.
                if place == 0 or step % 3 == 0:
                    optimizer.step()
        with torch.no_grad():
            model(batch(rank, step))
    attachment.end_round()
    assert are_alike(model)
    attachment.close()
    return found


CASES = {name: partial(_train, make=make, ddp={}) for name, make in OPTIMIZERS.items()}
CASES["two optimizers"] = partial(_train, make=OPTIMIZERS["adamw"], ddp={}, two=True)
CASES["closure"] = partial(_train, make=OPTIMIZERS["adamw"], ddp={}, has_closure=True)
CASES["wrapper"] = partial(_train, make=_Wrapper, ddp={})
# Within rounds, a layer that a rank does not use has no state there.
CASES["unused layers"] = partial(_train, make=OPTIMIZERS["adamw"], ddp={"find_unused_parameters": True})


@pytest.mark.parametrize("num_ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_are_alike_in_all_steps_that_exchange_gradients(num_ranks: int) -> None:
    for name, results in zip(CASES, run_cases(num_ranks, list(CASES.values())), strict=True):
        for result in results:
            assert not isinstance(result, Exception), (name, result)
            unlike = [period for period, is_alike in result if not is_alike]
            assert {4, 8, 2} == set(unlike), name
            assert [period for period, _ in result].count(1) > STEPS_TOGETHER + 25


def _resumed(rank: int, num_alone: int, has_closure: bool) -> list[bool]:
    """Train with period 4, go on from there with period 1; return whether the ranks are alike after each step."""
    torch.manual_seed(0)
    states: list[object] = []
    for period, steps in ((4, range(STEPS_TOGETHER + num_alone)), (1, range(100, 120))):
        model = DistributedDataParallel(Branches())
        attachment = cgx_ray.attach(model, codec="none", scheme="sra", period=period)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for part, state in zip((model, optimizer, attachment), states, strict=False):
            part.load_state_dict(state)
        alike = []
        for step in steps:

            def closure() -> float:
                model.zero_grad()  # noqa: B023
                model(batch(rank, step)).square().mean().backward()  # noqa: B023
                return 0.0

            if has_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            alike.append(are_alike(model))
        states = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, attachment)]
        attachment.close()
    return alike


RESUMED = {(n, closure): partial(_resumed, num_alone=n, has_closure=closure) for n in (4, 5) for closure in (0, 1)}


def test_ranks_are_alike_when_they_go_on_from_a_checkpoint_of_rounds() -> None:
    for case, results in zip(RESUMED, run_cases(2, list(RESUMED.values())), strict=True):
        assert results == [[True] * 20] * 2, case


def _without_its_optimizer(rank: int) -> bool:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="none", scheme="sra", period=100)

    def train_some() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS_TOGETHER + 3):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()

    train_some()
    attachment.end_round()
    is_alike = are_alike(model)
    attachment.close()
    return is_alike


def test_a_round_can_be_ended_when_its_optimizer_is_gone() -> None:
    (results,) = run_cases(2, [_without_its_optimizer])
    assert results == [True, True]

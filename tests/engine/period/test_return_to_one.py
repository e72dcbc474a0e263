"""Ranks that have trained alone, and exchange gradients again: their optimizers go on alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, batch
from support.ranks import run_cases
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.plan import STEPS_TOGETHER

# Period from a step on, and codec.
PLANS = {50: (4, "qsgd:bits=4"), 91: (1, "qsgd:bits=4"), 140: (8, "none"), 201: (1, "none"), 250: (2, "none")}
NUM_STEPS = 300

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


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.001, momentum=0.9),
    "whole numbers": partial(Counting, lr=1e-4),
}


def _train(rank: int, make: MakeOptimizer, *, ddp: dict[str, bool], two: bool = False) -> list[tuple[int, bool]]:
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
        model.zero_grad()
        # Most ranks do not use the layer `right` in later steps, so that its optimizer leaves it out there.
        uses_right = "find_unused_parameters" not in ddp or rank == 1 or step < 60
        model(batch(rank, step), use_right=uses_right).square().mean().backward()
        assert attachment.plan is not None
        found.append((attachment.plan.period, _are_alike(model)))
        for place, optimizer in enumerate(optimizers):
            # The second one steps in some steps only, and then maybe after a round's end.
            if place == 0 or step % 3 == 0:
                optimizer.step()
        with torch.no_grad():
            model(batch(rank, step))
    attachment.end_round()
    assert _are_alike(model)
    attachment.close()
    return found


def _are_alike(model: DistributedDataParallel) -> bool:
    mine = torch.cat([one.detach().flatten() for one in model.parameters()])
    of_ranks: list[Tensor] = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    return all(torch.equal(mine, other) for other in of_ranks)


CASES = {name: partial(_train, make=make, ddp={}) for name, make in OPTIMIZERS.items()}
CASES["two optimizers"] = partial(_train, make=OPTIMIZERS["adamw"], ddp={}, two=True)
# Within rounds, a layer that a rank does not use has no state there.
CASES["unused layers"] = partial(_train, make=OPTIMIZERS["adamw"], ddp={"find_unused_parameters": True})


@pytest.mark.parametrize("num_ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_are_alike_in_all_steps_that_exchange_gradients(num_ranks: int) -> None:
    for name, results in zip(CASES, run_cases(num_ranks, list(CASES.values())), strict=True):
        for result in results:
            assert not isinstance(result, Exception), (name, result)
            unlike = [period for period, is_alike in result if not is_alike]
            assert {4, 8, 2} == set(unlike), name
            assert [period for period, _ in result].count(1) > STEPS_TOGETHER + 80

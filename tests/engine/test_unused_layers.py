"""Residuals of layers that a step does not use, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.codecs.codec import KINDS
from cgx_ray.plan import CodecSpec, Scheme

FED_BACK = [
    ("topk:density=0.05", "allgather"),
    ("topk:density=0.05", "artopk_ring"),
    ("randomk:density=0.05", "allreduce"),
    ("powersgd:rank=2", "allreduce"),
    ("ef_signsgd", "sra"),
    ("qsgd:bits=2,rounding=nearest", "ring"),
]
NUM_STEPS = 9
Result = dict[str, dict[str, torch.Tensor]]


class Towers(nn.Module):
    """Two layers with gradients that do not depend on their weights; a pass may leave out the second layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(50, 40, bias=False), nn.Linear(50, 30, bias=False)

    def forward(self, x_BD: torch.Tensor, use_right: bool) -> torch.Tensor:
        left: torch.Tensor = (self.left(x_BD) * gains(x_BD, 40)).sum()
        return left + (self.right(x_BD) * gains(x_BD, 30)).sum() if use_right else left


def gains(x_BD: torch.Tensor, num_rows: int) -> torch.Tensor:
    seed = int(x_BD[0, 0].abs() * 1e6)
    return torch.randn(len(x_BD), num_rows, generator=torch.Generator().manual_seed(seed))


class Trainer:
    """Adds up the gradients that the model got and those that it should have got."""

    def __init__(self, rank: int, codec: str, scheme: str, *, transport: str = "tcp", **ddp: Any) -> None:
        self.rank, self.plain = rank, Towers()
        self.model = DistributedDataParallel(Towers(), **ddp)
        self.attachment = cgx_ray.attach(self.model, codec=codec, scheme=scheme, transport=transport)
        self.applied, self.true = (
            {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.plain.named_parameters()}
            for _ in range(2)
        )

    def step(self, step: int, *, use_right: bool, set_to_none: bool = True) -> None:
        x_BD = torch.randn(8, 50, generator=torch.Generator().manual_seed(100 * self.rank + step))
        for module, sums in ((self.plain, self.true), (self.model, self.applied)):
            module.zero_grad(set_to_none=set_to_none)
            module(x_BD, use_right).backward()
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    sums[name.removeprefix("module.")] += parameter.grad

    def result(self) -> Result:
        state = self.attachment.state_dict()
        self.attachment.close()
        owed = {
            name: state["residuals"].get(name, torch.zeros(true.numel())).double().view_as(true)
            for name, true in self.true.items()
        }
        return {"applied": self.applied, "true": self.true, "owed": owed}


def errors(results: list[Result]) -> dict[str, float]:
    """Return by layer |applied + mean residual - mean of the true sums| / |mean of the true sums|."""
    means = {
        kind: {name: torch.stack([result[kind][name] for result in results]).mean(0) for name in results[0][kind]}
        for kind in ("applied", "true", "owed")
    }
    return {
        name: float((means["applied"][name] + means["owed"][name] - true).norm() / true.norm())
        for name, true in means["true"].items()
    }


def _train(rank: int, codec: str, scheme: str, ddp: dict[str, Any], unused_on: list[int], set_to_none: bool) -> Result:
    trainer = Trainer(rank, codec, scheme, **ddp)
    for step in range(NUM_STEPS):
        # In the last step as well.
        use_right = step % 4 != 0 or rank not in unused_on
        trainer.step(step, use_right=use_right, set_to_none=set_to_none)
    return trainer.result()


# Relative rounding errors of nine sums in float32, with a few roundings in each encoding.
MAX_ERROR = 1e-5


@pytest.mark.fault("layers that no rank uses for some steps", "they keep their residuals")
@pytest.mark.parametrize(("codec", "scheme"), FED_BACK)
def test_a_layer_that_no_rank_used_keeps_what_it_is_owed(codec: str, scheme: str) -> None:
    results = run_ranks(2, _train, codec, scheme, {"find_unused_parameters": True}, [0, 1], True)
    found = errors(results)
    assert max(found.values()) <= MAX_ERROR, found
    assert all(float(owed.abs().max()) > 0 for owed in results[0]["owed"].values())


def test_a_layer_that_no_rank_used_keeps_what_it_is_owed_over_gloo() -> None:
    ddp = {"find_unused_parameters": True, "transport": "gloo"}
    found = errors(run_ranks(3, _train, "ef_signsgd", "sra", ddp, [0, 1, 2], True))
    assert max(found.values()) <= MAX_ERROR, found


@pytest.mark.parametrize("unused_on", [[0, 1], [1], []])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("as_view", [True, False])
def test_whatever_ranks_used_and_wherever_gradients_lie_nothing_is_lost(
    unused_on: list[int], set_to_none: bool, as_view: bool
) -> None:
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": as_view}
    found = errors(run_ranks(2, _train, *FED_BACK[0], ddp, unused_on, set_to_none))
    assert max(found.values()) <= MAX_ERROR, found


def _momentum(rank: int) -> list[bool]:
    """Return by kind True if the memory of the unused layer is unchanged and that of the used layer is not."""
    trainer = Trainer(rank, "dgc:density=0.05", "allgather", find_unused_parameters=True)
    trainer.step(0, use_right=True)
    before = trainer.attachment.state_dict()
    trainer.step(1, use_right=False)
    after = trainer.attachment.state_dict()
    trainer.attachment.close()
    same = {(kind, name): torch.equal(before[kind][name], after[kind][name]) for kind in KINDS for name in before[kind]}
    assert len(same) == 4
    return [is_same == name.startswith("right") for (_, name), is_same in same.items()]


def test_momentum_of_a_layer_that_no_rank_used_stays_as_it_is() -> None:
    assert run_ranks(2, _momentum) == [[True] * 4] * 2


def _paid_later(rank: int, scheme: str) -> Result:
    """Use only one layer in the step in which the next plan adds the residuals to its gradients."""
    trainer = Trainer(rank, *FED_BACK[0], find_unused_parameters=True)
    plan = cgx_ray.make_plan(
        cgx_ray.layers_of(trainer.model),
        version=1,
        world_size=2,
        codec=CodecSpec.parse("none"),
        scheme=Scheme(scheme),
    )
    for step in range(6):
        if step == 1:
            trainer.attachment.hold(plan)
        trainer.step(step, use_right=step not in (2, 3, 4))
    assert trainer.attachment.last_step is not None
    assert trainer.attachment.last_step.plan_version == 1
    return trainer.result()


@pytest.mark.parametrize("scheme", ["dense", "sra"])
def test_a_plan_without_memory_pays_a_layer_once_it_is_used(scheme: str) -> None:
    results = run_ranks(2, _paid_later, scheme)
    found = errors(results)
    assert max(found.values()) <= MAX_ERROR, found
    assert all(float(owed.abs().max()) == 0 for owed in results[0]["owed"].values())


def _static(rank: int) -> Result:
    """Load a checkpoint with a residual for a layer that the static graph never uses."""
    trainer = Trainer(rank, *FED_BACK[0], static_graph=True)
    state = trainer.attachment.state_dict()
    state["residuals"]["right.weight"] = torch.arange(1500.0)
    trainer.attachment.load_state_dict(state)
    for step in range(3):
        trainer.step(step, use_right=False)
    return trainer.result()


def test_a_static_graph_keeps_what_is_owed_to_a_layer_it_never_uses() -> None:
    results = run_ranks(2, _static)
    assert errors(results)["left.weight"] <= MAX_ERROR
    for result in results:
        assert torch.equal(result["owed"]["right.weight"].view(-1), torch.arange(1500.0, dtype=torch.float64))

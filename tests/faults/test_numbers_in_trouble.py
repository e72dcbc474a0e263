"""A new plan takes effect around a step that is not finite: residuals are sent once, and on all ranks alike."""

from __future__ import annotations

import pytest
import torch
from support.ranks import run_ranks
from support.scaled_training import FED_BACK, MAX_ERROR, Run, Trainer, relative_error

import cgx_ray

HELD_AT = 2
NUM_STEPS = 8
# Codec and scheme of the new plan, and the largest relative error: fp16 rounds to 11 bits.
NEXT = [("none", "dense", MAX_ERROR), ("fp16", "allreduce", 1e-3), ("topk:density=0.1", "artopk_ring", MAX_ERROR)]


def _switch(rank: int, bad_step: int, codec: str, scheme: str) -> tuple[Run, list[int]]:
    """Change the plan while a gradient of rank 1 is NaN in `bad_step`; return the sums, and the plan of each step."""
    trainer = Trainer(rank, *FED_BACK[0])
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    layers, versions = cgx_ray.layers_of(trainer.model), []
    for step in range(NUM_STEPS):
        if step == HELD_AT:
            plan = cgx_ray.make_plan(layers, version=1, world_size=2, codec=codec, scheme=scheme)
            trainer.attachment.hold(plan)
        before = trainer.true.clone()
        loss = trainer.loss(step) * (float("nan") if step == bad_step and rank == 1 else 1.0)
        trainer.scaler.scale(loss).backward()
        trainer.scaler.unscale_(optimizer)
        if step == bad_step:
            assert trainer.layer.weight.grad is not None
            assert not bool(trainer.layer.weight.grad.isfinite().all())
            trainer.true = before
        else:
            # unscale_ has already divided the gradient by the scale.
            trainer.take(1.0)
        trainer.scaler.step(optimizer)
        trainer.scaler.update()
        trainer.layer.weight.grad = None
        assert trainer.attachment.last_step is not None
        versions.append(trainer.attachment.last_step.plan_version)
    return trainer.result(2.0**9), versions


@pytest.mark.fault("the plan changes around a step with NaN", "all ranks change in the same step; no residual is lost")
# In the step before the new plan is in force, in its first step, which sends the residuals, and in the next one.
@pytest.mark.parametrize("bad_step", [HELD_AT, HELD_AT + 1, HELD_AT + 2])
@pytest.mark.parametrize(("codec", "scheme", "max_error"), NEXT)
def test_a_plan_change_around_a_nan_step_loses_nothing(
    bad_step: int, codec: str, scheme: str, max_error: float
) -> None:
    (first, versions), (second, other_versions) = run_ranks(2, _switch, bad_step, codec, scheme)
    assert versions == other_versions == [0] * (HELD_AT + 1) + [1] * (NUM_STEPS - HELD_AT - 1)
    error = relative_error([first, second])
    assert error <= max_error, error

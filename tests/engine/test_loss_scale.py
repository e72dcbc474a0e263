"""The codecs' memory follows the loss scale: applied and owed stay the sum of all gradients, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.scaled_training import COLUMNS, FED_BACK, MAX_ERROR, ROWS, Run, Trainer, inputs, relative_error
from support.sharded import gradients_of, make_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard

import cgx_ray
from cgx_ray.plan import CodecSpec, Scheme

CONSTANT = [1024.0] * 8


SCALES = {
    "constant": CONSTANT,
    "halved": [1024.0] * 4 + [512.0] * 4,
    "halved five times": [1024.0, 1024.0, 512.0, 256.0, 128.0, 64.0, 32.0, 32.0],
    "doubled three times": [2.0, 2.0, 4.0, 4.0, 8.0, 16.0, 16.0, 16.0],
}


MOMENTUM = [("dgc:density=0.05", "allgather"), ("dgc:density=0.05,clip=20.0", "artopk_ring")]


def _train(rank: int, codec: str, scheme: str, scales: list[float]) -> Run:
    trainer = Trainer(rank, codec, scheme)
    for step, scale in enumerate(scales):
        trainer.step(step, scale)
    return trainer.result(scales[-1])


@pytest.mark.fault("the loss scale is halved or doubled", "residuals follow it; none is lost")
@pytest.mark.parametrize("name", SCALES)
def test_applied_and_owed_are_the_sum_of_gradients_whatever_the_scale_does(name: str) -> None:
    error = relative_error(run_ranks(2, _train, *FED_BACK[0], SCALES[name]))
    assert error <= MAX_ERROR, error


@pytest.mark.parametrize(("codec", "scheme"), FED_BACK + MOMENTUM)
def test_scales_that_are_powers_of_two_change_no_bit_of_what_the_model_gets(codec: str, scheme: str) -> None:
    first = run_ranks(2, _train, codec, scheme, [1.0] * 8)
    second = run_ranks(2, _train, codec, scheme, SCALES["halved five times"])
    for ours, plain in zip(second, first, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours["delivered"], plain["delivered"], strict=True))
        assert torch.equal(ours["owed"], plain["owed"])
    if "dgc" not in codec:
        # With momentum correction the model gets sums with momentum, not sums of gradients.
        assert relative_error(second) <= MAX_ERROR


def _train_then(rank: int, scheme: str) -> Run:
    """Change from top-k to a plan without memory, which adds the residuals to its gradients. The scale changes, too."""
    trainer = Trainer(rank, *FED_BACK[0])
    layers = cgx_ray.layers_of(trainer.model)
    plan = cgx_ray.make_plan(
        layers,
        version=1,
        world_size=2,
        codec=CodecSpec.parse("none" if scheme == "dense" else "fp16"),
        scheme=Scheme(scheme),
    )
    for step, scale in enumerate([64.0, 64.0, 32.0, 8.0, 4.0, 2.0]):
        if step == 2:
            trainer.attachment.hold(plan)
        trainer.step(step, scale)
    return trainer.result(2.0)


@pytest.mark.parametrize("scheme", ["dense", "allreduce"])
def test_residuals_that_the_next_plan_pays_are_paid_in_its_unit(scheme: str) -> None:
    results = run_ranks(2, _train_then, scheme)
    assert all(result["owed"].abs().max() == 0 for result in results)
    # fp16 has 11 bits of precision, so each of the steps with it may be off by 2^-11.
    assert relative_error(results) <= (MAX_ERROR if scheme == "dense" else 1e-3)


def _resume(rank: int, num_old: int) -> list[Run]:
    """Train with `num_old` ranks at scale 1024, then resume with two ranks at scale 4."""
    old = []
    for number in range(rank, num_old, 2):
        trainer = Trainer(number, "topk:density=0.05", "allgather")
        for step in range(3):
            trainer.step(step, 1024.0)
        old.append((trainer, {**trainer.attachment.state_dict(), "rank": number, "world_size": num_old}))
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, [state for _, state in old])
    new = Trainer(rank, "topk:density=0.05", "allgather")
    new.attachment.load_state_dict([state for states in everyones for state in states])
    for step in range(3, 6):
        new.step(step, 4.0)
    result = new.result(4.0)
    for trainer, _ in old:
        trainer.attachment.close()
    # Means over those old ranks that ran in this process: every second one.
    applied = torch.stack([trainer.applied for trainer, _ in old]).mean(0)
    true = torch.stack([trainer.true for trainer, _ in old]).mean(0)
    return [{**result, "true": result["true"] + true, "applied": result["applied"] + applied}]


@pytest.mark.fault("a run resumes at another loss scale, with other ranks", "its residuals are the same")
@pytest.mark.parametrize("num_old", [2, 4])
def test_a_run_resumed_at_another_scale_and_world_size_owes_the_same(num_old: int) -> None:
    results = [result for (result,) in run_ranks(2, _resume, num_old)]
    applied = torch.stack([result["applied"] for result in results]).mean(0)
    error = relative_error([{**result, "applied": applied} for result in results])
    assert error <= MAX_ERROR, error


def _overflow(rank: int) -> Run:
    """Let GradScaler choose the scale: doubled every second step, halved after the step with Inf, which it skips."""
    trainer = Trainer(rank, *FED_BACK[0])
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    for step in range(9):
        before, scale = trainer.true.clone(), trainer.scaler.get_scale()
        loss = trainer.loss(step) * (float("inf") if step == 4 and rank == 1 else 1.0)
        trainer.scaler.scale(loss).backward()
        trainer.scaler.unscale_(optimizer)
        if step == 4:
            trainer.true = before
        else:
            # unscale_ has already divided the gradient by the scale.
            trainer.take(1.0)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.scaler.step(optimizer)
        trainer.scaler.update()
        trainer.layer.weight.grad = None
    assert scale == 2.0**12
    return trainer.result(scale)


def test_growth_and_a_skipped_step_lose_nothing() -> None:
    error = relative_error(run_ranks(2, _overflow))
    assert error <= MAX_ERROR, error


def _explored(rank: int) -> tuple[Run, float]:
    """Explore with steps that double the scale. Exploration restores the scaler, which is in `stateful`."""
    trainer = Trainer(rank, *FED_BACK[0])
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)

    def step(index: int) -> None:
        scale = trainer.scaler.get_scale()
        trainer.scaler.scale(trainer.loss(index)).backward()
        trainer.scaler.step(optimizer)
        trainer.scaler.update()
        # The scaler's `step` has already divided the gradient by the scale.
        trainer.take(1.0)
        assert trainer.scaler.get_scale() == 2 * scale

    step(0)
    step(1)
    kept = trainer.applied.clone(), trainer.true.clone()
    trainer.attachment.explore(
        [trainer.model, optimizer, trainer.scaler], step, candidates=["topk:density=0.1"], iterations=2
    )
    trainer.applied, trainer.true = kept
    step(2)
    return trainer.result(256.0), trainer.scaler.get_scale()


def test_exploration_restores_what_is_owed_in_its_unit() -> None:
    results = run_ranks(2, _explored)
    assert {scale for _, scale in results} == {512.0}
    assert relative_error([result for result, _ in results]) <= MAX_ERROR


def _sharded(rank: int, num_replicas: int, scales: list[float], resumes: bool) -> Run:
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    model = fully_shard(layer, mesh=make_mesh(num_replicas))
    attachment = cgx_ray.attach(model, codec="ef_signsgd")
    applied, true = torch.zeros(ROWS, COLUMNS, dtype=torch.float64), torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
    for step, scale in enumerate(scales):
        x_BD = inputs(rank, step)
        true += x_BD.double().sum(0)
        scaler.scale(model(x_BD).sum()).backward()
        scaler.update(scales[min(step + 1, len(scales) - 1)])
        applied += next(iter(gradients_of(model).values())).double() / scale
        model.zero_grad()
        if resumes and step == 3:
            attachment.load_state_dict(attachment.state_dict())
    state = attachment.state_dict()
    (owed_N,) = state["residuals"].values()
    attachment.close()
    owed = owed_N.double().view(ROWS, COLUMNS) / state.get("loss_scale", scales[-1])
    return {"applied": applied, "true": true, "owed": owed}


@pytest.mark.parametrize(("num_ranks", "num_replicas", "resumes"), [(2, 1, False), (2, 1, True), (4, 2, False)])
def test_shards_follow_the_loss_scale(num_ranks: int, num_replicas: int, resumes: bool) -> None:
    error = relative_error(run_ranks(num_ranks, _sharded, num_replicas, SCALES["halved five times"], resumes))
    assert error <= MAX_ERROR, error

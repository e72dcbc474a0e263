"""Whole trainings of two ranks on one GPU, by what users add to a plain one; on CPUs too, to show that it can pass.

tests/engine/test_cuda_engine.py compares bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.branches import weights_hash
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.plan import STEPS_TOGETHER

STEPS = 24


class Task:
    """A model of two ranks that learns which of ten inputs is the largest."""

    def __init__(self, rank: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.model = DistributedDataParallel(layers.to(device, dtype))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        generator = torch.Generator().manual_seed(rank)
        self._x_BN = torch.randn(256, 64, generator=generator).to(device, dtype)
        self._y_B = self._x_BN[:, :10].argmax(1)

    def loss(self) -> Tensor:
        return nn.functional.cross_entropy(self.model(self._x_BN).float(), self._y_B)

    def outcome(self, losses: list[Tensor]) -> tuple[float, float, str]:
        """Return the first and the last loss, and the hash of the weights."""
        return float(losses[0]), float(losses[-1]), weights_hash(self.model)


def _mixed_precision(rank: int, device: str, folder: str) -> Any:
    task = Task(rank, device)
    attachment = cgx_ray.attach(task.model, codec="topk:density=0.2", scheme="allgather")
    losses = _train_scaled(task, device, STEPS + 16, _scaler(device))
    attachment.close()
    return task.outcome(losses)


def _scaler(device: str) -> torch.amp.GradScaler:
    """Return one whose first scale is so large that float16 may overflow."""
    return torch.amp.GradScaler(device, init_scale=2.0**24, growth_interval=1000)


def _train_scaled(task: Task, device: str, num_steps: int, scaler: torch.amp.GradScaler) -> list[Tensor]:
    """Train with autocast; return the losses."""
    losses = []
    for _ in range(num_steps):
        task.optimizer.zero_grad()
        with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
            loss = task.loss()
        scaler.scale(loss).backward()
        scaler.step(task.optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses


def _bf16_weights(rank: int, device: str, folder: str) -> Any:
    task = Task(rank, device, torch.bfloat16)
    attachment = cgx_ray.attach(task.model, codec="qsgd:bits=8", scheme="sra")
    return _trained(task, attachment)


def _accumulation(rank: int, device: str, folder: str) -> Any:
    """Two backward passes a step, of which only the second averages."""
    task = Task(rank, device)
    attachment = cgx_ray.attach(task.model, codec="ef_signsgd", scheme="broadcast")
    losses = []
    for _ in range(STEPS):
        task.optimizer.zero_grad()
        for context in (task.model.no_sync(), nullcontext()):
            with context:
                loss = task.loss()
                (loss / 2).backward()
        task.optimizer.step()
        losses.append(loss.detach())
    attachment.close()
    return task.outcome(losses)


def _switches(rank: int, device: str, folder: str) -> Any:
    """Plans with memory, without and on the host follow each other, as a controller offers them."""
    task = Task(rank, device)
    layers = cgx_ray.layers_of(task.model)
    options = [
        ("topk:density=0.2", "artopk_ring", "auto"),
        ("qsgd", "sra", "auto"),
        ("none", "dense", "auto"),
        ("powersgd:rank=4", "allreduce", "auto"),
        ("qsgd", "sra", "cpu"),
        ("onebit", "tree", "auto"),
    ]
    plans: Iterator[cgx_ray.Plan] = (
        cgx_ray.make_plan(layers, version=version, world_size=2, codec=codec, scheme=scheme, device=where)
        for version, (codec, scheme, where) in enumerate(options)
    )
    attachment = cgx_ray.attach(task.model, plan=next(plans), weight_check_steps=4)

    def offer(step: int) -> None:
        if step % 4 == 3 and (plan := next(plans, None)) is not None:
            attachment.hold(plan)

    outcome = _trained(task, attachment, offer)
    assert attachment.plan is not None
    assert attachment.plan.version == len(options) - 1
    return outcome


def _rounds(rank: int, device: str, folder: str) -> Any:
    """Ranks train alone for four steps at a time, with a GradScaler, and continue from a state amid that."""
    task = Task(rank, device)
    task.optimizer = torch.optim.AdamW(task.model.parameters(), lr=0.01)
    scaler, losses, state = _scaler(device), [], None
    for num_steps in (STEPS_TOGETHER + 2, STEPS):
        task.model = DistributedDataParallel(task.model.module)
        attachment = cgx_ray.attach(task.model, codec="topk:density=0.2", scheme="allgather", period=4)
        if state is not None:
            attachment.load_state_dict(state)
        losses += _train_scaled(task, device, num_steps, scaler)
        state = attachment.state_dict()
        if num_steps == STEPS:
            attachment.end_round()
        attachment.close()
    return task.outcome(losses)


def _adaptive(rank: int, device: str, folder: str) -> Any:
    """Long enough to calibrate codecs, to measure gains and to report, not to decide."""
    task = Task(rank, device)
    attachment = cgx_ray.attach(task.model, policy="adaptive", folder=folder)
    return _trained(task, attachment, lambda step: attachment.observe(loss=task.loss().detach(), lr=0.5))


def _trained(
    task: Task, attachment: cgx_ray.Attachment, after_step: Callable[[int], None] = lambda step: None
) -> tuple[float, float, str]:
    losses = []
    for step in range(STEPS):
        task.optimizer.zero_grad()
        loss = task.loss()
        loss.backward()
        task.optimizer.step()
        losses.append(loss.detach())
        after_step(step)
    attachment.close()
    return task.outcome(losses)


WAYS = (_mixed_precision, _bf16_weights, _accumulation, _switches, _rounds, _adaptive)


# On CPUs `make test` trains in one way; tests of the engine train in the others.
@pytest.mark.parametrize(
    ("train", "device"),
    [
        *(pytest.param(train, "cpu", marks=() if train is _switches else pytest.mark.slow) for train in WAYS),
        *(pytest.param(train, "cuda", marks=pytest.mark.gpu) for train in WAYS),
    ],
)
def test_ranks_learn_and_hold_the_same_weights(
    train: Callable[[int, str, str], Any], device: str, tmp_path: Path
) -> None:
    (first, last, weights), other = run_ranks(2, train, device, str(tmp_path))
    assert last < 0.7 * first
    assert other[2] == weights

"""Refusals while ranks train alone, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.branches import PERIOD, Branches, PeriodTraining
from support.ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.errors import ConfigError, ReplicaError
from cgx_ray.plan import STEPS_TOGETHER


def _other_weights(rank: int) -> str:
    training = PeriodTraining(rank, weight_check_steps=10)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01)

    def train(steps: range) -> None:
        for number in steps:
            optimizer.zero_grad()
            training.backward(number)
            optimizer.step()

    end = STEPS_TOGETHER + PERIOD
    train(range(end))
    if rank == 1:
        # At a round's end, as memory that returns other bits would.
        anchors: Any = training.attachment._engine.rounds._anchor  # type: ignore[union-attr]
        for one in (*anchors.values(), *training.model.parameters()):
            one.detach().add_(0.1)
    with pytest.raises(ReplicaError) as raised:
        train(range(end, end + 40))
    training.attachment.close()
    return str(raised.value)


def test_ranks_that_begin_a_round_with_other_weights_are_named() -> None:
    for said in run_ranks(2, _other_weights):
        assert "the weights of rank 1 differ from those of rank 0" in said


class _NoOptimizer:
    """Changes parameters, and is no optimizer of torch."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> None:
        self._parameters, self._lr = list(parameters), lr

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=self._lr)


def _refused(rank: int, what: str) -> str:
    if what in ("0", "2000", "2.5", "True"):
        with pytest.raises(ConfigError) as refused:
            PeriodTraining(rank, period=eval(what))
        return str(refused.value)
    if what == "in backward":
        # Importing it warns of torch's own.
        from torch.distributed.optim import _apply_optimizer_in_backward

        model = Branches()
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.01})
        with pytest.raises(ConfigError) as refused:
            cgx_ray.attach(DistributedDataParallel(model), codec="none")
        return str(refused.value)
    training = PeriodTraining(rank)
    make = _NoOptimizer if what == "no optimizer" else torch.optim.SGD
    optimizer = make(training.model.parameters(), lr=0.01)
    message = ""
    for number in range(STEPS_TOGETHER + PERIOD + 1):
        optimizer.zero_grad()
        try:
            if what == "join" and number == STEPS_TOGETHER:
                with training.model.join():
                    training.backward(number)
            else:
                training.backward(number)
                optimizer.step()
        except (ConfigError, RuntimeError) as error:
            message = str(error)
            break
    training.attachment.close()
    return message


@pytest.mark.parametrize(
    ("what", "hint"),
    [
        ("0", "period 0 is not allowed; give whole steps, from 1 to 1024"),
        ("2000", "period 2000 is not allowed"),
        ("2.5", "period 2.5 is not allowed"),
        ("True", "period True is not allowed"),
        ("join", "give period 1, or all ranks as many batches"),
        ("no optimizer", "the parameters changed in a round without a step of a torch.optim.Optimizer"),
        ("in backward", "step an optimizer after backward instead"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(what: str, hint: str) -> None:
    for message in run_ranks(2, _refused, what):
        assert hint in message

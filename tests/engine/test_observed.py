"""Loss and learning rate that the training reports to its engine."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import SupportsFloat

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.engine.telemetry import ObservedTraining
from cgx_ray.errors import ConfigError


def test_numbers_and_tensors_of_one_element_are_taken_once_and_the_newest_counts() -> None:
    observed = ObservedTraining()
    assert observed.take()[:2] == (None, None)
    loss = torch.tensor(2.5, requires_grad=True)
    observed.add_report(loss=1, lr=None)
    observed.add_report(loss=loss, lr=torch.tensor([0.5], dtype=torch.float64))
    with torch.no_grad():
        loss.zero_()
    assert observed.take()[:2] == (2.5, 0.5)
    assert observed.take()[:2] == (None, None)


@pytest.mark.parametrize(
    "two_and_a_half",
    [
        *(dtype(2.5) for dtype in (np.float16, np.float32, np.float64)),
        *(np.full(shape, 2.5, np.float32) for shape in ((), (1,), (1, 1))),
        Fraction(5, 2),
        torch.tensor([[2.5]], dtype=torch.bfloat16),
    ],
    ids=repr,
)
def test_real_numbers_of_other_types_are_taken(two_and_a_half: SupportsFloat) -> None:
    observed = ObservedTraining()
    observed.add_report(loss=two_and_a_half, lr=np.int64(1))
    assert observed.take()[:2] == (2.5, 1.0)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_numbers_that_are_not_finite_count_as_not_reported(number: float | torch.Tensor) -> None:
    observed = ObservedTraining()
    observed.add_report(loss=number, lr=number)
    assert observed.take()[:2] == (None, None)
    observed.add_report(loss=-1.0, lr=0.0)
    assert observed.take()[:2] == (-1.0, None)


@pytest.mark.parametrize(
    "given",
    [
        *("2.5", [1.0], 1j),
        *(torch.ones(2), torch.ones(0), torch.ones((), dtype=torch.complex64)),
        *(np.ones(2), np.ones(0), np.array("2.5"), np.array(1j), np.complex64(1)),
    ],
    ids=repr,
)
def test_what_is_no_number_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="as loss; give a real number, or a tensor or array with one"):
        ObservedTraining().add_report(loss=given, lr=None)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_loss_on_a_gpu_is_taken_when_it_is_there() -> None:
    observed = ObservedTraining()
    loss = torch.ones((), device="cuda") * 3
    # Loading kernels and taking pinned memory for the first time wait for the device.
    observed.add_report(loss=loss, lr=None)
    observed.take()
    torch.cuda._sleep(2_000_000_000)
    observed.add_report(loss=loss, lr=None)
    assert observed.take()[:2] == (None, None)
    observed.add_report(loss=loss, lr=None)
    torch.cuda.synchronize()
    assert observed.take()[:2] == (3.0, None)


def _reported(rank: int) -> list[tuple[float | None, float | None]]:
    model = DistributedDataParallel(nn.Linear(2000, 1, bias=False))
    attachment = cgx_ray.attach(model, codec="topk:density=0.1")
    for step in range(4):
        loss = (step + rank) * model(torch.zeros(1, 2000)).sum() + step
        loss.backward()
        attachment.observe(loss=loss if rank == 0 else math.nan, lr=0.1)
    attachment.close()
    return [(sample.loss, sample.lr) for sample in attachment.take_samples()]


def test_samples_carry_what_was_reported_after_the_step_before_also_with_gradients_of_norm_zero() -> None:
    first, second = run_ranks(2, _reported)
    assert first == [(None, None), (0.0, 0.1), (1.0, 0.1), (2.0, 0.1)]
    assert second == [(None, None), (None, 0.1), (None, 0.1), (None, 0.1)]


def test_at_world_size_one_a_report_does_nothing() -> None:
    cgx_ray.attach(nn.Linear(2, 2)).observe(loss=math.nan, lr=0.1)

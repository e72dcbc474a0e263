"""Uses of a model that are allowed while its ranks train alone, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.branches import PERIOD, Branches, PeriodTraining, are_alike, batch
from support.ranks import log_lines, run_cases, run_ranks

from cgx_ray.engine.period.rho import MAX_NUMBERS, num_sums
from cgx_ray.errors import CGXError
from cgx_ray.plan import STEPS_TOGETHER


def _steps(
    training: PeriodTraining, step: Callable[[int], object], num_steps: int = STEPS_TOGETHER + 2 * PERIOD
) -> list[int]:
    """Return the steps after which ranks are not alike."""
    apart = []
    for number in range(num_steps):
        step(number)
        if not are_alike(training.model):
            apart.append(number)
    training.attachment.close()
    return apart


def _plain(rank: int, make: Callable[..., torch.optim.Optimizer], **ddp: Any) -> list[int]:
    training = PeriodTraining(rank, **ddp)
    optimizer = make(training.model.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        training.backward(number)
        optimizer.step()

    return _steps(training, step)


def _two_optimizers(rank: int) -> list[int]:
    """One of them is made during the training, and steps in every other step only."""
    training = PeriodTraining(rank)
    *most, last = training.model.parameters()
    first = torch.optim.Adam(most, lr=0.01)
    second: list[torch.optim.Optimizer] = []

    def step(number: int) -> None:
        training.model.zero_grad()
        training.backward(number)
        first.step()
        if number == 5:
            second.append(torch.optim.SGD([last], lr=0.01))
        if second and number % 2 == 0:
            second[0].step()

    # Where the second one does not step at a round's end, the round ends in the next forward pass.
    return _steps(training, step)


def _accumulated(rank: int) -> list[int]:
    training = PeriodTraining(rank)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01, momentum=0.9)

    def step(number: int) -> None:
        optimizer.zero_grad()
        with training.model.no_sync():
            training.backward(2 * number)
        training.backward(2 * number + 1)
        optimizer.step()

    return _steps(training, step)


def _tied_and_frozen() -> Branches:
    model = Branches()
    model.right.weight = model.left.weight
    model.norm.requires_grad_(False)
    return model


def _everyday(rank: int) -> list[int]:
    """Train a model of `_tied_and_frozen` with a schedule and an average of the weights; groups are added late."""
    training = PeriodTraining(rank, make=_tied_and_frozen)
    *most, last = [one for one in training.model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(most, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    averaged = torch.optim.swa_utils.AveragedModel(training.model.module)

    def step(number: int) -> None:
        if number == STEPS_TOGETHER + 1:
            optimizer.add_param_group({"params": [last], "lr": 0.1, "initial_lr": 0.1})
            schedule.base_lrs.append(0.1)
            schedule.lr_lambdas.append(schedule.lr_lambdas[0])
        optimizer.zero_grad()
        training.backward(number)
        optimizer.step()
        schedule.step()
        averaged.update_parameters(training.model.module)
        assert [group["lr"] for group in optimizer.param_groups] == schedule.get_last_lr()

    return _steps(training, step)


ALONE = [STEPS_TOGETHER + number for number in range(2 * PERIOD) if number % PERIOD != PERIOD - 1]
USES: dict[str, Callable[[int], list[int]]] = {
    "fused": partial(_plain, make=partial(torch.optim.AdamW, lr=0.01, fused=True)),
    "foreach, amsgrad": partial(_plain, make=partial(torch.optim.Adam, lr=0.01, foreach=True, amsgrad=True)),
    "tensor as rate": partial(_plain, make=partial(torch.optim.Adam, lr=torch.tensor(0.01))),
    "maximize": partial(_plain, make=partial(torch.optim.SGD, lr=1e-4, momentum=0.9, maximize=True)),
    "unknown": partial(_plain, make=partial(torch.optim.RMSprop, lr=0.001)),
    "views": partial(_plain, make=partial(torch.optim.SGD, lr=0.01), gradient_as_bucket_view=True),
    "small buckets": partial(_plain, make=partial(torch.optim.SGD, lr=0.01), bucket_cap_mb=0.0001),
    "unused": partial(_plain, make=partial(torch.optim.SGD, lr=0.01), find_unused_parameters=True),
    "static graph": partial(_plain, make=partial(torch.optim.SGD, lr=0.01), static_graph=True),
    "accumulated": _accumulated,
    "everyday": _everyday,
}


def test_rounds_end_with_the_optimizers_step_however_a_model_is_trained() -> None:
    for name, results in zip(USES, run_cases(2, list(USES.values())), strict=True):
        assert results == [ALONE, ALONE], name


def test_optimizers_that_take_turns_end_rounds_in_the_next_forward_pass() -> None:
    found, other = run_ranks(2, _two_optimizers)
    assert found == other
    assert set(found) <= set(range(STEPS_TOGETHER, STEPS_TOGETHER + 2 * PERIOD))
    assert set(ALONE) <= set(found)


def _ended(rank: int) -> list[bool]:
    training = PeriodTraining(rank, period=100)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01)
    found = []
    for number in range(STEPS_TOGETHER + 3):
        optimizer.zero_grad()
        training.backward(number)
        optimizer.step()
    for _ in range(2):
        found.append(are_alike(training.model))
        training.attachment.end_round()
        found.append(are_alike(training.model))
    training.attachment.close()
    return found


def test_a_round_can_be_ended_by_hand() -> None:
    assert run_ranks(2, _ended) == [[False, True, True, True]] * 2


def _sampled(rank: int) -> tuple[Any, Any, dict[str, float]]:
    training = PeriodTraining(rank)
    assert training.attachment.metrics() == {}
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01)
    samples = []
    for number in range(STEPS_TOGETHER + PERIOD):
        optimizer.zero_grad()
        training.backward(number)
        optimizer.step()
        if number in (STEPS_TOGETHER - 1, STEPS_TOGETHER + PERIOD - 1):
            samples.append(training.attachment.last_step)
            # Of the round alone, the second time.
            metrics = training.attachment.metrics()
    training.attachment.close()
    return samples[0], samples[1], metrics


def test_a_sample_of_a_round_is_its_mean_step() -> None:
    for before, alone, metrics in run_ranks(2, _sampled):
        assert (before.num_steps, alone.num_steps) == (1, PERIOD)
        assert alone.step == STEPS_TOGETHER + PERIOD - 1
        # With what rho is made of, for some steps, and a number per rank. In a ring of two each sends what it has.
        num_layers = len(list(Branches().parameters()))
        num_numbers = num_layers * (num_sums(num_layers) + 1)
        shared_bytes = 8 * (min(PERIOD, MAX_NUMBERS // num_numbers) * num_numbers + 2)
        assert alone.wire_bytes == round((before.wire_bytes + shared_bytes) / PERIOD)
        assert sum(one.sent_bytes for one in alone.transfers) == before.wire_bytes
        assert alone.dense_bytes == before.dense_bytes
        assert metrics["cgx_ray/period"] == PERIOD
        assert metrics["cgx_ray/wire_mb"] == pytest.approx(alone.wire_bytes / 1e6)
        assert metrics["cgx_ray/step_s"] == pytest.approx(alone.step_s)


def _broken(rank: int, scaler: torch.amp.GradScaler | None = None) -> tuple[str, bool]:
    training = PeriodTraining(rank, scaler=scaler)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01)
    for number in range(STEPS_TOGETHER + PERIOD):
        optimizer.zero_grad()
        training.backward(number)
        last = next(iter(training.model.parameters()))
        if rank == 1 and number == STEPS_TOGETHER + 1:
            last.grad = torch.full_like(last, float("nan"))
        if number == STEPS_TOGETHER + PERIOD - 1:
            with pytest.raises(CGXError) as raised:
                optimizer.step()
        else:
            optimizer.step()
    is_finite = torch.tensor(training.flat()).isfinite().all().item()
    training.attachment.close()
    return str(raised.value), bool(is_finite)


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)], ids=["none", "disabled"])
def test_nan_on_one_rank_is_named_on_all_and_spreads_to_none(scaler: torch.amp.GradScaler | None) -> None:
    (first, is_first_sound), (second, is_second_sound) = run_ranks(2, _broken, scaler)
    assert first == second
    assert "rank 1 has NaN or Inf in its parameters" in first
    assert (is_first_sound, is_second_sound) == (True, False)


def _scaled(rank: int, skips: dict[int, int], scale: float | None) -> tuple[list[float], list[float]]:
    """Train with a GradScaler, or with none; return the parameters and the scales.

    skips  by step, the rank whose gradients overflow in it. All skip such a step without a scaler
    """
    training = PeriodTraining(rank, period=PERIOD, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=7, enabled=scale is not None)
    scales = []
    for number in range(STEPS_TOGETHER + 2 * PERIOD):
        optimizer.zero_grad()
        loss = training.model(batch(rank, number)).square().mean()
        if scale is not None and skips.get(number) == rank:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if scale is not None or number not in skips:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    training.attachment.end_round()
    training.attachment.close()
    return training.flat(), scales


def _closed(rank: int, ends_round: bool, saves: bool = False) -> list[str]:
    lines = log_lines()
    training = PeriodTraining(rank, period=PERIOD)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.05)
    for number in range(STEPS_TOGETHER + PERIOD + 1):
        optimizer.zero_grad()
        training.model(batch(rank, number)).square().mean().backward()
        optimizer.step()
    if ends_round:
        training.attachment.end_round()
    if saves:
        training.attachment.state_dict()
    training.attachment.close()
    return [line for line in lines if "end_round" in line]


def test_closing_in_a_round_is_a_warning_with_the_remedy() -> None:
    for (line,) in run_ranks(2, _closed, False):
        assert line.startswith("closed in a round, whose 1 step the other ranks have not got")
    assert run_ranks(2, _closed, True) == [[], []]
    assert run_ranks(2, _closed, False, True) == [[], []]


def test_with_a_grad_scaler_all_ranks_skip_a_step_that_one_must_skip() -> None:
    skips = {STEPS_TOGETHER + 1: 0, STEPS_TOGETHER + 6: 1}
    (first, scales), (second, others) = run_ranks(2, _scaled, skips, 2.0**12)
    (expected, _), _ = run_ranks(2, _scaled, skips, None)
    assert first == second
    assert scales == others
    assert scales[STEPS_TOGETHER + 1] == scales[STEPS_TOGETHER] / 2
    # Another rho, which overflows say nothing about, and SGD, whose steps rho does not change.
    torch.testing.assert_close(torch.tensor(first), torch.tensor(expected), rtol=1e-4, atol=1e-6)


MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
# Its steps are others with another rho.
ADAMW = partial(torch.optim.AdamW, lr=0.01)


class _Scaled:
    """A training with moments and a GradScaler, which overflows on one rank within a round."""

    def __init__(
        self, rank: int, period: int = PERIOD, make: Callable[[Any], torch.optim.Optimizer] = MOMENTUM
    ) -> None:
        self.training = PeriodTraining(rank, period=period)
        self.optimizer = make(self.training.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def train(self, steps: range) -> list[float]:
        for number in steps:
            self.optimizer.zero_grad()
            loss = self.training.model(batch(self.training.rank, number)).square().mean()
            has_overflow = self.training.rank == 1 and number == STEPS_TOGETHER + 5
            self.scaler.scale(loss * (float("inf") if has_overflow else 1.0)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return self.training.flat()

    def saved(self) -> tuple[Any, ...]:
        parts = (self.training.model, self.optimizer, self.scaler, self.training.attachment)
        return copy.deepcopy(tuple(part.state_dict() for part in parts))

    def load(self, states: tuple[Any, ...]) -> None:
        parts = (self.training.model, self.optimizer, self.scaler, self.training.attachment)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(copy.deepcopy(state))


def _back_in_time(rank: int, make: Callable[[Any], torch.optim.Optimizer]) -> tuple[list[float], list[float]]:
    scaled = _Scaled(rank, make=make)
    scaled.train(range(STEPS_TOGETHER + 7))
    saved = scaled.saved()
    rest = range(STEPS_TOGETHER + 7, STEPS_TOGETHER + 14)
    whole = scaled.train(rest)
    scaled.load(saved)
    again = scaled.train(rest)
    scaled.training.attachment.close()
    return whole, again


@pytest.mark.parametrize("make", [MOMENTUM, ADAMW])
def test_a_run_goes_back_to_a_checkpoint_of_its_own_within_a_round(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    for whole, again in run_ranks(2, _back_in_time, make):
        assert whole == again


def _without_rounds(rank: int) -> tuple[float, float]:
    """Go on without rounds; return how far the first momenta are from the ranks' mean, and from that without rho."""
    scaled = _Scaled(rank)
    scaled.train(range(STEPS_TOGETHER + PERIOD + 1))
    saved = scaled.saved()
    rho = saved[3]["round"]["moments_rho"]
    scaled.training.attachment.close()
    scaled = _Scaled(rank, period=1)
    scaled.load(saved)
    scaled.train(range(100, 101))
    off, unscaled = 0.0, 0.0
    for number, parameter in enumerate(scaled.training.model.parameters()):
        before = saved[1]["state"][number]["momentum_buffer"].clone()
        dist.all_reduce(before)
        before /= dist.get_world_size()
        found = scaled.optimizer.state[parameter]["momentum_buffer"]
        assert parameter.grad is not None
        off = max(off, float((found - 0.9 * before / rho[number] - parameter.grad).abs().max()))
        unscaled = max(unscaled, float((found - 0.9 * before - parameter.grad).abs().max()))
    assert are_alike(scaled.training.model)
    scaled.train(range(101, 103))
    assert are_alike(scaled.training.model)
    assert {*scaled.saved()[3]["round"]["moments_rho"]} == {1.0}
    scaled.training.attachment.close()
    return off, unscaled


def test_moments_of_a_checkpoint_of_rounds_are_the_users_own_without_them() -> None:
    for off, unscaled in run_ranks(2, _without_rounds):
        assert off < 1e-6 < unscaled


def _closed_within_a_round(rank: int) -> str:
    scaled = _Scaled(rank)
    scaled.train(range(STEPS_TOGETHER + 1))
    scaled.training.attachment.close()
    with pytest.raises((CGXError, RuntimeError)) as raised:
        scaled.train(range(STEPS_TOGETHER + 1, STEPS_TOGETHER + 2))
    return str(raised.value)


def test_a_closed_model_trains_no_further_within_a_round() -> None:
    for said in run_ranks(2, _closed_within_a_round):
        assert "attach that" in said

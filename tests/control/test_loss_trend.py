"""Loss and learning rate that the training reports: worse plans are left, bad reports change nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.control_runs import FakeTraining, journal, start

from cgx_ray.control.gains.loss_trend import MAX_LOSSES, MIN_LOSSES, RATE_STEPS, LearningPhase, LossTrend
from cgx_ray.control.joined_steps import join
from cgx_ray.control.learned.measured import compressing_options
from cgx_ray.monitors.sample import node_steps
from cgx_ray.plan import CodecSpec, Option
from cgx_ray.planner.candidates import codec_options

SLOW_GBPS = 0.1


def noisy(curve: Callable[[int], float], scatter: float, seed: int) -> Callable[[int], float]:
    return lambda step: curve(step) + random.Random(f"{seed} {step}").gauss(0, scatter)


def judged(curve: Callable[[int], float], change: int) -> str | None:
    """Return the verdict on losses from step 1 on, if options change after step `change`."""
    trend = LossTrend()
    for step in range(1, change + 2 * MAX_LOSSES):
        trend.add_loss(curve(step))
        if step == change:
            trend.start_plan()
    return trend.worse


@pytest.mark.parametrize("power", [0.0, 0.1, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("change", [80, 200, 1000, 4000])
def test_a_loss_that_falls_as_a_power_of_the_steps_is_never_worse_after_a_change(power: float, change: int) -> None:
    for seed in range(5):
        for scatter in (0.01, 0.1):
            assert judged(noisy(lambda step: 4 * step**-power, scatter, seed), change) is None, (seed, scatter)


@pytest.mark.parametrize("period", [2, 8, 32])
def test_a_loss_that_falls_as_a_power_of_the_steps_is_not_worse_in_rounds(period: int) -> None:
    for power in (0.1, 0.5, 1.0, 1.5):
        for change in (80, 200, 1000):
            for scatter in (0.001, 0.1):
                curve, trend = noisy(lambda step, power=power: 4 * step**-power, scatter, 0), LossTrend()
                for step in range(1, change + 1):
                    trend.add_loss(curve(step))
                assert trend.can_judge
                trend.start_plan()
                for step in range(change + period, change + 2 * period * MAX_LOSSES, period):
                    trend.add_loss(curve(step), period)
                assert trend.worse is None, (power, change, scatter)


@pytest.mark.parametrize("period", [4, 8, 32])
def test_a_loss_that_is_back_on_its_curve_after_shorter_rounds_is_not_worse(period: int) -> None:
    for power in (0.1, 0.25, 0.5, 1.0):
        for change in (80, 200, 400):
            # Of 1 % at the change.
            scatter = 0.04 * change**-power
            curve, trend = noisy(lambda step, power=power: 4 * step**-power, scatter, 0), LossTrend()
            for step in range(1, change + 1):
                trend.add_loss(curve(step))
            trend.start_plan()
            step = change + MIN_LOSSES * period
            for _ in range(MIN_LOSSES):
                trend.add_loss(8 * change**-power, period)
            assert trend.worse is not None
            trend.keep_before()
            trend.start_plan()
            for later in range(step + period // 2, step + period * MAX_LOSSES, period // 2):
                trend.add_loss(curve(later), period // 2)
            assert trend.worse is None, (power, change)


def test_too_few_losses_judge_no_other_options() -> None:
    trend = LossTrend()
    assert trend.can_judge, "nothing is reported, so nothing will be judged"
    for step in range(79):
        trend.add_loss(1.0)
        assert not trend.can_judge, step
    trend.add_loss(1.0)
    assert trend.can_judge
    trend.restart()
    assert not trend.can_judge, "those before another learning rate say nothing"


@pytest.mark.parametrize("rise", [0.15, 1.0])
def test_a_loss_that_rises_after_a_change_is_worse(rise: float) -> None:
    for seed in range(5):
        curve = noisy(lambda step: 4 * step**-0.1 + (rise if step > 1000 else 0.0), 0.1, seed)
        worse = judged(curve, 1000)
        assert worse is not None
        assert worse.startswith("loss is "), worse


def test_a_loss_that_no_longer_falls_after_a_change_is_worse() -> None:
    for seed in range(5):
        assert judged(noisy(lambda step: 3 - 0.01 * min(step, 400), 0.05, seed), 400) is not None


def test_a_loss_that_rose_before_a_change_may_go_on_to_rise_as_fast() -> None:
    for seed in range(5):
        assert judged(noisy(lambda step: 1 + 0.01 * step, 0.05, seed), 400) is None


def test_too_few_or_no_losses_are_not_judged_and_others_than_finite_ones_are_left_out() -> None:
    assert judged(lambda step: 1.0 if step <= 60 else 9.0, 60) is None
    trend = LossTrend()
    for loss in (None, math.nan, math.inf, -math.inf, 1e160) * 100:
        trend.add_loss(loss)
    trend.start_plan()
    for loss in (None, math.nan) * 100:
        trend.add_loss(loss)
    assert trend.worse is None


@pytest.mark.fault("the loss, if reported, gets worse after a change", "the option that keeps the least is banned")
def test_a_plan_under_which_the_loss_rises_gives_way_to_one_that_keeps_more(tmp_path: Path) -> None:
    run = start(tmp_path, min_gain=0.6)
    run.gain |= {"topk:density=0.1": 0.8}
    run.gbps = 100.0
    run.loss = noisy(lambda _: 3.0 if used() & before else 2.0, 0.05, 0)

    def used() -> frozenset[Option]:
        return compressing_options(run.loop.plans[-1])

    before: frozenset[Option] = frozenset()
    run.run(200)
    run.gbps = SLOW_GBPS
    run.run(5)
    before = used()
    run.run(60)
    after = used()
    reasons = [entry["reason"] for entry in journal(tmp_path) if entry.get("reason", "").startswith("loss is ")]
    assert len(reasons) == 1, reasons
    assert before, "the slow link has called for a codec"
    assert not after & before, (before, after)
    least = min(run.gain[str(option.codec)] for option in before)
    assert all(run.gain[str(option.codec)] > least for option in after), (before, after)


@pytest.mark.parametrize(
    "report",
    [
        lambda step, rank: None,
        lambda step, rank: math.nan,
        lambda step, rank: math.inf,
        lambda step, rank: 2.0 if rank == 1 else None,
        lambda step, rank: math.nan if rank == 1 else 2.0,
    ],
    ids=["never", "nan", "infinite", "on one rank only", "nan on one rank"],
)
def test_training_goes_on_with_the_same_decisions_whatever_is_reported(
    tmp_path: Path, report: Callable[[int, int], float | None]
) -> None:
    chosen = []
    for index, of_rank in enumerate((None, report)):
        folder = tmp_path / str(index)
        folder.mkdir()
        run = start(folder)
        run.report = of_rank
        run.run(60)
        run.gbps = SLOW_GBPS
        run.run(100)
        chosen.append([plan.groups for plan in run.loop.plans])
    assert chosen[0] == chosen[1]


def test_the_loss_of_a_step_is_the_mean_over_the_ranks_that_reported_a_finite_one(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.report = lambda step, rank: [1.0, math.nan, None, 3.0][rank]
    assert join(node_steps(map(run.sample, range(4))), 4).loss == 2.0
    run.report = lambda step, rank: math.inf
    assert join(node_steps(map(run.sample, range(4))), 4).loss is None


@pytest.mark.parametrize(("num_steps", "reported"), [(1, 1), (1, 10), (32, 1)])
def test_a_slow_decay_of_the_learning_rate_starts_no_learning_phase_and_a_fast_one_does(
    num_steps: int, reported: int
) -> None:
    for halved_in, is_fast in ((1000, False), (90, True)):
        phase = LearningPhase()
        rates = (
            0.5 ** (step / halved_in) if step // num_steps % reported == 0 else None
            for step in range(0, 4000, num_steps)
        )
        assert any([phase.add_rate(lr, num_steps) for lr in rates]) is is_fast


def test_a_change_of_the_learning_rate_by_two_or_more_starts_a_learning_phase() -> None:
    for before, after in ((0.1, 0.01), (0.01, 0.02), (0.1, 0.05)):
        phase = LearningPhase()
        assert not any(phase.add_rate(lr) for lr in (before, 0.9 * before, None, math.nan, 0.0, before))
        assert not phase.is_on
        assert phase.add_rate(after)
        on = []
        for _ in range(2 * RATE_STEPS):
            on.append(phase.is_on)
            phase.add_rate(after)
        assert sum(on) == RATE_STEPS == on.index(False)


def test_after_the_learning_rate_falls_tenfold_only_options_that_keep_much_are_taken_up(tmp_path: Path) -> None:
    without_qsgd = codec_options(map(CodecSpec.parse, ("bf16", "topk:density=0.1", "topk:density=0.01")))

    def codecs(lr: float) -> set[str]:
        folder = tmp_path / str(lr)
        folder.mkdir()
        run = start(folder, min_gain=0.6, options=without_qsgd)
        run.gbps, run.lr = 100.0, 0.1
        run.run(40)
        run.gbps, run.lr = SLOW_GBPS, lr
        run.run(30)
        return {option.codec.name for option in compressing_options(run.loop.plans[-1])}

    assert "topk" in codecs(0.1)
    assert codecs(0.01) == {"bf16"}


def test_without_any_gain_and_with_gradients_of_norm_zero_the_run_stays_dense(tmp_path: Path) -> None:
    run: FakeTraining = start(tmp_path)
    run.gbps, run.gain, run.norm = SLOW_GBPS, {}, 0.0
    assert run.run(100) == []
    assert len(run.loop.plans) == 1


def test_clocks_that_are_set_back_on_the_nodes_change_no_decision(tmp_path: Path) -> None:
    chosen = []
    for clock in (float, lambda step: -1e6 * step):
        folder = tmp_path / str(len(chosen))
        folder.mkdir()
        run = start(folder)
        run.clock = clock
        run.gbps = SLOW_GBPS
        run.run(150)
        chosen.append([plan.groups for plan in run.loop.plans])
        assert len(journal(folder, "progress")) > 20
    assert len(chosen[0]) > 1
    assert chosen[0] == chosen[1]

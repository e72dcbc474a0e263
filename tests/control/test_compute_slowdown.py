"""Compute that is longer beside codecs: it belongs to the plan and not to dense."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from support.control_runs import journal, start

from cgx_ray.control.learned.compute_slowdown import ComputeSlowdown, SideBySide
from cgx_ray.control.learned.measured import is_dense
from cgx_ray.plan import Option


def noisy(level_s: float, num: int, *, seed: int, sigma: float) -> list[float]:
    chance = random.Random(seed)
    return [level_s * math.exp(chance.gauss(0, sigma)) for _ in range(num)]


FOUR, THREE = (frozenset([Option.parse(f"qsgd:bits={bits},bucket_size=128 over sra")]) for bits in (4, 3))


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_20_percent_is_no_slowdown_by_half(seed: int) -> None:
    slowdown = ComputeSlowdown()
    for switch in range(3):
        dense_s, others_s = (noisy(0.1, 8 - part, seed=100 * seed + 10 * switch + part, sigma=0.2) for part in (0, 5))
        slowdown.add_comparison(FOUR, dense_s, others_s)
        found = slowdown.under(FOUR)
        assert 0 <= found.mean < math.log(1.5)
        assert (found.mean > 0) == (found.error > 0)


@pytest.mark.parametrize("factor", [1.2, 1.5, 3.0])
def test_a_slowdown_is_found_at_the_first_switch_and_better_with_each(factor: float) -> None:
    slowdown, errors = ComputeSlowdown(), []
    for seed in range(0, 40, 2):
        dense_s, others_s = noisy(0.1, 8, seed=seed, sigma=0.03), noisy(0.1 * factor, 3, seed=seed + 1, sigma=0.03)
        slowdown.add_comparison(FOUR, dense_s, others_s)
        errors.append(slowdown.under(FOUR).error)
        assert slowdown.under(FOUR).mean == pytest.approx(math.log(factor), abs=0.1)
    assert errors[0] > errors[1] > errors[3] > errors[7] > 0
    assert slowdown.under(FOUR).mean == pytest.approx(math.log(factor), abs=0.02)


def test_other_options_have_the_newest_slowdown_until_they_have_their_own() -> None:
    slowdown = ComputeSlowdown()
    assert slowdown.under(FOUR) == (0.0, 0.0)
    slowdown.add_comparison(FOUR, [0.1] * 8, [0.15] * 3)
    assert slowdown.under(THREE) == slowdown.under(FOUR)
    slowdown.add_comparison(THREE, [0.1] * 8, [0.1] * 3)
    assert slowdown.under(THREE) == (0.0, 0.0)
    assert slowdown.under(FOUR).mean == pytest.approx(math.log(1.5))


def test_compute_that_falls_after_a_cold_start_is_no_slowdown() -> None:
    slowdown = ComputeSlowdown()
    slowdown.add_comparison(FOUR, [0.3, 0.25, 0.2], [0.1, 0.1, 0.1])
    assert slowdown.under(FOUR) == (0.0, 0.0)


def test_steps_on_both_sides_of_a_switch_are_compared_once_there_are_three_of_the_new_plan() -> None:
    sides = SideBySide()
    sides.start_plan(is_dense=True, is_new=True)
    assert [sides.add_step(seconds) for seconds in (1.0, 1.1, 1.2)] == [None] * 3
    sides.start_plan(is_dense=False, is_new=True)
    assert [sides.add_step(seconds) for seconds in (2.0, 2.1)] == [None] * 2
    found = sides.add_step(2.2)
    assert found is not None
    assert list(map(list, found)) == [[1.0, 1.1, 1.2], [2.0, 2.1, 2.2]]
    assert sides.add_step(2.3) is None, "once per plan"
    sides.start_plan(is_dense=True, is_new=True)
    assert [sides.add_step(seconds) for seconds in (1.3, 1.4)] == [None] * 2
    found = sides.add_step(1.5)
    assert found is not None
    assert list(map(list, found)) == [[1.3, 1.4, 1.5], [2.0, 2.1, 2.2, 2.3]]
    sides.start_plan(is_dense=False, is_new=False)
    assert [sides.add_step(2.0) for _ in range(20)] == [None] * 20, "back from measuring steps"


@pytest.mark.parametrize(("num_steps", "is_compared"), [(1, True), (10, True), (60, False)])
def test_another_plan_soon_after_the_first_is_compared_with_the_dense_steps_before_both(
    num_steps: int, is_compared: bool
) -> None:
    sides = SideBySide()
    sides.start_plan(is_dense=True, is_new=True)
    for _ in range(5):
        sides.add_step(1.0)
    sides.start_plan(is_dense=False, is_new=True)
    for _ in range(num_steps):
        sides.add_step(2.0)
    sides.start_plan(is_dense=False, is_new=True)
    found = [sides.add_step(3.0) for _ in range(3)][-1]
    assert (found is not None) == is_compared
    if found is not None:
        assert list(map(list, found)) == [[1.0] * 5, [3.0] * 3]


@pytest.mark.parametrize("jitter", [0.0, 0.1])
@pytest.mark.parametrize("slowdown", [1.5, 1.6, 2.0])
def test_a_plan_that_takes_more_compute_than_it_saves_is_left_for_dense(
    slowdown: float, jitter: float, tmp_path: Path
) -> None:
    run = start(tmp_path)
    run.gbps, run.compute_slowdown, run.jitter = 2.0, slowdown, jitter
    run.run(150)
    assert is_dense(run.loop.plans[-1]), journal(tmp_path, "decision")[-1]["reason"]


def test_a_plan_that_saves_more_than_it_takes_stays_and_dense_is_predicted_as_it_was_measured(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps, run.compute_slowdown = 0.5, 1.3
    run.run(120)
    first, *_, last = journal(tmp_path, "decision")
    assert not is_dense(run.loop.plans[-1])
    assert run.loop.facts().predicted_dense_step_s == pytest.approx(run.compute_s + 0.48, rel=0.1)
    assert last["inputs"]["compute_s"] == pytest.approx(first["inputs"]["compute_s"], rel=0.05)

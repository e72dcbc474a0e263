"""Compute that is longer beside codecs: it belongs to the plan and not to dense."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from support.control_runs import journal, start

from cgx_ray.control.measured import is_dense
from cgx_ray.control.stretch import ComputeStretch


def noisy(level_s: float, num: int, *, seed: int, sigma: float) -> list[float]:
    chance = random.Random(seed)
    return [level_s * math.exp(chance.gauss(0, sigma)) for _ in range(num)]


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_20_percent_is_no_stretch_of_half(seed: int) -> None:
    stretch = ComputeStretch()
    for switch in range(3):
        stretch.add(noisy(0.1, 8, seed=10 * seed + switch, sigma=0.2), noisy(0.1, 3, seed=switch - seed, sigma=0.2))
        assert 1.0 <= stretch.factor < 1.5
        assert (stretch.factor > 1) == (stretch.error > 0)


@pytest.mark.parametrize("factor", [1.2, 1.5, 3.0])
def test_a_stretch_is_found_at_the_first_switch_and_goes_when_it_is_over(factor: float) -> None:
    stretch = ComputeStretch()
    stretch.add(noisy(0.1, 8, seed=1, sigma=0.03), noisy(0.1 * factor, 3, seed=2, sigma=0.03))
    assert stretch.factor == pytest.approx(factor, rel=0.1)
    assert 0 < stretch.error < 0.1
    for seed in (3, 5):
        stretch.add(noisy(0.1, 3, seed=seed, sigma=0.03), noisy(0.1, 8, seed=seed + 1, sigma=0.03))
    assert (stretch.factor, stretch.error) == (1.0, 0.0)


def test_compute_that_falls_after_a_cold_start_is_no_stretch() -> None:
    stretch = ComputeStretch()
    stretch.add([0.3, 0.25, 0.2], [0.1, 0.1, 0.1])
    assert (stretch.factor, stretch.error) == (1.0, 0.0)


def test_a_plan_that_takes_more_compute_than_it_saves_is_left_for_dense(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps, run.stretch = 2.0, 1.6
    run.run(120)
    assert is_dense(run.loop.plans[-1]), journal(tmp_path)[-1]["reason"]


def test_a_plan_that_saves_more_than_it_takes_stays_and_dense_is_predicted_as_it_was_measured(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps, run.stretch = 0.5, 1.3
    run.run(120)
    first, *_, last = journal(tmp_path, "decision")
    assert not is_dense(run.loop.plans[-1])
    assert run.loop.facts().predicted_dense_step_s == pytest.approx(run.compute_s + 0.48, rel=0.1)
    assert last["inputs"]["compute_s"] == pytest.approx(first["inputs"]["compute_s"], rel=0.05)

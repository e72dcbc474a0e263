"""Changes of level and slow ranks, distinguished from noise."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from cgx_ray.control.network.changes import ChangeDetector, SlowRanks


def noisy(level: float, num: int, *, seed: int = 0, sigma: float = 0.05) -> Iterator[float]:
    chance = random.Random(seed)
    return (level * math.exp(chance.gauss(0, sigma)) for _ in range(num))


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("seed", range(8))
def test_a_step_by_2x_is_noticed_within_3_samples_of_a_second_and_once(factor: float, seed: int) -> None:
    detector = ChangeDetector()
    assert [detector.add_sample(value, 1.0) for value in noisy(7.0, 60, seed=seed)] == [None] * 60
    found = [detector.add_sample(value, 1.0) for value in noisy(7.0 * factor, 60, seed=seed + 100)]
    alarms = [second for second, since_s in enumerate(found, 1) if since_s is not None]
    assert len(alarms) == 1, alarms
    assert alarms[0] <= 3
    assert found[alarms[0] - 1] == alarms[0]


@pytest.mark.parametrize("seed", range(8))
def test_ten_minutes_of_noise_and_bursts_of_2_s_raise_no_alarm(seed: int) -> None:
    detector, chance = ChangeDetector(), random.Random(seed)
    values = list(noisy(3.0, 600, seed=seed))
    for start in range(10, 590, 12):
        for second in range(start, start + chance.randint(1, 2)):
            values[second] *= chance.uniform(0.55, 1.0)
    assert [second for second, value in enumerate(values) if detector.add_sample(value, 1.0) is not None] == []


def test_one_sample_says_as_much_as_several_that_cover_the_same_time() -> None:
    coarse, fine = ChangeDetector(), ChangeDetector()
    for _ in range(5):
        assert coarse.add_sample(1.0, 2.5) is None
    assert coarse.add_sample(2.0, 2.5) is None, "one sample is never enough"
    assert coarse.add_sample(2.0, 2.5) == pytest.approx(5.0)
    for _ in range(125):
        assert fine.add_sample(1.0, 0.1) is None
    found = [fine.add_sample(2.0, 0.1) for _ in range(25)]
    assert [since_s is not None for since_s in found].index(True) in (19, 20)


def test_a_slow_drift_is_followed_without_alarm() -> None:
    detector = ChangeDetector()
    assert all(detector.add_sample(2.0 ** (second / 120), 1.0) is None for second in range(600))


def test_a_value_without_a_logarithm_is_refused() -> None:
    for value in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive"):
            ChangeDetector().add_sample(value, 1.0)


def test_a_straggler_is_named_after_seconds_and_forgiven_when_it_is_back() -> None:
    slow = SlowRanks(3)
    # One slow step makes no slow rank.
    assert not slow.add_ratios({0: 1.0, 1: 3.0, 2: 1.0}, 0.5)
    assert not any(slow.add_ratios({0: 1.0, 1: 1.0, 2: 0.9}, 0.5) for _ in range(10))
    changed = [slow.add_ratios({0: 1.0, 1: 1.9, 2: 1.0}, 0.5) for _ in range(12)]
    assert slow.ranks == {1}
    assert changed.index(True) <= 5
    assert changed.count(True) == 1
    changed = [slow.add_ratios({0: 1.0, 1: 1.0, 2: 1.0}, 0.5) for _ in range(16)]
    assert slow.ranks == set()
    assert changed.count(True) == 1

"""A step that took longer than the interval of reports is reported when it ends; shorter ones wait for the interval."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue

import pytest
from support.samples import step_sample

from cgx_ray.monitors.node_monitor import NodeMonitor
from cgx_ray.monitors.sample import NodeSample, StepSample
from cgx_ray.session.due_samples import DueSamples

INTERVAL_S = 60.0


class _Delivering(NodeMonitor):
    """Keeps the ranks of the steps that it delivers."""

    def __init__(self) -> None:
        super().__init__("a", "127.0.0.1", interval_s=INTERVAL_S)
        self.delivered: SimpleQueue[list[int]] = SimpleQueue()

    def _deliver(self, steps: tuple[StepSample, ...], rest: NodeSample) -> None:
        self.delivered.put([step.rank for step in steps])


def test_a_node_delivers_a_long_step_of_all_its_ranks_at_once_and_the_next_ones_later() -> None:
    monitor = _Delivering()
    monitor.start_measuring({})
    try:
        assert monitor.delivered.get(timeout=INTERVAL_S / 2) == []
        for rank in (0, 1):
            monitor.report([step_sample(rank, 0)])
        assert monitor.delivered.get(timeout=INTERVAL_S / 2) == [0, 1]
        # The answer to an empty report brings the plan.
        assert monitor.delivered.get(timeout=INTERVAL_S / 2) == []
        monitor.report([step_sample(0, 1)])
        with pytest.raises(Empty):
            monitor.delivered.get(timeout=0.5)
    finally:
        monitor.stop()


def test_a_rank_hands_out_a_long_step_at_once_and_short_ones_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, ended = 100.0, list[StepSample]()

    def take() -> list[StepSample]:
        taken, ended[:] = list(ended), []
        return taken

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    due = DueSamples(take, interval_s=0.5)
    handed_out = []
    for step, ends_s in enumerate((100.0, 100.125, 100.25, 101.0, 103.0)):
        while now_s < ends_s:
            now_s += 0.0625
            handed_out += [(now_s, sample.step) for sample in due.take()]
        ended.append(step_sample(0, step))
        handed_out += [(now_s, sample.step) for sample in due.take()]
    assert handed_out == [(100.0, 0), (100.5, 1), (100.5, 2), (101.0, 3), (103.0, 4)]
    ended.append(step_sample(0, 5))
    assert due.take() == []
    assert [sample.step for sample in due.take_all()] == [5]
    assert due.take_all() == []

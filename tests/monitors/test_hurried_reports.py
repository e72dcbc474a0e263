"""A step that took longer than the interval of reports is reported when it ends; shorter ones wait for the interval."""

from __future__ import annotations

from queue import Empty, SimpleQueue

import pytest
from support.samples import step_sample

from cgx_ray.monitors.node_monitor import NodeMonitor
from cgx_ray.monitors.sample import NodeSample, StepSample

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

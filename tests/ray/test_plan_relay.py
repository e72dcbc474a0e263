"""Plans reach the ranks of a node through its agent, in a real local Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray

from cgx_ray.monitors.agent import NodeAgent
from cgx_ray.monitors.plan_relay import PlanRelay
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.plan import Layer, Plan, make_plan

PLANS = [make_plan([Layer(name="a", numel=10, ndim=2)], version=version, world_size=2) for version in (1, 2)]


@pytest.fixture
def agent() -> Iterator[NodeAgent]:
    """An agent in the test's own process. Its controllers are real actors."""
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    agent = NodeAgent("a", "run", "127.0.0.1", interval_s=0.05)
    yield agent
    agent.stop()
    ray.shutdown()


# Ray pickles a class inside a function by value. Its workers cannot import test modules.
def controller_with(plans: list[Plan]) -> Any:
    @ray.remote(num_cpus=0)
    class Planner:
        def __init__(self, plans: list[Plan]) -> None:
            self.plans = plans
            self.num_polls = 0

        def observe(self, sample: NodeSample) -> None: ...

        def plans_after(self, version: int, timeout_s: float) -> list[Plan]:
            self.num_polls += 1
            return [plan for plan in self.plans if plan.version > version]

        def polls(self) -> int:
            return self.num_polls

    return Planner.remote(plans)


def test_an_agent_asks_for_plans_once_for_all_its_ranks_and_says_so_if_nobody_answers(agent: NodeAgent) -> None:
    controller = controller_with(PLANS)
    assert PlanRelay().after(0, 60.0) is None, "the relay was not told of a controller"
    agent.start({}, controller)
    time.sleep(0.2)
    assert ray.get(controller.polls.remote()) == 0, "no rank has asked"
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(agent.plans_after, (0, 1, 0), [60.0] * 3)) == [PLANS, PLANS[1:], PLANS]
    assert agent.plans_after(2, 0.01) == []
    ray.kill(controller)
    assert agent.plans_after(2, 60.0) is None
    agent.start({}, controller_with(PLANS))
    assert agent.plans_after(1, 60.0) == PLANS[1:]

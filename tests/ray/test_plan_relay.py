"""Plans reach the ranks of a node through its agent, in a real local Ray."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray

from cgx_ray.monitors.agent import NodeAgent
from cgx_ray.monitors.plan_relay import PlanRelay
from cgx_ray.plan import Layer, Plan, make_plan

ONE, TWO, THREE = PLANS = [
    make_plan([Layer(name="a", numel=10, ndim=2)], version=version, world_size=2) for version in (1, 2, 3)
]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def agent(local_ray: None) -> Iterator[NodeAgent]:
    """An agent in the test's own process. Its controllers are real actors."""
    agent = NodeAgent("a", "run", "127.0.0.1", interval_s=0.05)
    yield agent
    agent.stop()


# Ray pickles a class inside a function by value. Its workers cannot import test modules.
def controller_with(plans: list[Plan]) -> Any:
    @ray.remote(num_cpus=0)
    class Planner:
        def __init__(self, plans: list[Plan]) -> None:
            self.plans = plans
            self.is_lost = False

        def observe(self, node_id: str, report: bytes, newest: int) -> tuple[None, list[Plan]]:
            if self.is_lost:
                self.is_lost = False
                raise ConnectionError("the answer is lost")
            return None, [plan for plan in self.plans if plan.version > newest]

        def lose_an_answer_with(self, plans: list[Plan]) -> None:
            self.plans += plans
            self.is_lost = True

    return Planner.remote(plans)


def test_ranks_get_the_plans_that_answers_to_reports_bring_and_hear_if_nobody_answers(agent: NodeAgent) -> None:
    assert agent.plans_after(0, 60.0) is None, "the agent has no controller yet"
    controller = controller_with([ONE, TWO])
    agent.start({}, controller)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(agent.plans_after, (0, 0), [60.0] * 2))
    # One answer brings all plans that the agent lacks.
    assert found == [[ONE, TWO]] * 2
    assert agent.plans_after(1, 60.0) == [TWO]
    assert agent.plans_after(2, 0.01) == []
    ray.kill(controller)
    assert agent.plans_after(2, 60.0) is None
    agent.start({}, controller_with(PLANS))
    assert agent.plans_after(1, 60.0) == [TWO, THREE]


@pytest.mark.fault("a new plan does not reach an agent", "the answer to its next report has it")
def test_plans_of_an_answer_that_is_lost_are_in_the_next_one(agent: NodeAgent) -> None:
    controller = controller_with([ONE])
    agent.start({}, controller)
    assert agent.plans_after(0, 60.0) == [ONE]
    ray.get(controller.lose_an_answer_with.remote([TWO, THREE]))
    assert agent.plans_after(1, 60.0) == [TWO, THREE]


def test_a_plan_that_comes_twice_is_kept_once() -> None:
    relay = PlanRelay(has_controller=True)
    relay.take_answer([ONE])
    relay.take_answer([ONE, TWO])
    assert relay.after(-1, 0.0) == [ONE, TWO]
    assert relay.newest == 2

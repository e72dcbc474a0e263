"""The controller without Ray: its event loop answers while its thread searches for a plan."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.control_runs import COSTS, DENSITIES, LAYERS, QUIET, WORLD, FakeTraining, journal

from cgx_ray.control import controller as controller_module
from cgx_ray.control.controller import Controller
from cgx_ray.control.history import Snapshot
from cgx_ray.control.policy import AdaptivePolicy, Decision, Situation
from cgx_ray.monitors.node_step import node_steps
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.plan import Plan, make_plan
from cgx_ray.planner.options import candidate_options

FIRST = make_plan(LAYERS, version=0, world_size=WORLD)


class SlowPolicy(AdaptivePolicy):
    """Waits for `may_go_on` before it decides. `has_begun` is set while it does."""

    def __init__(self) -> None:
        super().__init__(candidate_options(DENSITIES), min_gain=0.8)
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def decide(self, situation: Situation) -> Decision:
        self.has_begun.set()
        assert self.may_go_on.wait(60.0), "nobody let the policy go on"
        return super().decide(situation)


class FailingPolicy(AdaptivePolicy):
    def __init__(self) -> None:
        super().__init__(candidate_options(DENSITIES), min_gain=0.8)

    def decide(self, situation: Situation) -> Decision:
        raise ValueError("no plan can be found")


class _Sink:
    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None: ...

    def increase(self, name: str, by: float, labels: Mapping[str, str]) -> None: ...

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None: ...


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A controller has a process of its own, and tunes it. Here other tests follow."""
    monkeypatch.setattr(controller_module, "RaySink", _Sink)
    turn_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(turn_s)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def make_controller(tmp_path: Path, policy: AdaptivePolicy) -> Controller:
    return Controller(policy, str(tmp_path / "decisions.jsonl"), "run", "id", str(tmp_path / "snapshot"))


def reports(controller: Controller) -> Iterator[NodeSample]:
    """Yield the reports of a training under the controller's newest plan, one per step."""
    run = FakeTraining(controller._loop)
    for step in itertools.count(1):
        run.step = step
        samples = node_steps(map(run.sample, range(WORLD)))
        yield NodeSample(node_id="node", time_s=float(step), steps=samples, latency_s={"other": 1e-4}, host=QUIET)


async def feed_until_asked(controller: Controller, policy: SlowPolicy) -> None:
    """Report steps until the policy is asked for its first decision."""
    for report in reports(controller):
        await controller.observe(report)
        if await asyncio.to_thread(policy.has_begun.wait, 0.05):
            return


def test_reports_and_polls_are_answered_while_a_plan_is_searched(tmp_path: Path) -> None:
    policy = SlowPolicy()
    controller = make_controller(tmp_path, policy)

    async def run() -> list[Plan]:
        assert await controller.register(LAYERS, FIRST, COSTS, "thread", 0) == FIRST
        await feed_until_asked(controller, policy)
        poll = asyncio.create_task(controller.plans_after(0, 60.0))
        for number in range(3):
            late = NodeSample(node_id=f"late {number}", time_s=9.0, steps=(), latency_s={}, host=QUIET)
            assert await controller.observe(late) is None
        assert await controller.plans_after(0, 0.0) == []
        assert not poll.done()
        policy.may_go_on.set()
        return await poll

    (plan,) = asyncio.run(run())
    assert plan.version == 1
    kept = Snapshot(tmp_path / "snapshot").read()
    assert kept is not None
    assert kept.plans[-1] == plan, "ranks heard of a plan that the snapshot lacks"


def test_decisions_are_those_of_a_loop_that_is_stepped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(10**6))

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return float(next(times))

        time = monotonic

    monkeypatch.setattr(controller_module, "time", Clock)
    policy = AdaptivePolicy(candidate_options(DENSITIES), min_gain=0.8)

    async def run(folder: Path, *, waits: bool) -> list[dict[str, Any]]:
        controller = make_controller(folder, policy)
        await controller.register(LAYERS, FIRST, COSTS, "thread", 0)
        # Reports of dense steps alone: those of later plans would depend on when the plan came.
        made = [
            replace(report, steps=tuple(replace(step, plan_version=0) for step in report.steps))
            for report in itertools.islice(reports(controller), 6)
        ]
        for report in made:
            await controller.observe(report)
            if waits:
                await controller.look()
        await controller.history()
        return journal(folder)

    texts = []
    for waits in (True, False):
        times = iter(range(10**6))
        (tmp_path / str(waits)).mkdir()
        texts.append([json.dumps(line) for line in asyncio.run(run(tmp_path / str(waits), waits=waits))])
    assert texts[0] == texts[1]
    assert texts[0], "no decision was made"


def test_an_error_of_the_thread_is_logged_and_told_to_the_node_with_its_next_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    controller = make_controller(tmp_path, FailingPolicy())

    async def run() -> Sequence[BaseException]:
        await controller.register(LAYERS, FIRST, COSTS, "thread", 0)
        heard = []
        for report in itertools.islice(reports(controller), 6):
            try:
                await controller.observe(report)
            except ValueError as error:
                heard.append(error)
            await controller.look()
        return heard

    heard = asyncio.run(run())
    assert heard
    assert {str(error) for error in heard} == {"no plan can be found"}
    assert sum("no plan can be found" in record.getMessage() for record in caplog.records) == 1
    assert controller._loop.plans == [FIRST]


def test_senders_wait_when_too_many_reports_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "MAX_WAITING_REPORTS", 2)
    policy = SlowPolicy()
    controller = make_controller(tmp_path, policy)

    async def run() -> list[bool]:
        await controller.register(LAYERS, FIRST, COSTS, "thread", 0)
        await feed_until_asked(controller, policy)
        late = NodeSample(node_id="late", time_s=9.0, steps=(), latency_s={}, host=QUIET)
        sent = [asyncio.create_task(controller.observe(late)) for _ in range(4)]
        _, waiting = await asyncio.wait(sent, timeout=0.05)
        policy.may_go_on.set()
        await asyncio.gather(*sent)
        return [task in waiting for task in sent]

    # The report that led to the decision is the first that waits.
    assert asyncio.run(run()) == [False, True, True, True]

"""The controller without Ray, and the process of its loop: one answers while the other searches for a plan."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.control_runs import QUIET, journal, registration
from support.loop_policies import ADAPTIVE, RaisingPolicy, SlowPolicy
from support.loop_reports import FIRST, reports

from cgx_ray.control import controller as controller_module
from cgx_ray.control.controller import Controller
from cgx_ray.control.history import Snapshot
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.policy import Policy
from cgx_ray.errors import CGXError
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.report.journal_schema import journal_problem

pytestmark = pytest.mark.long

TESTS = Path(__file__).parents[1]
WITHIN_S = 30.0


class _Sink:
    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None: ...

    def increase(self, name: str, by: float, labels: Mapping[str, str]) -> None: ...

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None: ...


@pytest.fixture
def ended() -> list[Controller]:
    """Controllers that would have ended their process."""
    return []


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[Controller]
) -> Iterator[Callable[..., Controller]]:
    """Start a controller without Ray, whose loop has a real process, in a folder."""
    monkeypatch.setattr(controller_module, "RaySink", _Sink)
    started: list[Controller] = []

    def end(self: Controller) -> None:
        ended.append(self)

    monkeypatch.setattr(Controller, "_end", end)

    def start(policy: Policy, folder: Path = tmp_path) -> Controller:
        controller = Controller(policy, str(folder / "decisions.jsonl"), "run", "id", str(folder / "snapshot"))
        started.append(controller)
        assert controller.register(registration(first_plan=FIRST)) == FIRST
        return controller

    yield start
    for controller in started:
        controller._loop._process.kill()
    wait_until(lambda: all(controller in ended for controller in started))


def test_a_second_run_in_a_folder_says_that_it_adds_to_the_first_ones_journal(
    start: Callable[..., Controller], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(ADAPTIVE)
    assert "is of an earlier run" not in caplog.text
    second = tmp_path / "second"
    second.mkdir()
    (second / "decisions.jsonl").write_text("{}\n")
    start(ADAPTIVE, second)
    assert f"{second / 'decisions.jsonl'} is of an earlier run, and this one adds its lines to it: " in caplog.text


def observe(controller: Controller, report: NodeSample, newest: int = 0) -> tuple[str | None, list[int]]:
    """Report; return the node to probe and the versions of the plans that came with it."""
    order, plans = controller.observe(report.node_id, pickle.dumps(report), newest) or (None, [])
    return order, [plan.version for plan in plans]


def wait_until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def feed_until_asked(controller: Controller, policy: SlowPolicy) -> None:
    """Report steps until the policy is asked for its first decision."""
    for report in reports():
        observe(controller, report)
        time.sleep(0.05)
        if policy.begun.exists():
            return


def quiet_report(node_id: str) -> NodeSample:
    return NodeSample(node_id=node_id, time_s=9.0, steps=(), latency_s={}, host=QUIET)


def test_reports_and_ranks_are_answered_while_a_plan_is_searched(
    start: Callable[..., Controller], tmp_path: Path
) -> None:
    policy = SlowPolicy(tmp_path)
    controller = start(policy)
    feed_until_asked(controller, policy)
    for number in range(3):
        assert observe(controller, quiet_report(f"late {number}")) == (None, [])
    assert controller.plans_after(0) == []
    policy.go_on.touch()
    wait_until(lambda: bool(controller.plans_after(0)))
    (plan,) = controller.plans_after(0)
    assert plan.version == 1
    kept = Snapshot(tmp_path / "snapshot").read()
    assert kept is not None
    assert kept.plans[-1] == plan, "ranks heard of a plan that the snapshot lacks"
    assert observe(controller, quiet_report("late 0")) == (None, [1])
    assert observe(controller, quiet_report("late 0"), newest=1) == (None, [])


def test_decisions_are_those_of_a_loop_that_is_stepped(
    start: Callable[..., Controller], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(10**6))

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return float(next(times))

        time = monotonic

    monkeypatch.setattr(controller_module, "time", Clock)
    # Reports of dense steps alone: those of later plans would depend on when the plan came.
    made = list(itertools.islice(reports(), 6))
    folders = [tmp_path / name for name in ("stepped", "waits", "does not wait")]
    for folder in folders:
        folder.mkdir()
    stepped = ControlLoop(ADAPTIVE, Journal(folders[0] / "decisions.jsonl"))
    stepped.register(registration(first_plan=FIRST), 0.0, 1.0)
    for now_s, report in enumerate(made, 2):
        stepped.add_report(report.node_id, pickle.dumps(report), float(now_s))
    stepped.end(8.0)
    for folder in folders[1:]:
        times = iter(range(10**6))
        controller = start(ADAPTIVE, folder)
        for report in made:
            observe(controller, report)
            if folder.name == "waits":
                controller.look()
        controller.end()
    lines = [journal(folder) for folder in folders]
    assert lines[0], "no decision was made"
    assert lines[1] == lines[0]
    assert lines[2] == lines[0]


def test_an_error_of_the_loop_is_logged_and_raised_at_the_node_with_its_next_report(
    start: Callable[..., Controller], caplog: pytest.LogCaptureFixture
) -> None:
    controller = start(ADAPTIVE)
    heard = []
    for _ in range(6):
        try:
            controller.observe("node", b"no pickle", 0)
        except CGXError as error:
            heard.append(error)
        controller.look()
    assert heard
    assert {str(error) for error in heard} == {"UnpicklingError: invalid load key, 'n'."}
    assert "loop.py" in heard[0].__notes__[0], "the traceback of the loop's process is lost"
    said = caplog.text
    assert said.count("could not be used (UnpicklingError(") == 1, said
    assert controller.plans_after(-1) == [FIRST]


def test_a_policy_that_raises_leaves_the_plan_and_is_named_once_in_log_and_journal(
    start: Callable[..., Controller], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    controller = start(RaisingPolicy())
    for report in itertools.islice(reports(), 8):
        assert observe(controller, report)[1] == []
        controller.look()
    controller.end()
    assert controller.plans_after(-1) == [FIRST]
    said = caplog.text
    assert said.count("the policy has failed after step") == 1, said
    assert "loop_policies.py" in said, "the traceback of the policy is lost"
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines if line["event"] == "policy_error"] == [
        "ZeroDivisionError: no plan can be found"
    ]
    assert set(map(journal_problem, lines)) == {""}
    assert lines[-1] == {"event": "end", "time": lines[-1]["time"], "step": 8, "newest_step": 8}


def test_an_error_does_not_hold_back_plans(start: Callable[..., Controller]) -> None:
    controller = start(ADAPTIVE)
    heard = []
    for _ in range(6):
        heard.append(controller.observe("node", b"no pickle", -1))
        controller.look()
    assert heard == [(None, [FIRST])] * 6


def test_senders_wait_when_too_many_reports_do(
    start: Callable[..., Controller], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = SlowPolicy(tmp_path)
    controller = start(policy)
    feed_until_asked(controller, policy)
    monkeypatch.setattr(controller_module, "MAX_WAITING_REPORTS", controller._loop.num_waiting + 1)
    with ThreadPoolExecutor(4) as threads:
        sent = []
        for _ in range(4):
            sent.append(threads.submit(observe, controller, quiet_report("late")))
            time.sleep(0.05)
        were_done = [one.done() for one in sent]
        policy.go_on.touch()
    assert were_done == [True, False, False, False]
    assert [one.exception() for one in sent] == [None] * 4


def test_the_controller_ends_with_the_process_of_its_loop(
    start: Callable[..., Controller], ended: list[Controller], caplog: pytest.LogCaptureFixture
) -> None:
    controller = start(RaisingPolicy())
    # Ctrl-C ends the training first, which then ends the loop in order.
    assert os.getpgid(controller._loop.pid) != os.getpgrp()
    os.kill(controller._loop.pid, signal.SIGKILL)
    wait_until(lambda: controller in ended)
    said = [message for message in caplog.messages if "has ended (exit status -9): the controller ends too" in message]
    assert len(said) == 1, caplog.messages


def test_the_process_of_the_loop_ends_with_its_controller_even_in_the_middle_of_a_decision(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "support.loop_front", str(tmp_path)]
    with subprocess.Popen(argv, cwd=TESTS, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        loop = psutil.Process(int(front.stdout.readline()))
        assert loop.is_running()
        front.kill()
        # A busy machine may take longer than the second that is promised.
        loop.wait(timeout=60)


class _Unreadable(RaisingPolicy):
    """Raises when the process of the loop takes it out of its pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return divmod, (1, 0)


def test_a_process_that_cannot_start_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(controller_module, "RaySink", _Sink)
    with pytest.raises(CGXError, match=r"the control loop could not start \(exit status 1\); the log has its error"):
        Controller(_Unreadable(), str(tmp_path / "decisions.jsonl"), "run", "id", str(tmp_path / "snapshot"))
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_process_of_the_loop_imports_neither_ray_nor_torch() -> None:
    code = "import sys, cgx_ray.control.loop_process; sys.exit(bool({'ray', 'torch'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)

"""Monitors and the journal meet errors: what is left goes on, and says what is missing."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.control_runs import QUIET
from support.samples import step_sample

from cgx_ray.control.journal import lines as journal_module
from cgx_ray.control.journal.lines import Journal, QueuedJournal
from cgx_ray.control.journal_events import JournalEvents
from cgx_ray.monitors import host as host_module
from cgx_ray.monitors.host import HostMonitor
from cgx_ray.monitors.sample import NodeSample

LINE = {"event": "end", "time": 1.0, "step": None}


def _refuse(*args: object, **kwargs: object) -> Any:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@pytest.mark.fault("errors of `/proc/pressure` and of psutil", "that reading is left out, and logged once")
@pytest.mark.parametrize(
    ("owner", "name", "missing"),
    [
        (host_module, "read_pressure", {"pressure": {}}),
        (psutil, "virtual_memory", {"memory_share": 0.0}),
        (psutil, "cpu_percent", {"cpu_share": 0.0}),
        (psutil, "net_io_counters", {"sent_bytes_per_s": 0.0, "num_nic_errors": 0}),
        (psutil, "net_if_stats", {"nic_speed_bits_per_s": 0.0}),
    ],
)
def test_a_reading_that_the_kernel_refuses_is_left_out_and_said_once(
    owner: Any, name: str, missing: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(owner, name, _refuse)
    monitor = HostMonitor()
    loads = [monitor.read(0) for _ in range(3)]
    assert {field: getattr(loads[-1], field) for field in missing} == missing
    said = [message for message in caplog.messages if "Operation not supported" in message]
    # Cards are asked for their counters and for their speed; there are two kinds of pressure.
    assert 1 <= len(said) == len(set(said)) <= 2, said


def test_pressure_that_cannot_be_read_does_not_hide_the_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Reading a folder is an OSError, as reading the file is where the kernel was started without `psi=1`.
    for resource in ("cpu", "memory"):
        (tmp_path / resource).mkdir()
    monkeypatch.setattr(host_module.read_pressure, "__defaults__", (tmp_path,))
    load = HostMonitor().read(0)
    assert load.pressure == {}
    assert load.memory_share > 0


@pytest.mark.fault("the journal is on a file system that hangs", "lines wait, then are lost and counted")
def test_a_file_system_that_hangs_does_not_hold_up_who_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    append = Journal._append

    def hang(self: Journal, entry: dict[str, Any]) -> None:
        assert hangs.wait(60)
        append(self, entry)

    monkeypatch.setattr(Journal, "_append", hang)
    monkeypatch.setattr(journal_module, "MAX_WAITING_LINES", 10)
    log = QueuedJournal(tmp_path / "decisions.jsonl")
    for _ in range(20):
        log.write(LINE)
    assert not log.flush(0.1)
    # The thread has taken one or none of them.
    assert log.num_errors in (9, 10)
    hangs.set()
    assert log.flush(60)
    assert len((tmp_path / "decisions.jsonl").read_text().splitlines()) == 20 - log.num_errors


@pytest.mark.fault("the journal is a pipe that no process reads", "lines are lost and counted")
def test_a_pipe_in_place_of_the_journal_costs_lines_and_no_time(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    os.mkfifo(path)
    log = QueuedJournal(path)
    log.write(LINE)
    assert log.flush(60)
    assert log.num_errors == 1
    assert list(log.recent) == [LINE]


@pytest.mark.fault("no samples come for a minute", "one line in the journal, one in the log")
def test_the_journal_says_once_that_no_samples_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = Journal(tmp_path / "decisions.jsonl")
    events = JournalEvents(log, (), {})
    events.quiet(0.0, 1000.0)
    step = step_sample(0, 7)
    events.report(NodeSample(node_id="a", time_s=0, steps=(step,), latency_s={}, host=QUIET), 10.0)
    events.report(NodeSample(node_id="b", time_s=0, steps=(), latency_s={}, host=QUIET), 60.0)
    events.quiet(69.0, 1069.0)
    assert not log.path.exists()
    events.quiet(70.0, 1070.0)
    events.quiet(90.0, 1090.0)
    events.report(NodeSample(node_id="a", time_s=0, steps=(step,), latency_s={}, host=QUIET), 100.0)
    events.quiet(101.0, 1101.0)
    events.quiet(160.0, 1160.0)
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    first = {"event": "no_samples", "time": 1070.0, "step": 7, "seconds": 60.0, "quiet_nodes": ["a"]}
    assert lines == [first, {**first, "time": 1160.0, "quiet_nodes": ["a", "b"]}]
    assert sum("no samples for 60 s" in message for message in caplog.messages) == 2

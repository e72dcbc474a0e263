"""Every panel and rule of the boards, asked of a real Prometheus that watched a real adaptive run through Ray."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import ray
from support.controller_facts import KnownFacts
from support.samples import step_sample

from cgx_ray.monitors.agent import NodeAgent
from cgx_ray.monitors.controller_metrics import ControllerMetrics
from cgx_ray.monitors.export import METRICS
from cgx_ray.monitors.ray_sink import RaySink
from cgx_ray.monitors.round_trip import EchoServer
from dashboards.making.board import Panel, chosen, metrics_in
from dashboards.making.files import BOARDS
from dashboards.making.grafana import DECISION_MARKS
from dashboards.making.prometheus import PrometheusServer, Series
from dashboards.making.recording import (
    FAST_BIT_PER_S,
    FAST_STEPS,
    RUN_NAME,
    SETTLE_S,
    SLOW_BIT_PER_S,
    Recording,
    ray_and_prometheus,
    record,
)

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "dashboards" / "rules.yaml"
# A second run, whose metrics are set by the test: several nodes, slow links, faults.
OTHER_RUN = "several nodes"
# Gauges end with the run, at the latest after this time. Ray keeps them for two of its reports.
END_TIMEOUT_S = 90.0

pytestmark = [
    # Ray's own: it leaves sockets and files open until its processes end, and calls its own deprecated APIs.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    # `make test` compares the boards with Grafana's schema and the known metrics (test_board_files.py).
    pytest.mark.slow,
    # A run and two clusters' worth of processes, on machines that may be busy.
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def folder_of_boards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the boards, which Ray writes its own boards to."""
    folder = tmp_path_factory.mktemp("boards")
    for name in BOARDS:
        shutil.copy(ROOT / "dashboards" / f"{name}.json", folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder_of_boards: Path) -> Iterator[PrometheusServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", str(folder_of_boards))
        with ray_and_prometheus(tmp_path_factory.mktemp("prometheus"), RULES) as server:
            yield server


@pytest.fixture(scope="module")
def recording(server: PrometheusServer, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(server, tmp_path_factory.mktemp("run"))


def ask(recording: Recording, expression: str) -> list[Series]:
    asked = chosen(expression, run=RUN_NAME)
    return recording.server.query_range(asked, recording.start_s, recording.end_s, 1.0)


def question(board: str, title: str) -> Panel:
    (found,) = [one for one in BOARDS[board].questions if one.title == title]
    return found


def values_of(recording: Recording, board: str, title: str, legend: str) -> list[tuple[float, float]]:
    (query,) = [one for one in question(board, title).queries if one.legend == legend]
    (series,) = ask(recording, query.expression)
    return list(series.points)


@pytest.mark.usefixtures("server")
def test_ray_writes_its_boards_beside_these(folder_of_boards: Path) -> None:
    def uids() -> dict[str, str]:
        return {path.name: json.loads(path.read_text())["uid"] for path in folder_of_boards.glob("*.json")}

    wait_until(lambda: "train_grafana_dashboard.json" in uids(), "Ray's own boards", 60.0)
    assert {f"{name}.json" for name in BOARDS} < uids().keys()
    assert len(set(uids().values())) == len(uids())
    for name in BOARDS:
        assert (folder_of_boards / f"{name}.json").read_text() == (ROOT / "dashboards" / f"{name}.json").read_text()


def test_every_panel_shows_the_run(recording: Recording) -> None:
    empty = [
        (one.title, query.expression)
        for board in BOARDS.values()
        for one in board.questions
        if one.empty is None
        for query in one.queries[:1]
        if not ask(recording, query.expression)
    ]
    assert empty == []


def test_a_change_of_plan_is_seen_when_it_was_decided(recording: Recording) -> None:
    changes = [entry for entry in recording.decisions if entry["kind"] != "keep"]
    assert changes
    found = ask(recording, DECISION_MARKS)
    assert "first_measurements" in {series.labels["cause"] for series in found}
    marks_s = [value / 1e3 for series in found for value in series.values]
    # Of several changes within a second, with the same kind of cause, the newest alone is marked.
    for entry in (changes[0], changes[-1]):
        assert min(abs(entry["time"] - mark_s) for mark_s in marks_s) < 0.01, (entry, marks_s)
    versions = values_of(recording, "decisions", "Which plan does each rank use?", "newest")
    seen_s = next(time_s for time_s, version in versions if version >= changes[0]["new"]["version"])
    # Decision, report, scrape: each takes up to a second, and more on a busy machine.
    assert -1 < seen_s - changes[0]["time"] < 10, (seen_s, changes[0]["time"])
    assert versions[-1][1] >= changes[-1]["new"]["version"], versions


def test_seconds_are_seconds_and_bits_per_second_are_those_of_the_link(recording: Recording) -> None:
    measured = values_of(recording, "overview", "Is it faster than dense, and as fast as predicted?", "measured")
    own_s = median(recording.steps_s)
    assert own_s / 3 < median(value for _, value in measured) < own_s * 3, (own_s, measured)
    slowest_s = max(recording.steps_s)
    parts = question("overview", "Where does the time of a step go?").queries
    points = [ask(recording, query.expression)[0].points for query in parts]
    together_s = [sum(value for _, value in values) for values in zip(*points, strict=True)]
    # One step took at most so long, so the mean of an interval is less.
    assert 0 < max(together_s) <= slowest_s * 1.1
    rates = values_of(recording, "network", "How fast is a link?", "bandwidth")
    before = [rate for time_s, rate in rates if time_s < recording.changed_s]
    after = [rate for time_s, rate in rates if time_s > recording.end_s - SETTLE_S]
    assert median(before) == pytest.approx(FAST_BIT_PER_S, rel=0.5), rates
    assert median(after) == pytest.approx(SLOW_BIT_PER_S, rel=0.5), rates
    steps = values_of(recording, "overview", "How fast is the training?", "steps/s")
    assert 0 < max(value for _, value in steps) < 1.5 / min(recording.steps_s)


def test_bytes_and_steps_add_up(recording: Recording) -> None:
    """Counters hold what the run did: the dense bytes of all steps on both ranks, and the number of steps."""
    chosen_run = 'ray_train_run_name=~"boards.*"'
    at_end_s = recording.end_s - 1

    def at_end(expression: str) -> float:
        (series,) = recording.server.query_range(expression, at_end_s, at_end_s + 0.5, 1.0)
        return series.values[-1]

    num_steps = at_end(f"sum(ray_cgx_ray_steps_total{{{chosen_run}}})")
    dense_bytes = at_end(f"sum(ray_cgx_ray_dense_bytes_total{{{chosen_run}}})")
    # Those of the last half second may not have been reported.
    assert 2 * FAST_STEPS < num_steps <= 2 * len(recording.steps_s)
    numel = 64 * 512 + 512 + 512 * 512 + 512 + 512 * 64 + 64
    assert dense_bytes == pytest.approx(num_steps * 4 * numel)


def test_every_rule_works_and_only_rules_of_this_run_fire(recording: Recording) -> None:
    rules = recording.server.rules()
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    assert recorded
    assert [name for name in recorded if not ask(recording, name)] == []
    ratio = ask(recording, "cgx_ray:speedup:ratio")[0].values
    assert 0.1 < min(ratio) <= max(ratio) < 50, ratio


def test_gauges_end_with_their_run_and_nothing_else_grows(recording: Recording) -> None:
    """Ray serves the counters and histograms of a process that has ended until the cluster ends."""
    of_run = 'ray_train_run_name=~"boards.*"'

    def alive() -> set[str]:
        found = recording.server.query(f'count by (__name__) ({{__name__=~"ray_cgx_ray_.*",{of_run}}})')
        names = {name for series in found for name in metrics_in(series.labels["__name__"])}
        return {name for name in names if METRICS[name].kind == "gauge"}

    wait_until(lambda: not alive(), "no gauge of the run", END_TIMEOUT_S)
    (grown,) = recording.server.query(f"sum(increase(ray_cgx_ray_steps_total{{{of_run}}}[5s])) or vector(0)")
    assert grown.values == [0]


def test_panels_of_rare_events_show_them(server: PrometheusServer) -> None:
    """Set by hand what one healthy node does not have: a second node, slow links and ranks, faults."""
    agent = ray.remote(NodeAgent).options(num_cpus=0).remote("a", OTHER_RUN, "127.0.0.1", run_id="id")
    metrics = ControllerMetrics(RaySink(), OTHER_RUN, "id", journal="/runs/other/decisions.jsonl")
    rare = [one for board in BOARDS.values() for one in board.questions if one.empty is not None]
    # The machine's cards need not drop packets; the kernel may be without pressure stall information.
    rare = [one for one in rare if one.title not in ("Do cards drop packets?", "Do processes wait for a resource?")]
    step = 0

    def shown() -> bool:
        nonlocal step
        ray.get(agent.report.remote([replace(step_sample(rank, step), num_local=2) for rank in (0, 1)]))
        metrics.export(KnownFacts(newest_decision_s={("replace", "network"): time.time()}), num_journal_errors=1)
        step += 1
        return not missing()

    def missing() -> list[str]:
        return [
            one.title
            for one in rare
            for query in one.queries
            if not server.query(chosen(query.expression, run=OTHER_RUN))
        ]

    with closing(EchoServer("127.0.0.1")) as peer:
        ray.get(agent.start.remote({"b": peer.address}))
        wait_until(shown, "a value on every panel", 60.0)
    ray.get(agent.stop.remote())
    ray.kill(agent)


def test_alerts_of_the_other_run_name_it(server: PrometheusServer) -> None:
    """A silent node is pending at once, and named by run and node."""
    metrics = ControllerMetrics(RaySink(), OTHER_RUN, "id", journal="/runs/other/decisions.jsonl")

    def alerts() -> list[dict[str, Any]]:
        metrics.export(KnownFacts(), num_journal_errors=1)
        return next(rule for rule in server.rules() if rule["name"] == "CgxRayNodeSilent")["alerts"]

    (alert, *_) = wait_until(alerts, "an alert", 60.0)
    assert alert["labels"]["ray_train_run_name"] == OTHER_RUN
    assert alert["labels"]["peer"] == "c"
    assert alert["annotations"]["summary"] == f"Run {OTHER_RUN}: node c answers no other node"


def wait_until(claim: Callable[[], Any], what: str, timeout_s: float) -> Any:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if result := claim():
            return result
        time.sleep(0.5)
    pytest.fail(f"{what}: not within {timeout_s} s")

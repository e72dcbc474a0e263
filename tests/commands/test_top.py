"""The live view: what `cgx-ray top` and the demo show."""

from __future__ import annotations

import io
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.control_runs import WORLD, FakeTraining, registration, start

from cgx_ray.cli import main
from cgx_ray.commands import top
from cgx_ray.commands.cluster import NoClusterError
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.live_state import NAMESPACE, LiveState, new_actor_name, run_of_actor
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.errors import ConfigError
from cgx_ray.monitors.sample import HostLoad, NodeSample, node_steps
from cgx_ray.report.live_screen import PlainScreen, draw_view, plain_line
from cgx_ray.report.live_view import LiveView, outcomes_of, view_of_controller, view_of_record
from cgx_ray.report.record import load_run

LOAD = HostLoad(sent_bytes_per_s=12e6, received_bytes_per_s=11e6, neighbour_bytes_per_s=3e6)


def trained(tmp_path: Path) -> FakeTraining:
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(30)
    return run


def asked(run: FakeTraining, tmp_path: Path, name: str = "my run") -> dict[str, Any]:
    """Return what the controller of `run` would answer."""
    live = LiveState(name, [f"10.0.0.{rank}" for rank in range(WORLD)])
    for rank in range(WORLD):
        steps = node_steps([replace(run.sample(rank), step_s=0.5 + rank / 10)])
        latency_s = {"other": 2e-4}
        live.add_sample(NodeSample(node_id=f"node{rank}", time_s=1.0, steps=steps, latency_s=latency_s, host=LOAD))
    journal = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    found: dict[str, Any] = json.loads(json.dumps(live.fields(run.loop.facts(), run.loop.plans, journal[-20:])))
    return found


def lines_of(view: LiveView, width: int = 80) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(draw_view(view))
    return file.getvalue().splitlines()


def test_the_view_of_a_controller_shows_ranks_links_plan_and_decisions_in_80_columns(tmp_path: Path) -> None:
    view = view_of_controller(asked(trained(tmp_path), tmp_path))
    lines = lines_of(view)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(line.strip("│ ").split()) for line in lines)
    for rank in range(WORLD):
        assert f"rank {rank} 10.0.0.{rank} {5 + rank}00 ms" in text
    # The slowest rank has the longest bar, and the others bars in proportion.
    bars = [line.count("█") for line in lines if " rank " in line or "ranks  " in line][:WORLD]
    assert bars == [round(30 * (5 + rank) / 8) for rank in range(WORLD)]
    assert "compute 300 ms encode 2 ms" in text
    assert "speed newest steps 4.36x as fast as dense" in text
    assert "100 Mbit/s per rank (spread " in text
    assert "10.0.0.2 (ranks 2): 11 MiB/s out, 10 MiB/s in, others 2 MiB/s" in text
    assert "plan qsgd 4-bit over sra" in text
    assert "dense -> qsgd 4-bit over sra: first measurements" in text
    assert "predicted 620 ms per step, measured 62" in text


@pytest.mark.parametrize(
    ("addresses", "is_simulated", "said"),
    [
        (WORLD, False, ""),
        (1, False, " within this machine"),
        (1, True, " on a simulated link"),
    ],
)
def test_a_rate_that_no_network_has_says_so(tmp_path: Path, addresses: int, is_simulated: bool, said: str) -> None:
    nodes = [f"10.0.0.{rank % addresses}" for rank in range(WORLD)]
    run = FakeTraining(ControlLoop(Adaptive(), Journal(tmp_path / "decisions.jsonl"), nodes=nodes))
    run.loop.register(registration(is_simulated=is_simulated))
    run.gbps = 0.1
    run.run(30)
    live = run.loop.look()
    assert live is not None
    for view in (view_of_controller(live), view_of_record(load_run(tmp_path))):
        assert view.links[0].startswith(f"100 Mbit/s per rank{said} (spread "), view.links


def test_a_plan_that_ranks_do_not_have_yet_is_shown_as_the_next_one(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps, run.lag = 0.1, 20
    run.run(15)
    coming = "; next qsgd 4-bit over sra, decided at step 3"
    assert view_of_controller(asked(run, tmp_path)).plan == f"dense{coming}"
    assert view_of_record(load_run(tmp_path)).plan == f"dense{coming}"
    run.run(20)
    assert view_of_controller(asked(run, tmp_path)).plan == "qsgd 4-bit over sra (on trial)"
    assert view_of_record(load_run(tmp_path)).plan == "qsgd 4-bit over sra"
    # Its plans have numbers of their own.
    again = start(tmp_path)
    again.clock = lambda step: 1000.0 + step
    again.run(1)
    assert view_of_record(load_run(tmp_path)).plan == "dense"


def test_a_name_from_a_user_steers_no_terminal_and_is_no_markup(tmp_path: Path) -> None:
    name = "\x1b[2J[bold red]run[/] \x07\u202e\U0001f680"
    view = view_of_controller(asked(trained(tmp_path), tmp_path, name))
    for width in (40, 80):
        text = "\n".join(lines_of(view, width))
        assert "\x1b" not in text
        assert "\x07" not in text
        assert r"\x1b[2J[bold red]run[/]" in text
    file = io.StringIO()
    PlainScreen(Console(file=file, width=80)).update([view], "ok")
    assert "\x1b" not in file.getvalue()
    assert "[bold red]run[/]" in file.getvalue()


def test_the_last_step_of_a_run_has_a_line_where_there_is_no_terminal(tmp_path: Path) -> None:
    view = view_of_controller(asked(trained(tmp_path), tmp_path))
    file = io.StringIO()
    screen = PlainScreen(Console(file=file, width=200))
    # In less than the seconds between two lines.
    for step, is_running in ((1, True), (2, True), (3, False), (3, False)):
        screen.update([replace(view, step=step, is_running=is_running)], "")
    steps = [line for line in file.getvalue().splitlines() if line.startswith("my run: step ")]
    assert [line.partition("  ")[0] for line in steps] == ["my run: step 1", "my run: step 3"]


def test_of_many_ranks_the_slowest_are_shown(tmp_path: Path) -> None:
    view = view_of_controller(asked(trained(tmp_path), tmp_path))
    ranks = tuple(replace(view.ranks[0], name=f"rank {rank}", step_s=1.0 + rank) for rank in range(64))
    text = "\n".join(lines_of(replace(view, ranks=ranks)))
    assert "rank 63" in text
    assert "rank 10 " not in text
    assert "and 60 faster ranks" in text


def test_a_view_fits_a_terminal_of_80_by_24_and_keeps_predictions(tmp_path: Path) -> None:
    view = view_of_controller(asked(trained(tmp_path), tmp_path))
    ranks = tuple(replace(view.ranks[0], name=f"rank {rank}", step_s=1.0 + rank) for rank in range(64))
    decided = tuple(replace(line, text=f"{line.text} {'and more ' * 40}") for line in view.decisions)
    nodes = (view.links[0], *[view.links[1]] * 16)
    lines = lines_of(replace(view, ranks=ranks, links=nodes, decisions=decided, loss=4.5, notes=("slow", "silent")))
    assert len(lines) <= 24, "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert sum("predicted " in line for line in lines) >= len(decided)
    assert "and more an " not in " ".join(lines), "a word is cut"
    assert sum(line.rstrip("│ ").endswith("...") for line in lines) == len(decided)
    assert any("and 13 more nodes" in line for line in lines)


def test_a_view_has_steps_per_second_elapsed_time_speed_and_loss(tmp_path: Path) -> None:
    found = asked(trained(tmp_path), tmp_path)
    found["elapsed_s"] = 3725.0
    found["journal"][-1] |= {"event": "progress", "loss": 4.25, "between_s": 0.0, "step_s": 1.0}
    view = view_of_controller(found)
    text = "\n".join(lines_of(view))
    assert "1.25 steps/s, 1:02:05 elapsed, loss 4.250" in text
    assert "loss 4.250 at step 1" in "\n".join(lines_of(replace(view, loss_step=1)))
    assert "x as fast as dense" in text
    elapsed = view_of_record(load_run(tmp_path)).elapsed_s
    assert elapsed is not None
    assert elapsed > 0


def test_top_waits_for_a_run_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[dict[str, str]] = [{}, {}, {"late": "late/1"}]
    monkeypatch.setattr(top, "_running", lambda: running.pop(0) if len(running) > 1 else running[0])
    monkeypatch.setattr(top, "is_up", lambda: True)
    monkeypatch.setattr(top, "cluster_address", lambda: "10.0.0.7:6379")
    views = top._views_of_run("late", waits=True)
    assert [next(views), next(views)] == [None, None]
    assert top._find("late") == ("late", "late/1")
    with pytest.raises(ConfigError, match=r"no run 'early'.* at 10.0.0.7:6379: late; .* --address of another cluster"):
        next(top._views_of_run("early", waits=False))
    monkeypatch.setattr(top, "is_up", lambda: False)
    assert list(top._views_of_run("early", waits=True)) == [], "the cluster has ended"


def test_top_asks_nothing_of_a_cluster_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    is_up = [True]

    def listed(*, all_namespaces: bool) -> list[dict[str, str]]:
        assert is_up[0], "Ray would wait for a minute, and then end the process"
        return [{"name": new_actor_name("mine"), "namespace": NAMESPACE}]

    def found(name: str, namespace: str) -> None:
        assert is_up[0], "as above"
        raise ValueError("it starts")

    monkeypatch.setattr(top, "is_up", lambda: is_up[0])
    monkeypatch.setattr(top.ray.util, "list_named_actors", listed)
    monkeypatch.setattr(top.ray, "get_actor", found)
    monkeypatch.setattr(top, "RESTART_S", 0.0)
    views = top._views_of_run("mine", waits=True)
    assert next(views) is None
    is_up[0] = False
    assert list(views) in ([], [None])


def test_a_run_without_its_controller_is_shown_from_its_files(tmp_path: Path) -> None:
    run = trained(tmp_path)
    view = view_of_record(load_run(tmp_path))
    assert view.is_running
    assert view.plan == "qsgd 4-bit over sra"
    assert [rank.name for rank in view.ranks] == ["all ranks"]
    assert plain_line(view).startswith(f"{tmp_path.name}: step ")
    assert "4.36x as fast as dense" in plain_line(view)
    run.loop.end(100.0)
    assert not view_of_record(load_run(tmp_path)).is_running
    # Restarted workers begin a new part.
    run.loop.register(registration(run.loop.layers, run.loop.plans[0]))
    run.run(3)
    assert view_of_record(load_run(tmp_path)).is_running


def test_each_outcome_belongs_to_the_decision_that_predicted_it() -> None:
    decisions = [{"time": time, "predicted_step_s": seconds} for time, seconds in ((1.0, 0.5), (2.0, 0.7), (9.0, 0.8))]
    outcomes = [
        {"time": 9.0, "predicted_step_s": 0.7, "measured_step_s": 0.72},
        {"time": 12.0, "predicted_step_s": 0.8, "measured_step_s": 0.81},
    ]
    assert outcomes_of(decisions, outcomes) == [None, 0.72, 0.81]


def test_top_follows_a_folder_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "RESTART_S", 0.2)
    monkeypatch.setattr(top, "POLL_S", 0.05)
    run = trained(tmp_path)
    ending = threading.Timer(0.5, run.loop.end, [100.0])
    ending.start()
    done = CliRunner().invoke(main, ["top", str(tmp_path), "--svg", str(tmp_path / "top.svg")])
    ending.join()
    assert done.exit_code == 0, done.output
    output = done.output.replace("\n", " ")
    assert "dense -> qsgd 4-bit over sra: first measurements" in output
    assert output.rstrip().endswith("has ended after step 30")
    picture = (tmp_path / "top.svg").read_text()
    assert "measured" in picture
    assert "url(http" not in picture.replace('"', "")
    assert "(ended)" in picture.replace("&#160;", " ")


def test_top_waits_for_a_folder_that_does_not_exist_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "RESTART_S", 0.0)
    monkeypatch.setattr(top, "POLL_S", 0.0)
    folder, seen = tmp_path / "runs" / "late", []
    monkeypatch.setattr(top.time, "sleep", lambda seconds: seen.append(seconds) or appear())

    def appear() -> None:
        if not folder.exists():
            folder.mkdir(parents=True)
            trained(folder).loop.end(100.0)

    done = CliRunner().invoke(main, ["top", str(folder / "decisions.jsonl")])
    assert done.exit_code == 0, done.output
    output = done.output.replace("\n", " ")
    assert f"waiting for {folder} to begin, a folder that does not exist yet; Ctrl-C ends" in output
    assert output.rstrip().endswith("late has ended after step 30")


def test_a_run_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    trained(tmp_path).loop.end(100.0)
    done = CliRunner().invoke(main, ["top", str(tmp_path), "--once"])
    assert done.exit_code == 0, done.output
    assert "waiting" not in done.output


def test_top_waits_while_ray_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = asked(trained(tmp_path), tmp_path)
    starting = ["no port", "no port", "up"]

    def connect(address: str) -> None:
        if starting.pop(0) != "up":
            raise NoClusterError(f"no Ray cluster at {address!r}")

    monkeypatch.setattr(top, "connect", connect)
    monkeypatch.setattr(top, "POLL_S", 0.0)
    monkeypatch.setattr(top, "_views_of_run", lambda name, waits: iter([view_of_controller(found)]))
    done = CliRunner().invoke(main, ["top", "my run"])
    assert done.exit_code == 0, done.output
    assert starting == []
    assert "waiting for a Ray cluster at 'auto', as there is no folder my run; Ctrl-C ends" in done.output
    assert "my run has ended after step" in done.output


def test_a_run_that_cannot_be_found_is_one_clear_error() -> None:
    done = CliRunner().invoke(main, ["top", "nothing", "--once", "--address", "127.0.0.1:1"])
    assert done.exit_code == 2
    assert "no Ray cluster at '127.0.0.1:1'" in done.output


def test_a_folder_that_is_missing_or_holds_no_run_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    for folder, says in (
        (tmp_path / "missing", "no such folder: "),
        (f"{tmp_path.name}/missing", "no such folder: "),
        (tmp_path / "no" / "run", f", as there is no {tmp_path / 'no'}; "),
        ("no/run", "no such folder: no/run, as there is no no; "),
        ("./missing", "no such folder: missing; "),
        ("~/no-such-runs/run", "/no-such-runs; give "),
        ("~nobody-of-this-name/run", "~nobody-of-this-name"),
        (tmp_path, "has no decisions.jsonl with a plan"),
    ):
        done = CliRunner().invoke(main, ["top", str(folder), "--once"])
        assert done.exit_code == 2
        assert says in done.output.replace("\n", " ")


def test_a_name_with_a_slash_is_that_of_a_run_if_the_cluster_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "connect", lambda address: None)
    monkeypatch.setattr(top, "_running", lambda: {"team/run": "team/run/1"})
    assert top._folder_of("team/run", "auto", waits=False) is None
    with pytest.raises(ConfigError, match="no such folder: team/other, as there is no team;"):
        top._folder_of("team/other", "auto", waits=False)


def test_the_name_of_an_actor_tells_its_run_and_is_new_each_time() -> None:
    for name in ("run", "a/b", "\U0001f680"):
        first, second = new_actor_name(name), new_actor_name(name)
        assert first != second
        assert run_of_actor(first) == run_of_actor(second) == name

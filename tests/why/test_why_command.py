"""`cgx-ray why` as a user types it: output and exit status of the script, the report, and what it lacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.why.made_records import training

from cgx_ray.cli import main
from cgx_ray.commands import why as command
from cgx_ray.why.records import GATHERED_FILE, RankRecord, rank_file, to_json

SCRIPT = Path(__file__).parents[1] / "support" / "why" / "script.py"
SLOW = {"bytes_per_s": 11.7e6, "busy_s": 9.0, "sent_bytes": 100_000_000}


def write(folder: Path, records: list[RankRecord]) -> Path:
    folder.mkdir(exist_ok=True)
    for record in records:
        (folder / rank_file(record.rank)).write_text(json.dumps(to_json(record)))
    return folder


def why(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["why", *map(str, words)])


def test_a_training_is_observed_from_outside(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "cgx_ray", "why", "--steps", "6", "--json", str(tmp_path / "why.json"), "--"]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [*words, sys.executable, str(SCRIPT), "12"],
        env={**os.environ, **alone, "MASTER_PORT": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.startswith("loss 0.")
    assert done.stdout.count("\n") == 1, "the script's own output, and nothing else"
    found = json.loads((tmp_path / "why.json").read_text())
    assert done.returncode == found["exit_status"]
    assert [bar["rank"] for bar in found["parts"]["bars"]] == [0]
    assert found["parts"]["num_steps"] >= 4, "all but those beside a long pause"
    assert found["notes"] == []
    assert "cgx-ray why: Your step takes" in done.stderr


def test_the_launcher_that_stop_ends_prints_no_traceback() -> None:
    words = [sys.executable, "-m", "cgx_ray", "why", "--steps", "6", "--stop", "--", sys.executable, "-m"]
    done = subprocess.run(
        [*words, "torch.distributed.run", "--nproc-per-node", "1", str(SCRIPT), "1000000"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "cgx-ray why: Your step takes" in done.stderr


@pytest.mark.parametrize("has_loader", [False, True])
def test_workers_of_a_loader_are_a_remedy_only_where_there_is_a_loader(has_loader: bool, tmp_path: Path) -> None:
    slow = SCRIPT.read_text().replace("optimizer.zero_grad()", "optimizer.zero_grad(); __import__('time').sleep(0.05)")
    loader = "    loader = torch.utils.data.DataLoader(range(8))\n    for step"
    script = tmp_path / "slow.py"
    script.write_text(slow.replace("    for step", loader) if has_loader else slow)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    words = [sys.executable, "-m", "cgx_ray", "why", "--steps", "6", "--", sys.executable, str(script), "12"]
    done = subprocess.run(words, env={**os.environ, **alone}, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 5, done.stderr
    assert ("DataLoader(num_workers=" in done.stderr) is has_loader
    assert "less work between two steps" in done.stderr


def test_a_script_without_ddp_is_told_so_after_its_end() -> None:
    done = why("--", "sh", "-c", "exit 0")
    assert done.exit_code == 1
    assert "The script made no process group and no DDP model" in done.output


def test_the_status_of_a_script_that_fails_is_kept(tmp_path: Path) -> None:
    done = why("--", "sh", "-c", "exit 7")
    assert done.exit_code == 7
    assert "the script ended with status 7 before it made a process group" in done.output
    assert "cgx_ray is not installed" not in done.output
    assert why("--", "sh", "-c", "kill -9 $$").exit_code == 128 + signal.SIGKILL


def test_stop_ends_the_script_once_all_steps_were_seen(tmp_path: Path) -> None:
    seen = write(tmp_path / "seen", training(network_s=2.2, usual_path=SLOW))
    (seen / GATHERED_FILE).write_text("{}")
    script = f'cp {seen}/* "$CGX_WHY"; exec sleep 100'
    start_s = time.monotonic()
    assert why("--stop", "--", "sh", "-c", script).exit_code == 3
    assert time.monotonic() - start_s < 60


def test_a_script_that_ignores_sigterm_has_its_grace_and_is_killed(tmp_path: Path) -> None:
    seen = write(tmp_path / "seen", training())
    (seen / GATHERED_FILE).write_text("{}")
    script = f"trap '' TERM; cp {seen}/* \"$CGX_WHY\"; sleep 100"
    start_s = time.monotonic()
    assert why("--stop", "--grace", "0.5", "--", "sh", "-c", script).exit_code == 0
    assert 0.5 < time.monotonic() - start_s < 20


def test_ctrl_c_ends_the_script_and_reports_what_was_seen(tmp_path: Path) -> None:
    seen = write(tmp_path / "seen", training())
    script = f'cp {seen}/* "$CGX_WHY"; echo ready; exec sleep 100'
    argv = ["env", "--default-signal=INT", sys.executable, "-m", "cgx_ray", "why", "--", "sh", "-c", script]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Nothing large to mend there" in said


def test_ctrl_c_while_the_script_starts_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        # Not to the process: other threads of the tests' would take it.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return started[0]

    popen, handler = subprocess.Popen, signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(subprocess, "Popen", start)
    try:
        with pytest.raises(KeyboardInterrupt):
            command._run(["sleep", "60"], tmp_path, stop=False, grace_s=1.0)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert started[0].returncode is not None


def test_what_a_script_has_written_is_reported_as_text_page_picture_and_json(tmp_path: Path) -> None:
    seen = write(tmp_path / "seen", training(network_s=2.2, paths={(1, 2): SLOW}))
    (seen / "error-77.txt").write_text("Traceback ...\nValueError: of ours\n")
    html, plot, json_path = (tmp_path / f"why.{suffix}" for suffix in ("html", "svg", "json"))
    done = why("--attach", seen, "--html", html, "--plot", plot, "--json", json_path)
    assert done.exit_code == 3
    for words in (
        "waiting for a link of 93.6 Mbit/s from node-1 to node-2",
        "compression would gain: ",
        "the observer failed in a process, which trained on without it: ValueError: of ours",
    ):
        assert words in done.output
    page = html.read_text()
    assert "Content-Security-Policy" in page
    assert "rank 3, node-3" in page
    assert "<svg" in plot.read_text()
    assert json.loads(json_path.read_text())["bound"] == "network"


def test_names_of_nodes_are_text_in_the_page(tmp_path: Path) -> None:
    records = [replace(one, node=replace(one.node, name=f"<script>{one.rank}")) for one in training(network_s=2.2)]
    why("--attach", write(tmp_path / "seen", records), "--html", tmp_path / "why.html")
    assert "<script>" not in (tmp_path / "why.html").read_text()


def test_ranks_that_were_not_seen_are_named_and_other_nodes_say_where_the_report_is(tmp_path: Path) -> None:
    records = training()
    assert "ranks 2, 3 were not seen" in why("--attach", write(tmp_path / "some", records[:2])).output
    done = why("--attach", write(tmp_path / "others", records[2:]))
    assert (done.exit_code, "rank 2 and rank 3 ran here; the report is where rank 0 ran" in done.output) == (0, True)


def test_a_broken_record_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / rank_file(0)).write_text("{")
    done = why("--attach", tmp_path)
    assert (done.exit_code, str(tmp_path / rank_file(0)) in done.output.replace("\n", "")) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "give a training"),
        (("--attach", ".", "--", "sh"), "not both"),
        (("--steps", "0", "--", "sh"), "--steps"),
        (("--", "no-such-program"), "no-such-program cannot be started"),
    ],
)
def test_what_is_not_allowed_is_said(words: tuple[str, ...], says: str) -> None:
    done = why(*words)
    assert done.exit_code == 2
    assert says in done.output

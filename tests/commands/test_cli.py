"""The command line itself: its help is quick, and every command is where the tables say."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bench.__main__ import bench
from cgx_ray.cli import main
from cgx_ray.commands.lazy import LazyGroup
from cgx_ray.errors import ConfigError

HEAVY = ("torch", "ray", "matplotlib", "numpy", "rich")


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        ("cgx_ray.cli --help", set()),
        ("cgx_ray.cli --version", set()),
        ("bench.__main__ --help", set()),
        ("cgx_ray.cli lab --help", set()),
        ("cgx_ray.cli collective --help", {"rich", "numpy"}),
    ],
)
def test_help_imports_no_library_that_only_commands_need(words: str, allowed: set[str]) -> None:
    module, *arguments = words.split()
    code = f"""
import sys
from {module} import {"bench" if module.startswith("bench") else "main"} as command
command({arguments!r}, standalone_mode=False)
print([name for name in {HEAVY!r} if name in sys.modules and name not in {sorted(allowed)!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_without_matplotlib_only_what_draws_is_refused_and_names_the_extra(tmp_path: Path) -> None:
    network = "--model resnet18 --step-time 50ms --workers 4 --latency 1ms --bandwidth 1gbps"
    lines = [
        f"plan {network}",
        f"plan {network} --plot p.png",
        "report .",
        "demo",
        "probe",
        "lab schedule c1",
        "top -h",
    ]
    code = f"""
import sys
sys.modules["matplotlib"] = None
from click.testing import CliRunner
from cgx_ray.cli import main
for line in {lines!r}:
    done = CliRunner().invoke(main, line.split())
    print(done.exit_code, done.output.strip().splitlines()[-1])
"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=tmp_path)
    missing = '2 Error: pictures need matplotlib; run: pip install "cgx-ray[plots]"'
    said = dict(zip(lines, done.stdout.splitlines(), strict=True))
    assert [line for line in lines if said[line] == missing] == [lines[1], "report .", "demo", "probe"]
    assert all(said[line].startswith("0 ") for line in (lines[0], "lab schedule c1", "top -h")), said


def groups(group: LazyGroup, path: str = "cgx-ray") -> Iterator[tuple[str, LazyGroup]]:
    yield path, group
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, LazyGroup):
            yield from groups(command, f"{path} {name}")


def test_each_table_has_the_names_and_the_short_help_of_its_commands() -> None:
    assert isinstance(main, LazyGroup)
    assert isinstance(bench, LazyGroup)
    found = {**dict(groups(main)), **dict(groups(bench, "bench"))}
    assert found.keys() == {"cgx-ray", "cgx-ray lab", "bench"}
    for path, group in found.items():
        for name, (_, line) in group.places.items():
            command = group.get_command(click.Context(group), name)
            assert command is not None
            assert (command.name, command.get_short_help_str(limit=200).rstrip(".")) == (name, line.rstrip(".")), path


def test_an_unknown_command_is_one_clear_error() -> None:
    done = subprocess.run([sys.executable, "-m", "cgx_ray", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "No such command 'nonsense'" in done.stderr


def test_a_slip_in_a_command_s_name_is_answered_with_the_name() -> None:
    done = CliRunner().invoke(main, ["plna"])
    assert done.exit_code == 2
    assert "No such command 'plna'. Did you mean 'plan'?" in done.output


@pytest.mark.parametrize("words", [["-h"], ["plan", "-h"], ["lab", "up", "-h"]])
def test_h_is_help(words: list[str]) -> None:
    # In a process of its own: click keeps the names of help of a command's first call, here one of another test.
    done = subprocess.run([sys.executable, "-m", "cgx_ray", *words], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("plan --model gpt2", "give --workers, --latency and --bandwidth, or --clusters"),
        ("plan --model gpt2 --workers 4", "give --latency and --bandwidth, or --clusters"),
        ("plan --model gpt2 --latency 1ms --bandwidth 1gbps", "give --workers, or --clusters"),
        ("plan --model gpt2 --workers 4 --latency 1ms --bandwidth 1GB", "bandwidth '1GB' is not allowed"),
        ("report no_such_folder", "there is no folder "),
        (f"report {__file__}", f"{__file__} is a file; give the folder of a run"),
        ("top no_run --once --address 127.0.0.1:1", "there is no folder no_run, and no Ray cluster at '127.0.0.1:1'"),
    ],
)
def test_a_value_that_is_not_allowed_ends_with_status_2_and_names_what_is_missing(words: str, says: str) -> None:
    done = CliRunner().invoke(main, [*words.split(), *(["--step-time", "1s"] if words.startswith("plan") else [])])
    assert done.exit_code == 2
    assert says in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    "words", ["report . --html", "report . --plot", "report . --json", "plan --model gpt2 --plot", "probe --plot"]
)
def test_files_in_folders_that_do_not_exist_are_refused_alike(words: str, tmp_path: Path) -> None:
    file = tmp_path / "nothing" / "file.png"
    done = CliRunner().invoke(main, [*words.split(), str(file)])
    assert done.exit_code == 2
    assert "is no folder to write to" in done.output.replace("\n", " ")
    assert not file.parent.exists()


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("Unauthenticated: RPC error: InvalidAuthToken: ...", "refused: token; set RAY_AUTH_MODE=token"),
        ("gcs_client.cc:210: Failed to get cluster ID from GCS server", "is no Ray cluster"),
    ],
)
def test_why_ray_cannot_be_reached_is_read_from_its_log_at_once(
    said: str, says: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from cgx_ray.commands import cluster

    over = threading.Event()

    def init(**_: object) -> None:
        os.write(2, said.encode())
        over.wait(60)

    monkeypatch.setattr(cluster.ray, "init", init)
    with pytest.raises(ConfigError, match=says):
        cluster.connect("auto")
    over.set()
    assert capfd.readouterr().err == "", "Ray's own lines are not shown"

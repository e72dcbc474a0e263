"""Files that are made to take all memory or time, or to steer the terminal: each is one clear error."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import cgx_ray
from cgx_ray.cli import main
from cgx_ray.planner.scenario import TYPICAL_PROFILE
from cgx_ray.session.state_files import read_state, state_file
from cgx_ray.session.states import STATE_FORMAT
from cgx_ray.untrusted import MAX_BYTES, parse_json, parse_yaml, printable

pytestmark = pytest.mark.long

# Of a process with the libraries that a command imports, which take about 90 MiB of it.
MEMORY_KIB = 200 << 10
# So that a reader that fails the test does not take the machine along.
LIMIT_BYTES, LIMIT_CPU_S = 1 << 30, 20
MEASURED = """
import sys
from cgx_ray.cli import main
try:
    main(sys.argv[1:])
finally:
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
MODEL = ["plan", "--model", "resnet50", "--step-time", "100ms"]
NETWORK = ["--workers", "2", "--latency", "50us", "--bandwidth", "10gbps"]


def run(*argv: str) -> str:
    """Return what a command says on standard error. Its exit status is 1 or 2, and its memory bounded."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, LIMIT_CPU_S))

    command = [sys.executable, "-c", MEASURED, *argv]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2), (done.returncode, done.stdout, done.stderr)
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert int(done.stdout.split()[-1]) < MEMORY_KIB
    return done.stderr


def run_here(*argv: str) -> str:
    """Return what a command says on standard error; it runs in this process, so for files that are no bombs."""
    done = CliRunner().invoke(main, argv)
    assert done.exit_code in (1, 2), done.output
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def laughs() -> str:
    """Return YAML whose aliases stand for 9^10 texts."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
    ]
    return "\n".join(lines)


CLUSTERS: dict[str, tuple[str, Callable[[], str], str]] = {
    "aliases": ("a.yaml", laughs, "anchors, aliases and tags are not allowed"),
    "tags": ("a.yaml", lambda: "- !!python/object:os.system {}", "anchors, aliases and tags are not allowed"),
    "depth": ("a.yaml", lambda: "[" * 1_000_000, "nested deeper than 32"),
    "nodes": ("a.yaml", lambda: "- 1\n" * 1_000_000, "more than 20,000 nodes"),
    "a number in base 60": (
        "a.yaml",
        lambda: "- {name: a, usd_per_hour: " + "1:" * 400_000 + "1}",
        "longer than 1000 characters",
    ),
    "a date": ("a.yaml", lambda: "- {name: a, usd_per_hour: 2001-01-01}", "'2001-01-01' is not of type 'number'"),
    "digits": ("a.yaml", lambda: "- {name: a, usd_per_hour: " + "9" * 900 + "}", "a whole number of 2^63 or more"),
    "infinity": ("a.yaml", lambda: "- {name: a, usd_per_hour: .inf}", "inf is no finite number"),
    "price": ("a.yaml", lambda: "- {name: a, usd_per_hour: 1.0e+300}", "is greater than the maximum of"),
    "bytes": ("a.yaml", lambda: "#" * (100 << 20), f"more than {MAX_BYTES:,} bytes"),
    "escapes": (
        "a.yaml",
        lambda: r'- {name: "\e[2J", usd_per_hour: 1, gpu: "\e]0;x\a"}',
        r"cluster '\x1b[2J', 1 of its nodes: no GPU '\x1b]0;x\x07'",
    ),
    "columns": (
        "a.csv",
        lambda: ",".join(map(str, range(65_000))) + "\n" + "1\n" * 50_000,
        "more than 1,000,000 cells",
    ),
    "rows": ("a.csv", lambda: "name\n" + "1\n" * 8_000_000, "more than 1,000,000 cells"),
}

# They take neither memory nor time, whoever reads them.
NO_BOMBS = {"a date", "digits", "infinity", "price", "escapes"}


@pytest.mark.long
@pytest.mark.parametrize("kind", CLUSTERS)
def test_a_file_of_clusters_that_is_a_bomb_is_one_clear_error(tmp_path: Path, kind: str) -> None:
    name, text, message = CLUSTERS[kind]
    (tmp_path / name).write_text(text())
    said_by = run_here if kind in NO_BOMBS else run
    assert message in said_by(*MODEL, "--clusters", str(tmp_path / name))


PROFILE = TYPICAL_PROFILE.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lambda: "[" * 500_000, "nested deeper than 32"),
        (lambda: '{"a": [' + "{}," * 5_000_000 + "1]}", "more than 1,000,000 values"),
        (lambda: PROFILE.replace('"threads": 1', '"threads": ' + "9" * 5000), "Exceeds the limit (4300 digits)"),
        (lambda: PROFILE.replace('"threads": 1', '"threads": 1e999'), "inf is no finite number"),
    ],
)
def test_a_profile_that_is_a_bomb_is_one_clear_error(tmp_path: Path, text: Callable[[], str], message: str) -> None:
    (tmp_path / "profile.json").write_text(text())
    assert message in run(*MODEL, *NETWORK, "--profile", str(tmp_path / "profile.json"))


def test_a_model_or_schedule_that_is_a_bomb_is_one_clear_error(tmp_path: Path) -> None:
    model, schedule = tmp_path / "model.csv", tmp_path / "schedule.txt"
    model.write_text("name,shape,forward_macs\na," + "9" * 4000 + ",9\n")
    assert "both less than 2^53" in run("plan", "--model", str(model), "--step-time", "1s", *NETWORK)
    for text, message in (
        ("unit s\n" + "0 rate=1gbit\n" * 1_000_000, "more than 1,048,576 bytes"),
        ("unit s\nnan rate=1gbit\n", "'nan' is not a time"),
        ("unit s\n0 host=" + "9" * 5000 + " cut\n", "is not allowed; write host=2"),
        ("unit s\n0 \x1b[31m=3\n", r"'\x1b[31m' is not a property of a link"),
    ):
        schedule.write_text(text)
        assert message in run("lab", "schedule", str(schedule), "--plot", str(tmp_path / "a.png"))


@pytest.mark.long
@pytest.mark.parametrize(
    "command", ["report", *(pytest.param(one, marks=pytest.mark.slow) for one in ("top", "replay"))]
)
def test_a_journal_with_a_line_of_a_gigabyte_is_one_clear_error(tmp_path: Path, command: str) -> None:
    with (tmp_path / "decisions.jsonl").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(0, 2)
        file.write(b"\n")
    files = ["--html", str(tmp_path / "a.html"), "--plot", str(tmp_path / "a.png")] if command == "report" else []
    said = run(command, str(tmp_path), *files, *(["--once"] if command == "top" else []))
    assert "line 1 is broken (longer than 16 MiB)" in said or "line 1: longer than 16 MiB" in said


def _compressed(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr("archive/data.pkl", bytes(1 << 26))


def _expanded(file: Path) -> None:
    memories = {"residuals": {"w": torch.zeros(1).expand(1 << 40)}, "momentum": {}, "powersgd_q": {}}
    head = {"format": STATE_FORMAT, "rank": 0, "world_size": 1, "step": 7, "loss_scale": 1.0}
    torch.save({**head, **memories}, file)


@pytest.mark.parametrize(
    ("write", "message"), [(_compressed, "its parts are larger than it is"), (_expanded, "its tensors are larger")]
)
def test_a_checkpoint_that_grows_in_memory_is_refused(
    tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    write(tmp_path / state_file(0, 1))
    with pytest.raises(cgx_ray.StateError, match=message):
        read_state(tmp_path, 0, 1)


def test_texts_of_others_are_shown_without_orders_to_the_terminal() -> None:
    assert (
        printable("\x1b[31m\x9b1m\u202e\r\n\udcff \u00e9 \u65e5")
        == r"\x1b[31m\x9b1m\u202e\r\n\udcff" + " \u00e9 \u65e5"
    )


@pytest.mark.parametrize("text", ["1", '{"a": [1, 2.5, -3.0e+4, "b", null, true, {}]}', "[]", '"\\u00e9"'])
def test_readers_of_json_and_yaml_return_the_same(text: str) -> None:
    assert parse_json(text) == parse_json(text.encode()) == parse_yaml(text) == json.loads(text)

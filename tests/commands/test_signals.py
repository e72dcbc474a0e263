"""SIGTERM and Ctrl-C end every command soon and in order: the status that a shell expects, and nothing left behind."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from support.control_runs import start
from support.emulated import needs_lab

from bench.__main__ import bench
from cgx_ray.cli import main
from cgx_ray.commands.lazy import LazyGroup
from cgx_ray.errors import ConfigError
from cgx_ray.report.show import whole_file

pytestmark = pytest.mark.long
# Processes started in the background by a shell ignore SIGINT, and their children inherit it.
WITH_INT = ["env", "--default-signal=INT"]
# Longest wait for a command to begin, and for it to end. The promise is 2 s; two cores at load 8 took up to 5.
BEGIN_S, END_S = 120.0, 30.0
ROOT = Path(__file__).parents[2]
NUM_LAYERS = 1500
NETWORK = ["--workers", "64", "--latency", "50us", "--bandwidth", "1gbps", "--step-time", "100ms"]
Begun = Callable[[psutil.Process, Path], bool]


def takes_signals(process: psutil.Process, folder: Path) -> bool:
    """Return whether the command's handler of SIGTERM is set. It may still be importing its module."""
    caught = Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) & 1 << signal.SIGTERM - 1)


def computes(process: psutil.Process, folder: Path) -> bool:
    """Return whether the command has worked for longer than its imports take."""
    return sum(process.cpu_times()[:2]) > 2.5


def has_said(process: psutil.Process, folder: Path) -> bool:
    return (folder / "output").stat().st_size > 0


def has_built(process: psutil.Process, folder: Path) -> bool:
    return (folder / "built").exists()


def has_started(process: psutil.Process, folder: Path) -> bool:
    """Return whether the command has started the one that it was given."""
    return any(child.name() == "sleep" for child in process.children())


def has_children(process: psutil.Process, folder: Path) -> bool:
    """Return whether the command has started processes, and they have begun to work."""
    worked_s = 0.0
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            worked_s += sum(child.cpu_times()[:2])
    return worked_s > 4.0


class Case(NamedTuple):
    """A command that takes long. `{}` in its words stands for its folder."""

    words: str
    begun: Begun
    statuses: tuple[int, ...] = ()


JSON, PLOT = "--json {}/out.json", "--plot {}/out.png"
CASES = [
    Case("collective --numel 1000 --density 0.1 --workers 4 --latency 1ms --bandwidth 1gbps", takes_signals),
    Case("doctor", takes_signals),
    Case(f"probe {PLOT} {JSON}", takes_signals),
    Case(f"bench kernels {PLOT} {JSON}", computes),
    Case(f"bench adapt {PLOT} {JSON}", computes),
    Case(f"bench planner {PLOT} {JSON}", computes),
    Case(f"plan --model {{}}/model.csv {' '.join(NETWORK)} --sweep workers=64..1024 {PLOT} {JSON}", computes),
    Case("profile --out {}/out.json", computes),
    Case("profile-model {}/slow_model.py:build --out {}/out.csv", has_built),
    Case(f"replay {{}} {JSON}", computes),
    Case(f"report {{}} --html {{}}/out.html {PLOT}", computes),
    Case("top {}", has_said),
    Case("why -- sleep 60", has_started),
]
LAB_CASES = [
    Case("lab up --hosts 2", has_said, statuses=(0,)),
    Case(f"bench accuracy --ranks 2 {PLOT} {JSON}", has_children),
    Case(f"bench adapt --lab {PLOT} {JSON}", has_children),
    Case(f"bench collectives --ranks 2 {JSON}", has_children),
    Case(f"bench lab {JSON}", has_children),
    Case(f"bench network {JSON}", has_children),
    Case(f"bench peers --quick {JSON}", has_children),
    Case(f"bench scale --nodes 20 --agreeing 8 {JSON}", has_children),
    Case(f"bench step --ranks 2 {JSON}", has_children),
    Case(f"bench why {JSON}", has_children),
    Case(f"demo --workers 2 --steps 400 --out {{}}/demo {JSON}", has_children),
    Case(f"demo --simulated-link --workers 2 --steps 400 --out {{}}/demo {JSON}", has_children),
]
TERMINATED, INTERRUPTED = signal.SIGTERM, signal.SIGINT


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with files that keep commands busy: a long journal of a run that goes on, and a large model."""
    folder = tmp_path_factory.mktemp("inputs")
    run = start(folder)
    for gbps in (100.0, 0.1):
        run.gbps = gbps
        run.run(20)
    first, *others = (folder / "decisions.jsonl").read_text().splitlines(keepends=True)
    (folder / "decisions.jsonl").write_text(first + "".join(others) * 500)
    rows = [f"layer{index},100x100,1000\n" for index in range(NUM_LAYERS)]
    (folder / "model.csv").write_text("name,shape,forward_macs\n" + "".join(rows))
    return folder


@pytest.fixture
def folder(tmp_path: Path, inputs: Path) -> Path:
    for path in inputs.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    begin = f"import pathlib, time\ndef build():\n    pathlib.Path({str(tmp_path / 'built')!r}).touch()\n"
    (tmp_path / "slow_model.py").write_text(f"{begin}    time.sleep(99)\n")
    return tmp_path


def id_of(case: Case) -> str:
    """Return the name of the command."""
    return " ".join(word for word in case.words.split()[:2] if word[0] not in "-{")


def commands(group: LazyGroup, path: str = "") -> Iterator[str]:
    for name, (place, _) in group.places.items():
        inside = group.get_command(None, name) if place.endswith(":lab") else None  # type: ignore[arg-type]
        if isinstance(inside, LazyGroup) and not path:
            yield from commands(inside, f"{name} ")
        else:
            yield f"{path}{name}"


def test_every_command_that_takes_long_is_among_the_cases() -> None:
    assert isinstance(main, LazyGroup)
    assert isinstance(bench, LazyGroup)
    short = {f"lab {name}" for name in ("set", "cut", "reconnect", "status", "schedule", "down", "run")}
    no_gpu, quick = {"bench gpu"}, {"compare"}
    long = {*commands(main), *(f"bench {name}" for name in bench.places)} - short - no_gpu - quick
    assert {id_of(case) for case in (*CASES, *LAB_CASES)} == long


def check_end(case: Case, folder: Path, number: signal.Signals) -> int:
    """Send a signal to the command once it works; check its end. Return its process id."""
    words = case.words.replace("{}", str(folder)).split()
    module = ["bench", *words[1:]] if words[0] == "bench" else ["cgx_ray.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} if words[0] == "bench" else None
    with (folder / "output").open("w") as output, (folder / "errors").open("w") as errors:
        argv = [*WITH_INT, sys.executable, "-m", *module]
        process = psutil.Popen(argv, cwd=folder, env=environment, stdout=output, stderr=errors)
    said = (folder / "errors").read_text
    children: list[psutil.Process] = []
    try:
        deadline_s = time.monotonic() + BEGIN_S
        while not (takes_signals(process, folder) and case.begun(process, folder)):
            assert process.poll() is None, said()
            assert time.monotonic() < deadline_s, said()
            time.sleep(0.02)
        children = process.children(recursive=True)
        process.send_signal(number)
        status = process.wait(timeout=END_S)
    finally:
        if process.poll() is None:
            process.kill()
        _, left = psutil.wait_procs(children, timeout=END_S)
        for child in left:
            child.kill()
    assert status in (case.statuses or (128 + number,)), (status, said())
    assert not left
    assert "Traceback" not in said()
    assert not list(folder.glob("out.*"))
    assert not list(folder.glob(".*"))
    return int(process.pid)


def cases(*quick: str) -> pytest.MarkDecorator:
    """Parametrize over CASES. All but `quick` are for `make test-faults`: each takes seconds to begin."""
    marks = {id_of(case): [] if id_of(case) in quick else [pytest.mark.slow] for case in CASES}
    assert marks.keys() >= set(quick)
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=marks[id_of(case)], id=id_of(case)) for case in CASES]
    )


# One of each kind: imports, computes, runs code of the user, has files under way, shows a screen; and a bench.
@cases("doctor", "bench planner", "plan", "profile-model", "report", "top")
def test_sigterm_ends_a_command(case: Case, folder: Path) -> None:
    check_end(case, folder, TERMINATED)


@cases("top")
def test_ctrl_c_ends_a_command(case: Case, folder: Path) -> None:
    check_end(case, folder, INTERRUPTED)


@pytest.mark.slow
@needs_lab()
@pytest.mark.parametrize("number", [TERMINATED, INTERRUPTED])
@pytest.mark.parametrize("case", LAB_CASES, ids=id_of)
def test_a_signal_ends_a_command_with_its_processes(case: Case, folder: Path, number: signal.Signals) -> None:
    pid = check_end(case, folder, number)
    # Others' labs may be up.
    assert f"cgx{pid}-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


LOSES_IT = """
import os, signal, time
import click
from cgx_ray.commands.lazy import MainGroup

class Deleted:
    def __del__(self):
        os.kill(os.getpid(), signal.Signals[os.environ["NAME"]])
        time.sleep(1)

@click.group(cls=MainGroup, places={"wait": ("__main__:wait", "")})
def main(): pass

@click.command
def wait():
    Deleted()
    time.sleep(60)

main()
"""


@pytest.mark.parametrize("number", [TERMINATED, INTERRUPTED])
def test_a_signal_that_a_finalizer_has_lost_ends_the_command_all_the_same(number: signal.Signals) -> None:
    argv = [*WITH_INT, f"NAME={number.name}", sys.executable, "-c", LOSES_IT, "wait"]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=END_S, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (128 + number, "", "")


def test_a_file_that_is_cut_short_leaves_the_old_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")

    def write_half() -> None:
        with whole_file(path) as new:
            new.write_text("hal")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("out.json", "old")]
    with whole_file(path) as new:
        new.write_text("new")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("out.json", "new")]
    with whole_file(Path("/dev/null")) as new:
        new.write_text("nothing")
    assert Path("/dev/null").is_char_device()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    for error in (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), FileNotFoundError("half a message")):
        said = re.escape(f"{path} cannot be written: {error.strerror or error}")
        with pytest.raises(ConfigError, match=said), whole_file(path):
            raise error
    assert list(tmp_path.iterdir()) == []


IN_TEXT = """
import click, sys
from cgx_ray.commands.lazy import MainGroup
class Group(MainGroup):
    def get_command(self, ctx, name):
        return click.Command(name, callback=lambda: exec(
            "import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
        ))
sys.exit(Group(places={})(["run"]))
"""


def test_a_signal_in_code_that_is_run_from_text_ends_a_module_with_its_own_status(tmp_path: Path) -> None:
    (tmp_path / "in_text.py").write_text(IN_TEXT)
    process = psutil.Popen([sys.executable, "-m", "in_text"], cwd=tmp_path)
    assert process.wait(timeout=BEGIN_S) == 128 + signal.SIGTERM

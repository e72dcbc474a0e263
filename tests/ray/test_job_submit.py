"""The examples as jobs on a Ray cluster that does not have cgx_ray: each job brings the wheel with it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.endings import RAYS_OWN, actors_below, listening, wait_for, wait_for_nothing
from support.ray_processes import ENV, RAY, end_with_children, free_ports
from support.wheels import ROOT, make_environment

TORCHRUN = "python -m torch.distributed.run --standalone --nproc-per-node 2"
SENT = r"(?P<less>[\d.,]+) MB of (?P<more>[\d.,]+) MB"
EVENTS = {"start", "decision", "outcome", "progress", "end"}
DIGITS = r"accuracy [789]\d\.\d%, (?P<{}>[\d,]+) bytes sent per step and rank\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """A Ray head of our own, and the folder that its jobs get as their working directory."""

    address: str
    folder: Path
    head: subprocess.Popen[bytes]

    @property
    def runtime_env(self) -> dict[str, object]:
        (wheel,) = self.folder.glob("*.whl")
        # As in examples/README.md: Ray copies the working directory to each node, and pip installs the wheel from it.
        return {"pip": [f"${{RAY_RUNTIME_ENV_CREATE_WORKING_DIR}}/{wheel.name}"]}

    def submit(self, entrypoint: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Submit a job and return when it has ended."""
        runtime_env = {**self.runtime_env, "env_vars": {"OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1", **env}}
        argv = ["submit", *options, "--working-dir", str(self.folder), "--runtime-env-json", json.dumps(runtime_env)]
        return self.call(*argv, "--", *entrypoint.split())

    def call(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `ray job`."""
        command = [*RAY, "job", argv[0], "--address", self.address, *argv[1:]]
        return subprocess.run(command, env=ENV, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def jobs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    python = make_environment(tmp_path_factory.mktemp("cluster"))
    folder = tmp_path_factory.mktemp("working_dir")
    shutil.copy(wheel, folder)
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    gcs, dashboard, client, agent = free_ports(4)
    argv = [str(python), *RAY[1:], "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={gcs}"]
    argv += ["--num-cpus=2", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--disable-usage-stats"]
    argv += [f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"]
    argv += [f"--object-store-memory={128 << 20}"]
    env = {**ENV, "PATH": f"{python.parent}:{ENV['PATH']}", "HOME": str(folder.parent)}
    # Not tmp_path: paths of Ray's sockets must be shorter than 107 characters.
    with tempfile.TemporaryDirectory(prefix="cgx-", dir="/tmp", ignore_cleanup_errors=True) as temp_dir:
        log_path = folder.parent / "head.log"
        with log_path.open("w") as log:
            head = subprocess.Popen([*argv, f"--temp-dir={temp_dir}"], env=env, stdout=log, stderr=log)
        try:
            wait_for_jobs_api(head, dashboard, log_path)
            yield Jobs(address=f"http://127.0.0.1:{dashboard}", folder=folder, head=head)
        finally:
            end_with_children(head)


def wait_for_jobs_api(head: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert head.poll() is None, log_path.read_text()
        assert time.monotonic() < deadline, log_path.read_text()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)


def test_every_example_is_submitted_here() -> None:
    here = Path(__file__).read_text()
    missing = [path.name for path in (ROOT / "examples").glob("*.py") if f"examples/{path.name}" not in here]
    assert missing == []
    readme = (ROOT / "examples" / "README.md").read_text()
    assert [path.name for path in (ROOT / "examples").glob("*.py") if f"`{path.name}`" not in readme] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entrypoint", "says"),
    [
        # Plain Ray Train, before our three lines.
        ("python examples/existing_script.py --epochs 5", r"epoch 5: accuracy [89]\d\.\d%\n"),
        ("python examples/existing_script_cgx.py --epochs 5", r"epoch 5: accuracy [89]\d\.\d%\n"),
        ("python examples/lightning_digits.py --epochs 3", r"epoch 3: accuracy [89]\d\.\d%\n"),
        (
            f"{TORCHRUN} examples/transformers_bytes.py --steps 20 --output ${{PWD}}/transformers",
            r"step 20: loss \d\.\d+\n",
        ),
        (f"{TORCHRUN} examples/accelerate_digits.py --epochs 4", r"accuracy [789]\d\.\d%\n"),
        (f"{TORCHRUN} examples/torchrun_gpt_bytes.py --steps 5 --batch-size 1", r"step 5: loss \d\.\d+\n"),
        (f"{TORCHRUN} examples/torchrun_fsdp2.py --steps 5 --batch-size 1", rf"step 5: loss \d\.\d+, sent {SENT}\n"),
        (f"{TORCHRUN} examples/backend_cgx.py --steps 2 --batch-size 1", r"cgx: loss \d\.\d+ after [\d.]+ s\n"),
        (
            f"{TORCHRUN} examples/digits_accuracy.py --steps 100",
            rf"none: {DIGITS.format('more')}(?:.*\n)*qsgd:bits=3: {DIGITS.format('less')}",
        ),
        (
            "python examples/elastic_nodes.py --max-workers 2 --steps 10 --checkpoint-every 5 --storage runs",
            r"2 workers begin at step 0\n(.*\n)*.*step 5: 2 workers, loss \d\.\d+\n(.*\n)*done: 10 steps, 2 workers",
        ),
    ],
    ids=lambda value: value.partition("examples/")[2].partition(".py")[0] or "log",
)
def test_an_example_runs_as_a_job_with_the_wheel(jobs: Jobs, entrypoint: str, says: str) -> None:
    done = jobs.submit(entrypoint)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "succeeded" in done.stdout
    found = re.search(says, done.stdout)
    assert found, done.stdout
    numbers = {name: float(text.replace(",", "")) for name, text in found.groupdict().items()}
    if numbers:
        assert numbers["less"] < 0.2 * numbers["more"]


@pytest.mark.slow
def test_a_job_that_is_done_says_so(jobs: Jobs, tmp_path: Path) -> None:
    done = jobs.submit(f"python examples/train_gpt_bytes.py --steps 5 --workers 2 --storage {tmp_path} --name job")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "done: {'step': 5, 'loss':" in done.stdout
    assert whole_checkpoints(tmp_path / "job")
    assert events_of(tmp_path / "job") <= EVENTS


@pytest.mark.slow
def test_a_job_with_a_wrong_argument_fails_with_our_message(jobs: Jobs) -> None:
    done = jobs.submit("python examples/train_gpt_bytes.py --codec zip")
    assert done.returncode == 1
    assert "unknown codec 'zip'; known: none, fp16" in done.stdout
    assert "failed" in done.stdout


@pytest.mark.slow
def test_a_stopped_job_leaves_checkpoints_with_residuals_and_a_journal_and_nothing_else(
    jobs: Jobs, tmp_path: Path
) -> None:
    before, segments = running(jobs), our_segments()
    (port,) = free_ports(1)
    arguments = f"--steps 1000000 --workers 2 --batch-size 1 --storage {tmp_path} --name stopped"
    options = ("--no-wait", "--submission-id", "stopped")
    entrypoint = f"python examples/train_gpt_bytes.py {arguments} --checkpoint-every 5"
    done = jobs.submit(entrypoint, *options, CGX_PORTS=f"{port}-{port + 9}")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: bool(whole_checkpoints(tmp_path / "stopped")), 200.0, lambda: jobs.call("logs", "stopped").stdout)
    assert {"ray::NodeAgent", "ray::Controller"} <= running(jobs)
    assert listening(port), "its monitors listen while it trains"
    done = jobs.call("stop", "stopped")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stopped" in jobs.call("status", "stopped").stdout.lower()
    wait_for_nothing(
        lambda: (running(jobs) - before) | (our_segments() - segments) | alive_actors(jobs) | listening(port)
    )
    assert {"start"} <= events_of(tmp_path / "stopped") <= EVENTS


def whole_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run on two workers that have the script's file, and one of ours per rank."""
    names = {"state.pt", *(f"cgx_ray-rank{rank:05d}-of-00002.pt" for rank in range(2))}
    return [folder for folder in run.glob("checkpoint_*/") if names <= {path.name for path in folder.iterdir()}]


def events_of(run: Path) -> set[str]:
    return {json.loads(line)["event"] for line in (run / "decisions.jsonl").read_text().splitlines()}


def running(jobs: Jobs) -> set[str]:
    """Names of the cluster's actors and drivers that run. Idle workers stay, and so do Ray's own actors."""
    drivers = set()
    for process in psutil.Process(jobs.head.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "examples/" in (command := " ".join(process.cmdline())):
                drivers.add(command)
    return drivers | actors_below(jobs.head.pid)


def alive_actors(jobs: Jobs) -> set[str]:
    """Classes of the cluster's actors that live, as `ray list actors` asks for them."""
    with urllib.request.urlopen(f"{jobs.address}/api/v0/actors?limit=10000") as answer:
        actors = json.load(answer)["data"]["result"]["result"]
    assert actors
    return {actor["class_name"] for actor in actors if actor["state"] != "DEAD"} - RAYS_OWN


def our_segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("cgx-ray-*")}

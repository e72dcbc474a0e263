"""The examples, started as a user starts them: as a job on a running Ray cluster, and under torchrun."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ray_processes import end_with_children, free_ports

ROOT = Path(__file__).resolve().parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
# A job finds `python` as in an activated environment. Without "disabled" Ray writes a token file to the user's home.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
ENV = {**os.environ, "PATH": PATH, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def cluster(tmp_path) -> Iterator[str]:
    """A Ray head of our own, as the address for jobs. Its processes are ended by their ids."""
    gcs, dashboard, client, agent = free_ports(4)
    argv = [*RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={gcs}", "--num-cpus=2"]
    argv += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
    argv += [f"--dashboard-agent-listen-port={agent}", f"--object-store-memory={128 << 20}", "--disable-usage-stats"]
    # Not tmp_path: paths of Ray's sockets must be shorter than 107 characters.
    with tempfile.TemporaryDirectory(prefix="cgx-", dir="/tmp", ignore_cleanup_errors=True) as temp_dir:
        log_path = tmp_path / "head.log"
        with log_path.open("w") as log:
            head = subprocess.Popen([*argv, f"--temp-dir={temp_dir}"], env=ENV, stdout=log, stderr=log)
        try:
            wait_for_jobs_api(head, dashboard, log_path)
            yield f"http://127.0.0.1:{dashboard}"
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


def test_the_example_runs_as_a_submitted_job(cluster, tmp_path):
    argv = [*RAY, "job", "submit", "--address", cluster, "--working-dir", ".", "--"]
    argv += ["python", "examples/train_gpt_bytes.py", "--steps", "5", "--workers", "2"]
    argv += ["--storage", str(tmp_path / "runs"), "--name", "job"]
    done = subprocess.run(argv, cwd=ROOT, env=ENV, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "succeeded" in done.stdout
    assert "done: {'step': 5, 'loss':" in done.stdout
    files = sorted(path.name for path in (tmp_path / "runs" / "job").glob("checkpoint_*/*"))
    assert sum(name.startswith("cgx_ray-rank") for name in files) == 2, f"one state per rank: {files}"
    assert "state.pt" in files
    for line in (tmp_path / "runs" / "job" / "decisions.jsonl").read_text().splitlines():
        assert json.loads(line)["event"] in ("start", "decision", "outcome", "progress", "end")


def test_the_example_under_torchrun_goes_on_from_its_checkpoint(tmp_path):
    def train(num_steps: int, *arguments: str) -> str:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        argv += ["examples/torchrun_gpt_bytes.py", "--steps", str(num_steps), "--batch-size", "2", *arguments]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    arguments = ["--checkpoint", str(tmp_path / "state.pt"), "--codec", "topk:density=0.05", "--scheme", "allgather"]
    first, resumed = train(5, *arguments), train(10, *arguments)
    assert re.fullmatch(r"step 5: loss [\d.]+\n", first)
    assert re.fullmatch(r"step 10: loss [\d.]+\n", resumed)
    assert float(resumed.split()[-1]) < float(first.split()[-1])

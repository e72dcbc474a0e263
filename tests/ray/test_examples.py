"""The examples where a job does not reach: a checkpoint is continued, a node is lost, a script before and after."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.ray_processes import ENV, RayNodes, end_with_children

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def test_three_lines_make_an_existing_script_compress_and_the_readme_shows_them() -> None:
    before, after = (
        (EXAMPLES / name).read_text().splitlines() for name in ("existing_script.py", "existing_script_cgx.py")
    )
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:]]
    (shown,) = re.findall(r"```diff\n(.*?)```", (EXAMPLES / "README.md").read_text(), re.DOTALL)
    assert len(changed) == 3
    assert [f"{line[0]}{line[2:]}" for line in changed] == [line for line in shown.splitlines() if line[0] == "+"]
    context = [line[1:] for line in shown.splitlines() if line[0] == " "]
    assert set(context) <= set(before)
    assert not any(line[0] == "-" for line in shown.splitlines())


def test_the_example_under_torchrun_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
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


# Ray takes two minutes to give up waiting for the third worker.
@pytest.mark.slow
def test_the_elastic_example_goes_on_without_a_node_that_is_lost(tmp_path: Path) -> None:
    """3 -> 2 workers: the second group begins at a checkpoint of the first and has its residuals."""
    with tempfile.TemporaryDirectory(prefix="cgx-", dir="/tmp", ignore_cleanup_errors=True) as temp_dir:
        nodes = RayNodes(tmp_path, temp_dir, num_cpus=2)
        try:
            lost = nodes.add_node(num_cpus=1)
            said = _train_until_a_node_is_lost(nodes.address, lost, tmp_path)
        finally:
            nodes.end()
    groups = re.findall(r"(\d) workers begin at step (\d+)", said)
    assert groups[0] == ("3", "0")
    size, first = groups[-1]
    assert size == "2"
    assert 10 <= int(first) < 200
    steps = [tuple(map(int, found)) for found in re.findall(r"step (\d+): (\d) workers, loss", said)]
    assert steps[0] == (10, 3)
    assert steps[-1] == (200, 2)
    assert "done: 200 steps, 2 workers at the end" in said


def _train_until_a_node_is_lost(address: str, lost: subprocess.Popen[bytes], folder: Path) -> str:
    """Run the example to its end, and end a node once it has checkpoints. Return what it said."""
    argv = [sys.executable, "examples/elastic_nodes.py", "--min-workers", "1", "--max-workers", "3", "--steps", "200"]
    argv += ["--checkpoint-every", "10", "--storage", str(folder), "--name", "elastic"]
    env = {**ENV, "RAY_ADDRESS": address, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20", "OMP_NUM_THREADS": "1"}
    path = folder / "driver.log"
    with path.open("w") as log:
        driver = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 240
        # Ray Train asks its workers for their reports every two seconds, and notes checkpoints here.
        while not list(folder.glob("elastic/checkpoint_manager_snapshot.json")):
            assert driver.poll() is None, path.read_text()
            assert time.monotonic() < deadline, path.read_text()
            time.sleep(0.2)
        end_with_children(lost)
        assert driver.wait(timeout=240) == 0, path.read_text()
    finally:
        driver.kill()
        driver.wait()
    return path.read_text()

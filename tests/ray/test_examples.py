"""The examples without Ray, started under torchrun as their docstrings say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("torchrun_fsdp2.py", "--steps", "5", "--batch-size", "1"),
            r"step 5: loss \d\.\d+, sent (?P<less>[\d.]+) MB of (?P<more>[\d.]+) MB\n",
        ),
        (("backend_cgx.py", "--steps", "2", "--batch-size", "1"), r"cgx: loss \d\.\d+ after [\d.]+ s\n"),
        (
            ("digits_accuracy.py", "--steps", "100"),
            r"none: accuracy [789]\d\.\d%, (?P<more>[\d,]+) bytes sent per step and rank\n"
            r"qsgd:bits=3: accuracy [789]\d\.\d%, (?P<less>[\d,]+) bytes sent per step and rank\n",
        ),
    ],
    ids=["torchrun_fsdp2", "backend_cgx", "digits_accuracy"],
)
def test_an_example_trains_and_says_what_it_sent(arguments: tuple[str, ...], says: str) -> None:
    script, *rest = arguments
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv += [f"examples/{script}", *rest]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(says, done.stdout)
    assert found, done.stdout
    numbers = {name: float(text.replace(",", "")) for name, text in found.groupdict().items()}
    if numbers:
        assert numbers["less"] < 0.2 * numbers["more"]

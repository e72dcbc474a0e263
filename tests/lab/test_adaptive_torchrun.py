"""An adaptive training without Ray in four hosts of a lab, as `cgx-ray lab run` starts it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.emulated import needs_lab

from cgx_ray.cli import main
from cgx_ray.lab.jobs import run_in_hosts
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.journal_schema import journal_problem

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@needs_lab(rates_only=False)
def test_four_hosts_leave_dense_on_a_slow_link_and_the_decisions_can_be_made_again(tmp_path: Path) -> None:
    folder, said = tmp_path / "run", []
    script = [str(ROOT / "examples" / "torchrun_gpt_bytes.py"), "--steps", "30", "--batch-size", "1"]
    argv = [sys.executable, "-m", "torch.distributed.run", *script, "--policy", "adaptive", "--folder", str(folder)]
    with Lab(4, rate_bit_per_s=2e8, latency_s=1e-3) as lab:
        status = run_in_hosts(lab, range(4), argv, lambda host, line: said.append(f"[{host}] {line}"), dict(os.environ))
    assert status == 0, "".join(said)
    lines = [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]
    assert [problem for line in lines if (problem := journal_problem(line))] == []
    assert (lines[0]["event"], lines[-1]["event"]) == ("start", "end")
    assert len(set(lines[0]["nodes"])) == 4
    decisions = [line for line in lines if line["event"] == "decision"]
    assert decisions[0]["kind"] == "replace", decisions[0]["reason"]
    assert "qsgd" in decisions[0]["reason"]
    assert [line for line in lines if line["event"] == "outcome"], "steps under the new plan were measured"
    assert not [line for line in said if "lost the control loop" in line], said
    report = ["report", str(folder), "--html", str(tmp_path / "r.html"), "--plot", str(tmp_path / "r.png")]
    for command in (report, ["replay", str(folder)]):
        shown = CliRunner().invoke(main, command)
        assert shown.exit_code == 0, (command, shown.output)

"""FSDP2 and HSDP models under policy "adaptive": real ranks try codecs over a slow link, and agree on each plan."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.branches import Branches
from support.ranks import log_lines, run_cases, run_ranks
from support.sharded import make_mesh, shard, train, try_codecs, weights_of

import cgx_ray
from cgx_ray.cli import main
from cgx_ray.control.journal.sentences import TRIALS
from cgx_ray.report.journal_schema import journal_problem


def _adapt(rank: int, folder: str, num_replicas: int) -> tuple[list[str], list[str], Any]:
    """Train until a codec was chosen; return the lines of the log, the plans, and sums of the weights."""
    said = log_lines()
    logging.getLogger("cgx_ray").setLevel(logging.INFO)
    model, plans = try_codecs(rank, "cpu", folder, num_replicas)
    return said, plans, {name: value.sum().item() for name, value in weights_of(model).items()}


@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(2, 1), (4, 2)])
def test_ranks_try_codecs_and_choose_the_fastest(num_ranks: int, num_replicas: int, tmp_path: Path) -> None:
    results = run_ranks(num_ranks, _adapt, str(tmp_path), num_replicas)
    said, plans, weights = results[0]
    assert plans[:2] == ["dense", "qsgd 4-bit over sra"]
    # All ranks had the same plans in the same steps: replicas agree to the bit.
    assert all(other == weights for _, _, other in results)
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert not [journal_problem(line) for line in lines if journal_problem(line)]
    trial, *others = [line for line in lines if line["event"] == "decision"]
    choice = next(line for line in others if line["made_by"] not in TRIALS and line["new"]["plan"] != "dense")
    assert (trial["made_by"], trial["old"]["plan"], trial["new"]["plan"]) == (
        "plan_trial",
        "dense",
        "qsgd 4-bit over sra",
    )
    assert choice["new"]["plan"].startswith("qsgd ")
    assert choice["new"]["plan"] in plans
    assert choice["predicted_step_s"] < 0.8 * choice["predicted_dense_s"]
    assert [line for line in lines if line["event"] == "outcome"]
    assert any("policy adaptive (strict) begins dense" in line for line in said)
    assert any("trying qsgd 4-bit over sra for a few steps" in line for line in said)
    assert any("faster than dense" in line for line in said)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "faster than dense" in result.output
    assert "first measurements: per step qsgd " in (tmp_path / "report.html").read_text()
    result = CliRunner().invoke(main, ["replay", str(tmp_path)])
    assert "is of a sharded model: codecs are tried, and only measured steps tell" in result.output


def _keep_one(rank: int, folder: str) -> list[str]:
    said = log_lines()
    logging.getLogger("cgx_ray").setLevel(logging.INFO)
    model = shard(Branches(), make_mesh())
    attachment = cgx_ray.attach(model, codec="bf16", folder=folder)
    train(model, rank, range(5))
    attachment.close()
    return said


def _refuse(rank: int, arguments: dict[str, Any]) -> str:
    with pytest.raises(cgx_ray.ConfigError) as caught:
        cgx_ray.attach(shard(Branches(), make_mesh()), **arguments)
    return str(caught.value)


def test_a_static_run_has_a_journal_and_other_policies_and_candidates_are_refused(tmp_path: Path) -> None:
    refused: list[dict[str, Any]] = [
        {"policy": "flexible"},
        {"policy": "adaptive", "candidates": ("bf16", "topk:density=0.1")},
        {"policy": "adaptive", "candidates": ("bf16", "ef_signsgd")},
        {"policy": "adaptive", "candidates": (("qsgd:bits=4", "allgather"),)},
    ]
    cases = [partial(_refuse, arguments=arguments) for arguments in refused]
    results = run_cases(2, [partial(_keep_one, folder=str(tmp_path)), *cases])
    said, (paper, *_), (sparse, *_), (feedback, *_), (scheme, *_) = results
    events = [json.loads(line)["event"] for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert {"start", "progress", "end"} == {*events}
    assert any("under bf16 over" in line for line in said[0])
    assert "which plans for gradients of whole layers; give policy='adaptive', or a codec" in paper
    assert "candidate topk" in sparse
    assert "as scheme sra does not carry it" in sparse
    assert "as it has error feedback" in feedback
    assert "as all goes over sra there" in scheme

"""FSDP2 and HSDP models under policy "adaptive": real ranks try codecs over a slow link, and agree on each plan."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from support.branches import Branches
from support.ranks import log_lines, run_cases, run_ranks
from support.sharded import make_mesh, shard, sum_inside, weights_of
from torch import nn

import cgx_ray
from cgx_ray.cli import main
from cgx_ray.collectives.transport.simulated_link import SimulatedLink
from cgx_ray.report.journal_schema import journal_problem
from cgx_ray.session.attach import attach_with
from cgx_ray.session.settings import Settings

# Longest time for a choice, in seconds, on a busy machine.
CHOSEN_S = 60.0
# 0.5 MB of gradients take 0.1 s, and those of replicas half of it.
SLOW_BITS_PER_S = 4e7


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))


def _train_until(model: nn.Module, rank: int, is_enough: Callable[[], bool]) -> int:
    """Train until `is_enough` on rank 0, on all ranks to the same step; return the number of steps."""
    end_s, more, step = time.monotonic() + CHOSEN_S, torch.ones(1), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while more.item():
        x_BD = torch.randn(8, 256, generator=torch.Generator().manual_seed(step + 1000 * rank))
        (model(x_BD) - x_BD).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        more.fill_(float(not is_enough() and time.monotonic() < end_s))
        dist.broadcast(more, 0)
    return step


def _adapt(rank: int, folder: str, num_replicas: int, *, sums_inside: bool) -> tuple[list[str], list[str], Any]:
    """Train until a codec was chosen; return the lines of the log, the plans by version, and weights."""
    if sums_inside:
        sum_inside()
    said = log_lines()
    logging.getLogger("cgx_ray").setLevel(logging.INFO)
    model = shard(_model(), make_mesh(num_replicas))
    link = SimulatedLink(latency_s=1e-4, schedule=((0.0, SLOW_BITS_PER_S),))
    attachment = attach_with(model, Settings(simulated_link=link), folder=folder, report_s=0.1)
    plans: dict[int, str] = {}

    def is_chosen() -> bool:
        assert attachment.plan is not None
        plans.setdefault(attachment.plan.version, attachment.plan.describe())
        return len(plans) > 2 and attachment.plan.lease is None and attachment.plan.describe() != "dense"

    _train_until(model, rank, is_chosen)
    # The outcome of the choice, and its speed.
    end_s = time.monotonic() + 1.5
    _train_until(model, rank, lambda: time.monotonic() > end_s)
    assert attachment.plan is not None
    attachment.close()
    weights = {name: value.sum().item() for name, value in weights_of(model).items()}
    return said, [attachment.plan.describe(), *plans.values()], weights


@pytest.mark.parametrize(("num_ranks", "num_replicas", "sums_inside"), [(2, 1, False), (4, 2, False), (4, 2, True)])
def test_ranks_try_codecs_and_choose_the_fastest(
    num_ranks: int, num_replicas: int, sums_inside: bool, tmp_path: Path
) -> None:
    results = run_ranks(num_ranks, partial(_adapt, sums_inside=sums_inside), str(tmp_path), num_replicas)
    said, plans, weights = results[0]
    assert plans[0].startswith("qsgd ")
    assert plans[1] == "dense"
    # All ranks had the same plans in the same steps: replicas agree to the bit.
    assert all(other == weights for _, _, other in results)
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert not [journal_problem(line) for line in lines if journal_problem(line)]
    trial, *_, choice = [line for line in lines if line["event"] == "decision"]
    assert (trial["made_by"], trial["old"]["plan"], trial["new"]["plan"]) == (
        "plan_trial",
        "dense",
        "qsgd 3-bit over sra",
    )
    assert choice["new"]["plan"] == plans[0]
    assert choice["predicted_step_s"] < 0.8 * choice["predicted_dense_s"]
    assert [line for line in lines if line["event"] == "outcome"]
    assert any("policy adaptive (strict) begins dense" in line for line in said)
    assert any("trying qsgd 3-bit over sra for a few steps" in line for line in said)
    assert any("faster than dense" in line for line in said)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "faster than dense" in result.output
    assert "first measurements: per step qsgd " in (tmp_path / "report.html").read_text()
    result = CliRunner().invoke(main, ["replay", str(tmp_path)])
    assert "codecs of a sharded model are tried: only measured steps tell what comes next" in result.output


def _keep_one(rank: int, folder: str) -> list[str]:
    said = log_lines()
    logging.getLogger("cgx_ray").setLevel(logging.INFO)
    model = shard(_model(), make_mesh())
    attachment = cgx_ray.attach(model, codec="bf16", folder=folder)
    end_s = time.monotonic() + 1.0
    _train_until(model, rank, lambda: time.monotonic() > end_s)
    attachment.close()
    return said


def _refuse(rank: int, arguments: dict[str, Any]) -> str:
    with pytest.raises(cgx_ray.ConfigError) as caught:
        cgx_ray.attach(shard(Branches(), make_mesh()), **arguments)
    return str(caught.value)


def test_a_static_run_has_a_journal_and_other_policies_and_candidates_are_refused(tmp_path: Path) -> None:
    candidates = {"policy": "adaptive", "candidates": ("bf16", "topk:density=0.1")}
    cases = [
        partial(_keep_one, folder=str(tmp_path)),
        partial(_refuse, arguments={"policy": "flexible"}),
        partial(_refuse, arguments=candidates),
    ]
    said, (paper, *_), (own, *_) = (result for result in run_cases(2, cases))
    events = [json.loads(line)["event"] for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert {"start", "progress", "end"} == {*events}
    assert any("under bf16 over" in line for line in said[0])
    assert "which plans for gradients of whole layers; give policy='adaptive', or a codec" in paper
    assert "candidate topk:density=0.1 cannot be tried with an FSDP2 model" in own

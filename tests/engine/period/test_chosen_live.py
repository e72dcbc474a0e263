"""A run that chooses its period while it trains, without Ray, on a simulated slow link."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.branches import weights_hash
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.cli import main
from cgx_ray.collectives.transport.simulated_link import SimulatedLink
from cgx_ray.policies import Adaptive
from cgx_ray.report.journal_schema import journal_problem
from cgx_ray.session.attach import attach_with
from cgx_ray.session.settings import Settings

# 1 MB of gradients takes 0.8 s in dense steps, and then 0.1 s.
LINK = SimulatedLink(latency_s=1e-3, schedule=((0, 1e7),))
NUM_STEPS = 260


def _train(rank: int, folder: str) -> list[tuple[int, int, str]]:
    """Return version and period of the plan after each step, and a hash of the weights."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))
    settings = Settings(policy=Adaptive(fidelity="fast"), simulated_link=LINK, shared_memory=False)
    attachment = attach_with(model, settings, folder=folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seen = []
    for step in range(NUM_STEPS):
        x_BD = torch.randn(8, 256, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        (model(x_BD) - x_BD).square().mean().backward()
        optimizer.step()
        assert attachment.plan is not None
        seen.append((attachment.plan.version, attachment.plan.period, weights_hash(model)))
    attachment.close()
    return seen


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[tuple[int, int, str]]]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(2, _train, str(folder))


def test_rounds_are_chosen_on_a_slow_link_at_one_step_on_all_ranks(
    run: tuple[Path, list[list[tuple[int, int, str]]]],
) -> None:
    _, (first, second) = run
    assert [seen[:2] for seen in first] == [seen[:2] for seen in second]
    periods = [period for _, period, _ in first]
    assert max(periods) > 1
    alike = [step for step, (one, other) in enumerate(zip(first, second, strict=True)) if one == other]
    begun = periods.index(max(periods))
    # All ranks are alike before rounds, and at the end of each of them.
    assert set(range(begun)) <= set(alike)
    assert len([step for step in alike if step > begun]) >= (NUM_STEPS - begun) // max(periods) - 2


def test_the_journal_says_why_and_the_decisions_can_be_made_again(
    run: tuple[Path, list[list[tuple[int, int, str]]]], tmp_path: Path
) -> None:
    folder, _ = run
    lines = [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]
    assert [problem for line in lines if (problem := journal_problem(line))] == []
    reasons = [line["reason"] for line in lines if line["event"] == "decision"]
    assert any("steps is expected to end" in reason for reason in reasons), reasons
    report = ["report", str(folder), "--html", str(tmp_path / "r.html"), "--plot", str(tmp_path / "r.png")]
    for command in (["replay", str(folder / "decisions.jsonl")], report, ["top", "--once", str(folder)]):
        shown = CliRunner().invoke(main, command)
        assert shown.exit_code == 0, (command, shown.output)
        assert "otherwise: 0" in shown.output or command[0] != "replay"

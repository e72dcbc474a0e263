"""Policy "adaptive" where all ranks are on one machine: no codec is tried where its memory is all they cross."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.control_runs import WORLD, FakeTraining, journal, registration

from cgx_ray.control.journal.facts import IN_MEMORY
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.journal.recorded import read_layers, read_situation
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.logs import NAME
from cgx_ray.plan import make_plan

HERE, FAR = ("10.0.0.1",) * WORLD, tuple(f"10.0.0.{rank}" for rank in range(WORLD))


def train(tmp_path: Path, nodes: tuple[str, ...], gbps: float, **registered: object) -> ControlLoop:
    loop = ControlLoop(Adaptive(), Journal(tmp_path / "decisions.jsonl"), nodes=nodes)
    loop.register(registration(**registered))
    # So little compute that codecs promise much.
    run = FakeTraining(loop, gbps=gbps, compute_s=0.001, step=1)
    run.run(40)
    run.compute_s = 0.002
    run.run(120)
    loop.end(1e6)
    return loop


def test_dense_stays_and_no_codec_is_timed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, NAME)
    loop = train(tmp_path, HERE, 5.0)
    assert [plan.describe() for plan in loop.plans] == ["dense"]
    start, *_ = journal(tmp_path, "start")
    decisions = journal(tmp_path, "decision")
    assert all(line["reason"].endswith(IN_MEMORY) for line in decisions)
    assert {line["made_by"] for line in decisions} == {"policy"}
    # A replay decides the same.
    situation = read_situation(decisions[0]["situation"], read_layers(start))
    assert Adaptive().decide(situation).reason == decisions[0]["reason"]
    assert " per step: all ranks are on one machine;" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("nodes", "gbps", "registered"),
    [
        (FAR, 5.0, {}),
        (HERE, 5.0, {"is_simulated": True}),
        # The loopback device is limited.
        (HERE, 1.0, {}),
        # Codecs cost the processors nothing.
        (HERE, 5.0, {"encodes_on": "device"}),
    ],
)
def test_elsewhere_codecs_are_chosen(
    nodes: tuple[str, ...], gbps: float, registered: dict[str, object], tmp_path: Path
) -> None:
    loop = train(tmp_path, nodes, gbps, **registered)
    assert any(plan.describe() != "dense" for plan in loop.plans)


def test_a_plan_that_compresses_is_judged_by_its_steps(tmp_path: Path) -> None:
    first = make_plan(registration().layers, version=0, world_size=WORLD, codec="qsgd:bits=4")
    loop = train(tmp_path, HERE, 5.0, first_plan=first)
    decided = journal(tmp_path, "decision")[0]
    assert decided["old"]["plan"] == loop.plans[0].describe() == "qsgd 4-bit over sra"
    assert IN_MEMORY not in decided["reason"]

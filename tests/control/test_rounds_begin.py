"""When the policy is asked about rounds: as soon as ranks may train alone, not at the next review."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.control_runs import LAYERS, WORLD, FakeTraining, registration

from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.learned.measured import period_cause
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.plan import STEPS_TOGETHER, make_plan
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.prediction import Measured


def test_rounds_begin_when_ranks_may_train_alone(tmp_path: Path) -> None:
    periods = {}
    for fidelity in ("strict", "balanced"):
        loop = ControlLoop(Adaptive(fidelity=fidelity), Journal(tmp_path / fidelity / "decisions.jsonl"))
        loop.register(registration())
        run = FakeTraining(loop, gbps=0.05, step=1)
        run.run(STEPS_TOGETHER - 1)
        assert loop.plans[-1].period == 1
        decisions = run.run(4)
        assert [one.reason.partition(":")[0] for one in decisions] == (
            ["exchanges up to 32 steps apart are allowed now"] if fidelity == "balanced" else []
        )
        periods[fidelity] = loop.plans[-1].period
    assert periods["strict"] == 1 < periods["balanced"]


def test_a_loss_that_gets_worse_in_rounds_halves_the_period_until_it_no_longer_does(tmp_path: Path) -> None:
    loop = ControlLoop(Adaptive(fidelity="balanced"), Journal(tmp_path / "decisions.jsonl"))
    loop.register(registration())
    run = FakeTraining(loop, gbps=0.05, step=1)
    scatter = random.Random(0)
    run.loss = lambda step: (3.0 if loop.plans[-1].period > 4 else 2.0) + scatter.gauss(0, 0.02)
    run.run(STEPS_TOGETHER + 20)
    assert loop.plans[-1].period == 1, "the losses so far are too few to judge rounds by"
    run.run(3000)
    assert list(dict.fromkeys(plan.period for plan in loop.plans)) == [1, 16, 8, 4]
    assert "loss is" in (tmp_path / "decisions.jsonl").read_text()


@pytest.mark.parametrize(
    ("before", "now", "in_force", "is_cause"),
    [(1, 1, 1, False), (1, 32, 1, True), (32, 32, 8, False), (32, 1, 8, True), (32, 1, 1, False), (32, 8, 8, False)],
)
def test_a_longest_period_is_a_cause_if_it_allows_more_or_less_than_the_plan_has(
    before: int, now: int, in_force: int, is_cause: bool
) -> None:
    measured = Measured(
        layers=LAYERS,
        backward_s=(0.1,) * len(LAYERS),
        network=Network.flat(WORLD, Link(alpha_s=1e-4, beta_s_per_byte=1e-8)),
        codec_costs={},
        gain={},
        max_period=before,
    )
    plan = make_plan(LAYERS, version=0, world_size=WORLD, codec="qsgd", scheme="sra", period=in_force)
    assert (period_cause(measured, replace(measured, max_period=now), plan) is not None) is is_cause

"""How far the loss has fallen: codecs cost more of what is left of it, so policies change to others."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from support.control_runs import COST, LAYERS, FakeTraining, journal, registration

from cgx_ray.control.gains.loss_trend import MAX_FALL, MIN_LOSSES, LossFall
from cgx_ray.control.history import History
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.journal.recorded import read_situation
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.replay import Replay, WhatIf
from cgx_ray.control.trial.tried_codecs import codecs_to_try
from cgx_ray.plan import NONE, CodecSpec
from cgx_ray.planner.scenario import typical_gains

FOUR, EIGHT = (CodecSpec(name="qsgd", bits=bits) for bits in (4, 8))


def halving(every: int) -> Callable[[int], float]:
    return lambda step: 4.0 * 0.5 ** (step / every)


def start(tmp_path: Path, policy: Adaptive, loss: Callable[[int], float] | None, errors: float = 1.0) -> FakeTraining:
    """Start on a slow link, where the codec with the fewest bytes is best. `errors`: times those of the table."""
    loop = ControlLoop(policy, Journal(tmp_path / "decisions.jsonl"))
    codecs = map(str, policy.timed_codecs)
    loop.register(registration(codec_costs=dict.fromkeys(codecs, COST)))
    costs = {str(codec): codec.record.losses[str(codec)] for codec in policy.timed_codecs}
    gain = {name: 1 - errors * (cost.relative_error or 0.0) for name, cost in costs.items()}
    return FakeTraining(loop, gbps=0.1, step=1, gain=gain, loss=loss)


def codecs_in_force(run: FakeTraining) -> set[CodecSpec]:
    return {group.option.codec for group in run.loop.plans[-1].groups} - {NONE}


def test_a_loss_that_falls_far_takes_more_bits_and_says_why(tmp_path: Path) -> None:
    run = start(tmp_path, Adaptive(review_s=1e6), halving(100))
    run.run(100)
    assert codecs_in_force(run) == {FOUR}
    run.run(400)
    assert codecs_in_force(run) == {EIGHT}
    lines = [line for line in journal(tmp_path, "decision") if "qsgd 8-bit" in line["new"]["plan"]]
    assert lines[0]["reason"].startswith("loss has fallen to 0.19 of the first losses: ")
    assert "qsgd 4-bit would end 1.2% above dense, as the loss has fallen so far" in lines[0]["reason"]
    assert lines[0]["old"]["expected_loss"] > 1.01 > lines[0]["new"]["expected_loss"]
    assert read_situation(lines[0]["situation"], LAYERS).planner_input.now.loss_fall > 4


def test_errors_that_are_too_large_for_strict_take_more_bits_and_say_why(tmp_path: Path) -> None:
    twice = start(tmp_path / "twice", Adaptive(), None, errors=2)
    twice.run(100)
    assert codecs_in_force(twice) == {FOUR}
    said = journal(tmp_path / "twice", "decision")[-1]
    assert said["new"]["expected_loss"] == pytest.approx(1.0092)
    assert "expected loss 1.009 ± 0.006 of dense" in said["reason"]
    thrice = start(tmp_path / "thrice", Adaptive(), None, errors=3)
    thrice.run(100)
    assert codecs_in_force(thrice) == {EIGHT}
    reason = journal(tmp_path / "thrice", "decision")[-1]["reason"]
    assert "qsgd 4-bit would end 1.4% above dense, as its errors are so large here" in reason


def test_candidates_above_max_loss_and_those_never_measured_are_named(tmp_path: Path) -> None:
    policy = Adaptive(candidates=("bf16", "qsgd:bits=3", "qsgd:bits=5"), max_loss=1.005)
    loop = ControlLoop(policy, Journal(tmp_path / "decisions.jsonl"))
    loop.register(registration(codec_costs=dict.fromkeys(map(str, policy.timed_codecs), COST)))
    run = FakeTraining(loop, gbps=0.1, step=1, gain=dict.fromkeys(map(str, policy.timed_codecs), 0.99))
    run.run(60)
    assert codecs_in_force(run) == {CodecSpec(name="bf16")}
    reason = journal(tmp_path, "decision")[0]["reason"]
    assert "qsgd 3-bit was measured to end up to 0.7% above dense's loss, and max_loss is 1.005" in reason
    assert "what qsgd 5-bit costs in loss was not measured, and max_loss is 1.005" in reason


def test_each_limit_takes_the_fewest_bits_that_it_allows(tmp_path: Path) -> None:
    run = start(tmp_path, Adaptive(fidelity="balanced", periods=(1,), max_loss=1.05, review_s=1e6), halving(100))
    bits = []
    for _ in range(50):
        run.run(20)
        bits += [codec.bits for codec in codecs_in_force(run) if codec.bits not in bits]
    assert bits == [3, 4, 8]


@pytest.mark.parametrize("loss", [None, lambda step: 4.0, lambda step: -halving(50)(step)])
def test_a_loss_that_is_unknown_or_does_not_fall_changes_nothing(
    tmp_path: Path, loss: Callable[[int], float] | None
) -> None:
    run = start(tmp_path, Adaptive(), loss)
    run.run(400)
    assert codecs_in_force(run) == {FOUR}
    assert journal(tmp_path, "decision")[-1]["situation"]["loss_fall"] == 1


def test_a_loss_that_goes_on_to_fall_asks_no_more_where_codecs_cost_no_more(tmp_path: Path) -> None:
    run = start(tmp_path, Adaptive(review_s=1e6), halving(100))
    run.run(500)
    assert codecs_in_force(run) == {EIGHT}
    num_decisions = len(journal(tmp_path, "decision"))
    run.run(1000)
    assert len(journal(tmp_path, "decision")) <= num_decisions + 1


def test_workers_that_are_started_again_and_another_controller_go_on_with_the_first_losses(tmp_path: Path) -> None:
    run = start(tmp_path, Adaptive(), halving(200))
    run.run(300)
    assert codecs_in_force(run) == {FOUR}
    history = run.loop.history()
    run.loop = ControlLoop(Adaptive(), Journal(tmp_path / "decisions.jsonl"), history)
    run.loop.register(registration(codec_costs=dict.fromkeys(map(str, Adaptive().timed_codecs), COST)))
    run.run(300)
    assert codecs_in_force(run) == {EIGHT}
    assert isinstance(history, History)


def test_the_first_losses_and_the_least_later_ones_count() -> None:
    in_rounds = LossFall()
    for loss in [8.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 4.0]:
        in_rounds.add_loss(loss, 32)
    assert in_rounds.ratio == 2
    fall = LossFall()
    for loss in [8.0] * (MIN_LOSSES - 1):
        fall.add_loss(loss)
    assert fall.ratio == 1
    for loss in [None, math.nan, math.inf, 0.0, -1.0, 8.0, *[2.0] * MIN_LOSSES]:
        fall.add_loss(loss)
    assert fall.ratio == 4
    for loss in [3.0] * 100:
        fall.add_loss(loss)
    assert fall.ratio == 4
    # Other data, or tiny losses that pass.
    for losses, ratio in (([16.0], 1), ([4.0], 2), ([1e-310], MAX_FALL), ([2.0], 4)):
        for loss in losses * 2 * MIN_LOSSES:
            fall.add_loss(loss)
        assert fall.ratio == pytest.approx(ratio)


def test_a_run_that_goes_on_in_the_same_folder_counts_from_the_first_losses_of_all(tmp_path: Path) -> None:
    first = start(tmp_path, Adaptive(review_s=1e6), halving(100))
    first.run(500)
    first.loop.end(0.0)
    with (tmp_path / "decisions.jsonl").open("a") as file:
        file.write('{"event": "progress", "loss": null, "num_steps": 3}\n[1]\n{"event": "prog')
    resumed = start(tmp_path, Adaptive(review_s=1e6), lambda step: halving(100)(500 + step))
    assert resumed.loop._state is not None
    fall = resumed.loop._state.loss_fall.ratio
    assert fall == pytest.approx(first.loop._state.loss_fall.ratio, rel=0.05)
    resumed.run(60)
    assert codecs_in_force(resumed) == {EIGHT}


def test_8_bits_are_in_no_plan_while_fewer_bits_will_do_and_neither_plan_nor_replay_differs(tmp_path: Path) -> None:
    run = start(tmp_path, Adaptive(review_s=5.0), halving(400))
    run.run(300)
    lines = journal(tmp_path, "start", "decision")
    assert len(lines) > 5
    assert not [line for line in lines if "8-bit" in str(line.get("new", {}).get("plan"))]
    again = Replay(WhatIf())
    for line in lines:
        again.add_line(line)
    assert again.num_again == again.num_same > 5
    assert str(EIGHT) not in typical_gains()
    assert EIGHT not in codecs_to_try(Adaptive())
    assert EIGHT in codecs_to_try(Adaptive(candidates=("qsgd:bits=4", "qsgd:bits=8")))

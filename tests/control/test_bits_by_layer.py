"""Policy "adaptive" with errors by layer: other bits in other layers, kept while errors scatter, and replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.control_runs import COST, GAIN, MeteredTraining, journal, registration

from cgx_ray.control.history import History
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.learned.measured import bits_by_layer
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.replay import Replay, WhatIf
from cgx_ray.plan import NONE, CodecSpec
from cgx_ray.planner.candidates import codec_options
from cgx_ray.session.settings import Settings

FEW, MORE = (CodecSpec(name="qsgd", bits=bits) for bits in (2, 4))


def start(folder: Path, history: History | None = None) -> MeteredTraining:
    policy = Adaptive(candidates=codec_options((NONE, FEW, MORE)))
    loop = ControlLoop(policy, Journal(folder / "decisions.jsonl"), history)
    loop.register(registration(codec_costs={"qsgd": COST}))
    run = MeteredTraining(loop)
    run.step, run.widths, run.gbps = 1, (2, 4), 0.4
    # With 2 bits, errors are within those whose loss was measured: 4 % more than dense's, with 4 bits 0.5 %.
    run.gain = {str(FEW): 0.5, str(MORE): GAIN[str(MORE)]}
    run.error = {"embed": 0.099, "head": 0.001}
    return run


def test_layers_end_with_other_bits_where_their_errors_differ_and_with_the_same_where_they_do_not(
    tmp_path: Path,
) -> None:
    run = start(tmp_path)
    run.run(100)
    assert bits_by_layer(run.loop.plans[-1]) == {"embed": 4, "head": 2}
    alike = start(tmp_path / "alike")
    # As many elements, as much error.
    alike.error = {"embed": 0.02, "head": 0.08}
    alike.run(100)
    assert len(set(bits_by_layer(alike.loop.plans[-1]).values())) == 1


@pytest.mark.parametrize("scatter", [0.05, 0.3])
def test_bits_stay_while_errors_scatter_and_move_since_other_bits_would_be_less_than_5_percent_better(
    tmp_path: Path, scatter: float
) -> None:
    run = start(tmp_path)
    run.scatter = scatter
    run.run(400)
    replaced = [line for line in journal(tmp_path, "decision") if line["kind"] == "replace"]
    assert len(replaced) == 1, [line["reason"] for line in replaced]
    assert bits_by_layer(run.loop.plans[-1]) == {"embed": 4, "head": 2}
    num_decisions = len(journal(tmp_path, "decision"))
    run.error = {"embed": 0.00001, "head": 0.1}
    run.run(400)
    assert bits_by_layer(run.loop.plans[-1]) == {"embed": 4, "head": 2}
    after = journal(tmp_path, "decision")[num_decisions:]
    assert {(line["kind"], line["reason"].partition(":")[0]) for line in after} == {("keep", "regular review")}


def test_decisions_on_errors_by_layer_are_made_again_from_the_journal(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.scatter = 0.1
    run.run(200)
    again = Replay(WhatIf())
    lines = journal(tmp_path, "start", "decision")
    for line in lines:
        again.add_line(line)
    assert again.num_again == again.num_same >= 2
    assert again.num_other_prediction == 0
    errors = lines[-1]["situation"]["squared_errors"]
    unknown = {bits: [error is None for error in row] for bits, row in errors.items()}
    assert unknown == {"2": [False, True, False], "4": [False, True, False]}
    without = Replay(WhatIf())
    for line in lines:
        if "situation" in line:
            del line["situation"]["squared_errors"]
        without.add_line(line)
    assert without.num_different > 0, "the errors decide"


def test_after_a_restart_plans_are_made_with_the_errors_of_before_until_others_are_measured(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.run(100)
    again = start(tmp_path / "again", run.loop.history())
    again.step, again.error = 3, {}
    again.run(15)
    assert bits_by_layer(again.loop.plans[-1]) == {"embed": 4, "head": 2}
    last = journal(tmp_path / "again", "decision")[-1]
    assert "started again" in last["reason"]
    assert last["situation"]["squared_errors"].keys() == {"2", "4"}


def test_errors_are_measured_with_the_bits_that_may_be_chosen() -> None:
    def bits(**settings: object) -> list[int | None]:
        return [codec.bits for codec in Settings(**settings).codecs_by_layer()]  # type: ignore[arg-type]

    assert bits() == [4, 8]
    assert bits(fidelity="balanced") == [3, 4, 8]
    assert bits(fidelity="fast") == [2, 3, 4, 8]
    assert bits(candidates=("qsgd:bits=8", "topk", "qsgd:bits=1,bucket_size=64")) == [1, 4, 8]
    assert bits(candidates=("bf16",)) == bits(policy="static") == bits(policy="flexible") == []

"""Levels of fidelity: they follow from the committed run of `python -m bench accuracy`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.accuracy.cases import CODECS, WORKLOADS, read_option
from cgx_ray.plan import NONE, CodecSpec, preferred_scheme
from cgx_ray.planner.candidates import efficiency
from cgx_ray.planner.fidelity import (
    LOSS_COSTS,
    MAX_SPREAD_LOSS,
    MEASURED_FALL,
    PERIOD_LOSSES,
    SEED_SPREAD,
    Fidelity,
    codecs_of,
    describe_costs,
    describe_loss,
    loss_of,
    period_loss,
)


def _rows(name: str) -> dict[str, Any]:
    path = Path(__file__).parents[2] / "bench" / "data" / name
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


ROWS = _rows("accuracy.json")
ENDS = ("least", "largest")
TOPK = CodecSpec.parse("topk:density=0.1")


def _option_text(codec: str) -> str:
    spec = CodecSpec.parse(codec)
    return f"{spec} over {preferred_scheme(spec)}"


@pytest.mark.parametrize("codec", LOSS_COSTS)
def test_the_table_is_the_committed_run(codec: str) -> None:
    option, cost = _option_text(codec), LOSS_COSTS[codec]
    for workload in WORKLOADS:
        measured = ROWS[f"{workload} {option}: loss"]["ratio"]
        assert getattr(cost, workload) == pytest.approx(measured, abs=5e-5), (workload, measured)
    if cost.relative_error is not None:
        error = max(ROWS[f"{workload} {option}: relative error"]["value"] for workload in WORKLOADS)
        assert cost.relative_error == pytest.approx(error, rel=0.01)


def test_the_table_has_every_codec_of_the_committed_run_over_its_usual_scheme() -> None:
    usual = {
        str(option.codec) for option in map(read_option, CODECS) if option.scheme is preferred_scheme(option.codec)
    }
    assert set(LOSS_COSTS) == usual
    assert ROWS["seeds"]["value"] >= 3
    assert ROWS["steps"]["value"] >= 300


def test_losses_of_periods_are_the_worst_of_the_committed_run() -> None:
    for replicas, losses in PERIOD_LOSSES.items():
        rows = _rows(f"periods_{replicas}_ranks.json")
        assert (rows["seeds"]["value"], rows["ranks"]["value"]) == (3, replicas)
        for period, loss in losses.items():
            name = re.compile(rf"\w+ dense, every {period} steps: loss")
            measured = max(row["ratio"] for text, row in rows.items() if name.fullmatch(text))
            assert loss == pytest.approx(measured, abs=5e-5), period


def test_two_replicas_lose_no_more_and_sixteen_little_more_than_is_expected_of_them() -> None:
    for replicas in (2, 16):
        rows = _rows(f"periods_{replicas}_ranks.json")
        found = [re.fullmatch(r"\w+ dense, every (\d+) steps: loss", name) for name in rows]
        for match in filter(None, found):
            assert rows[match[0]]["ratio"] <= period_loss(int(match[1]), replicas) + 2e-3, match[0]


def test_codecs_in_rounds_lose_what_is_expected_of_them_or_less() -> None:
    rows = _rows("periods_4_ranks.json")
    found = [re.fullmatch(r"(?:gpt|digits)\w* (qsgd:\S*) over sra, every (\d+) steps: loss", name) for name in rows]
    cases = {(match[1], int(match[2])) for match in found if match is not None}
    assert len(cases) >= 6
    for codec, period in cases:
        measured = max(rows[f"{w} {codec} over sra, every {period} steps: loss"]["ratio"] for w in WORKLOADS)
        # Seeds differ by more.
        assert measured <= loss_of(CodecSpec.parse(codec), period, 4) + 2e-3, (codec, period, measured)


def test_nine_in_ten_trainings_end_within_the_spread_of_the_mean_of_their_seeds() -> None:
    far = []
    for file in ("accuracy", "periods_2_ranks", "periods_4_ranks", "periods_8_ranks"):
        rows = _rows(f"{file}.json")
        for name in [name for name in rows if re.fullmatch(r"gpt_(adamw|sgd) (?!dense:|bf16).*: loss", name)]:
            mean = rows[name]["ratio"]
            least, largest = (rows[f"{name.removesuffix('loss')}{end} loss over dense"]["value"] for end in ENDS)
            if mean <= MAX_SPREAD_LOSS:
                far += [abs(loss - mean) for loss in (least, largest, 3 * mean - least - largest)]
    assert len(far) >= 100
    assert sorted(far)[9 * len(far) // 10] == pytest.approx(SEED_SPREAD, abs=5e-4)


def test_an_expected_loss_has_its_spread_where_that_was_measured() -> None:
    assert describe_loss(1.0) == "1.000 of dense"
    assert describe_loss(1.0141) == "1.014 ± 0.006 of dense"
    assert describe_loss(1.19) == "1.190 of dense"


def test_levels_allow_what_was_measured_within_their_limit() -> None:
    strict, balanced = (set(codecs_of(level)) for level in (Fidelity.STRICT, Fidelity.BALANCED))
    assert strict < balanced
    assert {NONE, CodecSpec(name="bf16"), CodecSpec(name="qsgd", bits=4)} <= strict
    for codec in strict - {NONE}:
        assert LOSS_COSTS[str(codec)].worst <= 1.005
    for codec in balanced - {NONE}:
        assert LOSS_COSTS[str(codec)].worst <= 1.025
    assert all(codec.density is None for codec in strict)


def test_codecs_lose_more_of_a_loss_that_has_fallen_further_and_no_more_than_their_errors_can() -> None:
    four, eight, half = (CodecSpec.parse(text) for text in ("qsgd:bits=4", "qsgd:bits=8", "bf16"))
    worst = LOSS_COSTS[str(four)].worst
    assert loss_of(four, 1, 4) == loss_of(four, 1, 4, MEASURED_FALL) == worst
    assert loss_of(four, 1, 4, 2 * MEASURED_FALL) == pytest.approx(1 + 2 * (worst - 1))
    # What regressions lost at most, whose loss fell 32-fold (LOG 123).
    assert 1.08 < loss_of(four, 1, 4, 1e6) < 1.1
    for codec in (eight, half):
        assert loss_of(codec, 1, 4, 1e6) < 1.001
    assert efficiency(0.99, four, 2 * MEASURED_FALL) == pytest.approx(1 / (1 + 2 * (worst - 1)))
    # How the loss of codecs with feedback grows was not measured.
    sparse = CodecSpec(name="topk", density=0.1)
    assert loss_of(sparse, 1, 4, 10 * MEASURED_FALL) == loss_of(sparse, 1, 4)


def test_fast_adds_top_k_at_the_densities_and_others_do_not() -> None:
    densities = (0.1, 0.004)
    sparse = {CodecSpec(name="topk", density=density) for density in densities}
    assert sparse <= set(codecs_of("fast", densities))
    two_bits = {CodecSpec(name="qsgd", bits=2), CodecSpec(name="qsgd", bits=2, bucket_size=64)}
    assert set(codecs_of("fast", ())) - set(codecs_of("balanced")) == two_bits
    assert codecs_of("strict", densities) == codecs_of("strict")
    found = codecs_of("fast", densities)
    assert len(set(found)) == len(found)


def test_the_progress_of_a_codec_without_feedback_is_its_measured_loss() -> None:
    codec = CodecSpec.parse("qsgd:bits=2,bucket_size=128")
    cost = LOSS_COSTS[str(codec)]
    assert cost.relative_error is not None
    assert efficiency(1 - cost.relative_error, codec) == 1 / cost.worst
    assert efficiency(1 - 2 * cost.relative_error, codec) == pytest.approx(1 / (1 + 2 * (cost.worst - 1)))


def test_errors_that_are_larger_than_in_the_table_cost_as_many_times_as_much() -> None:
    four = CodecSpec.parse("qsgd:bits=4")
    cost = LOSS_COSTS[str(four)]
    assert cost.relative_error is not None
    added = cost.worst - 1
    assert loss_of(four, 1, 4, error=0.5 * cost.relative_error) == cost.worst
    for times, fall in ((2, 1), (3, MEASURED_FALL), (3, 2 * MEASURED_FALL)):
        grown = times * added * max(1, fall / MEASURED_FALL)
        assert loss_of(four, 1, 4, fall, times * cost.relative_error) == pytest.approx(1 + grown)
    # A codec that cost nothing where it made no errors.
    assert loss_of(CodecSpec(name="bf16"), 1, 4, error=0.5) == pytest.approx(1.02)
    # No more than the errors can.
    assert loss_of(four, 1, 4, 1e6, 0.1) == pytest.approx(1.3)


def test_the_progress_of_a_codec_with_feedback_is_its_gain() -> None:
    assert efficiency(0.8, TOPK) == 0.8
    assert efficiency(1.25, TOPK) == 0.8
    assert efficiency(0.7, CodecSpec.parse("qsgd:bits=5")) == 0.7


def test_costs_are_named_for_codecs_that_strict_does_not_allow() -> None:
    assert describe_costs(codecs_of("strict")) == ""
    worst = LOSS_COSTS["topk:density=0.1"].worst - 1
    assert describe_costs([NONE, TOPK, TOPK]) == f"topk 10 % was measured to end up to {worst:.1%} above dense's loss"
    between = describe_costs([CodecSpec.parse("topk:density=0.05")])
    worst = LOSS_COSTS["topk:density=0.033"].worst - 1
    assert between == (f"topk 5 % was not measured, density 0.033 ended up to {worst:.1%} above dense's loss")
    assert describe_costs([CodecSpec.parse("qsgd:bits=5")]) == ("what qsgd 5-bit costs in loss was not measured")

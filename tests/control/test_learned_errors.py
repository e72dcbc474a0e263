"""Errors of predictions, learned from steps: what was tried, what was not, and what is forgotten."""

from __future__ import annotations

import math

import pytest
from support.control_runs import COST

from cgx_ray.control.learned.learned_errors import MEMORY_S, LearnedErrors
from cgx_ray.plan import DENSE, NONE, CodecSpec, Layer, Option, Scheme
from cgx_ray.planner.planned_group import PlannedGroup

QSGD, BF16 = CodecSpec(name="qsgd", bits=4, bucket_size=128), CodecSpec(name="bf16")
LAYERS = (Layer(name="a", numel=3_000_000, ndim=2), Layer(name="b", numel=1_000_000, ndim=2))


def groups(*options: Option) -> tuple[PlannedGroup, ...]:
    if len(options) == 1:
        return (PlannedGroup.of(LAYERS, options[0]),)
    return tuple(PlannedGroup.of([layer], option) for layer, option in zip(LAYERS, options, strict=True))


SRA, TREE = Option(codec=QSGD, scheme=Scheme.SRA), Option(codec=QSGD, scheme=Scheme.TREE)
OTHER = Option(codec=BF16, scheme=Scheme.SRA)


def test_a_plan_is_expected_to_take_as_long_over_its_prediction_as_it_did() -> None:
    errors = LearnedErrors()
    assert errors.factor(groups(SRA)) == 1.0
    for _ in range(10):
        errors.learn_step(groups(SRA), math.log(1.5), 0.0)
    assert errors.factor(groups(SRA)) == pytest.approx(1.5, rel=1e-3)


def test_the_error_of_a_mixture_is_shared_by_its_options_by_bytes() -> None:
    errors = LearnedErrors()
    for _ in range(20):
        errors.learn_step(groups(SRA, OTHER), math.log(1.3), 0.0)
    assert errors.factor(groups(SRA, OTHER)) == pytest.approx(1.3, rel=1e-3)
    assert errors.option_factor(SRA) > errors.option_factor(OTHER) > 1


def test_the_error_of_a_mixture_with_dense_is_that_of_the_rest() -> None:
    errors = LearnedErrors()
    errors.learn_step(groups(DENSE), math.log(1.1), 0.0)
    for plan in (groups(SRA, DENSE), groups(DENSE, SRA)):
        errors.learn_step(plan, math.log(1.3), 0.0)
        assert errors.factor(plan) == pytest.approx(1.3, rel=1e-3)
    assert errors.factor(groups(SRA)) == pytest.approx(1.3, rel=1e-3)
    assert errors.factor(groups(DENSE)) == pytest.approx(1.1, rel=1e-3)


def test_an_option_that_was_never_tried_looks_no_better_than_predicted_and_than_its_twins() -> None:
    errors = LearnedErrors()
    errors.learn_step(groups(SRA), math.log(0.7), 0.0)
    assert errors.factor(groups(TREE)) == errors.factor(groups(OTHER)) == 1.0
    ring = Option(codec=QSGD, scheme=Scheme.RING)
    errors.learn_step(groups(ring), math.log(1.5), 0.0)
    assert errors.factor(groups(TREE)) == pytest.approx(1.5, rel=1e-3), "the largest of its twins"


def test_a_codec_that_failed_makes_its_other_schemes_suspect_but_no_other_codec() -> None:
    errors = LearnedErrors()
    errors.learn_step(groups(DENSE), 0.0, 0.0)
    errors.learn_step(groups(Option(codec=NONE, scheme=Scheme.SRA)), 0.0, 0.0)
    errors.learn_step(groups(SRA), math.log(2), 0.0)
    assert errors.factor(groups(TREE)) == pytest.approx(2, rel=1e-3)
    assert errors.factor(groups(OTHER)) == 1.0


def test_errors_are_forgotten_after_ten_minutes_and_later_after_a_failure() -> None:
    errors = LearnedErrors()
    errors.learn_step(groups(SRA), math.log(2), 0.0)
    errors.remember_longer()
    errors.forget_old(MEMORY_S + 1)
    assert errors.factor(groups(SRA)) > 1.5
    errors.forget_old(2 * MEMORY_S + 1)
    assert errors.factor(groups(SRA)) == 1.0


@pytest.mark.parametrize("ratio", [1 / 300, 0.5, 10.0])
def test_codec_times_follow_steps_both_ways(ratio: float) -> None:
    errors, calibrated = LearnedErrors(), {str(QSGD): COST, str(BF16): COST}
    errors.learn_codecs([str(QSGD)], ratio)
    corrected = errors.corrected(calibrated)
    assert corrected[str(QSGD)].encode_a_s == pytest.approx(ratio * COST.encode_a_s)
    assert corrected[str(BF16)] == COST
    assert errors.is_timed(str(QSGD))
    assert not errors.is_timed(str(BF16))


def test_what_was_learned_just_before_another_network_was_noticed_is_undone() -> None:
    errors = LearnedErrors()
    errors.learn_step(groups(SRA), math.log(1.1), 0.0)
    errors.learn_step(groups(SRA), math.log(3), 100.0)
    errors.learn_step(groups(DENSE), math.log(3), 101.0)
    errors.network_changed(104.0)
    assert errors.factor(groups(SRA)) == pytest.approx(1.1, rel=1e-3)
    assert errors.factor(groups(DENSE)) == 1.0, "as if it had never been measured"
    errors.network_changed(104.0)
    assert errors.factor(groups(SRA)) == pytest.approx(1.1, rel=1e-3)


def test_layer_rules_take_no_error_of_dense() -> None:
    errors = LearnedErrors()
    ruled = (PlannedGroup.of(LAYERS[:1], DENSE), PlannedGroup.of(LAYERS[1:], SRA, is_fixed=True))
    errors.learn_step(ruled, math.log(1.3), 0.0)
    assert errors.option_factor(DENSE) == pytest.approx(1.3, rel=1e-3)
    assert errors.option_factor(SRA) == 1.0

"""Bits per layer: the optimum against brute force, and the order of the methods on recorded gradients."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.planner.bits import CGX_TABLE_7, gain_error, measure_bits, record_gradients
from cgx_ray.codecs.gain import GainCurve
from cgx_ray.demo.gpt import GPTConfig
from cgx_ray.errors import CGXError
from cgx_ray.plan import CodecSpec, Layer, make_plan
from cgx_ray.planner.bits import BitsProblem, LayerErrors, dp
from cgx_ray.planner.papers.cgx import bayes, kmeans, linear
from cgx_ray.session.calibrate import measure_errors

SMALL_GPT = GPTConfig(context=64, width=128, num_layers=3)


@pytest.fixture(scope="module")
def gradients() -> list[dict[str, torch.Tensor]]:
    return list(record_gradients((0, 3, 6), SMALL_GPT))


def random_problem(rng: random.Random, num_layers: int, widths: tuple[int, ...], alpha: float) -> BitsProblem:
    """Return sizes over three decades and gradients over six; more bits do not always have smaller errors."""
    layers = []
    for _ in range(num_layers):
        numel = int(10 ** rng.uniform(3, 6))
        energy = rng.choice((0.0, 1.0, 1.0, 1.0)) * 10 ** rng.uniform(-3, 3) * numel
        norm = math.sqrt(energy)
        errors = {bits: energy * rng.uniform(0.5, 1.5) / (2**bits - 1) ** 2 for bits in range(1, 9)}
        layers.append(LayerErrors(numel=numel, norm=norm, top_norm=norm, squared_errors=errors))
    return BitsProblem(layers=tuple(layers), widths=widths, alpha=alpha)


def fewest_bytes(problem: BitsProblem) -> int:
    """Return the fewest bytes of all choices within the error."""
    static = math.fsum(layer.squared_errors[4] for layer in problem.layers)
    costs = []
    for bits in itertools.product(problem.widths, repeat=len(problem.layers)):
        chosen = list(zip(problem.layers, bits, strict=True))
        if math.fsum(layer.squared_errors[b] for layer, b in chosen) <= problem.alpha**2 * static * (1 + 1e-12):
            costs.append(sum(CodecSpec(name="qsgd", bits=b).payload_bytes(layer.numel) for layer, b in chosen))
    return min(costs)


def test_dp_equals_brute_force_and_no_method_is_behind_4_bits_everywhere_in_60_cases() -> None:
    rng = random.Random(0)
    for case in range(60):
        problem = random_problem(rng, rng.randint(1, 4), (2, 3, 4, 5, 8), rng.choice((1.0, 1.5, 3.0)))
        best = dp(problem)
        assert (best.wire_bytes, best.gap) == (fewest_bytes(problem), 0), (case, problem)
        for choice in (best, kmeans(problem), linear(problem), bayes(problem, num_trials=12)):
            assert best.wire_bytes <= choice.wire_bytes <= problem.static_bytes, (case, choice)
            assert choice.relative_error <= problem.alpha * (1 + 1e-12), (case, choice)
            assert choice.bound_bytes <= best.wire_bytes, (case, choice)


def test_where_4_bits_make_no_error_no_method_makes_any() -> None:
    exact_from_4 = {1: 0.4, 2: 0.4, 3: 0.1, **dict.fromkeys(range(4, 9), 0.0)}
    zero = dict.fromkeys(range(1, 9), 0.0)
    problem = BitsProblem(
        layers=tuple(layer_errors(numel=5000, squared_errors=e) for e in (exact_from_4, zero, exact_from_4))
    )
    assert (dp(problem).bits, dp(problem).gap) == ((4, 1, 4), 0)
    for choice in (dp(problem), kmeans(problem), linear(problem), bayes(problem, num_trials=12)):
        errors = [layer.squared_errors[bits] for layer, bits in zip(problem.layers, choice.bits, strict=True)]
        assert errors == [0.0, 0.0, 0.0], choice


def test_kmeans_goes_by_the_largest_elements_of_the_accumulated_gradients() -> None:
    """Both layers have the same size, norm and errors. Each may have 3 bits if the other one has 5."""
    errors = {bits: 1 / (2**bits - 1) ** 2 for bits in range(1, 9)}
    for top_norms, bits in (((1.0, 2.0), (3, 5)), ((2.0, 1.0), (5, 3))):
        layers = tuple(layer_errors(numel=5000, top_norm=top, squared_errors=errors) for top in top_norms)
        assert kmeans(BitsProblem(layers=layers, alpha=1.6, widths=(3, 5))).bits == bits


def test_dp_of_300_layers_of_odd_sizes_is_the_optimum_and_with_few_labels_has_a_small_gap() -> None:
    problem = random_problem(random.Random(1), 300, tuple(range(1, 9)), 2.0)
    best, hasty = dp(problem), dp(problem, max_labels=2)
    assert best.gap == 0
    assert hasty.bound_bytes <= best.wire_bytes <= hasty.wire_bytes
    # The dual and what fills up its choice differ by less than the largest layer's share.
    assert hasty.gap < 0.01, hasty.gap


@pytest.mark.slow
def test_on_gradients_of_the_gpt_dp_takes_no_more_than_kmeans_than_4_bits(
    gradients: list[dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {row.name: row for row in measure_bits(gradients)}
    assert rows["bits_kmeans_over_4_bits"].met, rows["bits_kmeans_over_4_bits"]
    assert rows["bits_dp_over_4_bits"].met, rows["bits_dp_over_4_bits"]
    ours = {row.name.split("_")[1]: row.value for row in rows.values() if "error_x2" in row.name}
    with capsys.disabled():
        print(f"\nwire bytes over 4 bits at twice the error: {ours}; CGX, table 7: {CGX_TABLE_7}")
    assert ours["dp"] == min(ours.values()), ours


def test_half_the_bits_make_about_the_error_that_theory_says(gradients: list[dict[str, torch.Tensor]]) -> None:
    """Stochastic rounding on a grid of step s has a variance of at most s^2/4; one bit less at least doubles s."""
    for name, errors in measure_errors(gradients, widths=(2, 4, 8)).items():
        ratio = errors.squared_errors[2] / errors.squared_errors[4]
        assert 0.5 * (15 / 3) ** 2 <= ratio <= 1.5 * (15 / 3) ** 2, (name, ratio)


def test_a_plan_has_the_bits_of_each_layer_and_ends_groups_where_they_change() -> None:
    layers = [Layer(name=name, numel=5000, ndim=2) for name in "abcd"] + [Layer(name="norm", numel=8, ndim=1)]
    plan = make_plan(
        layers, version=0, world_size=2, codec="qsgd", bits={"a": 2, "c": 3, "d": 3, "norm": 2}, group_bytes=30_000
    )
    assert [(group.layers, group.option.codec.bits) for group in plan.groups] == [
        (("d", "c"), 3), (("b",), 4), (("norm",), None), (("a",), 2)
    ]  # fmt: skip


def layer_errors(**changes: object) -> LayerErrors:
    given = {"numel": 10, "norm": 1.0, "top_norm": 1.0, "squared_errors": {b: 1.0 / b for b in range(1, 9)}, **changes}
    return LayerErrors(**given)  # type: ignore[arg-type]


LAYERS = [Layer(name="a", numel=5000, ndim=2)]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: BitsProblem(layers=()), "no layers"),
        (lambda: layer_errors(norm=math.nan), "norm is nan; measure it on finite gradients"),
        (lambda: layer_errors(numel=0), "0 elements"),
        (lambda: BitsProblem(layers=(layer_errors(squared_errors={3: 1.0}),), widths=(3,)), r"measured at \[4\] bits"),
        (lambda: BitsProblem(layers=(layer_errors(),), alpha=0.5), "give a larger alpha or more bits"),
        (lambda: BitsProblem(layers=(layer_errors(),), alpha=0), "alpha 0 is not allowed"),
        (lambda: BitsProblem(layers=(layer_errors(),), widths=(4, 3)), "ascending order"),
        (lambda: BitsProblem(layers=(layer_errors(),), codec=CodecSpec(name="topk")), "no bits to choose"),
        (lambda: make_plan(LAYERS, version=0, world_size=2, codec="topk", bits={"a": 3}), "topk has no bits"),
        (lambda: make_plan(LAYERS, version=0, world_size=2, codec="qsgd", bits={"b": 3}), "bits are given for 'b'"),
    ],
)
def test_bad_input_is_one_clear_error(make: object, says: str) -> None:
    with pytest.raises(CGXError, match=says):
        make()  # type: ignore[operator]


def test_gain_from_one_histogram_is_within_1_percent_of_exact_topk_on_gradients_of_the_gpt(
    gradients: list[dict[str, torch.Tensor]],
) -> None:
    errors = [gain_error(torch.cat(tuple(layers.values()))) for layers in gradients]
    assert max(errors) <= 0.01, errors


MAGNITUDES = st.floats(min_value=2.0**-40, max_value=2.0**40, width=32)


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.one_of(st.just(0.0), MAGNITUDES, MAGNITUDES.map(lambda x: -x)), min_size=1, max_size=40),
    density=st.floats(min_value=0.0005, max_value=1.0),
)
def test_gain_from_one_histogram_is_never_off_by_more_than_the_width_of_a_bin(
    values: list[float], density: float
) -> None:
    """Elements count as the mean square of their bin; the ends of a bin have a ratio of at most 17/16."""
    square_N = sorted((value * value for value in values), reverse=True)
    kept = math.fsum(square_N[: CodecSpec(name="topk", density=density).num_kept(len(values))])
    true = kept / math.fsum(square_N) if any(square_N) else 1.0
    ends = 17 / 16
    mean = (1 + ends + ends**2) / 3
    most = (ends**2 / mean) / (1 / mean)
    (gain,) = GainCurve(torch.tensor(values)).gain([density])
    assert true / most * (1 - 1e-9) <= gain <= true * most * (1 + 1e-9), (gain, true)


def test_the_one_element_that_topk_always_keeps_counts_whole() -> None:
    assert GainCurve(torch.tensor([-2.0])).gain([0.001, 0.5]) == [1.0, 1.0]
    assert math.isnan(GainCurve(torch.tensor([math.inf])).gain([0.5])[0])

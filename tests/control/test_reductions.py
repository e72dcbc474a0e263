"""Values of all ranks, reduced by node and then to a step, beside plain sums over all samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import step_sample

from cgx_ray.control.joined_steps import MEAN_PARTS, JoinedStep, join
from cgx_ray.monitors.reductions import reducer
from cgx_ray.monitors.sample import (
    Burst,
    InsideLink,
    LayerError,
    NodeStep,
    StepSample,
    StepValues,
    Transfer,
    node_steps,
    reduce_nodes,
    reduce_ranks,
)

Samples = Sequence[StepSample]

# Sums and means of at most MAX_RANKS positive numbers: some ten roundings of 1.1e-16 each.
MAX_RANKS, TOLERANCE = 6, 2e-15
FEW = settings(deadline=None, max_examples=40)
POSITIVE, SHARES, NAMES = st.floats(1e-6, 1e3), st.floats(0, 1), st.sampled_from("abc")


@st.composite
def _samples(draw: st.DrawFn) -> list[StepSample]:
    """Draw the samples of a step of at least two ranks: some measure more than others."""
    num_groups, num_ranks = draw(st.integers(0, 3)), draw(st.integers(2, MAX_RANKS))

    def sample(rank: int) -> StepSample:
        compute_s = draw(POSITIVE)
        groups = [draw(POSITIVE) for _ in range(num_groups)]
        others = st.sampled_from([other for other in range(num_ranks) if other != rank])
        return StepSample(
            rank=rank,
            step=7,
            plan_version=3,
            num_steps=8,
            step_s=compute_s + draw(POSITIVE),
            between_s=draw(st.just(0.0) | POSITIVE),
            compute_s=compute_s,
            encode_s=draw(POSITIVE),
            exchange_s=draw(POSITIVE),
            decode_s=draw(POSITIVE),
            wire_bytes=draw(st.integers(0, 1 << 40)),
            dense_bytes=draw(st.integers(0, 1 << 40)),
            ready_s=tuple(draw(POSITIVE) for _ in groups),
            transfers=tuple(
                Transfer(group=index, scheme="sra", numel=1, wire_bytes=1, seconds=seconds)
                for index, seconds in enumerate(groups)
            ),
            gain=draw(st.dictionaries(NAMES, SHARES)),
            kept=draw(st.dictionaries(NAMES, SHARES)),
            gain_curve=draw(st.just(()) | st.tuples(SHARES, SHARES, SHARES)),
            norm=draw(st.none() | POSITIVE),
            layer_errors=draw(st.dictionaries(NAMES, st.builds(LayerError, POSITIVE, SHARES, POSITIVE))),
            error_bits=draw(st.none() | st.integers(1, 8)),
            loss=draw(st.sampled_from([None, math.nan, math.inf]) | POSITIVE),
            lr=draw(st.none() | POSITIVE),
            bursts=tuple(draw(st.lists(st.builds(Burst, st.integers(1, 1 << 30), POSITIVE), max_size=2))),
            rate_from=draw(st.dictionaries(others, st.just(0.0) | POSITIVE)),
            lag_s=draw(st.dictionaries(others, st.floats(-1e3, 1e3))),
            num_local=draw(st.sampled_from([1, 1, 2])),
            weight_drift=draw(st.none() | SHARES),
            inside=draw(st.none() | st.builds(InsideLink, POSITIVE, POSITIVE)),
        )

    return [sample(rank) for rank in range(num_ranks)]


def _parts(samples: Samples, ranks_per_node: int) -> list[NodeStep]:
    nodes = [samples[first : first + ranks_per_node] for first in range(0, len(samples), ranks_per_node)]
    return [part for node in nodes for part in node_steps(node)]


def _without_waits(samples: Samples, name: str) -> list[float]:
    """Return a field without the time for which a rank waits for the longest pause of another."""
    longest_s = max(one.between_s for one in samples)
    least_s = [{"step_s": one.compute_s, "exchange_s": 0.0}.get(name) for one in samples]
    values = [(getattr(one, name), longest_s - one.between_s) for one in samples]
    return [
        value if least is None else max(value - wait_s, least)
        for (value, wait_s), least in zip(values, least_s, strict=True)
    ]


def _mean_by_name(name: str) -> Callable[[Samples], dict[str, Any]]:
    def mean(samples: Samples) -> dict[str, Any]:
        found = [getattr(one, name) for one in samples]
        names = {key for one in found for key in one}
        return {key: np.mean([one[key] for one in found if key in one]) for key in names}

    return mean


def _over_known(name: str, reduce: Callable[[Any], Any]) -> Callable[[Samples], Any]:
    def reduced(samples: Samples) -> Any:
        known = [value for one in samples if (value := getattr(one, name)) is not None and math.isfinite(value)]
        return reduce(np.array(known)) if known else None

    return reduced


def _mean_errors(samples: Samples) -> dict[str, tuple[Any, Any, Any]]:
    found = {}
    for name in {name for one in samples for name in one.layer_errors}:
        energy, lost, top = np.array([one.layer_errors[name] for one in samples if name in one.layer_errors]).T
        found[name] = (energy.mean(), (energy * lost).sum() / energy.sum(), top.mean())
    return found


EXPECTED: dict[str, Callable[[Samples], Any]] = {
    "step": lambda samples: 7,
    "plan_version": lambda samples: 3,
    "step_s": lambda samples: np.median(_without_waits(samples, "step_s")),
    "between_s": lambda samples: max(one.between_s for one in samples),
    "compute_s": lambda samples: max(one.compute_s for one in samples),
    "codec_s": lambda samples: np.median([one.encode_s + one.decode_s for one in samples]),
    "means": lambda samples: {name: np.mean(_without_waits(samples, name)) for name in MEAN_PARTS},
    "ready_s": lambda samples: tuple(np.max([one.ready_s for one in samples], axis=0)),
    "slowness": lambda samples: {
        one.rank: one.compute_s / np.median([other.compute_s for other in samples]) for one in samples
    },
    "gain": _mean_by_name("gain"),
    "kept": _mean_by_name("kept"),
    "gain_curve": lambda samples: tuple(
        np.mean(curves, axis=0) if (curves := [one.gain_curve for one in samples if one.gain_curve]) else ()
    ),
    "norm": _over_known("norm", lambda norms: np.sqrt(np.mean(norms**2))),
    "layer_errors": _mean_errors,
    "error_bits": lambda samples: next((one.error_bits for one in samples if one.layer_errors), None),
    "loss": _over_known("loss", np.mean),
    "lr": _over_known("lr", np.median),
    "num_steps": lambda samples: 8,
    "may_train_alone": lambda samples: True,
    "num_local": lambda samples: 2 if all(one.num_local == 2 for one in samples) else 1,
    "inside": lambda samples: max(
        (one.inside for one in samples if one.inside), key=lambda link: link.beta_s_per_byte, default=None
    ),
}


def _are_close(found: Any, expected: Any) -> bool:
    if isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(_are_close(found[name], expected[name]) for name in expected)
    if isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(_are_close, found, expected))
    return found is expected is None or math.isclose(found, expected, rel_tol=TOLERANCE)


@given(_samples(), st.integers(1, MAX_RANKS))
@FEW
def test_each_field_of_a_step_is_that_of_all_ranks_at_once(samples: list[StepSample], ranks_per_node: int) -> None:
    joined = join(_parts(samples, ranks_per_node), len(samples))
    others = {"traffic", "node_sizes"}
    found = {field.name: getattr(joined, field.name) for field in fields(JoinedStep) if field.name not in others}
    assert found.keys() == EXPECTED.keys()
    for name, expected in EXPECTED.items():
        assert _are_close(found[name], expected(samples)), (name, found[name], expected(samples))


@given(_samples(), st.integers(1, MAX_RANKS))
@FEW
def test_traffic_of_a_step_is_that_of_all_ranks_at_once(samples: list[StepSample], ranks_per_node: int) -> None:
    parts = _parts(samples, ranks_per_node)
    traffic = join(parts, len(samples)).traffic
    of_node = {rank: {samples[other].num_local for other in part.ranks} for part in parts for rank in part.ranks}
    num_sharing = {rank: 2 if found == {2} and len(samples) > 2 else 1 for rank, found in of_node.items()}
    lag_s = {(one.rank, other): lag_s for one in samples for other, lag_s in one.lag_s.items()}
    trips_s = {(a, b): lag_s[a, b] + lag_s[b, a] for a, b in lag_s if a < b and (b, a) in lag_s}
    assert [one.seconds for one in traffic.exchanges] == [
        min(transfer.seconds for transfer in group) for group in zip(*(one.transfers for one in samples), strict=True)
    ]
    assert traffic.bursts == {
        one.rank: tuple(Burst(num_sharing[one.rank] * burst.num_bytes, burst.seconds) for burst in one.bursts)
        for one in samples
        if one.bursts
    }
    assert traffic.pair_rate == {
        (sender, one.rank): rate for one in samples for sender, rate in one.rate_from.items() if rate
    }
    assert traffic.round_trip_s == {pair: seconds for pair, seconds in trips_s.items() if seconds > 0}


@given(_samples())
@FEW
def test_records_of_a_node_keep_the_values_of_each_rank(samples: list[StepSample]) -> None:
    (part,) = _parts(samples, MAX_RANKS)
    for name in ("between_s", *MEAN_PARTS, "bursts", "rate_from", "lag_s"):
        assert getattr(part, name) == tuple(getattr(one, name) for one in samples), name
    assert part.ranks == tuple(range(len(samples)))
    assert part.weight_drift == samples[0].weight_drift


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithNewField(StepSample):
    new_s: float = 0.0


def test_a_field_must_name_its_reduction() -> None:
    with pytest.raises(TypeError, match="_WithNewField names no reduction of new_s"):
        reducer(_WithNewField, "of_ranks")


def test_records_have_all_fields_that_are_reduced_and_no_others_but_those_made_by_hand() -> None:
    samples = [step_sample(rank, 0) for rank in range(2)]
    assert reduce_ranks(samples).keys() | {"ranks", "error_bits"} == {field.name for field in fields(NodeStep)}
    assert reduce_nodes(node_steps(samples)).keys() | {"step_s", "error_bits"} == {
        field.name for field in fields(StepValues)
    }

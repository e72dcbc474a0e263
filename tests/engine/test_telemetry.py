"""Errors in measurements do not stop training and change no bit of it."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import ranks
from support.branches import Branches, batch, train
from support.ranks import run_ranks
from support.samples import step_sample
from support.sharded import make_mesh, shard, weights_of
from support.sharded import train as train_sharded
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.codecs.gain import GainCurve
from cgx_ray.collectives import Transport
from cgx_ray.control.joined_steps import join
from cgx_ray.engine import step_sample as sample_module
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.gains.gain_meter import GainMeter
from cgx_ray.engine.step import PauseWatch
from cgx_ray.engine.telemetry import Telemetry
from cgx_ray.monitors.sample import CURVE_DENSITIES, StepSample, node_steps
from cgx_ray.plan import CodecSpec, Plan, make_plan
from cgx_ray.session.attachment import process
from cgx_ray.session.settings import Settings

TOPK = CodecSpec(name="topk", density=0.1)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_S", 40)


class _Adaptive:
    """A stand-in for the session of a Ray worker: policy "adaptive", dense at first."""

    settings = Settings(fidelity="fast")

    def first_plan(self, layers: Any, world_size: int, bucket_bytes: int, costs: Any) -> Plan:
        return make_plan(layers, version=0, world_size=world_size, codec="none", scheme="dense")

    def start(self, attachment: cgx_ray.Attachment) -> None:
        pass


def _adaptive_gain(rank: int, dtype: torch.dtype) -> tuple[float, int, list[str], list[list[int]]]:
    """Return the gain of top-k and the length of the curve at step 1, hashes of weights, and peers of lags by step."""
    process.session = _Adaptive()
    model = DistributedDataParallel(Branches().to(dtype))
    attachment = cgx_ray.attach(model)
    hashes = train(model, rank, range(3))
    gains = {sample.step: sample for sample in attachment.take_samples()}
    attachment.close()
    lags = [sorted(sample.lag_s) for _, sample in sorted(gains.items())]
    return gains[1].gain["topk:density=0.1"], len(gains[1].gain_curve), hashes, lags


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gains_of_gradients_of_any_dtype_are_measured(dtype: torch.dtype) -> None:
    (gain, num_densities, hashes, lags), (_, _, other_hashes, _) = run_ranks(2, _adaptive_gain, dtype)
    # All types train the same model, except for rounding. The gain with float32 is 0.431, once feedback has settled.
    assert gain == pytest.approx(0.431, abs=0.05)
    assert num_densities == len(CURVE_DENSITIES)
    assert hashes == other_hashes
    assert lags == [[], [1], [1]], "a step tells of the greetings right before it"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_curve_of_a_gradient_is_that_of_its_values_in_float32(dtype: torch.dtype) -> None:
    grad_N = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert GainCurve(grad_N).gain(CURVE_DENSITIES) == GainCurve(grad_N.float()).gain(CURVE_DENSITIES)


def _broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("nothing to see")


# By name of the function that breaks: its owner, and the numbers that are then missing.
FAULTS: dict[str, tuple[Any, str]] = {
    "measure": (GainMeter, "gains"),
    "correct": (GainMeter, "gains"),
    "gains": (GainMeter, "gains"),
    "curve": (GainMeter, "gains"),
    "take_bursts": (Transport, "rates of arrival"),
    "StepSample": (sample_module, "times, bytes and gains"),
}


@contextmanager
def _fault(owner: Any, name: str | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            patch.setattr(owner, name, _broken)
        yield


def _logged(act: Callable[[], object]) -> list[str]:
    """Return the warnings and errors that cgx_ray logs while `act` runs."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("cgx_ray").addHandler(handler)
    try:
        act()
    finally:
        logging.getLogger("cgx_ray").removeHandler(handler)
    assert all(record.exc_info for record in records)
    return [record.getMessage() for record in records]


def _train_with(rank: int, fault: str | None) -> tuple[list[str], list[str], int, list[int]]:
    """Return hashes of the weights, logged lines, the number of failures, and the steps that have gains."""
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec=TOPK, scheme="allgather")
    engine = attachment._engine
    assert isinstance(engine, Engine)
    hashes: list[str] = []
    with engine.metered([TOPK], 2), _fault(FAULTS[fault][0] if fault else None, fault):
        # `last_step` waits until the last step is measured.
        said = _logged(lambda: (hashes.extend(train(model, rank, range(6))), attachment.last_step))
    failures = engine.telemetry.num_failures
    steps = [sample.step for sample in attachment.take_samples() if sample.gain]
    assert engine.step == 6
    attachment.close()
    return hashes, said, failures, steps


def _train_with_each(rank: int) -> dict[str | None, Any]:
    """Return the results by the function that breaks, on rank 1 only."""
    return {fault: _train_with(rank, fault if rank == 1 else None) for fault in (None, *FAULTS)}


@pytest.mark.fault("an exception in telemetry on one rank", "a warning; no bit of the training changes")
def test_an_error_of_what_is_measured_is_said_once_and_changes_no_bit() -> None:
    healthy, broken = run_ranks(2, _train_with_each)
    hashes, said, failures, steps = healthy[None]
    assert (said, failures, steps) == ([], 0, [1, 3, 5])
    for fault, (_, numbers) in FAULTS.items():
        other_hashes, said, failures, steps = broken[fault]
        assert other_hashes == hashes == healthy[fault][0], fault
        assert len(said) == 1, (fault, said)
        assert said[0].startswith("rank 1, step ")
        assert f"{numbers} could not be measured (ZeroDivisionError('nothing to see'))" in said[0]
        assert "training goes on without" in said[0]
        assert failures == (3 if numbers == "gains" else 6), fault
        # Gains are computed before their curve, so an error in the curve does not lose them.
        assert steps == ([1, 3, 5] if fault in ("curve", "take_bursts") else []), fault


def _train_sharded_with_fault(rank: int) -> Any:
    model = shard(Branches(), make_mesh())
    attachment = cgx_ray.attach(model, codec="qsgd")
    with _fault(sample_module, "StepSample" if rank == 1 else None):
        said = _logged(lambda: train_sharded(model, rank, range(3)))
    weights = weights_of(model)
    steps = [sample.step for sample in attachment.take_samples()]
    attachment.close()
    return weights, said, steps


def test_an_error_of_what_is_measured_of_shards_is_said_once() -> None:
    (weights, no_words, steps), (other_weights, said, no_steps) = run_ranks(2, _train_sharded_with_fault)
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert (no_words, steps, no_steps) == ([], [0, 1, 2], [])
    assert len(said) == 1
    assert said[0].startswith("rank 1, step 0: times and bytes could not be measured")


def test_what_exceeds_twice_the_usual_time_before_backward_is_a_pause() -> None:
    watch = PauseWatch()
    # The first steps tell what is usual: the first one of all loads data and compiles.
    assert [watch.add_step(before_s, 2.0, 0.0) for before_s in (60.0, 1.0, 1.0, 1.0, 1.9)] == [0.0] * 5
    assert watch.add_step(31.0, 2.0, 0.0) == 30.0
    # A batch that is three times as long needs three times as long for both.
    assert watch.add_step(3.0, 6.0, 0.0) == 0.0
    assert [watch.add_step(1.0, 2.0, 0.0) for _ in range(5)] == [0.0] * 5
    assert watch.add_step(33.0, 6.0, 0.0) == 30.0
    # Pauses before every other step stay pauses; in each step they are a part of it.
    assert [watch.add_step(before_s, 2.0, 0.0) > 0 for before_s in (1.25, 9.0) * 50] == [False, True] * 50
    assert [watch.add_step(9.0, 2.0, 0.0) > 0 for _ in range(40)][-1] is False


def test_without_a_time_of_backward_the_time_before_it_tells_alone() -> None:
    watch = PauseWatch()
    # One bucket brings all gradients.
    assert [watch.add_step(before_s, 0.0, 0.0) for before_s in (1.0, 1.0, 1.0, 5.0)] == [0.0, 0.0, 0.0, 4.0]


def test_a_known_pause_is_a_pause_in_each_step_too() -> None:
    watch = PauseWatch()
    # As of a report that Ray takes every two seconds.
    assert [watch.add_step(2.0, 0.5, 1.75) for _ in range(20)] == [1.75] * 20
    assert watch.add_step(0.25, 0.5, 0.0) == 0.0
    assert watch.add_step(12.0, 0.5, 1.75) == 11.75
    assert watch.add_step(0.25, 0.5, 3.0) == 0.25, "known of another step"


PAUSE_S = 1.0
NUM_STEPS = 12


def _pause(model: torch.nn.Module, rank: int, step: int) -> None:
    """Do what trainings do between steps: all ranks sleep before step 6, rank 0 evaluates and saves before step 9."""
    if step == 6:
        time.sleep(PAUSE_S)
    if step == 9 and rank == 0:
        ends_s = time.perf_counter() + PAUSE_S
        with torch.no_grad():
            while time.perf_counter() < ends_s:
                model(batch(rank, step))
        torch.save(model.state_dict(), io.BytesIO())


def _train_with_pauses(rank: int) -> list[StepSample]:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model)
    for step in range(NUM_STEPS):
        # The model itself, as DDP takes part in no evaluation of one rank.
        _pause(model.module, rank, step)
        train(model, rank, range(step, step + 1))
    samples = attachment.take_samples()
    attachment.close()
    return samples


def test_sleeps_evaluations_and_checkpoints_are_between_the_steps_and_no_compute() -> None:
    of_rank = run_ranks(2, _train_with_pauses)
    steps = [join(node_steps(of_step), 2) for of_step in zip(*of_rank, strict=True)]
    assert len(steps) == NUM_STEPS
    for step in (steps[6], steps[9]):
        assert step.between_s > PAUSE_S / 2, step
        assert step.compute_s < PAUSE_S / 2, step
        assert step.step_s < PAUSE_S / 2, step
        assert step.means["exchange_s"] < PAUSE_S / 2, step
    # Rank 1 has waited for rank 0.
    assert of_rank[1][9].between_s < PAUSE_S / 2 < of_rank[1][9].step_s


def _train_sharded_with_pauses(rank: int) -> list[StepSample]:
    model = shard(Branches(), make_mesh())
    attachment = cgx_ray.attach(model, codec="qsgd")
    for step in range(8):
        if step == 6:
            time.sleep(PAUSE_S)
        train_sharded(model, rank, range(step, step + 1))
    samples = attachment.take_samples()
    attachment.close()
    return samples


def test_pauses_of_a_sharded_model_are_no_compute() -> None:
    for samples in run_ranks(2, _train_sharded_with_pauses):
        assert samples[6].between_s > PAUSE_S / 2
        assert samples[6].compute_s <= samples[6].step_s < PAUSE_S / 2


def test_metrics_are_means_since_the_last_call() -> None:
    telemetry = Telemetry(0)
    assert telemetry.take_means() == {}
    telemetry.add_sample(step_sample(0, 0))
    assert telemetry.take_means()["cgx_ray/step_s"] == 0.25
    # A round of three steps counts as three.
    telemetry.add_sample(replace(step_sample(0, 1), step_s=0.5, wire_bytes=3500))
    telemetry.add_sample(replace(step_sample(0, 4), step_s=0.1, num_steps=3, plan_version=4))
    means = telemetry.take_means()
    assert means == pytest.approx(
        {
            "cgx_ray/step_s": 0.8 / 4,
            "cgx_ray/compute_s": 0.1,
            "cgx_ray/wire_mb": 0.002,
            "cgx_ray/dense_mb": 0.004,
            "cgx_ray/period": 3,
            "cgx_ray/plan": 4,
        }
    )
    assert telemetry.take_means() == means, "no new step"

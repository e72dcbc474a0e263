"""Checkpoint-restore exploration and plans of bits per layer, on real processes."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.branches import Branches, batch, train
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.plan import CodecSpec, Option, Scheme
from cgx_ray.planner.papers import flexible
from cgx_ray.planner.papers.flexible import Trial
from cgx_ray.session.attachment import process
from cgx_ray.session.explore import Exploration, _measure
from cgx_ray.session.settings import Settings

CANDIDATES = ["topk:density=0.3", "topk:density=0.1", "topk:density=0.01"]


class Run:
    """A model with dropout and running statistics, an optimizer with moments, and a schedule."""

    def __init__(self, rank: int) -> None:
        branches = Branches()
        branches.left = nn.Sequential(nn.BatchNorm1d(131), nn.Dropout(0.1), branches.left)  # type: ignore[assignment]
        self.rank, self.scale = rank, 1.0
        self.model = DistributedDataParallel(branches)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        torch.manual_seed(rank)

    def step(self, index: int) -> None:
        x_BD = batch(self.rank, index)
        self.optimizer.zero_grad()
        ((self.model(x_BD) - x_BD).square().mean() * self.scale).backward()
        self.optimizer.step()
        self.schedule.step()

    def digest(self, attachment: cgx_ray.Attachment) -> str:
        """Return a hash of all that a step reads and changes."""
        states = (self.model.state_dict(), self.optimizer.state_dict(), self.schedule.state_dict())
        plain = _plain([*states, attachment.state_dict(), torch.get_rng_state()])
        return hashlib.sha256(pickle.dumps(plain)).hexdigest()


def _plain(value: Any) -> Any:
    """Return `value` as lists and text: equal tensors that share memory differently pickle differently."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return [(str(key), _plain(value[key])) for key in value]
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return repr(value)


def _explore(rank: int) -> dict[str, Any]:
    run = Run(rank)
    attachment = cgx_ray.attach(run.model, codec="topk:density=0.05", scheme="allgather")
    for index in range(3):
        run.step(index)
    before = run.digest(attachment)
    stateful = [run.model, run.optimizer, run.schedule]
    found = attachment.explore(stateful, run.step, candidates=CANDIDATES, iterations=4)
    # However long exchanges take here.
    flexible.LINK_TRIGGER = 1e9
    again = attachment.explore(stateful, run.step, candidates=CANDIDATES, iterations=4, since=found)
    assert again is found
    assert attachment.plan == found.plan
    flexible.GAIN_TRIGGER = -1.0
    anew = attachment.explore(stateful, run.step, candidates=CANDIDATES, iterations=4, since=found)
    assert anew.plan.version == attachment.plan.version == found.plan.version + 4
    after = run.digest(attachment)
    errors = []
    for step, iterations in ((lambda index: None, 4), (run.step, 1)):
        with pytest.raises(cgx_ray.ConfigError) as caught:
            attachment.explore(stateful, step, iterations=iterations)
        errors.append(str(caught.value))
    process.session = SimpleNamespace(settings=Settings())  # type: ignore[assignment]
    with pytest.raises(cgx_ray.ConfigError, match=r"policy Adaptive.* chooses plans itself"):
        attachment.explore(stateful, run.step)
    process.session = None
    # The one that failed had a plan on its way.
    recovered = attachment.explore(stateful, run.step, candidates=CANDIDATES[:1], iterations=4)
    assert (recovered.plan.version, attachment.plan) == (11, recovered.plan)
    run.step(3)
    assert attachment.last_step is not None
    last = attachment.last_step
    attachment.close()
    return {"before": before, "after": after, "found": found, "errors": errors, "last": (last.step, last.plan_version)}


def test_exploration_leaves_no_trace_but_the_plan_of_the_knee() -> None:
    first, second = run_ranks(2, _explore)
    found: Exploration = first["found"]
    assert first["before"] == first["after"]
    assert second["before"] == second["after"]
    assert first["found"] == second["found"]
    assert [trial.codec for trial in found.trials] == [CodecSpec.parse(text) for text in CANDIDATES]
    # Top-k keeps less at a smaller density.
    gains = [trial.gain for trial in found.trials]
    assert gains == sorted(gains, reverse=True), gains
    assert all(trial.codec_s > 0 and trial.exchange_s > 0 for trial in found.trials), found.trials
    assert found.knee in found.front
    assert {group.option.codec for group in found.plan.groups if group.option.codec.name != "none"} == {
        found.knee.codec
    }
    # Three plans were tried, and the knee's is the fourth. Training goes on at the step where it was.
    assert found.plan.version == 4
    assert "0 times" in first["errors"][0]
    assert "iterations 1 is not allowed" in first["errors"][1]
    assert first["last"] == (3, 11)


def test_a_trigger_fires_at_another_gain_or_another_exchange_time() -> None:
    trial = Trial(codec=CodecSpec.parse(CANDIDATES[0]), scheme=Scheme.ALLGATHER, codec_s=1, exchange_s=2, gain=0.5)
    for gain, exchange_s, has_changed in (
        (0.54, 2.4, False),
        (0.46, 1.7, False),
        (0.56, 2.0, True),
        (0.44, 2.0, True),
        (0.5, 2.6, True),
        (0.5, 1.5, True),
    ):
        assert trial.has_changed(replace(trial, gain=gain, exchange_s=exchange_s)) == has_changed


def _refused(attachment: cgx_ray.Attachment, run: Run, **arguments: Any) -> str:
    with pytest.raises(cgx_ray.CGXError) as caught:
        attachment.explore([run.model, run.optimizer], run.step, iterations=2, **arguments)
    return str(caught.value)


def _explore_without_gradients(rank: int) -> dict[str, Any]:
    run = Run(rank)
    attachment = cgx_ray.attach(run.model)
    bad = [
        _refused(attachment, run, candidates=["topk:density=0.01", "qsgd:bits=2"], scheme="artopk_ring"),
        _refused(attachment, run, scheme="star"),
    ]
    assert attachment.last_step is None, "refused before the first step"
    run.scale = 1.0 - rank
    found = attachment.explore([run.model, run.optimizer], run.step, candidates=CANDIDATES[:1], iterations=2)
    run.scale = 0.0
    nobody = _refused(attachment, run, candidates=CANDIDATES[:1])
    attachment.close()
    return {"bad": bad, "found": found, "nobody": nobody}


def test_ranks_without_gradients_do_not_count_and_bad_candidates_are_refused_before_the_first_step() -> None:
    first, second = run_ranks(2, _explore_without_gradients)
    assert first == second
    assert "scheme artopk_ring cannot carry codec qsgd" in first["bad"][0]
    assert "unknown scheme 'star'" in first["bad"][1]
    (trial,) = first["found"].trials
    assert 0.3 <= trial.gain <= 1, trial
    assert "0 or not finite in all 2 steps with topk:density=0.3" in first["nobody"]


TOPK = Option(codec=CodecSpec(name="topk", density=0.1), scheme=Scheme.ALLGATHER)


def _sample(step: int, exchange_s: float, kept: float | None = None) -> Any:
    """Return a sample that has measured what TOPK kept, and predicted another gain for it, if `kept` is given."""
    own = ({str(TOPK): kept}, {str(TOPK.codec): 0.9}) if kept is not None else ({}, {})
    return SimpleNamespace(step=step, encode_s=1.0, decode_s=2.0, exchange_s=exchange_s, kept=own[0], gain=own[1])


@pytest.mark.parametrize(
    ("samples", "measured"),
    [
        ([_sample(0, 4), _sample(1, 100, 0.5), _sample(2, 6), _sample(3, 100, 0.7)], ((3.0, 5.0), 0.6)),
        ([_sample(0, 4), _sample(1, 100), None, _sample(3, 100, 0.5)], ((3.0, 4.0), 0.5)),
        ([_sample(0, 4), None, _sample(2, 6), None], ((3.0, 5.0), None)),
        ([None, _sample(1, 100, 0.5), None, None], (None, 0.5)),
        ([None] * 4, (None, None)),
    ],
    ids=["all", "no gain and a lost time", "lost gains", "lost times", "all lost"],
)
def test_a_step_counts_by_its_own_sample_or_not_at_all(samples: list[Any], measured: Any) -> None:
    # The last sample of the candidate before has the number of a step to come.
    engine: Any = SimpleNamespace(step=0, last_step=_sample(2, 1000))

    def step(iteration: int) -> None:
        engine.step += 1
        engine.last_step = samples[iteration] or engine.last_step

    assert _measure(engine, step, 4, TOPK) == measured


def _explore_without_samples(rank: int) -> tuple[Any, str]:
    run = Run(rank)
    attachment = cgx_ray.attach(run.model)
    engine: Any = attachment._engine
    if rank == 1:
        engine.telemetry.add_sample = lambda sample: None
    found = attachment.explore([run.model, run.optimizer], run.step, candidates=CANDIDATES[:1], iterations=2)
    engine.telemetry.add_sample = lambda sample: None
    nobody = _refused(attachment, run, candidates=CANDIDATES[:1])
    attachment.close()
    return found, nobody


def test_lost_samples_do_not_count_unless_all_ranks_lost_theirs() -> None:
    first, second = run_ranks(2, _explore_without_samples)
    assert first == second
    assert "no rank could measure its times in 2 steps with topk:density=0.3" in first[1]


def _bits_by_layer(rank: int) -> tuple[list[str], list[int]]:
    model = DistributedDataParallel(Branches())
    layers = cgx_ray.layers_of(model)
    bits = {"first.weight": 2, "left.weight": 5, "right.weight": 5}
    plan = cgx_ray.make_plan(layers, version=0, world_size=2, codec="qsgd", bits=bits)
    attachment = cgx_ray.attach(model, plan=plan)
    hashes = train(model, rank, range(3))
    assert attachment.last_step is not None
    sizes = [transfer.wire_bytes for transfer in attachment.last_step.transfers]
    attachment.close()
    return hashes, sizes


def test_a_plan_with_other_bits_for_other_layers_runs_and_sends_their_bytes() -> None:
    (hashes, sizes), other = run_ranks(2, _bits_by_layer)
    assert (hashes, sizes) == other
    numel = 131 * 33
    # The small layers go before the last group.
    assert [sizes[0], sizes[-1]] == [
        CodecSpec(name="qsgd", bits=5).payload_bytes(2 * numel),
        CodecSpec(name="qsgd", bits=2).payload_bytes(numel),
    ]


def test_a_run_of_one_has_nothing_to_explore() -> None:
    attachment = cgx_ray.attach(Branches())
    with pytest.raises(cgx_ray.PlanError, match="explore with more workers"):
        attachment.explore([], lambda index: None)

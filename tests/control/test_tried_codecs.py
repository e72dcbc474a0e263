"""Codecs of sharded models are tried: which ones, in which order, which is kept, and what a round may cost.

Steps are given, of a training whose codecs take what `Times` says; the loop is stepped without clock and sockets.
"""

from __future__ import annotations

import json
import logging
import math
import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.samples import step_sample

from cgx_ray.control.history import Registration
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.policy import Policy, Static
from cgx_ray.control.trial.tried_codecs import CHANGE_SHARE, REVIEW_SHARE, TRIAL_STEPS, codecs_to_try
from cgx_ray.monitors.sample import HostLoad, NodeSample, StepSample, node_steps
from cgx_ray.plan import CodecSpec, Layer, Plan, make_plan
from cgx_ray.report.journal_schema import journal_problem

LAYERS = (
    Layer(name="embedding", numel=1 << 20, ndim=2),
    Layer(name="norm", numel=512, ndim=1),
    Layer(name="head", numel=1 << 20, ndim=2),
)
# By the name of the codec: seconds of a step. Compute is 0.1 s.
Times = Mapping[str, float]
SLOW_LINK: Times = {"none": 1.0, "bf16": 0.6, "qsgd 4-bit": 0.25, "qsgd 3-bit": 0.22}
COMPUTE_S = 0.1
tried_policy = partial(Adaptive, candidates=("bf16", "qsgd:bits=4", "qsgd:bits=3"))
# Steps from a decision to the first one under its plan.
DELAY = 2


class Training:
    """Two ranks on two nodes that follow the loop's plans."""

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        times: Times,
        *,
        overrides: dict[str, str] | None = None,
        noise: float = 0.0,
        report_s: float = 0.0,
    ) -> None:
        """
        noise     standard deviation of the logarithm of a step's seconds
        report_s  seconds between two reports of all steps since the one before, at least one
        """
        self.times, self.compute_s, self.now_s = times, COMPUTE_S, 0.0
        self._noise, self._report_s, self._reported_s = noise, report_s, 0.0
        self._random, self._steps = random.Random(0), list[list[StepSample]]()
        self.journal_path = folder / "decisions.jsonl"
        self.loop = ControlLoop(policy, Journal(self.journal_path), run_name="sharded")
        first = make_plan(LAYERS, version=0, world_size=2, scheme="dense", overrides=overrides)
        self.plan = self.loop.register(Registration(layers=LAYERS, first_plan=first, is_sharded=True))
        self.step, self._coming = 0, list[tuple[int, Plan]]()
        # Name of the codec in each step, and its seconds.
        self.names: list[str] = []
        self.seconds: list[float] = []

    def name(self) -> str:
        """Return the name of the codec of the layer "head" in the plan in force."""
        codec = next(group.option.codec for group in self.plan.groups if "head" in group.layers)
        return "none" if codec.name == "none" else codec.describe()

    def run(self, num_steps: int) -> list[str]:
        """Train, and return the codec of each step."""
        before = len(self.names)
        for _ in range(num_steps):
            self._begin_step()
            name = self.name()
            self.names.append(name)
            step_s = self.times[name] * math.exp(self._random.gauss(0, self._noise))
            self.now_s += step_s
            self.seconds.append(step_s)
            self._steps.append([self._sample(rank, step_s) for rank in (0, 1)])
            if self.now_s >= self._reported_s + self._report_s:
                self._report()
            newest = self.loop.plans[-1]
            if newest.version > max([self.plan.last_version, *(plan.version for _, plan in self._coming)]):
                self._coming.append((self.step + DELAY, newest))
            self.step += 1
        return self.names[before:]

    def _begin_step(self) -> None:
        if self.plan.lease is not None and self.step > self.plan.lease.last_step:
            self.plan = self.plan.lease.fallback
        while self._coming and self._coming[0][0] <= self.step:
            self.plan = self._coming.pop(0)[1]

    def _sample(self, rank: int, step_s: float) -> StepSample:
        return replace(
            step_sample(rank, self.step),
            plan_version=self.plan.version,
            step_s=step_s,
            compute_s=min(self.compute_s, step_s),
            transfers=(),
            ready_s=(),
            gain={},
            gain_curve=(),
            lag_s={},
            loss=None,
            weight_drift=None,
        )

    def _report(self) -> None:
        self._reported_s = self.now_s
        for rank, samples in enumerate(zip(*self._steps, strict=True)):
            node = NodeSample(
                node_id=f"node{rank}",
                time_s=self.now_s,
                steps=node_steps(samples),
                latency_s={},
                host=HostLoad(sent_bytes_per_s=0.0, received_bytes_per_s=0.0),
            )
            self.loop.add_report(f"node{rank}", pickle.dumps(node), self.now_s)
        self._steps.clear()

    def lines(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.journal_path.read_text().splitlines()]
        for line in lines:
            assert not journal_problem(line), (journal_problem(line), line)
        return [line for line in lines if line["event"] == event]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Training]:
    def make(times: Times, policy: Policy | None = None, **rest: Any) -> Training:
        return Training(tmp_path, policy or tried_policy(), times, **rest)

    return make


def _order(names: list[str]) -> list[str]:
    return [name for name, before in zip(names, [None, *names], strict=False) if name != before]


def test_codecs_are_tried_by_what_they_promise_until_no_other_promises_enough(train: Callable[..., Training]) -> None:
    training = train(SLOW_LINK)
    # 3 bits promise 0.19 s, 4 bits 0.21, bf16 0.55, of which only the first is under 0.95 of 0.22.
    assert _order(training.run(40)) == ["none", "qsgd 3-bit"]
    trial, choice = training.lines("decision")
    assert (trial["made_by"], trial["kind"], choice["made_by"], choice["kind"]) == (
        *("plan_trial", "replace"),
        *("policy", "replace"),
    )
    assert choice["reason"] == "first measurements: per step qsgd 3-bit 220 ms, dense 1 s"
    assert (choice["predicted_step_s"], choice["predicted_dense_s"]) == (0.22, 1.0)
    assert training.plan.lease is None
    facts = training.loop.facts()
    assert facts.speed_up == pytest.approx(1 / 0.22)
    assert facts.is_dense_measured
    assert facts.num_decisions == {("replace", "first_measurements"): 2}


def test_a_bound_is_the_compute_and_the_rest_by_bytes(train: Callable[..., Training]) -> None:
    training = train(SLOW_LINK)
    training.run(20)
    (trial,) = [line for line in training.lines("decision") if line["made_by"] == "plan_trial"]
    options = trial["new"]["options"].values()
    wire, dense = (sum(option[kind] for option in options) for kind in ("wire_bytes", "dense_bytes"))
    assert trial["predicted_step_s"] == pytest.approx(COMPUTE_S + (1.0 - COMPUTE_S) * wire / dense)
    outcome = training.lines("outcome")[0]
    assert (outcome["predicted_step_s"], outcome["measured_step_s"]) == (trial["predicted_step_s"], 0.22)


def test_where_codecs_are_slow_the_next_one_is_tried_and_dense_stays(train: Callable[..., Training]) -> None:
    times = {"none": 0.2, "bf16": 0.3, "qsgd 4-bit": 0.4, "qsgd 3-bit": 0.5}
    training = train(times)
    assert _order(training.run(80)) == ["none", "qsgd 3-bit", "qsgd 4-bit", "bf16", "none"]
    last = training.lines("decision")[-1]
    assert (last["kind"], last["made_by"], last["new"]["plan"]) == ("replace", "return", "dense")
    assert (
        last["reason"] == "first measurements: per step dense 200 ms, bf16 300 ms, qsgd 4-bit 400 ms, qsgd 3-bit 500 ms"
    )


def test_where_compute_bounds_the_steps_nothing_is_tried(train: Callable[..., Training]) -> None:
    training = train(dict.fromkeys(SLOW_LINK, 0.104))
    assert _order(training.run(1000)) == ["none"]
    (decision,) = training.lines("decision")
    assert (decision["kind"], decision["reason"]) == (
        "keep",
        "first measurements: per step dense 104 ms, of which 96% is compute: no codec promises enough",
    )


def test_of_codecs_that_are_as_fast_the_one_with_most_bytes_is_chosen(train: Callable[..., Training]) -> None:
    training = train({"none": 1.0, "bf16": 0.605, "qsgd 4-bit": 0.62, "qsgd 3-bit": 0.6})
    assert _order(training.run(60)) == ["none", "qsgd 3-bit", "qsgd 4-bit", "bf16"]


@pytest.mark.parametrize("times", [{"none": 1.04, "bf16": 1.0, "qsgd 4-bit": 1.01, "qsgd 3-bit": 1.02}])
def test_less_than_five_percent_are_no_reason_to_leave_dense(train: Callable[..., Training], times: Times) -> None:
    assert _order(train(times, tried_policy(review_s=1e6)).run(100))[-1] == "none"


def test_other_step_times_begin_another_round_that_begins_with_dense(train: Callable[..., Training]) -> None:
    training = train(SLOW_LINK)
    training.run(30)
    training.times = {"none": 0.15, "bf16": 0.2, "qsgd 4-bit": 0.4, "qsgd 3-bit": 0.4}
    # 3 bits promise 0.11 s, bf16 0.125; both take longer.
    assert _order(training.run(100)) == ["qsgd 3-bit", "none", "qsgd 4-bit", "bf16", "none"]
    last = training.lines("decision")[-1]
    assert (last["kind"], last["made_by"]) == ("disable", "policy")
    assert last["cause"] == "a step takes 400 ms instead of 220 ms"
    facts = training.loop.facts()
    assert facts.num_reverts == {"slower_than_dense": 1}
    assert ("disable", "network") in facts.num_decisions


def test_other_compute_alone_is_no_cause_where_it_bounds_the_steps(train: Callable[..., Training]) -> None:
    training = train(dict.fromkeys(SLOW_LINK, 0.104))
    training.run(30)
    training.times, training.compute_s = dict.fromkeys(SLOW_LINK, 0.208), 0.204
    assert _order(training.run(100)) == ["none"]
    # The rest of a dense step is as before.
    assert training.loop.facts().dense_step_s == pytest.approx(0.208)


def test_regular_rounds_cost_a_small_share_of_the_time(train: Callable[..., Training]) -> None:
    training = train(SLOW_LINK, tried_policy(review_s=1.0))
    training.run(30)
    # 5 s of dense steps cost 4 s each round, and so at least 200 s pass before the next one.
    names = training.run(6000)
    rounds = sum(name == "none" and before != "none" for name, before in zip(names, ["none", *names], strict=False))
    slow_s = sum(SLOW_LINK[name] - 0.22 for name in names)
    assert rounds > 3
    assert slow_s < 1.3 * REVIEW_SHARE * sum(SLOW_LINK[name] for name in names)


def test_rounds_of_a_link_that_goes_back_and_forth_cost_a_limited_share(train: Callable[..., Training]) -> None:
    training = train(SLOW_LINK, tried_policy(review_s=1e6))
    training.run(30)
    lost_s = all_s = 0.0
    for turn in range(100):
        training.times = {name: (0.5 if turn % 2 else 1.0) * step_s for name, step_s in SLOW_LINK.items()}
        names = training.run(40)
        all_s += sum(training.times[name] for name in names)
        lost_s += sum(training.times[name] - training.times["qsgd 3-bit"] for name in names)
    assert lost_s < 1.3 * CHANGE_SHARE * all_s


def test_rounds_of_short_steps_that_are_reported_together_cost_no_more(train: Callable[..., Training]) -> None:
    # A trial lasts for some reports, and so for many steps.
    training = train(dict.fromkeys(SLOW_LINK, 0.08) | {"none": 0.02}, tried_policy(review_s=1.0), report_s=1.0)
    training.compute_s = 0.005
    # The first round has no other one before it.
    assert len({*training.run(500)}) == 4
    begun_s = training.now_s
    names = training.run(25_000)
    slow_s = 0.06 * sum(name != "none" for name in names)
    assert 0 < slow_s < 1.3 * REVIEW_SHARE * (training.now_s - begun_s)


def test_noise_neither_leaves_dense_nor_begins_rounds(train: Callable[..., Training]) -> None:
    times = {"none": 0.2, "bf16": 0.21, "qsgd 4-bit": 0.225, "qsgd 3-bit": 0.235}
    training = train(times, tried_policy(review_s=60.0), noise=0.15, report_s=1.0)
    names = training.run(18_000)
    assert sum(times[name] for name in names) < 1.02 * 0.2 * len(names)


@pytest.mark.parametrize("step_s", [0.5, 3.0, 60.0])
def test_noise_of_long_steps_begins_few_rounds(train: Callable[..., Training], step_s: float) -> None:
    times = {name: step_s * seconds / 0.22 for name, seconds in SLOW_LINK.items()}
    training = train(times, tried_policy(review_s=1e9), noise=0.1)
    training.compute_s = step_s / 3
    training.run(60)
    before = len(training.lines("decision"))
    training.run(1500)
    # Most would be five samples off by chance.
    assert len(training.lines("decision")) <= before + 6


def test_a_codec_that_saves_nothing_any_more_is_left_for_dense(train: Callable[..., Training]) -> None:
    training = train(SLOW_LINK)
    training.run(40)
    training.times = {"none": 0.150, "bf16": 0.151, "qsgd 4-bit": 0.153, "qsgd 3-bit": 0.154}
    assert _order(training.run(200))[-1] == "none"
    assert training.lines("decision")[-1]["kind"] == "disable"


def test_a_compressed_plan_that_compute_bounds_is_left_once_dense_is_as_fast(train: Callable[..., Training]) -> None:
    training = train(SLOW_LINK, tried_policy(review_s=10.0))
    training.times = SLOW_LINK | {"qsgd 3-bit": 0.104}
    training.run(40)
    assert training.name() == "qsgd 3-bit"
    # The link is fast now. Steps under 3 bits stay as they were.
    training.times = dict.fromkeys(SLOW_LINK, 0.104) | {"none": 0.102}
    training.run(3000)
    assert training.name() == "none"
    assert training.lines("decision")[-1]["cause"] == "regular review"


def test_a_plan_that_becomes_slower_than_dense_is_compared_with_it(train: Callable[..., Training]) -> None:
    training = train({"none": 0.25, "bf16": 0.5, "qsgd 4-bit": 0.5, "qsgd 3-bit": 0.22}, tried_policy(review_s=1e6))
    training.run(60)
    assert training.name() == "qsgd 3-bit"
    training.times = dict(training.times) | {"qsgd 3-bit": 0.262}
    training.run(200)
    assert training.name() == "none"
    assert training.lines("decision")[-1]["cause"] == "a step takes 262 ms, a dense one 250 ms"


def test_the_speed_up_of_dense_is_one_and_of_a_trial_its_own(train: Callable[..., Training]) -> None:
    training = train(SLOW_LINK, tried_policy(review_s=20.0))
    training.run(4)
    assert training.loop.facts().speed_up == 1.0
    training.run(300)
    for line in training.lines("progress"):
        if line["speed_up"] is not None:
            assert line["speed_up"] == pytest.approx(1.0 / line["step_s"], rel=0.01), line


def test_a_plan_of_someone_else_is_named(train: Callable[..., Training], caplog: pytest.LogCaptureFixture) -> None:
    training = train(SLOW_LINK)
    training.run(2)
    training.plan = make_plan(LAYERS, version=7, world_size=2, codec="qsgd")
    with caplog.at_level(logging.WARNING, "cgx_ray"):
        training.run(5)
    (record,) = caplog.records
    assert "the ranks have plan 7, which is none of the controller's" in record.getMessage()


def test_where_rules_leave_no_layer_nothing_is_decided(train: Callable[..., Training]) -> None:
    training = train(SLOW_LINK, overrides={"*": "qsgd:bits=8"})
    training.times = {"qsgd 8-bit": 0.3}
    training.run(500)
    assert not training.lines("decision")


@pytest.mark.parametrize(("world_size", "says"), [(2, "the workers were started again"), (3, "2 workers became 3")])
def test_workers_that_are_started_again_try_again(train: Callable[..., Training], world_size: int, says: str) -> None:
    training = train(SLOW_LINK)
    training.run(40)
    first = make_plan(LAYERS, version=0, world_size=world_size, scheme="dense")
    plan = training.loop.register(Registration(layers=LAYERS, first_plan=first, is_sharded=True))
    assert plan.describe() == ("qsgd 3-bit over sra" if world_size == 2 else "dense")
    if world_size == 2:
        training.plan, training.step = plan, 0
        training.run(60)
        assert training.lines("decision")[-1]["cause"] == says


def test_layer_rules_hold_in_every_plan(train: Callable[..., Training]) -> None:
    training = train(SLOW_LINK, overrides={"embedding": "qsgd:bits=8"})
    training.run(30)
    assert len(training.loop.plans) > 2
    for plan in training.loop.plans:
        (fixed,) = [group for group in plan.groups if group.is_fixed]
        assert (fixed.layers, str(fixed.option.codec)) == (("embedding",), "qsgd:bits=8,bucket_size=128")
        assert {name for group in plan.groups for name in group.layers} == {layer.name for layer in LAYERS}


def test_a_static_policy_keeps_its_plan_and_the_journal_is_written(train: Callable[..., Training]) -> None:
    training = train(SLOW_LINK, Static("qsgd"))
    assert _order(training.run(200)) == ["none"]
    assert not training.lines("decision")
    assert training.lines("progress")


def test_a_lease_that_ends_first_ends_the_round(train: Callable[..., Training]) -> None:
    training = train(SLOW_LINK)
    training.run(6)
    leased = training.loop.plans[-1]
    assert leased.lease is not None
    training.run(DELAY)
    training.plan = leased.lease.fallback
    training.run(3 * TRIAL_STEPS)
    assert training.names[-1] == "none"
    facts = training.loop.facts()
    assert (facts.num_reverts, facts.plan_version) == ({"trial_expired": 1}, leased.lease.fallback.version)
    # Later, as a regular round.
    assert _order(training.run(80)) == ["none", "qsgd 3-bit"]


def test_a_controller_that_takes_over_tries_again_from_the_plan_in_force(train: Callable[..., Training]) -> None:
    training = train(SLOW_LINK)
    training.run(30)
    history = pickle.loads(pickle.dumps(training.loop.history()))
    training.loop = ControlLoop(tried_policy(), Journal(training.journal_path), history, run_name="sharded")
    training.loop.resume()
    assert _order(training.run(60)) == ["qsgd 3-bit", "none", "qsgd 3-bit"]
    assert training.lines("decision")[-1]["cause"] == "the controller was started again"


def test_codecs_with_memory_and_those_that_sra_does_not_carry_are_not_tried() -> None:
    tried = codecs_to_try(Adaptive(candidates=("topk:density=0.1", "bf16", "qsgd:bits=4", "onebit", "powersgd")))
    assert tried == tuple(map(CodecSpec.parse, ("none", "bf16", "qsgd:bits=4")))
    assert len(codecs_to_try(Adaptive(fidelity="fast"))) > 4
    assert codecs_to_try(Static("topk")) == (CodecSpec.parse("none"),)

"""`python -m bench adapt --lab`: the control loop beside static plans on emulated networks, with real ranks and engine.

1. Each static plan trains on each network of the schedules for some steps. Its step time does not depend on what was
   before, so its progress on a schedule follows from these times.
2. The schedules are played to an adaptive training.
3. On 16 networks, short adaptive trainings without a history are compared with plain DDP.

The simulated time of a step is the planner's prediction from the link as it was set, and from codec times and a step
without exchange as measured before. For plans of the engine, what a step on PROCESSOR_NETWORK takes longer than
predicted is added on all networks. The planner gives each rank a processor of its own, and here ranks and the lab's
switch may share them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from queue import Empty

from bench.adapt.lab_cases import (
    ADAPTIVE,
    COMPUTE_S,
    DDP,
    NOOP,
    PROCESSOR_NETWORK,
    QUICK,
    RATE_DIVISOR,
    AdaptLabOptions,
    LabPhase,
    LabWay,
)
from bench.adapt.progress import ScheduleScore, WeightedStep, schedule_panel, score_schedule, weighted_steps
from bench.network.job import Job
from bench.shared.ranks import started_ranks
from bench.shared.runner import BenchRun, OnPart
from bench.step.cases import StepNetwork
from cgx_ray.lab.namespaces import Lab
from cgx_ray.plan import Plan
from cgx_ray.planner.candidates import CodecCost
from cgx_ray.planner.fidelity import Fidelity
from cgx_ray.planner.planned_group import groups_of
from cgx_ray.planner.prediction import Measured, Prediction, predict
from cgx_ray.report.result import Row

# Seconds between two looks at whether the ranks still live, and at the clock.
_LOOK_S = 0.05


# Largest time of the loop over that of the best static plan of each phase, of the best single plan, and of dense.
ORACLE_GOAL, STATIC_GOAL, DENSE_GOAL = "<= 1.1", "<= 1", "<= 1.03"
# Largest relative error of a simulated step.
SIMULATION_GOAL = "<= 0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTime:
    """Seconds of a step of one static plan on one network.

    predicted_s  by the planner
    processor_s  what a step of this plan took longer on PROCESSOR_NETWORK; 0 for plain DDP, which has no engine
    efficiency   progress as a share of a dense step's
    """

    way: str
    network: StepNetwork
    step_s: float
    predicted_s: float
    processor_s: float
    efficiency: float

    @property
    def simulated_s(self) -> float:
        return self.predicted_s + self.processor_s

    @property
    def pace_s(self) -> float:
        """Seconds for the progress of a dense step."""
        return self.step_s / self.efficiency

    @property
    def error(self) -> float:
        """Relative error of the simulated time."""
        return self.simulated_s / self.step_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPoint:
    """An adaptive training on one network, beside plain DDP.

    ddp_s   of a step of DDP
    pace_s  seconds for the progress of a dense step, of the whole training but its first step
    """

    network: StepNetwork
    ddp_s: float
    pace_s: float


@dataclass(slots=True, kw_only=True)
class AdaptLabNumbers:
    """Results. `scores` and `num_switches` by schedule. `seconds`: of everything."""

    times: list[PlanTime] = field(default_factory=list)
    scores: dict[str, ScheduleScore] = field(default_factory=dict)
    num_switches: dict[str, int] = field(default_factory=dict)
    grid: list[GridPoint] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def pace_s(self) -> dict[StepNetwork, dict[str, float]]:
        """Seconds for the progress of a dense step, by network and static plan."""
        found: dict[StepNetwork, dict[str, float]] = {}
        for one in self.times:
            found.setdefault(one.network, {})[one.way] = one.pace_s
        return found


def measure_in_lab(run: BenchRun, fidelity: Fidelity) -> list[Row]:
    """Run all parts, and say how the papers' networks are scaled to the lab. Return rows; add a panel per schedule."""
    options = replace(QUICK if run.quick else AdaptLabOptions(), fidelity=fidelity)
    run.print_text(
        f"{options.num_ranks} ranks, {options.workload().dense_bytes / 1e6:.1f} MB of gradients, "
        f"{1e3 * COMPUTE_S:g} ms of compute per step. Schedules: rates divided by {RATE_DIVISOR:g}, as for a model "
        f"{RATE_DIVISOR:g} times as large; latencies as in the paper; {options.epoch_s:g} s per epoch. "
        "The networks of the schedule `drawn` stay as they are."
    )
    numbers = measure_adapt_lab(options, run.on_part)
    run.panels += [schedule_panel(name, score) for name, score in numbers.scores.items()]
    return list(lab_rows(numbers, has_goals=options.has_goals))


def measure_adapt_lab(options: AdaptLabOptions, on_part: OnPart) -> AdaptLabNumbers:
    """Run all parts.

    on_part  called before each part with its name and the share of the parts that are done

    Raises BenchError if a rank ends early, LabError if the lab cannot be made.
    """
    began_s, numbers = time.monotonic(), AdaptLabNumbers()
    first, *_ = options.networks()
    assert first.rate_bit_per_s is not None
    with ExitStack() as stack:
        lab = stack.enter_context(
            Lab(options.num_ranks, rate_bit_per_s=first.rate_bit_per_s, latency_s=first.latency_s)
        )
        name, num_ranks = "bench adapt --lab", options.num_ranks
        ranks = started_ranks("bench.adapt.lab_rank", options.job(), name=name, num_ranks=num_ranks, lab=lab)
        job = Job(stack.enter_context(ranks))
        num_parts = 3 + len(options.ways) + len(options.phases()) + len(options.grid)
        index = itertools.count()
        bench = _AdaptLab(lab, job, options, lambda part: on_part(part, next(index) / num_parts))
        bench.prepare()
        bench.time_plans(numbers)
        bench.play_schedules(numbers)
        bench.compare_with_dense(numbers)
    numbers.seconds = time.monotonic() - began_s
    return numbers


class _Training:
    """A way at work.

    ends_s    when the first step began, then when each step ended, as of `time.monotonic`
    plans     those that were in force, by the step from which on they were
    """

    def __init__(self, job: Job) -> None:
        self.ends_s: list[float] = []
        self.plans: dict[int, Plan] = {}
        self._job = job
        self._is_done = False

    @property
    def num_steps(self) -> int:
        return max(0, len(self.ends_s) - 1)

    def wait(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds`. Raises BenchError if a rank ends."""
        while not holds():
            self._job.check()
            try:
                message = self._job.answers.get(timeout=_LOOK_S)
            except Empty:
                continue
            if isinstance(message, float):
                self.ends_s.append(message)
            elif isinstance(message, Plan):
                self.plans[self.num_steps] = message
            self._is_done = message == "done"

    def wait_until(self, time_s: float) -> None:
        self.wait(lambda: time.monotonic() >= time_s)

    def stop(self) -> None:
        """End the training and wait for its last step."""
        self._job.order("stop")
        self.wait(lambda: self._is_done)


class _AdaptLab:
    """The parts of the bench, which share a lab and ranks."""

    def __init__(self, lab: Lab, job: Job, options: AdaptLabOptions, on_part: Callable[[str], None]) -> None:
        self._lab, self._job, self._options, self._on_part = lab, job, options, on_part
        self._workload = options.workload()
        self._codec_costs: dict[str, CodecCost] = {}
        self._gain: dict[str, float] = {}
        self._noop_s = 0.0

    def prepare(self) -> None:
        """Measure codecs, and a step without exchange."""
        self._on_part("codecs")
        self._job.order("codecs")
        for codec, found in self._job.answer().items():
            self._codec_costs[codec], self._gain[codec] = CodecCost(**found["cost"]), found["gain"]
        self._on_part("noop")
        with self._at_work(NOOP) as training:
            self._noop_s = self._visit(training, self._options.networks()[0])

    def measured(self, network: StepNetwork) -> Measured:
        """Return the input of the simulator."""
        link = network.link
        assert link is not None
        measured = self._workload.measured(link=link, codec_costs=self._codec_costs, compute_s=self._noop_s)
        return replace(measured, gain=self._gain)

    def time_plans(self, numbers: AdaptLabNumbers) -> None:
        """Time each static plan on each network of the schedules."""
        for way in self._options.ways:
            self._on_part(way.name)
            # Ranks make more connections where the round trip is long, so all ways connect on the same network.
            self._set(self._options.networks()[0])
            with self._at_work(way) as training:
                processor_s = 0.0
                if way.kind == "static":
                    step_s = self._visit(training, PROCESSOR_NETWORK)
                    processor_s = step_s - self._predict(way, PROCESSOR_NETWORK).step_s
                for network in self._options.networks():
                    step_s = self._visit(training, network)
                    predicted = self._predict(way, network)
                    assert predicted.efficiency is not None
                    numbers.times.append(
                        PlanTime(
                            way=way.name,
                            network=network,
                            step_s=step_s,
                            predicted_s=predicted.step_s,
                            processor_s=processor_s,
                            efficiency=predicted.efficiency,
                        )
                    )

    def _predict(self, way: LabWay, network: StepNetwork) -> Prediction:
        layers = self._workload.layers
        return predict(self.measured(network), groups_of(way.plan(layers, self._options.num_ranks), layers))

    def play_schedules(self, numbers: AdaptLabNumbers) -> None:
        """Play each schedule to an adaptive training without a history."""
        for name, phases in self._options.phases().items():
            self._on_part(name)
            self._set(phases[0].network)
            with self._at_work(ADAPTIVE[self._options.fidelity]) as training:
                start_s, played = self._play(training, phases)
            steps = self._steps(training, phases[0].network)
            counted = [
                one._replace(began_s=one.began_s - start_s, ended_s=one.ended_s - start_s)
                for one in steps
                if one.ended_s > start_s
            ]
            numbers.scores[name] = score_schedule(played, numbers.pace_s, counted)
            numbers.num_switches[name] = _num_switches(training)

    def compare_with_dense(self, numbers: AdaptLabNumbers) -> None:
        """Train on each network of the grid, with plain DDP and then adaptive."""
        ddp_s: dict[StepNetwork, float] = {}
        self._on_part(DDP.name)
        with self._at_work(DDP) as training:
            for network in self._options.grid:
                ddp_s[network] = self._visit(training, network)
        for network in self._options.grid:
            self._on_part(network.title)
            self._set(network)
            with self._at_work(ADAPTIVE[self._options.fidelity]) as training:
                self._train_enough(training)
            steps = self._steps(training, network)
            progress = math.fsum(step.efficiency for step in steps)
            pace_s = (steps[-1].ended_s - steps[0].began_s) / progress
            numbers.grid.append(GridPoint(network=network, ddp_s=ddp_s[network], pace_s=pace_s))

    @contextmanager
    def _at_work(self, way: LabWay) -> Iterator[_Training]:
        """Train `way` until the body ends."""
        self._job.order(f"train {way.name}")
        training = _Training(self._job)
        training.wait(lambda: training.num_steps > 0)
        yield training
        training.stop()

    def _set(self, network: StepNetwork) -> None:
        assert network.rate_bit_per_s is not None
        self._lab.set(rate_bit_per_s=network.rate_bit_per_s, latency_s=network.latency_s)

    def _visit(self, training: _Training, network: StepNetwork) -> float:
        """Set the network; return the mean seconds of the steps after it has settled."""
        self._set(network)
        settled_s = time.monotonic() + self._options.settle_s
        training.wait(lambda: training.ends_s[-1] >= settled_s)
        first, ends_s, options = training.num_steps, training.ends_s, self._options
        training.wait(
            lambda: (
                training.num_steps - first >= options.num_visit_steps and ends_s[-1] - ends_s[first] >= options.visit_s
            )
        )
        return (ends_s[-1] - ends_s[first]) / (training.num_steps - first)

    def _play(self, training: _Training, phases: Sequence[LabPhase]) -> tuple[float, list[LabPhase]]:
        """Play `phases` from the end of the first step on, on whose network the training began.

        Return when they began, and the phases with the times, after that, at which links were changed.
        """
        start_s, played, changed_s = training.ends_s[1], [], 0.0
        for index, phase in enumerate(phases):
            training.wait_until(start_s + phase.end_s)
            if index + 1 < len(phases):
                self._set(phases[index + 1].network)
            began_s, changed_s = changed_s, time.monotonic() - start_s
            played.append(replace(phase, begin_s=began_s, end_s=changed_s))
        return start_s, played

    def _train_enough(self, training: _Training) -> None:
        start_s, options = training.ends_s[0], self._options
        training.wait(
            lambda: training.num_steps >= options.num_grid_steps and training.ends_s[-1] - start_s >= options.grid_s
        )

    def _steps(self, training: _Training, network: StepNetwork) -> list[WeightedStep]:
        """Return the steps of an adaptive training that has ended."""
        versions = {step: plan.version for step, plan in training.plans.items()}
        return weighted_steps(training.ends_s, versions, list(training.plans.values()), self.measured(network))


def _num_switches(training: _Training) -> int:
    groups = [plan.groups for plan in training.plans.values()]
    return sum(before != after for before, after in itertools.pairwise(groups))


def lab_rows(numbers: AdaptLabNumbers, *, has_goals: bool) -> Iterator[Row]:
    """Yield all numbers. Ratios are of seconds for the same progress, within this run."""

    def goal(text: str) -> str | None:
        return text if has_goals else None

    for name, score in numbers.scores.items():
        yield Row(name=f"{name}_over_oracle", value=score.over_oracle, unit="x", goal=goal(ORACLE_GOAL))
        yield Row(name=f"{name}_over_best_static", value=score.over_best_static, unit="x", goal=goal(STATIC_GOAL))
        for way, progress in score.static.items():
            yield Row(name=f"{name}_{way}_over_oracle", value=score.oracle / progress, unit="x")
        yield Row(name=f"{name}_switches", value=float(numbers.num_switches[name]), unit="switches")
    for point in numbers.grid:
        yield Row(
            name=f"{point.network.name}_over_dense",
            value=point.pace_s,
            unit="s",
            baseline=point.ddp_s,
            ratio=point.pace_s / point.ddp_s,
            goal=goal(DENSE_GOAL),
        )
    for one in numbers.times:
        yield Row(
            name=_simulated(one),
            value=one.simulated_s,
            unit="s",
            baseline=one.step_s,
            ratio=abs(one.error),
            goal=goal(SIMULATION_GOAL),
        )
    for way, seconds in _processor_s(numbers).items():
        yield Row(name=f"processors_{way}", value=seconds, unit="s")
    yield Row(name="lab_minutes", value=numbers.seconds / 60, unit="min")


def _processor_s(numbers: AdaptLabNumbers) -> dict[str, float]:
    return {one.way: one.processor_s for one in numbers.times}


def _simulated(one: PlanTime) -> str:
    """Return the name of the row of a simulated time."""
    return f"simulated_{one.way}_{one.network.name}"

"""`python -m bench adapt`: the control loop on networks and machines that change, in simulation."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean

import click

from bench.adapt.cases import CASES, AdaptCase
from bench.adapt.papers import PAPER_CASES, compare_papers, paper_rows
from bench.adapt.simulate import SimulatedRun, SimulatedStep
from bench.shared.picture import Line, Plot
from bench.shared.runner import BenchRun, bench_command
from bench.shared.simulated_cluster import WORLD, ClusterState, SimulatedCluster
from cgx_ray.control.history import Registration
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.errors import ConfigError
from cgx_ray.lab.namespaces import Lab
from cgx_ray.plan import make_plan
from cgx_ray.planner.by_hand import BY_HAND, unless_by_hand
from cgx_ray.planner.fidelity import Fidelity
from cgx_ray.planner.joint import best_plan
from cgx_ray.planner.planned_group import PlannedGroup, groups_of
from cgx_ray.planner.prediction import predict
from cgx_ray.report.result import Row

# Largest ratio of a plan's seconds per progress to dense that keeps the promise.
PROMISE = 1.03
# A plan answers a change once it is at most 5 % slower than the best plan of the moment.
ANSWERED = 1.05

Groups = tuple[PlannedGroup, ...]
# Seconds and number of steps that follow each other.
Stretch = tuple[float, int]


@bench_command(quick="One seed per case; with --lab, a check of half a minute without goals.", picture="adapt.png")
@click.argument("cases", nargs=-1, type=click.Choice([case.name for case in CASES]), metavar="[CASE]...")
@click.option(
    "--lab",
    "is_in_lab",
    is_flag=True,
    help="Real ranks on emulated networks: three schedules, and 16 networks beside plain DDP. Takes 26 minutes.",
)
@click.option(
    "--fidelity",
    type=click.Choice([level.value for level in Fidelity]),
    default=Fidelity.STRICT.value,
    show_default=True,
    help="With --lab, of the adaptive training.",
)
def adapt(run: BenchRun, cases: tuple[str, ...], is_in_lab: bool, fidelity: str) -> Iterable[Row]:
    """Drive the control loop in a simulated cluster, or in a lab.

    Runs all cases in seven minutes, or those named. Regret is over the best plan of each moment.
    """
    if not is_in_lab:
        numbers = measure_adapt(run.quick, cases, run.on_part)
        run.panels += [pace_panel(case, runs[0].scores) for case, runs in numbers.runs.items()]
        return numbers.rows
    from bench.adapt.lab import measure_in_lab  # noqa: PLC0415 - it imports torch: 2 s

    if cases:
        raise ConfigError(f"case {cases[0]} is simulated; leave it out with --lab")
    reason = Lab.available(rates_only=False)
    if reason is not None:
        raise ConfigError(f"--lab: {reason}")
    return measure_in_lab(run, Fidelity(fidelity))


def pace_panel(name: str, paces: Sequence[tuple[float, float, float]]) -> Plot:
    """Return a panel of seconds per progress of a dense step. `paces`: when each step began, the loop's, the best's."""
    time_s, plan_s, best_s = zip(*paces, strict=True)
    lines = [Line(label="best plan", x=time_s, y=best_s, style="-"), Line(label="loop", x=time_s, y=plan_s, style="-")]
    return Plot(title=name, x="", y="", lines=lines, log="y")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptRun:
    """One run of a case, judged by the truth.

    regret       progress of the best plan of each moment, in the same time, over that of the run, less 1
    over_static  progress of the best single plan over that of the run
    slow_share   share of the time under plans more than 3 % slower than dense
    answers      seconds and steps from each change until the plan in force was within 5 % of the best
    slow_stretch longest period under plans more than 3 % slower than dense
    num_false    plans disabled though they were not slower than dense
    scores       of each step: its begin, and seconds per progress of its plan and of the best one
    """

    seed: int
    num_switches_per_min: float
    regret: float
    over_static: float
    slow_share: float
    answers: Sequence[Stretch]
    slow_stretch: Stretch
    num_false: int
    scores: Sequence[tuple[float, float, float]] = field(repr=False)


@dataclass(slots=True)
class AdaptNumbers:
    """Results by case, and all rows."""

    runs: dict[str, list[AdaptRun]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


def measure_adapt(quick: bool, only: Sequence[str], on_part: Callable[[str, float], None]) -> AdaptNumbers:
    """Run the cases, all or those named in `only`; `quick`: one seed each, and without the papers' policies.

    on_part  called before each case with its name and the share of the cases that are done
    """
    numbers = AdaptNumbers()
    chosen = [case for case in CASES if not only or case.name in only]
    for index, case in enumerate(chosen):
        on_part(case.name, index / len(chosen))
        runs = [run_case(case, seed) for seed in range(1 if quick else case.num_seeds)]
        numbers.runs[case.name] = runs
        numbers.rows += _rows(case, runs)
        if case.name in PAPER_CASES and not quick:
            numbers.rows += paper_rows(case.name, compare_papers(case))
    return numbers


def run_case(case: AdaptCase, seed: int) -> AdaptRun:
    """Simulate one run and judge it."""
    cluster = SimulatedCluster(case.model, case.costs, case.gain, case.errors(seed), seed)
    layers = case.model.layers
    with tempfile.TemporaryDirectory() as folder:
        policy = Adaptive(candidates=case.options, min_gain=case.min_gain)
        loop = ControlLoop(policy, Journal(Path(folder) / "decisions.jsonl"))
        first = make_plan(layers, version=0, world_size=4)
        loop.register(Registration(layers=tuple(layers), first_plan=first, codec_costs=case.calibrated_costs(seed)))
        run = SimulatedRun(loop=loop, cluster=cluster, schedule=case.schedule)
        run.run(until_s=case.seconds)
    return _judge(case, run, seed, groups_of(first, layers))


def _judge(case: AdaptCase, run: SimulatedRun, seed: int, dense: Groups) -> AdaptRun:
    cluster, layers = run.cluster, case.model.layers
    groups_by_version = {plan.version: groups_of(plan, layers) for plan in run.loop.plans}
    steps = run.steps[case.judged_from_step :]
    states = {step.state for step in run.steps}
    candidates = {dense, *itertools.chain.from_iterable(_candidates(case, cluster, state) for state in states)}
    allowed = {
        state: [groups for groups in candidates if _keeps_enough(case, cluster, groups, state)] for state in states
    }
    best = {state: min(cluster.score(groups, state) for groups in allowed[state]) for state in states}
    time_s = {state: math.fsum(step.step_s for step in steps if step.state == state) for state in states}
    progress = math.fsum(step.efficiency for step in steps)
    static = max(
        math.fsum(time_s[state] / cluster.score(groups, state) for state in states)
        for groups in candidates
        if all(groups in allowed[state] for state in states)
    )

    @cache
    def score(version: int, state: ClusterState) -> float:
        return cluster.score(groups_by_version[version], state)

    def is_slow(version: int, state: ClusterState) -> bool:
        return score(version, state) > PROMISE * cluster.score(dense, state)

    def is_answered(step: SimulatedStep) -> bool:
        groups = groups_by_version[step.plan.version]
        is_near = score(step.plan.version, step.state) <= ANSWERED * best[step.state]
        return is_near and _keeps_enough(case, cluster, groups, step.state)

    slow_s = math.fsum(step.step_s for step in steps if is_slow(step.plan.version, step.state))
    return AdaptRun(
        seed=seed,
        num_switches_per_min=60 * sum(one.kind != "keep" for _, one in run.decisions) / run.now_s,
        regret=math.fsum(time_s[state] / best[state] for state in states) / progress - 1,
        over_static=static / progress,
        slow_share=slow_s / math.fsum(time_s.values()),
        answers=_answers(run.steps, is_answered),
        slow_stretch=max(_stretches(steps, lambda step: is_slow(step.plan.version, step.state)), default=(0.0, 0)),
        num_false=sum(
            not is_slow(one.plan.version - 1, run.schedule(time_s))
            for time_s, one in run.decisions
            if one.kind == "disable"
        ),
        scores=[(step.began_s, score(step.plan.version, step.state), best[step.state]) for step in run.steps],
    )


def _candidates(case: AdaptCase, cluster: SimulatedCluster, state: ClusterState) -> list[Groups]:
    """Return the best plan in `state`, that of each codec, and, where options are biased, that of each option.

    They must beat plans by hand, as the loop's: what mixtures of schemes save here, they do not on real networks.
    """
    if case.by_hand:
        layers = case.model.layers
        plans = (
            make_plan(layers, version=0, world_size=WORLD, codec=codec, scheme=scheme)
            for codec, scheme in BY_HAND
            if codec in case.codecs
        )
        return [groups_of(plan, layers) for plan in plans]
    truth = cluster.truth(state)
    by_codec = [[option for option in case.options if option.codec == codec] for codec in case.codecs]
    sets = [list(case.options), *by_codec]
    if cluster.errors.bias:
        sets += [[option] for option in case.options]

    def score(groups: Sequence[PlannedGroup]) -> float:
        return predict(truth, groups).score

    found = (best_plan(truth, options, min_gain=case.min_gain) for options in sets)
    return [unless_by_hand(one, truth, case.options, score, min_gain=case.min_gain).best.groups for one in found]


def _keeps_enough(case: AdaptCase, cluster: SimulatedCluster, groups: Groups, state: ClusterState) -> bool:
    efficiency = predict(cluster.truth(state), groups).efficiency
    return efficiency is not None and efficiency >= case.min_gain


def _stretches(steps: Iterable[SimulatedStep], is_bad: Callable[[SimulatedStep], bool]) -> list[Stretch]:
    """Return seconds and number of the bad steps that follow each other, for each such stretch."""
    bad = [list(group) for is_bad_group, group in itertools.groupby(steps, is_bad) if is_bad_group]
    return [(math.fsum(step.took_s for step in group), len(group)) for group in bad]


def _answers(steps: Sequence[SimulatedStep], is_answered: Callable[[SimulatedStep], bool]) -> list[Stretch]:
    """Return seconds and steps from each change of state until a plan that answers it was in force."""
    _, *changed = [list(group) for _, group in itertools.groupby(steps, lambda step: step.state)]
    late = [list(itertools.takewhile(lambda step: not is_answered(step), group)) for group in changed]
    return [(math.fsum(step.took_s for step in group), len(group)) for group in late]


def _rows(case: AdaptCase, runs: Sequence[AdaptRun]) -> Iterable[Row]:
    """Return the numbers of a case: means over seeds, except the slowest answer and the sum of false disables.

    The goal of an answer is met if it is met in seconds or in steps; its ratio is that to the nearer limit.
    """
    values = {
        "regret": (fmean(run.regret for run in runs), "share"),
        "over_best_static": (fmean(run.over_static for run in runs), "x"),
        "slower_than_dense": (fmean(run.slow_share for run in runs), "share"),
        "switches": (fmean(run.num_switches_per_min for run in runs), "1/min"),
        "false_disables": (float(sum(run.num_false for run in runs)), "disables"),
    }
    for name, (value, unit) in values.items():
        yield Row(name=f"{case.name}_{name}", value=value, unit=unit, goal=case.goals.get(name))
    yield from _stretch_rows(f"{case.name}_answer", [one for run in runs for one in run.answers], case.answer)
    yield from _stretch_rows(f"{case.name}_slow_stretch", [run.slow_stretch for run in runs], case.slow_stretch)


def _stretch_rows(name: str, found: Sequence[Stretch], limit: Stretch | None) -> Iterable[Row]:
    """Return the longest stretch. Its goal is met if it is met in seconds or in steps; the ratio is to the nearer."""
    if not found:
        return
    seconds, steps = max(found)
    ratio = min(seconds / limit[0], steps / limit[1]) if limit is not None else None
    yield Row(name=name, value=seconds, unit="s", ratio=ratio, goal="<= 1" if limit is not None else None)
    yield Row(name=f"{name}_steps", value=float(steps), unit="steps")

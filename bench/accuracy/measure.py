"""`python -m bench accuracy`: validation loss after training with each codec, over dense, at equal steps.

Real trainings: four rank processes with one thread each, DistributedDataParallel and the engine, over loopback or in a
lab. Every codec gets the same weights, batches, learning rates and clipping as dense, so that losses are compared seed
by seed. Models are small, so that the full run (16 codecs, 3 workloads, 3 seeds, 300 steps) takes about 45 minutes on
two cores that others use too.

gpt_adamw  byte-level GPT with AdamW, weight decay and clipping
gpt_sgd    the same with SGD and momentum
digits     a CNN on scikit-learn's images of digits, with SGD and momentum
gpt_demo   the demo's GPT, 4.9 million parameters, with AdamW; only if asked for
regression an MLP that learns the outputs of another one, squared error, with AdamW; only if asked for

dgc has a momentum of its own, so its optimizers have none (SGD: momentum, AdamW: beta1).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import click

from bench.accuracy.cases import (
    ADAPTIVE,
    CGX,
    CODECS,
    LARGE_WORKLOAD,
    POLICIES,
    REGRESSION,
    WORKLOADS,
    AccuracyOptions,
    quick_options,
    read_option,
)
from bench.accuracy.workloads import check_workload
from bench.adapt.lab_cases import RATE_DIVISOR
from bench.shared.picture import Line, Plot
from bench.shared.ranks import run_ranks
from bench.shared.runner import BenchRun, bench_command
from cgx_ray.errors import ConfigError
from cgx_ray.lab.namespaces import Lab
from cgx_ray.plan import DENSE
from cgx_ray.report.result import Row
from cgx_ray.units import parse_rate

# A time to dense's last loss is the time to this multiple of it: a codec may end a little above it and be good enough.
NEAR_LOSS = 1.01
# 4 bits everywhere, which bits by layer are compared with.
STATIC = str(read_option("qsgd:bits=4"))
# A policy that allows long periods is expected to use one of so many steps where exchanges take most of the time.
LONG_PERIOD = 8


@bench_command(quick="A short check: one seed, 60 steps, two codecs unless others are given.", picture="accuracy.png")
@click.option(
    "--workloads",
    default=",".join(WORKLOADS),
    show_default=True,
    metavar="NAME,...",
    help=f"Trainings; {LARGE_WORKLOAD} has the demo's model, and {REGRESSION} targets without noise.",
)
@click.option(
    "--codecs",
    metavar="TEXT;...",
    help='Compare these with dense, such as "qsgd:bits=2; topk:density=0.01 over artopk_ring"; "adaptive", '
    '"adaptive fast" and "cgx dp" are policies, "torch fp16" is a hook.  [default: 15 codecs]',
)
@click.option("--seeds", default=3, show_default=True, help="Trainings per codec and workload.")
@click.option("--steps", default=300, show_default=True, help="Steps per training.")
@click.option("--ranks", default=4, show_default=True, help="Processes.")
@click.option("--rate", help="Train in a lab whose links have this rate, such as 100mbit.  [default: loopback]")
@click.option(
    "--schedule",
    metavar="NAME",
    help=f"Train in a lab whose links change: c1, c2 or a file in epochs; rates over {RATE_DIVISOR:g}.",
)
def accuracy(
    run: BenchRun,
    workloads: str,
    codecs: str | None,
    seeds: int,
    steps: int,
    ranks: int,
    rate: str | None,
    schedule: str | None,
) -> Iterable[Row]:
    """Train small models with each codec and dense, and compare the losses.

    All codecs get the same weights and batches. The default run takes about 45 minutes on two cores.
    """
    options = AccuracyOptions(
        workloads=tuple(workloads.split(",")),
        codecs=CODECS if codecs is None else tuple(codecs.split(";")),
        num_seeds=seeds,
        num_steps=steps,
        num_ranks=ranks,
        rate_bit_per_s=None if rate is None else parse_rate("rate", rate),
        schedule=schedule,
    )
    options = quick_options(options) if run.quick else options
    for workload in options.workloads:
        check_workload(workload)
    lab_reason = Lab.available() if options.is_timed else None
    if lab_reason is not None:
        raise ConfigError(f"--{'rate' if rate else 'schedule'} needs a lab; {lab_reason}; leave it out for loopback")

    def on_run(one: TrainingRun, fraction: float) -> None:
        run.on_part(f"{one.workload}, seed {one.seed}: {one.option}", fraction)

    accuracies = accuracies_of(measure_accuracy(options, on_run))
    run.title += f", {options.num_ranks} ranks, {rate or schedule or 'loopback'}, {options.num_steps} steps"
    run.panels += panels_of(options, accuracies)
    return rows_of(options, accuracies)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One training.

    option          "dense", codec over scheme, or "adaptive" with its fidelity if that is not the default
    points          (steps done, seconds of training, validation loss), ten of them; fewer if it has diverged
    wire_bytes      that one rank sends per step; NaN for torch's hooks
    relative_error  largest of rank 0's messages at the points: squared error over |g|^2, without error feedback. NaN
                    for policies
    bytes_over_static, error_over_static
                    wire bytes, and error of the average over ranks, of the bits in force over those of 4 bits in the
                    same layers and steps; NaN if there were none
    step_s          median of the seconds of the steps in the second half of the training
    expected_loss   loss over dense's that was expected of the plan at the end; NaN if its codecs were not measured
    plans           (network of the schedule from 0 on, plan, its period, steps); none of torch's hooks
    """

    workload: str
    option: str
    seed: int
    points: tuple[tuple[int, float, float], ...]
    has_diverged: bool
    wire_bytes: float
    relative_error: float
    bytes_over_static: float = math.nan
    error_over_static: float = math.nan
    step_s: float = math.nan
    expected_loss: float = math.nan
    plans: tuple[tuple[int, str, int, int], ...] = ()

    @property
    def loss(self) -> float:
        """The last validation loss, infinite if the training has diverged."""
        return math.inf if self.has_diverged else self.points[-1][2]

    @property
    def long_share(self) -> float:
        """Share of the steps under a period of LONG_PERIOD or more."""
        num_steps = sum(steps for *_, steps in self.plans)
        return sum(steps for _, _, period, steps in self.plans if period >= LONG_PERIOD) / max(1, num_steps)

    def seconds_to(self, loss: float) -> float | None:
        """Return the seconds of training until the validation loss was `loss`, None if it never was.

        Between two points the loss counts as a straight line.
        """
        before_s, before = 0.0, math.inf
        for _, seconds, now in self.points:
            if now <= loss:
                share = (before - loss) / (before - now) if before < math.inf else 1.0
                return before_s + share * (seconds - before_s)
            before_s, before = seconds, now
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecAccuracy:
    """All seeds of a codec in a workload, and those of dense, in the same order."""

    runs: tuple[TrainingRun, ...]
    dense: tuple[TrainingRun, ...]

    @property
    def workload(self) -> str:
        return self.runs[0].workload

    @property
    def option(self) -> str:
        return self.runs[0].option

    @property
    def num_diverged(self) -> int:
        return sum(run.has_diverged for run in self.runs)

    @property
    def ratios(self) -> list[float]:
        """Loss over dense's by seed, infinite for a training that has diverged."""
        return [run.loss / dense.loss for run, dense in zip(self.runs, self.dense, strict=True)]

    @property
    def ratio(self) -> float:
        """Mean of `ratios`."""
        return fmean(self.ratios)

    @property
    def wire_share(self) -> float:
        """Wire bytes over dense's."""
        return self.runs[0].wire_bytes / self.dense[0].wire_bytes

    @property
    def relative_error(self) -> float:
        return max(run.relative_error for run in self.runs)

    @property
    def curve(self) -> list[tuple[float, float, float]]:
        """Means over seeds of the points that all have reached."""
        by_point = zip(*(run.points for run in self.runs), strict=False)
        return [(fmean(p[0] for p in one), fmean(p[1] for p in one), fmean(p[2] for p in one)) for one in by_point]

    @property
    def speedup(self) -> float | None:
        """Dense's seconds to nearly its last loss over the codec's, mean over seeds; None if one never came there."""
        shares = []
        for run, dense in zip(self.runs, self.dense, strict=True):
            own_s, dense_s = (one.seconds_to(NEAR_LOSS * dense.loss) for one in (run, dense))
            if own_s is None or dense_s is None:
                return None
            shares.append(dense_s / own_s)
        return fmean(shares)

    def rows(self, *, is_timed: bool) -> Iterator[Row]:
        name = f"{self.workload} {self.option}"
        loss, dense = fmean(run.loss for run in self.runs), fmean(run.loss for run in self.dense)
        if self.num_diverged:
            yield Row(name=f"{name}: loss", value=None, unit=_unit(self.workload), baseline=dense)
            yield Row(name=f"{name}: diverged", value=self.num_diverged, unit="seeds")
        else:
            yield Row(name=f"{name}: loss", value=loss, unit=_unit(self.workload), baseline=dense, ratio=self.ratio)
            yield Row(name=f"{name}: least loss over dense", value=min(self.ratios), unit="x")
            yield Row(name=f"{name}: largest loss over dense", value=max(self.ratios), unit="x")
        wire_bytes, dense_bytes = self.runs[0].wire_bytes, self.dense[0].wire_bytes
        if math.isfinite(wire_bytes):
            yield Row(name=f"{name}: wire", value=wire_bytes, unit="bytes", baseline=dense_bytes, ratio=self.wire_share)
        error = self.relative_error if math.isfinite(self.relative_error) else None
        yield Row(name=f"{name}: relative error", value=error, unit="share")
        if self.option in ADAPTIVE:
            # The plan at the end is the one of most steps, or should be.
            expected = fmean(run.expected_loss for run in self.runs)
            yield Row(name=f"{name}: expected loss over dense", value=expected, unit="x")
            share = fmean(run.long_share for run in self.runs)
            yield Row(name=f"{name}: steps with a period of {LONG_PERIOD} or more", value=share, unit="share")
        if self.option in POLICIES:
            yield from self._plan_rows(name)
        if all(math.isfinite(run.bytes_over_static) for run in self.runs):
            # The goals are for bits that a policy has chosen.
            goals = ("<= 0.7", "<= 2") if self.option in CGX else (None, None)
            share, ratio = (fmean(values) for values in zip(*map(_over_static, self.runs), strict=True))
            yield Row(name=f"{name}: wire over 4 bits", value=share, unit="x", goal=goals[0])
            yield Row(name=f"{name}: error over 4 bits", value=ratio, unit="x", goal=goals[1])
        if is_timed:
            yield Row(name=f"{name}: time to dense's loss, faster by", value=self.speedup, unit="x")

    def _plan_rows(self, name: str) -> Iterator[Row]:
        steps: Counter[tuple[int, str]] = Counter()
        for run in self.runs:
            steps.update({(network, plan): num_steps for network, plan, _, num_steps in run.plans})
        networks = sorted({network for network, _ in steps})
        for at in networks if len(networks) > 1 else ():
            of_network = {plan: num_steps for (network, plan), num_steps in steps.items() if network == at}
            plan = max(of_network, key=of_network.__getitem__)
            share = of_network[plan] / sum(of_network.values())
            yield Row(name=f"{name}: network {at + 1}, most steps {plan}", value=share, unit="share")


def _over_static(run: TrainingRun) -> tuple[float, float]:
    return run.bytes_over_static, run.error_over_static


def rows_beside_static(accuracies: Sequence[CodecAccuracy], *, is_timed: bool) -> Iterator[Row]:
    """Yield loss, and in a lab time, of each policy over those of 4 bits everywhere after the same steps."""
    static = {one.workload: one for one in accuracies if one.option == STATIC}
    for one in accuracies:
        four = static.get(one.workload)
        if four is None or four.num_diverged or one.num_diverged or one.option not in POLICIES:
            continue
        pairs = list(zip(one.runs, four.runs, strict=True))
        name = f"{one.workload} {one.option}"
        loss = fmean(run.loss / other.loss for run, other in pairs)
        yield Row(name=f"{name}: loss over 4 bits", value=loss, unit="x", goal="<= 1.01")
        if is_timed:
            seconds = fmean(run.points[-1][1] / other.points[-1][1] for run, other in pairs)
            yield Row(name=f"{name}: seconds over 4 bits", value=seconds, unit="x", goal="<= 1")
            step = fmean(run.step_s / other.step_s for run, other in pairs)
            yield Row(name=f"{name}: step over 4 bits", value=step, unit="x", goal="<= 1")


def measure_accuracy(options: AccuracyOptions, on_run: Callable[[TrainingRun, float], None]) -> list[TrainingRun]:
    """Train all cases.

    on_run  called after each training with it and the fraction of trainings done

    Raises BenchError if a rank ends early, LabError if the lab cannot be made.
    """
    job = {
        "workloads": options.workloads,
        "ways": options.ways,
        "num_seeds": options.num_seeds,
        "num_steps": options.num_steps,
        "changes": [event.at for event in one.events] if (one := options.schedule_of_a_training) is not None else [0],
    }
    lines = run_ranks(
        "bench.accuracy.rank",
        job,
        name="bench accuracy",
        num_ranks=options.num_ranks,
        rate_bit_per_s=options.rate_bit_per_s,
        schedule=options.schedule_of_all,
    )
    runs = []
    for line in lines:
        runs.append(TrainingRun(**json.loads(line)))
        on_run(runs[-1], len(runs) / options.num_trainings)
    return runs


def accuracies_of(runs: Sequence[TrainingRun]) -> list[CodecAccuracy]:
    """Return the seeds of each codec in each workload together, in the order of `runs`."""
    cases: dict[tuple[str, str], list[TrainingRun]] = {}
    for run in runs:
        cases.setdefault((run.workload, run.option), []).append(run)
    return [
        CodecAccuracy(runs=tuple(found), dense=tuple(cases[workload, str(DENSE)]))
        for (workload, _), found in cases.items()
    ]


def rows_of(options: AccuracyOptions, accuracies: Sequence[CodecAccuracy]) -> list[Row]:
    """Return the numbers as rows, after those that say what was run."""
    is_timed = options.is_timed
    return [
        Row(name="ranks", value=options.num_ranks, unit="processes"),
        Row(name="steps", value=options.num_steps, unit="steps"),
        Row(name="seeds", value=options.num_seeds, unit="seeds"),
        *(row for one in accuracies for row in one.rows(is_timed=is_timed)),
        *rows_beside_static(accuracies, is_timed=is_timed),
    ]


def panels_of(options: AccuracyOptions, accuracies: Sequence[CodecAccuracy]) -> Iterator[Plot]:
    """Yield the loss over steps, over time in a lab, and the last losses, of each workload."""
    for workload in options.workloads:
        found = [one for one in accuracies if one.workload == workload]
        axes = {"step": 0, "seconds of training": 1} if options.is_timed else {"step": 0}
        for x, index in axes.items():
            lines = [
                Line(label=one.option, x=[at[index] for at in one.curve], y=[at[2] for at in one.curve], style="-")
                for one in found
            ]
            yield Plot(title=workload, x=x, y=f"validation loss, {_unit(workload)}", lines=lines, log="y")
        points = [Line(label=one.option, x=[one.option] * len(one.ratios), y=one.ratios, style="o") for one in found]
        yield Plot(title=f"{workload}, each seed", x="", y="last loss / dense's", lines=points, log="y")


def _unit(workload: str) -> str:
    return "squared error" if workload == REGRESSION else "nats"

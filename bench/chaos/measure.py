"""`python -m bench chaos`: two trainings with the same seed on real Ray in a lab, one of which meets random faults.

It must come to the same loss, with the same weights on all ranks, and leave nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.table import Table

from bench.chaos.cluster import AGENT, CONTROLLER, LOOP, OURS, WORKER, ChaosCluster, chaos_cluster
from bench.chaos.driver import ChaosRun
from bench.chaos.faults import ChaosError, ChaosFault, ChaosKind, ChaosOptions
from bench.chaos.harm import RESTART_S, harm
from cgx_ray.errors import CGXError
from cgx_ray.report.record import RunRecord, load_run
from cgx_ray.report.result import Row
from cgx_ray.report.show import new_table

# Longest time without a step, in seconds, at the start and later.
_START_S, _STALL_S = 300.0, 180.0
# Share of the steps after which threads and open files are counted: long after the last fault, and not at the end.
_COUNTED_SHARE = 0.97
# Longest wait for processes and files to go, in seconds; the goal is shorter.
_GONE_S = 60.0

OnLine = Callable[[str], None]
OnPart = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survived:
    """A fault from outside that the training survived, and the seconds from its end to the end of the next step."""

    fault: ChaosFault
    back_s: float


@dataclass(slots=True, kw_only=True)
class ChaosResult:
    """One training.

    steps, run    its steps, and its journal
    seconds       from the first step to the last
    survived      faults from outside
    counts        threads and open files near the end, by class of actor: the most of all its processes
    num_actors    processes near the end, by class of actor
    ended_s       seconds from the last step until our actors were gone; None if they were not
    left          our processes and files that were left
    """

    steps: RunRecord
    run: RunRecord
    seconds: float = 0.0
    survived: list[Survived] = field(default_factory=list)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_actors: dict[str, int] = field(default_factory=dict)
    ended_s: float | None = None
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosNumbers:
    """Results of both trainings, and the faults."""

    faults: list[ChaosFault]
    quiet: ChaosResult
    harmed: ChaosResult


def measure_chaos(options: ChaosOptions, out: Path, on_line: OnLine, on_part: OnPart) -> ChaosNumbers:
    """Train twice.

    out      empty folder for the runs and Ray's logs
    on_line  gets a line per fault, once the training has survived it
    on_part  called with what is under way and the share of the steps that are done

    Raises ChaosError if the training ends or stalls.
    """
    faults = options.draw()
    with chaos_cluster(options.num_hosts, options.ranks_per_host, out / "logs") as cluster:
        on_part("starting the workers", 0.0)
        quiet = _ChaosTraining(
            cluster, options, out, "quiet", [], lambda line: None, lambda share: on_part("quiet", share / 2)
        )
        quiet_result = quiet.run()
        harmed = _ChaosTraining(
            cluster, options, out, "chaos", faults, on_line, lambda share: on_part("chaos", 0.5 + share / 2)
        )
        return ChaosNumbers(faults=faults, quiet=quiet_result, harmed=harmed.run())


class _ChaosTraining:
    """One training and the faults that it meets."""

    def __init__(
        self,
        cluster: ChaosCluster,
        options: ChaosOptions,
        out: Path,
        name: str,
        faults: Sequence[ChaosFault],
        on_line: OnLine,
        on_share: Callable[[float], None],
    ) -> None:
        config = {
            "steps": options.steps,
            "seed": options.seed,
            "step_s": options.step_s,
            "width": options.width,
            "num_layers": options.num_layers,
            "faults": [fault.fields() for fault in faults if fault.is_in_loop],
        }
        self._run = ChaosRun(name=name, num_workers=options.num_ranks, storage_path=str(out), config=config)
        self._cluster, self._options, self._faults = cluster, options, faults
        self._on_line, self._on_share = on_line, on_share
        self._steps = RunRecord(self._run.log_dir)
        self._news_s = time.monotonic() + _START_S - _STALL_S
        # Named in the message of an error.
        self._newest = "before the first fault"

    def run(self) -> ChaosResult:
        """Train to the end. Raises ChaosError if the training ends or stalls."""
        try:
            result = self._train()
        except CGXError as error:
            step = self._steps.steps[-1].step if self._steps.steps else None
            raise ChaosError(f"run {self._run.name}, after step {step}, {self._newest}: {error}") from error
        result.run = load_run(self._run.run_dir)
        return result

    def _train(self) -> ChaosResult:
        result = ChaosResult(steps=self._steps, run=RunRecord(self._run.run_dir))
        self._cluster.submit(self._run)
        for fault in self._faults:
            self._wait(partial(self._has_reached, fault.step - 1))
            if self._steps.end is not None:
                break
            if fault.is_in_loop:
                self._on_line(str(fault))
            else:
                result.survived.append(self._meet(fault))
        self._wait(partial(self._has_reached, round(_COUNTED_SHARE * self._options.steps)))
        self._count(result)
        self._wait(lambda: self._steps.end is not None)
        result.seconds = self._steps.steps[-1].time - self._steps.start_time
        result.ended_s = self._cluster.wait_until(lambda: not self._actors(), _GONE_S)
        result.left = self._actors() + self._cluster.leftover_files()
        return result

    def _meet(self, fault: ChaosFault) -> Survived:
        """Do `fault`, undo it after its time, and wait for the next step."""
        self._newest = f"during {fault.kind} from step {fault.step} on"
        with harm(self._cluster, fault, self._run.run_dir):
            end_s = time.monotonic() + fault.seconds
            self._wait(lambda: time.monotonic() >= end_s)
        self._newest = f"after {fault.kind} from step {fault.step} on"
        num_steps, end_s = len(self._steps.steps), time.monotonic()
        self._wait(lambda: len(self._steps.steps) > num_steps)
        survived = Survived(fault=fault, back_s=time.monotonic() - end_s)
        self._on_line(f"{fault}; the next step ended {survived.back_s:.1f} s later")
        return survived

    def _has_reached(self, step: int) -> bool:
        return bool(self._steps.steps) and self._steps.steps[-1].step >= step

    def _wait(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds` or the end of training. Raises ChaosError if no step ends for long."""
        while not holds() and self._steps.end is None:
            self._cluster.check()
            if self._steps.poll():
                self._news_s = time.monotonic()
                self._on_share(len(self._steps.steps) / self._options.steps)
            elif time.monotonic() > self._news_s + _STALL_S:
                raise ChaosError(f"no step for {_STALL_S:.0f} s:\n{self._cluster.log_tail()}")
            time.sleep(0.05)

    def _count(self, result: ChaosResult) -> None:
        """Count processes, threads and open files, once killed actors are back."""
        wanted = {WORKER: self._options.num_ranks, AGENT: self._options.num_hosts, CONTROLLER: 1, LOOP: 1}
        self._cluster.wait_until(
            lambda: all(len(self._cluster.actors(name)) == number for name, number in wanted.items()), RESTART_S
        )
        for name in OURS:
            found = self._cluster.actors(name)
            result.num_actors[name] = len(found)
            result.counts[name] = (
                max((process.num_threads() for process in found), default=0),
                max((process.num_fds() for process in found), default=0),
            )

    def _actors(self) -> list[str]:
        """Return our processes in the lab."""
        return [f"{name} {process.pid}" for name in OURS for process in self._cluster.actors(name)]


_WORDS = {WORKER: "worker", AGENT: "agent", CONTROLLER: "controller", LOOP: "loop"}
# Threads and open files that an actor may have more than in a quiet run. Ray's own clients keep some connections and
# threads per peer that was started again.
_MAX_MORE = 12


def chaos_rows(options: ChaosOptions, numbers: ChaosNumbers) -> list[Row]:
    """Return all numbers, with goals if `options` has them."""
    harmed, quiet = numbers.harmed, numbers.quiet
    return [
        Row(name="seed", value=options.seed, unit=""),
        Row(name="steps", value=len(harmed.steps.steps), unit="steps"),
        Row(name="minutes", value=harmed.seconds / 60, unit="min", baseline=quiet.seconds / 60),
        *_fault_rows(numbers, options),
        *_loss_rows(numbers, options),
        *_control_rows(numbers),
        *_end_rows(numbers, options),
    ]


def _fault_rows(numbers: ChaosNumbers, options: ChaosOptions) -> list[Row]:
    harmed = numbers.harmed
    in_loop = sum(fault.is_in_loop for fault in numbers.faults)
    return [
        Row(
            name="faults_survived",
            value=in_loop + len(harmed.survived),
            unit="faults",
            goal=f"== {options.faults}" if options.has_goals else None,
        ),
        Row(name="slowest_return", value=max((one.back_s for one in harmed.survived), default=None), unit="s"),
    ]


def _loss_rows(numbers: ChaosNumbers, options: ChaosOptions) -> list[Row]:
    quiet, harmed = (_end_of(result) for result in (numbers.quiet, numbers.harmed))
    loss, baseline = harmed["validation_loss"], quiet["validation_loss"]
    return [
        Row(
            name="validation_loss",
            value=loss,
            unit="nats/byte",
            baseline=baseline,
            ratio=loss / baseline,
            goal="<= 1.01" if options.has_goals else None,
        ),
        Row(name="weights_identical", value=float(harmed["weights_identical"]), unit="bool", goal="== 1"),
    ]


def _control_rows(numbers: ChaosNumbers) -> list[Row]:
    harmed, quiet = numbers.harmed.run, numbers.quiet.run
    switches = [sum(one["kind"] != "keep" for one in run.decisions) for run in (harmed, quiet)]
    return [
        Row(name="decisions", value=len(harmed.decisions), unit="", baseline=len(quiet.decisions)),
        Row(name="plan_switches", value=switches[0], unit="", baseline=switches[1]),
        Row(name="controllers_in_the_journal", value=len(harmed.starts), unit="", baseline=len(quiet.starts)),
        Row(name="journal_is_ended", value=float(harmed.is_ended), unit="bool", goal="== 1"),
    ]


def _end_rows(numbers: ChaosNumbers, options: ChaosOptions) -> list[Row]:
    harmed, quiet = numbers.harmed, numbers.quiet
    rows = [
        Row(
            name="actors_gone_after",
            value=harmed.ended_s,
            unit="s",
            baseline=quiet.ended_s,
            goal="<= 10" if options.has_goals else None,
        ),
        Row(name="left_behind", value=len(harmed.left), unit="", baseline=len(quiet.left), goal="== 0"),
    ]
    for name, word in _WORDS.items():
        wanted = quiet.num_actors[name]
        rows.append(
            Row(
                name=f"{word}s_at_the_end", value=harmed.num_actors[name], unit="", baseline=wanted, goal=f"== {wanted}"
            )
        )
        for what, value, before in zip(("threads", "open_files"), harmed.counts[name], quiet.counts[name], strict=True):
            goal = f"<= {_MAX_MORE}" if options.has_goals else None
            rows.append(
                Row(name=f"{word}_{what}", value=value, unit="", baseline=before, ratio=value - before, goal=goal)
            )
    return rows


def _end_of(result: ChaosResult) -> dict[str, float]:
    assert result.steps.end is not None
    return result.steps.end


def fault_table(faults: Sequence[ChaosFault], survived: Sequence[Survived]) -> Table:
    """Return a row per kind: how often, and the seconds until the next step."""
    table = new_table("faults, and seconds from their end to the end of the next step", "", "times", "mean", "longest")
    for kind in ChaosKind:
        number = sum(fault.kind is kind for fault in faults)
        back_s = [one.back_s for one in survived if one.fault.kind is kind]
        cells = [f"{sum(back_s) / len(back_s):.1f}", f"{max(back_s):.1f}"] if back_s else ["", ""]
        if number:
            table.add_row(str(kind), str(number), *cells)
    return table

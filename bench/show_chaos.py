"""The rows of `cgx-ray bench chaos`, and its table of faults."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from cgx_ray.bench.chaos import ChaosNumbers, ChaosResult, Survived
from cgx_ray.bench.chaos_cluster import AGENT, CONTROLLER, LOOP, WORKER
from cgx_ray.bench.chaos_faults import ChaosFault, ChaosKind, ChaosOptions
from cgx_ray.report.result import Row
from cgx_ray.report.show import new_table

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

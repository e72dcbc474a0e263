"""The demo's numbers: times of both runs, their ratios, and whether they meet the goals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from cgx_ray.lab.events import LinkEvent
from cgx_ray.report.live_view import describe_decision
from cgx_ray.report.record import RunRecord, StepLine, smooth_losses
from cgx_ray.report.result import Row
from cgx_ray.report.show import new_table, print_line
from cgx_ray.units import format_rate

# DDP rebuilds its buckets after the first step, and the first steps touch new memory.
_WARMUP_STEPS = 3
# 1 % is the accuracy that cgx_ray promises. Compressed runs differ slightly, even on the same batches.
_TARGET_SLACK = 1.01
# Goal: slow steps until the plan for the slow network is in force. One is the evidence, two more pass in the agreement.
MAX_DELAY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPhases:
    """The steps entirely before and entirely after the network changed, without the first few."""

    fast: tuple[StepLine, ...]
    slow: tuple[StepLine, ...]

    @classmethod
    def of(cls, record: RunRecord) -> NetworkPhases:
        change = record.changes[0].step
        assert change is not None
        # The network changed during step `change` + 1.
        return cls(
            fast=tuple(line for line in record.steps if _WARMUP_STEPS <= line.step <= change),
            slow=tuple(line for line in record.steps if line.step > change + 1),
        )


def median_step_s(lines: Sequence[StepLine]) -> float | None:
    """Return the median time of the steps; None without steps."""
    return statistics.median(line.step_s for line in lines) if lines else None


def train_seconds(record: RunRecord) -> float:
    """Return the time from the start of the first step to the end of the last."""
    return record.steps[-1].time - record.start_time


def time_to_loss_s(record: RunRecord, target: float) -> float | None:
    """Return the time until the smoothed loss first reaches `target`; None if it never does."""
    for line, loss in zip(record.steps, smooth_losses(record.steps), strict=True):
        if loss <= target:
            return line.time - record.start_time
    return None


def loss_target(dense: RunRecord) -> float:
    """Return the last smoothed loss of the dense run, plus 1 %."""
    return smooth_losses(dense.steps)[-1] * _TARGET_SLACK


def decision_delay(record: RunRecord) -> int | None:
    """Return the steps after the network's change until the decision that noticed it is in force; None if none is.

    A decision noticed the change if it used a bandwidth of at most twice the new rate: one right after the change may
    still use the old bandwidth. Keeping the plan is a decision too, in force at once.
    """
    change = record.changes[0]
    assert change.step is not None
    for line in record.decisions:
        if line["time"] <= change.time or line["inputs"]["bandwidth_gbps"] * 1e9 > 2 * change.change["rate_bit_per_s"]:
            continue
        if line["kind"] == "keep":
            return int(line["step"] - change.step)
        new = line["new"]["version"]
        under = (one.step for one in record.steps if one.plan_version is not None and one.plan_version >= new)
        first = next(under, None)
        return None if first is None else first - change.step - 1
    return None


def make_rows(dense: RunRecord, decided: RunRecord) -> list[Row]:
    """Return one row per number of the demo."""
    rows = _phase_rows(dense, decided)
    rows += _loss_rows(dense, decided)
    delay = decision_delay(decided)
    # None is a miss, not a number that is missing.
    met = delay is not None and delay <= MAX_DELAY
    rows.append(Row(name="decision_delay", value=delay, unit="steps", goal=f"<= {MAX_DELAY}", met=met))
    assert decided.end is not None
    identical = float(decided.end["weights_identical"])
    rows.append(Row(name="weights_identical", value=identical, unit="bool", goal="== 1"))
    return rows


def _phase_rows(dense: RunRecord, decided: RunRecord) -> list[Row]:
    ours, theirs = NetworkPhases.of(decided), NetworkPhases.of(dense)
    slow, slow_dense, slow_free = median_step_s(ours.slow), median_step_s(theirs.slow), _compute_s(ours.slow)
    fast, fast_dense, fast_free = median_step_s(ours.fast), median_step_s(theirs.fast), _compute_s(ours.fast)
    return [
        Row(name="slow_phase_step_s", value=slow, unit="s", baseline=slow_dense, limit=slow_free),
        Row(
            name="slow_phase_speedup",
            value=_ratio(slow_dense, slow),
            unit="x",
            baseline=1.0,
            limit=_ratio(slow_dense, slow_free),
            goal=">= 3",
        ),
        Row(name="fast_phase_step_s", value=fast, unit="s", baseline=fast_dense, limit=fast_free),
        Row(
            name="fast_phase_ratio",
            value=_ratio(fast, fast_dense),
            unit="x",
            baseline=1.0,
            limit=_ratio(fast_free, fast_dense),
            goal="<= 1.03",
        ),
    ]


def _loss_rows(dense: RunRecord, decided: RunRecord) -> list[Row]:
    assert dense.end is not None
    assert decided.end is not None
    loss, loss_dense = decided.end["validation_loss"], dense.end["validation_loss"]
    target = loss_target(dense)
    seconds, seconds_dense = time_to_loss_s(decided, target), time_to_loss_s(dense, target)
    return [
        Row(name="validation_loss", value=loss, unit="nats/byte", baseline=loss_dense),
        Row(name="validation_loss_ratio", value=loss / loss_dense, unit="x", baseline=1.0, goal="<= 1.01"),
        Row(name="time_to_loss_s", value=seconds, unit="s", baseline=seconds_dense),
        Row(name="time_to_loss_ratio", value=_ratio(seconds_dense, seconds), unit="x", baseline=1.0),
    ]


def _compute_s(lines: Sequence[StepLine]) -> float | None:
    """Return the median time of compute, a lower bound on the step; None if unknown."""
    seconds = [line.compute_s for line in lines if line.compute_s is not None]
    return statistics.median(seconds) if seconds else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def print_summary(console: Console, dense: RunRecord, decided: RunRecord | None, link: str) -> None:
    """Print a table of both runs, then the decisions and the ratios."""
    change = dense.changes[0]
    records = [dense] if decided is None else [dense, decided]
    title = f"byte-level GPT, {len(dense.steps)} steps, {link}"
    table = new_table(title, "", *(record.name for record in records), wrap=True)
    for label, cells in _table_rows(records, change):
        table.add_row(label, *cells)
    console.print(table)
    if decided is None:
        return
    for line in decided.decisions:
        print_line(console, describe_decision(line))
    by_name = {row.name: row for row in make_rows(dense, decided)}
    print_line(
        console,
        f"time to the same loss ({loss_target(dense):.3f}): {_times(by_name['time_to_loss_ratio'].value)} faster; "
        f"validation loss: {by_name['validation_loss_ratio'].value:.4f} of dense",
    )


def _times(value: float | None) -> str:
    return "never reached, not" if value is None else f"{value:.2f}x"


def _table_rows(records: Sequence[RunRecord], change: LinkEvent) -> list[tuple[str, list[str]]]:
    phases = [NetworkPhases.of(record) for record in records]
    ends = [record.end or {} for record in records]
    slow_rate = format_rate(change.change["rate_bit_per_s"])
    return [
        ("median step, fast network", [_seconds(median_step_s(phase.fast)) for phase in phases]),
        (f"median step, {slow_rate}", [_seconds(median_step_s(phase.slow)) for phase in phases]),
        ("training time", [_seconds(train_seconds(record)) for record in records]),
        ("validation loss (nats/byte)", [f"{end['validation_loss']:.4f}" for end in ends]),
        ("weights identical on all ranks", ["yes" if end["weights_identical"] else "NO" for end in ends]),
        ("plan at the end", [record.steps[-1].plan for record in records]),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"

"""The demo's numbers: what each run took, the ratios, and whether they meet the goals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from cgx_ray.demo.view import describe_decision, format_rate
from cgx_ray.lab.events import LinkEvent
from cgx_ray.report.record import RunRecord, StepLine
from cgx_ray.report.result import Row
from cgx_ray.report.smoothing import smooth_losses

# DDP rebuilds its buckets after the first step and memory is still being touched for the first time.
_WARMUP_STEPS = 3
# Both runs see the same batches, yet no two compressed runs are equal: 1 % is the promised accuracy.
_TARGET_SLACK = 1.01
_DELAY_STEPS, _DELAY_S = 20, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The steps wholly before and wholly after the network changed, without the first few."""

    fast: tuple[StepLine, ...]
    slow: tuple[StepLine, ...]

    @classmethod
    def of(cls, record: RunRecord) -> Phases:
        change = record.changes[0].step
        assert change is not None
        # The change fell into the step after `change`.
        return cls(
            fast=tuple(line for line in record.steps if _WARMUP_STEPS <= line.step <= change),
            slow=tuple(line for line in record.steps if line.step > change + 1),
        )


def median_step_s(lines: Sequence[StepLine]) -> float | None:
    return statistics.median(line.step_s for line in lines) if lines else None


def train_seconds(record: RunRecord) -> float:
    """From the start of the first step to the end of the last."""
    return record.steps[-1].time - _start(record)


def time_to_loss_s(record: RunRecord, target: float) -> float | None:
    """Until the smoothed loss is first at or below `target`; None if it never is."""
    for line, loss in zip(record.steps, smooth_losses(record.steps), strict=True):
        if loss <= target:
            return line.time - _start(record)
    return None


def _start(record: RunRecord) -> float:
    return record.steps[0].time - record.steps[0].step_s


def loss_target(dense: RunRecord) -> float:
    """The smoothed loss that dense ends with, and 1 %."""
    return smooth_losses(dense.steps)[-1] * _TARGET_SLACK


def decision_delay(record: RunRecord) -> tuple[int, float] | None:
    """Steps and seconds from the network's change to the first decision that knows of it; None if none does.

    To keep the plan is a decision too. It knows of the change if the bandwidth it was made with is at most twice the
    new rate: a decision right after the change may still rest on the old network.
    """
    change = record.changes[0]
    assert change.step is not None
    for line in record.decisions:
        bandwidth_bit_per_s = line["inputs"]["bandwidth_gbps"] * 1e9
        if line["time"] > change.time and bandwidth_bit_per_s <= 2 * change.change["rate_bit_per_s"]:
            return line["step"] - change.step, line["time"] - change.time
    return None


def make_rows(dense: RunRecord, adaptive: RunRecord) -> list[Row]:
    """One row for each number the demo has to show."""
    rows = _phase_rows(dense, adaptive)
    rows += _loss_rows(dense, adaptive)
    rows += _delay_rows(adaptive)
    assert adaptive.end is not None
    identical = float(adaptive.end["weights_identical"])
    rows.append(Row(name="weights_identical", value=identical, unit="bool", goal="== 1"))
    return rows


def _phase_rows(dense: RunRecord, adaptive: RunRecord) -> list[Row]:
    ours, theirs = Phases.of(adaptive), Phases.of(dense)
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


def _loss_rows(dense: RunRecord, adaptive: RunRecord) -> list[Row]:
    assert dense.end is not None
    assert adaptive.end is not None
    loss, loss_dense = adaptive.end["validation_loss"], dense.end["validation_loss"]
    target = loss_target(dense)
    seconds, seconds_dense = time_to_loss_s(adaptive, target), time_to_loss_s(dense, target)
    return [
        Row(name="validation_loss", value=loss, unit="nats/byte", baseline=loss_dense),
        Row(name="validation_loss_ratio", value=loss / loss_dense, unit="x", baseline=1.0, goal="<= 1.01"),
        Row(name="time_to_loss_s", value=seconds, unit="s", baseline=seconds_dense),
        Row(name="time_to_loss_ratio", value=_ratio(seconds_dense, seconds), unit="x", baseline=1.0),
    ]


def _delay_rows(adaptive: RunRecord) -> list[Row]:
    """The goal is 20 steps or 5 s, whichever is later: meeting one of them is meeting both."""
    steps, seconds = decision_delay(adaptive) or (None, None)
    met = steps is not None and seconds is not None and (steps <= _DELAY_STEPS or seconds <= _DELAY_S)
    return [
        Row(name="decision_delay_steps", value=steps, unit="steps", goal=f"<= {_DELAY_STEPS}", met=met),
        Row(name="decision_delay_s", value=seconds, unit="s", goal=f"<= {_DELAY_S:g}", met=met),
    ]


def _compute_s(lines: Sequence[StepLine]) -> float | None:
    """Median step time had the network been free: what compute alone takes."""
    seconds = [line.compute_s for line in lines if line.compute_s is not None]
    return statistics.median(seconds) if seconds else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def print_summary(console: Console, dense: RunRecord, adaptive: RunRecord | None, link: str) -> None:
    """A table of both runs, then the decisions and the ratios."""
    change = dense.changes[0]
    table = Table(title=f"byte-level GPT, {len(dense.steps)} steps, {link}", title_justify="left")
    table.add_column("")
    records = [dense] if adaptive is None else [dense, adaptive]
    for record in records:
        table.add_column(record.name, justify="right")
    for label, cells in _table_rows(records, change):
        table.add_row(label, *cells)
    console.print(table)
    if adaptive is None:
        return
    for line in adaptive.decisions:
        console.print(describe_decision(line), highlight=False, markup=False, soft_wrap=True)
    by_name = {row.name: row for row in make_rows(dense, adaptive)}
    console.print(
        f"time to the same loss ({loss_target(dense):.3f}): {_times(by_name['time_to_loss_ratio'].value)} faster; "
        f"validation loss: {by_name['validation_loss_ratio'].value:.4f} of dense",
        highlight=False,
        soft_wrap=True,
    )


def _times(value: float | None) -> str:
    return "never reached, not" if value is None else f"{value:.2f}x"


def _table_rows(records: Sequence[RunRecord], change: LinkEvent) -> list[tuple[str, list[str]]]:
    phases = [Phases.of(record) for record in records]
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

"""One look at a running training: the values that `cgx-ray top` and the demo show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from cgx_ray.plan import plan_under
from cgx_ray.report.record import RunRecord, StepLine
from cgx_ray.units import format_bytes, format_measured_rate, format_rate, format_seconds

PARTS = ("compute", "encode", "exchange", "decode")
# Share of the time between steps from which it is named: where processors are busy, single steps begin late.
LEAST_BETWEEN = 0.05
# What a rate is that no network has, by `link_kind`.
_LINK_WORDS = {"machine": " within this machine", "simulated": " on a simulated link"}
# Decisions that are shown.
SHOWN_DECISIONS = 2
# Lines of the journal that are shown.
_SHOWN_EVENTS = ("decision", "outcome", "progress")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """The last step of a rank, or the mean of some steps over all ranks.

    name   "rank 3" or "all ranks"
    parts  seconds by name of PARTS; they overlap. Empty if unknown, as in plain DDP
    """

    name: str
    node: str
    step_s: float
    parts: Mapping[str, float]
    is_slow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionLine:
    """A decision: what was predicted, and what was measured later, None until then."""

    step: int
    text: str
    is_change: bool
    predicted_s: float
    measured_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """A training at this moment.

    num_steps  of the whole training; None if unknown
    loss       at `loss_step`; None if none was reported
    speed      against dense, and the share of the time between steps, in words; None if both are unknown
    elapsed_s  of training, without the time between a run and one that goes on in its folder; None if unknown
    links      lines of text
    notes      what deserves attention, such as slow ranks or lines of files that were skipped
    """

    name: str
    is_running: bool
    step: int | None
    num_steps: int | None = None
    loss: float | None = None
    loss_step: int | None = None
    plan: str | None = None
    ranks: tuple[RankLine, ...] = ()
    speed: str | None = None
    elapsed_s: float | None = None
    links: tuple[str, ...] = ()
    decisions: tuple[DecisionLine, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def loss_text(self) -> str:
        """The loss in words, with its step if that is not the newest one; "" if it is unknown."""
        if self.loss is None:
            return ""
        return f"loss {self.loss:.3f}" + (f" at step {self.loss_step}" if self.loss_step != self.step else "")

    @property
    def pace(self) -> tuple[str, ...]:
        """Steps per second and seconds so far, in words; empty if unknown."""
        step_s = max((rank.step_s for rank in self.ranks), default=0.0)
        rate = [f"{1 / step_s:.3g} steps/s"] if step_s > 0 else []
        return (*rate, *([f"{timedelta(seconds=round(self.elapsed_s))} elapsed"] if self.elapsed_s is not None else []))


def view_of_record(record: RunRecord, *, num_steps: int | None = None, links: Sequence[str] = ()) -> LiveView:
    """Return the view of a run's files. `links`: lines to show instead of the controller's last estimate."""
    last_step = record.steps[-1] if record.steps else None
    # A run without the history of the one before numbers its plans anew.
    own = [line for line in record.decisions if not record.starts or line["time"] >= record.starts[-1]["time"]]
    ranks: tuple[RankLine, ...]
    loss: float | None
    loss_step: int | None
    lines = [*record.progress, *record.decisions]
    newest = max(lines, key=lambda line: line["time"]) if lines else None
    if last_step is not None:
        plan: str | None = last_step.plan
        version = last_step.plan_version
        ranks = (RankLine(name="rank 0", node="", step_s=last_step.step_s, parts=_step_parts(last_step)),)
        step: int | None = last_step.step
        loss, loss_step = last_step.loss, step
    else:
        plan, version = (plan_in_force(record) or {}).get("plan"), _version_in_force(record)
        ranks = tuple(_progress_line(line) for line in record.progress[-1:])
        step = newest["step"] if newest is not None else None
        loss, loss_step = _reported_loss(record.progress)
    return LiveView(
        name=record.name,
        is_running=record.end is None and not record.is_ended,
        step=step,
        num_steps=num_steps,
        loss=loss,
        loss_step=loss_step,
        plan=plan and plan + _next_plan(own, version),
        ranks=ranks,
        speed=_speed(record.progress, record.progress[-1].get("speed_up") if record.progress else None),
        elapsed_s=record.duration_s if lines else None,
        links=tuple(links) or _estimated_links(record.progress[-1] if record.progress else None, link_kind(record)),
        decisions=decision_lines(record.decisions, record.outcomes)[-SHOWN_DECISIONS:],
        notes=(*broken_note(record.broken), *drift_note(record.drifts), *fault_note(record.faults)),
    )


def view_of_controller(found: Mapping[str, Any]) -> LiveView:
    """Return the view of what the controller answers (`control.live_state`)."""
    journal = found["journal"]
    by_event = {event: [line for line in journal if line["event"] == event] for event in _SHOWN_EVENTS}
    version, trial = found["plan"]["version"], " (on trial)" if found["plan"]["is_on_trial"] else ""
    slow = set(found["slow_ranks"])
    notes = [f"rank {rank} computes much longer than the others" for rank in sorted(slow)]
    notes += [
        f"the link of rank {rank} carries only {format_rate(gbps * 1e9)}"
        for rank, gbps in found["slow_links_gbps"].items()
    ]
    notes += [f"rank {rank} sends no samples; decisions go on without it" for rank in found["silent_ranks"]]
    if found["num_silent_nodes"]:
        notes.append(f"{found['num_silent_nodes']} nodes no longer answer the others")
    notes += drift_note([line for line in journal if line["event"] == "drift"])
    notes += fault_note([line for line in journal if line["event"] == "fault"])
    loss, loss_step = _reported_loss(by_event["progress"])
    return LiveView(
        name=found["run"],
        is_running=True,
        step=max((rank["step"] for rank in found["ranks"]), default=None),
        plan=f"{found['plan']['text']}{trial}{_next_plan(by_event['decision'], version)}",
        ranks=tuple(
            RankLine(
                name=f"rank {rank['rank']}",
                node=rank["node"],
                step_s=rank["step_s"],
                parts={part: rank[f"{part}_s"] for part in PARTS},
                is_slow=rank["rank"] in slow,
            )
            for rank in found["ranks"]
        ),
        loss=loss,
        loss_step=loss_step,
        speed=_speed(by_event["progress"], found["speed_up"]),
        elapsed_s=found.get("elapsed_s"),
        links=(*_estimated_links(found, found.get("link", "network")), *map(_node_line, found["nodes"])),
        decisions=decision_lines(by_event["decision"], by_event["outcome"])[-SHOWN_DECISIONS:],
        notes=tuple(notes),
    )


def _next_plan(decisions: Sequence[Mapping[str, Any]], version: int | None) -> str:
    """Return in words the plan that was decided last, while ranks have `version` and not yet that plan; else ""."""
    line = next((line for line in reversed(decisions) if line["kind"] != "keep"), None)
    if line is None or version is None or line["new"].get("version", -1) <= version:
        return ""
    old, new = line["old"]["plan"], line["new"]["plan"]
    return f"; next {new if new != old else f'other groups of {new}'}, decided at step {line['step']}"


def drift_note(drifts: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return a note about the newest line of the journal on weights that differ between ranks, if there is one."""
    if not drifts:
        return ()
    return (
        f"the weights of the ranks differ by rounding, by {drifts[-1]['weight_drift']:.2g} of a layer's norm at step "
        f"{drifts[-1]['step']}; average_weights=True makes them the same again",
    )


def fault_note(faults: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return a note about the first error that ended the training on a rank, if there is one."""
    if not faults:
        return ()
    first, more = faults[0], f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return (f"the training stopped on rank {first['rank']}: {first['text']}{more}",)


def decision_lines(
    decisions: Sequence[Mapping[str, Any]], outcomes: Sequence[Mapping[str, Any]]
) -> tuple[DecisionLine, ...]:
    """Return the decisions, each with its outcome."""
    return tuple(
        DecisionLine(
            step=line["step"],
            text=f"{change_of(line)}: {line['reason']}",
            is_change=line["kind"] != "keep",
            predicted_s=line["predicted_step_s"],
            measured_s=measured,
        )
        for line, measured in zip(decisions, outcomes_of(decisions, outcomes), strict=True)
    )


def outcomes_of(decisions: Sequence[Mapping[str, Any]], outcomes: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return the measured seconds of each decision's steps, None where they were never measured."""
    measured: list[float | None] = [None] * len(decisions)
    for outcome in outcomes:
        predicted_s = outcome.get("predicted_step_s")
        for index in range(len(decisions) - 1, -1, -1):
            line = decisions[index]
            # The next decision may follow in the same moment, with another prediction.
            if line["time"] <= outcome["time"] and predicted_s in (None, line["predicted_step_s"]):
                measured[index] = outcome["measured_step_s"]
                break
    return measured


def change_of(line: Mapping[str, Any]) -> str:
    """Return the old and the new plan of a decision."""
    if line["kind"] == "keep":
        return f"keep {line['new']['plan']}"
    old, new = line["old"]["plan"], line["new"]["plan"]
    if old == new and "cause" in line:
        # It was on trial.
        return f"keep {new}"
    return f"{old} -> {new}" if old != new else f"{new}, other groups"


def is_new_plan(line: Mapping[str, Any]) -> bool:
    """Return whether a decision chose another plan, and not one for a few measuring steps."""
    return line["kind"] != "keep" and line.get("made_by") not in ("codec_trial", "dense_trial", "plan_trial", "return")


def describe_decision(line: Mapping[str, Any]) -> str:
    """Return a line with step, old and new plan, and the reason, which contains the prediction."""
    return f"decided at step {line['step']}: {change_of(line)}: {line['reason']}"


def plan_in_force(record: RunRecord) -> Mapping[str, Any] | None:
    """Return the plan of the newest steps; without any, that of the last line that has one."""
    lines = [*record.starts, *record.progress] or record.decisions
    if not lines:
        return None
    last = max(lines, key=lambda line: line["time"])
    if last["event"] == "progress":
        return plan_under(last["version"], {plan["version"]: plan for plan in plans_of(record)})
    plan: Mapping[str, Any] = last["plan" if last["event"] == "start" else "new"]
    return plan


def _version_in_force(record: RunRecord) -> int | None:
    """Return the version of the newest steps, as far as the journal shows it."""
    lines = [*record.starts, *record.progress]
    if not lines:
        return None
    last = max(lines, key=lambda line: line["time"])
    version: int | None = last["version"] if last["event"] == "progress" else last["plan"].get("version")
    return version


def plans_of(record: RunRecord) -> list[Mapping[str, Any]]:
    """Return the plans of the journal that have a version."""
    plans = [line["plan"] for line in record.starts]
    plans += [plan for line in record.decisions for plan in (line["old"], line["new"])]
    return [plan for plan in plans if "version" in plan]


def broken_note(broken: Sequence[str]) -> tuple[str, ...]:
    """Return a line that counts the skipped lines of a run's files and names the first."""
    if not broken:
        return ()
    more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
    return (f"skipped: {broken[0]}{more}",)


def _step_parts(step: StepLine) -> dict[str, float]:
    parts = {part: getattr(step, f"{part}_s") for part in PARTS}
    return {part: seconds for part, seconds in parts.items() if seconds is not None}


def _reported_loss(progress: Sequence[Mapping[str, Any]]) -> tuple[float, int] | tuple[None, None]:
    """Return the loss of the newest progress line that has one, and its step."""
    newest = next((line for line in reversed(progress) if line.get("loss") is not None), None)
    return (newest["loss"], newest["step"]) if newest is not None else (None, None)


def _progress_line(line: Mapping[str, Any]) -> RankLine:
    parts = {part: line[f"{part}_s"] for part in PARTS}
    return RankLine(name="all ranks", node="", step_s=line["step_s"], parts=parts)


def _speed(progress: Sequence[Mapping[str, Any]], speed_up: float | None) -> str | None:
    """Return the speed of the newest steps, and the time between the steps of the newest progress line."""
    line, said = progress[-1] if progress else {}, []
    if speed_up is not None and line.get("is_dense_measured"):
        said.append(f"newest steps {speed_up:.2f}x as fast as dense")
    elif speed_up is not None and line:
        # As in the verdict, no ratio is made of a prediction.
        said.append(f"dense is predicted to take {format_seconds(speed_up * line['step_s'])} per step")
    between_s = line.get("between_s", 0.0)
    if line and between_s >= LEAST_BETWEEN * (between_s + line["step_s"]) > 0:
        said.append(f"{between_s / (between_s + line['step_s']):.0%} of the time between steps")
    return ", ".join(said) or None


def link_kind(record: RunRecord) -> str:
    """Return what lies between the ranks: "network", "machine" for the memory of one machine, or "simulated"."""
    if not record.starts:
        return "network"
    start = record.starts[-1]
    # Journals of old versions know the nodes only.
    return start.get("link") or ("machine" if len({*start["nodes"]}) == 1 else "network")


def _estimated_links(line: Mapping[str, Any] | None, kind: str) -> tuple[str, ...]:
    """Return bandwidth and latency as the controller estimates them. `kind` as `link_kind` returns it."""
    if line is None:
        return ()
    found = []
    if line["bandwidth_gbps"] is not None:
        low, value, high = (format_measured_rate(gbps * 1e9) for gbps in line["bandwidth_gbps"])
        low = low.removesuffix(high.partition(" ")[2]).rstrip()
        found.append(f"{value} per rank{_LINK_WORDS.get(kind, '')} (spread {low} to {high})")
    if line["latency_ms"] is not None:
        found.append(f"{line['latency_ms']:.2g} ms one way")
    return (", ".join(found),) if found else ()


def _node_line(node: Mapping[str, Any]) -> str:
    ranks = ", ".join(map(str, node["ranks"])) or "-"
    sent, received = (format_bytes(round(node[f"{way}_bytes_per_s"])) for way in ("sent", "received"))
    text = f"{node['node']} (ranks {ranks}): {sent}/s out, {received}/s in"
    others = node["neighbour_bytes_per_s"]
    return f"{text}, others {format_bytes(round(others))}/s" if others else text

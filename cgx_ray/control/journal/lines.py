"""The journal of a training, `decisions.jsonl`: one JSON line per event. `report/journal.schema.json` describes them.

| event | written |
|---|---|
| `start` | first, per worker group and per start of a controller: layers, policy, calibrated codec times, nodes |
| `decision` | with each decision: plans, reason, prediction, and the situation that the policy was given (`recorded`) |
| `outcome` | when the prediction of a decision has been compared with measured steps |
| `progress` | in growing intervals: mean seconds of a step's parts, bytes and link since the last one (`progress`) |
| `wait` | when a plan is wanted, but dense is not known well enough to judge it; once until the next decision |
| `silence` | when other ranks than before are silent |
| `drift` | when the ranks' weights differ by rounding, and again when twice as much |
| `fault` | with each of the first errors that end the training on a rank |
| `policy_error` | when the policy raises an error, or its plan fits no rank; once per type of error |
| `no_samples` | when no rank's samples have come for a minute; once until they come again |
| `end` | when the controller is asked to end; a controller that was killed leaves none |
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from cgx_ray.control.journal.facts import LinkKind, LoopFacts
from cgx_ray.control.journal.recorded import cost_fields, group_fields, situation_fields
from cgx_ray.control.journal.sentences import RunTotals
from cgx_ray.control.policies.policy import Decision, DecisionKind, Policy, Situation
from cgx_ray.monitors.sample import Fault
from cgx_ray.plan import NONE, Layer, Option, Plan
from cgx_ray.planner.candidates import CodecCosts
from cgx_ray.planner.fidelity import expected_loss, loss_of
from cgx_ray.planner.legs import EncodesOn
from cgx_ray.planner.planned_group import groups_of
from cgx_ray.planner.prediction import Measured
from cgx_ray.units import format_count

logger = logging.getLogger(__name__)

# Rises when a field changes so that an older reader would misread it. New fields and events leave it as it is.
FORMAT = 1
# Newest lines that are also kept in memory, for the live view: they are there even if the disk is full.
KEPT_LINES = 20
# Characters of an error's text that are kept.
MAX_TEXT = 1000
# Lines that wait for a slow file system: hours of them, some megabytes.
MAX_WAITING_LINES = 1000
# Part of the control loop that made a decision: the policy; a codec timed in one layer; dense measured again; a codec
# tried in all layers; the return from such measuring steps; the guard of the promise.
MadeBy = Literal["policy", "codec_trial", "dense_trial", "plan_trial", "return", "guard"]


class Journal:
    """Appends to `path`. When the disk is full, lines are lost but training goes on.

    recent      newest lines, whether or not they reached the disk
    totals      over all lines, those of earlier controllers of the run included
    num_errors  lines that were lost
    user_knows  that lines are lost, or will be
    """

    def __init__(self, path: Path, *, warns: bool = True) -> None:
        """`warns`: log the first line that is lost."""
        self.path = path
        self.num_errors = 0
        self.user_knows = not warns
        self.recent: deque[dict[str, Any]] = deque(maxlen=KEPT_LINES)
        self.totals = RunTotals()

    def write(self, entry: dict[str, Any]) -> None:
        """Append `entry` on a line of its own. A failure loses the line; all are counted and the first is logged."""
        self.recent.append(entry)
        self.totals.add_line(entry)
        try:
            line = json.dumps(entry, allow_nan=False).encode()
        except ValueError as error:
            self._lose(f"{entry['event']}: {error}")
        else:
            self._put(line)

    def _put(self, line: bytes) -> None:
        self._append(line)

    def _append(self, line: bytes) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                # A write that failed, or a killed process, leaves half a line. It must cost no other line.
                file.write(b"\n" * _ends_in_mid_line(file.fileno()) + line + b"\n")
        except OSError as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        if not self.user_knows:
            self.user_knows = True
            logger.warning(
                "lines of the journal %s are lost: %s; training goes on, but `cgx-ray report` will lack them: free its "
                "disk, or give the next run another folder",
                self.path,
                why,
            )
        self.num_errors += 1


class QueuedJournal(Journal):
    """A journal with a thread of its own, so that the loop does not wait for a file system that hangs.

    Lines wait in memory. Once MAX_WAITING_LINES do, further ones are lost.
    """

    def __init__(self, path: Path, *, warns: bool = True) -> None:
        super().__init__(path, warns=warns)
        self._waiting: queue.Queue[bytes | threading.Event] = queue.Queue(MAX_WAITING_LINES)
        self._thread = threading.Thread(target=self._work, name="cgx-ray-journal", daemon=True)
        self._thread.start()

    def _put(self, line: bytes) -> None:
        """Have `line` appended. Returns at once."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lose(f"{MAX_WAITING_LINES} lines wait for the file system")

    def flush(self, timeout_s: float) -> bool:
        """Return True once all lines so far are written or lost; False after `timeout_s` seconds."""
        end_s, is_done = time.monotonic() + timeout_s, threading.Event()
        try:
            self._waiting.put(is_done, timeout=timeout_s)
        except queue.Full:
            return False
        return is_done.wait(max(end_s - time.monotonic(), 0.0))

    def _work(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._append(item)


def _ends_in_mid_line(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def report_hint(journal: Journal) -> str:
    """Return where to read more of a run."""
    lost = f"{format_count(journal.num_errors, 'line')} could not be written"
    # Not Path.is_file, which raises an error where the folder may not be searched.
    if journal.user_knows and not os.path.isfile(journal.path):
        return f"There is no journal: {lost}" if journal.num_errors else "There is no journal"
    hint = f"Report: cgx-ray report {journal.path.parent}"
    return f"{hint} ({lost})" if journal.num_errors else hint


def start_entry(
    policy: Policy,
    layers: Sequence[Layer],
    plan: Plan,
    calibrated_costs: CodecCosts,
    encodes_on: EncodesOn,
    *,
    nodes: Sequence[str],
    link: LinkKind,
    on_one_node: bool,
    time_s: float,
) -> dict[str, Any]:
    """Return the journal's first line of a worker group, which begins with `plan`.

    nodes        address of each rank's node; empty if unknown
    link         what lies between the ranks
    on_one_node  all ranks share memory
    """
    num_addresses = len({*nodes})
    num_nodes = 1 if on_one_node else num_addresses if num_addresses > 1 else plan.world_size
    return {
        "event": "start",
        "format": FORMAT,
        "time": time_s,
        # Arguments that are not JSON as text, which makes no policy again.
        "policy": json.loads(json.dumps(policy.recorded(), default=repr)),
        "world_size": plan.world_size,
        "nodes": list(nodes),
        "link": link,
        "layers": [asdict(layer) for layer in layers],
        "told_codec_s": cost_fields(calibrated_costs),
        "encodes_on": encodes_on,
        "num_ruled_layers": sum(len(one.layers) for one in plan.groups if one.is_fixed and one.option.codec != NONE),
        "plan": _plan_fields(plan, layers, num_nodes),
    }


def decision_entry(
    decision: Decision,
    *,
    old: Plan,
    new: Plan,
    measured: Measured,
    situation: Situation,
    made_by: MadeBy,
    on_one_node: bool,
    step: int,
    time_s: float,
) -> dict[str, Any]:
    """Return the journal's line for a decision made after `step` on `measured`.

    situation    given to the policy; for a decision that the policy did not make, what it would have been given
    on_one_node  all ranks share memory, which `measured` takes for one rank per node
    """
    num_nodes = 1 if on_one_node else measured.network.num_nodes
    return {
        "event": "decision",
        "time": time_s,
        "step": step,
        "kind": decision.kind,
        "made_by": made_by,
        "old": _plan_fields(old, measured.layers, num_nodes, measured.loss_of),
        "new": _plan_fields(new, measured.layers, num_nodes, measured.loss_of),
        "new_groups": [] if new is old else group_fields(new.groups, measured.layers),
        "new_period": new.period,
        "reason": decision.reason,
        "inputs": _measured_fields(measured),
        "predicted_step_s": decision.step_s,
        "predicted_dense_s": decision.dense_s,
        "bound_by": decision.predicted.bound_by,
        "situation": situation_fields(situation),
    }


def tried_entry(
    decision: DecisionKind,
    made_by: MadeBy,
    *,
    old: Plan,
    new: Plan,
    layers: Sequence[Layer],
    reason: str,
    cause: str,
    compute_s: float,
    facts: LoopFacts,
    predicted_s: tuple[float, float],
    step: int,
    time_s: float,
) -> dict[str, Any]:
    """Return the journal's line for a decision by trial, which has no inputs to make it from again.

    cause        in words, the beginning of `reason`
    compute_s    of the steps that it rests on
    facts        about the network
    predicted_s  of the new plan's steps, and of dense ones
    """
    bits_per_s, latency_s = facts.bandwidth_bits_per_s, facts.latency_s
    return {
        "event": "decision",
        "time": time_s,
        "step": step,
        "kind": decision,
        "made_by": made_by,
        "old": _plan_fields(old, layers, old.world_size),
        "new": _plan_fields(new, layers, new.world_size),
        "reason": reason,
        "cause": cause,
        "inputs": {
            "world_size": new.world_size,
            "bandwidth_gbps": bits_per_s / 1e9 if bits_per_s is not None else None,
            "latency_ms": latency_s * 1e3 if latency_s is not None else None,
            "compute_s": compute_s,
            "dense_bytes": sum(layer.dense_bytes for layer in layers),
        },
        "predicted_step_s": predicted_s[0],
        "predicted_dense_s": predicted_s[1],
    }


def outcome_entry(
    predicted_s: float, measured_s: float, *, applied_step: int, version: int, step: int, time_s: float
) -> dict[str, Any]:
    """Return the journal's line for the seconds of a step that a decision led to.

    applied_step  first one under the decision's plan, which has this `version`
    """
    return {
        "event": "outcome",
        "time": time_s,
        "step": step,
        "version": version,
        "applied_step": applied_step,
        "predicted_step_s": predicted_s,
        "measured_step_s": measured_s,
    }


def silence_entry(silent_ranks: Collection[int], *, step: int, time_s: float) -> dict[str, Any]:
    """Return the journal's line for other silent ranks than before, none if all report again."""
    return {"event": "silence", "time": time_s, "step": step, "silent_ranks": sorted(silent_ranks)}


def drift_entry(weight_drift: float, *, step: int, time_s: float) -> dict[str, Any]:
    """Return the journal's line for weights that differ between ranks."""
    return {"event": "drift", "time": time_s, "step": step, "weight_drift": weight_drift}


def fault_entry(fault: Fault, *, time_s: float) -> dict[str, Any]:
    """Return the journal's line for an error that ended the training on a rank."""
    return {
        "event": "fault",
        "time": time_s,
        "step": fault.step,
        "rank": fault.rank,
        "kind": fault.kind,
        "text": fault.text[:MAX_TEXT],
    }


def policy_error_entry(error: Exception, *, step: int, time_s: float) -> dict[str, Any]:
    """Return the journal's line for an error of the policy, after which the plan in force stays."""
    text = f"{type(error).__name__}: {error}"
    return {"event": "policy_error", "time": time_s, "step": step, "text": text[:MAX_TEXT]}


def no_samples_entry(seconds: float, quiet_nodes: Sequence[str], *, step: int, time_s: float) -> dict[str, Any]:
    """Return the journal's line for a time without samples. `quiet_nodes`: those whose monitor does not report."""
    return {
        "event": "no_samples",
        "time": time_s,
        "step": step,
        "seconds": round(seconds, 1),
        "quiet_nodes": list(quiet_nodes),
    }


def end_entry(*, step: int | None, newest_step: int, time_s: float) -> dict[str, Any]:
    """Return the journal's last line of a worker group. `step`: the last one that was joined; newest: of any rank."""
    return {"event": "end", "time": time_s, "step": step, "newest_step": newest_step}


def _usual_loss(option: Option, period: int, replicas: int) -> float:
    return loss_of(option.codec, period, replicas)


def _plan_fields(
    plan: Plan, layers: Sequence[Layer], num_nodes: int, option_loss: Callable[[Option, int, int], float] = _usual_loss
) -> dict[str, Any]:
    """Return the plan in one phrase; and the groups, layers, elements and bytes of a step for each option.

    option_loss  as `Measured.loss_of`. Default: nothing was measured
    """
    plan = plan.on_one_node() if num_nodes == 1 else plan
    options: dict[str, dict[str, Any]] = {}
    for group in groups_of(plan, layers):
        codec = group.option.codec
        counts = options.setdefault(
            str(group.option),
            {"groups": 0, "layers": 0, "numel": 0, "dense_bytes": 0, "wire_bytes": 0}
            | {
                "text": group.option.describe(),
                "codec": codec.name,
                "scheme": str(group.option.scheme),
                "density": codec.density or 1.0,
            },
        )
        added = (1, len(group.layers), group.numel, group.dense_bytes, group.wire_bytes)
        for name, number in zip(("groups", "layers", "numel", "dense_bytes", "wire_bytes"), added, strict=True):
            counts[name] += number
    replicas = num_nodes if plan.has_inside else plan.world_size
    loss = expected_loss(option_loss(group.option, plan.period, replicas) for group in plan.groups)
    return {"version": plan.version, "plan": plan.describe(), "expected_loss": loss, "options": options}


def _measured_fields(measured: Measured) -> dict[str, Any]:
    """Return the measurements that a decision was made on."""
    network = measured.network
    return {
        "world_size": network.num_workers,
        "ranks_per_node": network.ranks_per_node,
        "bandwidth_gbps": network.between.bandwidth_gbps,
        "latency_ms": network.between.alpha_s * 1e3,
        "compute_s": measured.compute_s,
        "dense_bytes": sum(layer.dense_bytes for layer in measured.layers),
        "gain": dict(measured.gain),
    }

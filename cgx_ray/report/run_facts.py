"""Numbers of a run that its report shows: time by part, plans in force, speed-up, cost, and what to try next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from cgx_ray.errors import listed
from cgx_ray.plan import plan_under
from cgx_ray.report.live_view import LEAST_BETWEEN, is_new_plan, link_kind, outcomes_of, plans_of
from cgx_ray.report.record import SMOOTHED_STEPS, RunRecord, StepLine, smooth_losses

# Usual prediction error, either way, from which predictions deserve attention.
LARGE_ERROR = 0.2
# Share of the step from which compute leaves little for compression to save.
MOSTLY_COMPUTE = 0.85
# Share of the time between steps from which it is the first thing to shorten.
MUCH_BETWEEN = 0.3
# By fidelity, what an adaptive run may try next.
_LOOSER = {
    "strict": "with fidelity='balanced', which allows what is expected within 5 % of dense's loss",
    "balanced": "with fidelity='fast', which allows sparser codecs",
    "fast": "with candidates of your own",
}
# A single step that took so many times as long as those before and after it is one with a pause.
PAUSE = 3.0
# Steps of a start that are in no line, at most.
_START_STEPS = 3
_PARTS = ("compute_s", "encode_s", "exchange_s", "decode_s")


class StepSpan(NamedTuple):
    """Some steps of one plan: one, or those between two progress lines.

    step_s     mean seconds of a step, without what happened between steps
    parts_s    compute, and what compute did not hide of encoding, exchange and decoding; None if unknown. They add up
               to `step_s`
    between_s  mean seconds per step of what happened between steps, 0 where steps.jsonl lacks it
    speed_up   against dense steps, as the controller knew it; None if it did not
    """

    time: float
    step: int
    num_steps: int
    step_s: float
    parts_s: tuple[float, float, float, float] | None
    version: int | None
    between_s: float = 0.0
    speed_up: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """Ratio of a dense step's seconds to the run's. A predicted one may be far off, and no reader is shown it.

    dense_s   mean seconds of a dense step, None if the run's own are unknown
    known_by  how dense steps are known, in words
    """

    ratio: float
    dense_s: float | None
    is_predicted: bool
    known_by: str


def spans(record: RunRecord) -> list[StepSpan]:
    """Return the run's steps, from steps.jsonl if there is one, else from the journal's progress lines."""
    return _steps(record) if record.steps else _progress(record)


def _steps(record: RunRecord) -> list[StepSpan]:
    # As in the journal: whatever came before training is in the first step.
    lines = record.steps[1:]
    seconds = [_without_pause(lines, at) for at in range(len(lines))]
    return [
        StepSpan(
            line.time,
            line.step,
            1,
            step_s,
            _parts(step_s, [getattr(line, part) for part in _PARTS]),
            line.plan_version,
        )
        for line, step_s in zip(lines, seconds, strict=True)
    ]


def _without_pause(lines: Sequence[StepLine], at: int) -> float:
    """Return the seconds of a step of steps.jsonl, which include a pause before it.

    So one that took PAUSE times as long as those before and after it counts as the longer of these. In rounds every
    last step is a long one.
    """
    own_s, beside = lines[at].step_s, [*lines[max(at - 1, 0) : at], *lines[at + 1 : at + 2]]
    longer_s = max((line.step_s for line in beside), default=math.inf)
    return own_s if own_s < PAUSE * longer_s or ", every " in lines[at].plan else longer_s


def _progress(record: RunRecord) -> list[StepSpan]:
    return [
        StepSpan(
            line["time"],
            line["step"],
            line["num_steps"],
            line["step_s"],
            _parts(line["step_s"], [line[part] for part in _PARTS]),
            line["version"],
            line.get("between_s", 0.0),
            line.get("speed_up"),
        )
        for line in record.progress
    ]


def _parts(step_s: float, parts: Sequence[float | None]) -> tuple[float, float, float, float] | None:
    """Divide what compute did not hide as encoding, exchange and decoding divide their sum."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    compute_s, *others = known
    busy_s = sum(others)
    exposed_s = max(0.0, step_s - compute_s)
    encode_s, exchange_s, decode_s = (exposed_s * part / busy_s if busy_s > 0 else 0.0 for part in others)
    return min(compute_s, step_s), encode_s, exchange_s if busy_s > 0 else exposed_s, decode_s


def mean_parts(found: Sequence[StepSpan]) -> tuple[float, float, float, float] | None:
    """Return the mean seconds of each part over all steps; None if they are unknown."""
    known = [(span.num_steps, span.parts_s) for span in found if span.parts_s is not None]
    total = sum(num_steps for num_steps, _ in known)
    if not total:
        return None
    compute_s, encode_s, exchange_s, decode_s = (
        sum(num_steps * parts[index] for num_steps, parts in known) / total for index in range(len(_PARTS))
    )
    return compute_s, encode_s, exchange_s, decode_s


def mean_step_s(found: Sequence[StepSpan]) -> float | None:
    """Return the mean seconds of a step, without what happened between steps; None without steps."""
    total = sum(span.num_steps for span in found)
    return steps_s(found) / total if total else None


def counted_steps(record: RunRecord) -> str:
    """Return in words which steps the run's times and its speed-up are of: those of `spans`."""
    return listed([_steps_of(*each) for each in _ranges(record)])


def left_out_steps(record: RunRecord) -> str:
    """Return in words which steps of the run are in no mean, and why; empty if none is known to be missing."""
    known = _ranges(record)
    if not known:
        return ""
    gaps = [(before + 1, first - 1) for (_, before), (first, _) in itertools.pairwise([(-1, -1), *known])]
    said = [f"{_steps_of(*gap)} ({_why_left_out(*gap)})" for gap in gaps if gap[0] <= gap[1]]
    last, newest, late = known[-1][1], record.newest_step, ""
    if newest is not None and newest > last:
        late = f"{_steps_of(last + 1, newest)} (not reported by all ranks before the end)"
    return ", ".join(filter(None, (listed(said), late)))


def _why_left_out(first: int, last: int) -> str:
    # The first step after a restart is in no line, too.
    if last - first < _START_STEPS:
        return "start-up"
    return "not in the journal" if first else "before this journal"


def _ranges(record: RunRecord) -> list[tuple[int, int]]:
    """Return the first and the last step of each run of steps that follow each other."""
    ranges: list[tuple[int, int]] = []
    for span in spans(record):
        first = span.step - span.num_steps + 1
        if ranges and ranges[-1][1] + 1 == first:
            ranges[-1] = ranges[-1][0], span.step
        else:
            ranges.append((first, span.step))
    return ranges


def _steps_of(first: int, last: int) -> str:
    return f"{first} to {last}" if last > first else str(first)


def between_share(found: Sequence[StepSpan]) -> float:
    """Return the share of the time that passed between steps, in evaluations, checkpoints, reports and the like.

    0 if it is too small to be told from steps that begin late.
    """
    between_s = sum(span.num_steps * span.between_s for span in found)
    share = between_s / (between_s + steps_s(found)) if between_s else 0.0
    return share if share >= LEAST_BETWEEN else 0.0


def steps_s(found: Sequence[StepSpan]) -> float:
    """Return the seconds of all steps, without those between them."""
    return sum(span.num_steps * span.step_s for span in found)


def options_by_version(record: RunRecord) -> dict[int, Mapping[str, Mapping[str, Any]]]:
    """Return the options of each plan of the journal, with their groups and bytes, by version."""
    return {plan["version"]: plan["options"] for plan in plans_of(record) if "options" in plan}


def options_of(version: int | None, known: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> Mapping[str, Any]:
    """Return the options in force under `version`; empty if unknown."""
    return (plan_under(version, known) if version is not None else None) or {}


def shares_by(name: str, record: RunRecord, found: Sequence[StepSpan]) -> dict[str, float]:
    """Return the share of all dense bytes of the run under each "codec", "scheme" or "density"."""
    known, total, shares = options_by_version(record), 0.0, dict[str, float]()
    for span in found:
        for option in options_of(span.version, known).values():
            if "dense_bytes" in option:
                num_bytes = span.num_steps * option["dense_bytes"]
                key = f"{100 * option[name]:.3g} %" if name == "density" else option[name]
                key = "dense" if key == "none" else key
                shares[key] = shares.get(key, 0.0) + num_bytes
                total += num_bytes
    return {key: share / total for key, share in sorted(shares.items(), key=lambda one: -one[1])} if total else {}


def density_and_bits(options: Mapping[str, Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return the kept share of elements, and the encoded bits per element, on average over all elements."""
    counts = [option for option in options.values() if "numel" in option]
    numel = sum(option["numel"] for option in counts)
    if not numel:
        return None
    density = sum(option["numel"] * option["density"] for option in counts) / numel
    return density, 8 * sum(option["wire_bytes"] for option in counts) / numel


def dense_of(records: Sequence[RunRecord]) -> RunRecord | None:
    """Return the run without compression that a demo has beside others; other folders hold any runs."""
    return next((record for record in records if record.name == "dense" and record.steps), None)


def num_changes(record: RunRecord) -> int:
    """Return the number of decisions for another plan, without those for a few measuring steps."""
    return sum(map(is_new_plan, record.decisions))


def losses(record: RunRecord) -> list[tuple[int, int, float]]:
    """Return the first and the last step of each line with a training loss, and the loss, a mean over some steps."""
    if record.steps:
        pairs = zip(record.steps, smooth_losses(record.steps), strict=True)
        return [(line.step, line.step, loss) for line, loss in pairs]
    lines = [line for line in record.progress if line.get("loss") is not None]
    return [(line["step"] - line["num_steps"] + 1, line["step"], line["loss"]) for line in lines]


def last_loss(record: RunRecord) -> float | None:
    """Return the training loss at the end, a mean over SMOOTHED_STEPS or more; None if it was not reported."""
    if record.steps:
        return smooth_losses(record.steps)[-1]
    total, num_steps = 0.0, 0
    for first, last, loss in reversed(losses(record)):
        if num_steps >= SMOOTHED_STEPS:
            break
        total, num_steps = total + (last - first + 1) * loss, num_steps + last - first + 1
    return total / num_steps if num_steps else None


def loss_note(*records: RunRecord) -> tuple[str, ...]:
    """Return a line on how to report the loss, if one of the runs has none."""
    names = [record.name for record in records if last_loss(record) is None]
    if not names:
        return ()
    of_runs = f" of {listed(names)}" if len(records) > 1 else ""
    how = "attachment.observe(loss=loss) reports it, ray.train.report does not"
    return (f"no loss was reported{of_runs}; {how}",)


def world_size(record: RunRecord) -> int | None:
    """Return the number of ranks, None if no line has it."""
    if record.starts:
        return int(record.starts[-1]["world_size"])
    return int(record.decisions[-1]["inputs"]["world_size"]) if record.decisions else None


def prediction_errors(record: RunRecord) -> list[float]:
    """Return measured over predicted seconds, minus 1, of each decision with an outcome.

    Without those for sharded models, of which a bound is known before they are measured, or what was measured.
    """
    measured = outcomes_of(record.decisions, record.outcomes)
    pairs = zip(measured, record.decisions, strict=True)
    return [found / line["predicted_step_s"] - 1 for found, line in pairs if found is not None and "cause" not in line]


def next_step(record: RunRecord, gained: SpeedUp | None) -> str:
    """Return in one sentence what to try next."""
    found = spans(record)
    parts = mean_parts(found[-max(1, len(found) // 3) :])
    errors = [abs(error) for error in prediction_errors(record)]
    reverts = [line for line in record.decisions if line["kind"] == "disable"]
    if record.starts and record.starts[-1]["policy"]["kind"] == "static":
        return "Train once with policy='adaptive', which measures the link and finds the plan for it."
    if not record.decisions:
        return "Train with CGXConfig(policy='adaptive') for a while: without decisions there is nothing to improve."
    if (share := between_share(found)) >= MUCH_BETWEEN:
        return (
            f"{share:.0%} of the time passed between steps, where no codec helps: evaluate, save and report less often "
            "(Ray takes a report every two seconds)."
        )
    if parts is not None and parts[0] >= MOSTLY_COMPUTE * sum(parts):
        share = parts[0] / sum(parts)
        return (
            f"Compute takes {share:.0%} of the last steps, so no network and no codec makes them much shorter: look at "
            "the model, the batch and the processor first."
        )
    if len(reverts) >= 2:
        return (
            f"{len(reverts)} plans were slower than dense and taken back: run `cgx-ray profile` on these machines "
            "while they are busy as in training, to see which codecs cost more than they save."
        )
    # The median: one decision that falls on a change of the network is off by much, and says nothing of the others.
    if errors and median(errors) > LARGE_ERROR:
        look = (
            "see whether the link carries other traffic, by `cgx-ray probe` on a Ray cluster or by `cgx-ray why "
            "--probe -- torchrun ...`"
        )
        if link_kind(record) != "network":
            look = "see whether other programs use the processors of this machine"
        return (
            f"Half of the predictions were off by {median(errors):.0%} or more: {look}, and let the run train longer, "
            "as errors are learned."
        )
    if parts is not None and parts[1] + parts[3] > parts[2]:
        return (
            "Encoding and decoding take more of the step than the exchange: give each rank more cores, or encode on "
            "the GPU."
        )
    if gained is not None and gained.ratio < 1.1:
        return "Dense gradients are nearly as fast on this link: compression helps on a slower one or with more nodes."
    exchange = f" ({parts[2] / sum(parts):.0%} of the last steps)" if parts is not None and sum(parts) > 0 else ""
    policy = record.starts[-1]["policy"] if record.starts else {}
    looser = _LOOSER.get(str(policy.get("fidelity")), "with codecs that send less")
    return f"The exchange is what is left to shorten{exchange}: try again {looser}, and compare the loss."

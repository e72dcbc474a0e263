"""`python -m bench step`: seconds of a training step by the way gradients are averaged, on an emulated network.

Real sizes, codecs and exchange; backward sleeps, so that the ranks' "GPUs" fit on few cores. All ways take turns in
every round. A number is the median over all counted steps of the slowest rank's seconds, from the common start until it
holds the averages. The limit is the longer of the step without exchange and of a link that is busy from the first
bucket or group to the end. The prediction is the planner's, with the link as it was set, the step without exchange as
measured, and codec times measured on rank 0 before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from rich.table import Table

from bench.shared.ranks import run_ranks
from bench.step.cases import (
    FASTEST_GOAL,
    LIMIT_GOALS,
    PEER_GOALS,
    PREDICTION_GOAL,
    WAYS,
    StepNetwork,
    StepOptions,
    StepWay,
)
from bench.step.workload import Workload, predicted_s
from cgx_ray.engine.chrome_trace import PhaseSpan
from cgx_ray.plan import Plan
from cgx_ray.planner.options import CodecCost
from cgx_ray.report.result import Row
from cgx_ray.report.show import new_table

_STEPS_PER_TURN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Measurements of the ranks on one network, by the name of the way.

    seconds      of each counted step, of the slowest rank
    plans        in force, of ways of the engine
    codec_costs  by `str(CodecSpec)`; empty on loopback
    spans        of the last step of ways of the engine
    """

    seconds: Mapping[str, Sequence[float]]
    plans: Mapping[str, Plan]
    codec_costs: Mapping[str, CodecCost]
    spans: Mapping[str, Sequence[PhaseSpan]]

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """Read what `step_rank` writes."""
        raw = json.loads(line)
        return cls(
            seconds=raw["seconds"],
            plans={name: Plan.from_json(text) for name, text in raw["plans"].items()},
            codec_costs={codec: CodecCost(**cost) for codec, cost in raw["codec_costs"].items()},
            spans={name: [PhaseSpan(*span) for span in spans] for name, spans in raw["spans"].items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Seconds of a step of one way on one network. What does not apply, or was not measured in this run, is None.

    ddp_s        of plain DDP with the same buckets
    fp16_hook_s  of torch's hook
    fastest_s    of the fastest way with an exchange, in a run of all ways
    plan         in force
    """

    way: StepWay
    network: StepNetwork
    seconds: float
    ddp_s: float | None
    fp16_hook_s: float | None
    fastest_s: float | None
    limit_s: float | None
    predicted_s: float | None
    plan: Plan | None

    @property
    def name(self) -> str:
        return f"{self.way.name}_{self.network.name}"

    def over(self, other_s: float | None) -> float | None:
        return None if other_s is None else self.seconds / other_s

    def rows(self, *, with_goals: bool) -> Iterator[Row]:
        peer, peer_goal = PEER_GOALS.get(self.way.name, ("", None)) if with_goals else ("", None)
        beats_hook = peer == "fp16_hook"
        yield Row(
            name=self.name,
            value=self.seconds,
            unit="s",
            baseline=self.ddp_s,
            limit=self.limit_s,
            ratio=self.over(self.ddp_s),
            goal=None if beats_hook else peer_goal,
        )
        if self.limit_s is not None:
            goal = LIMIT_GOALS.get(self.way.name) if with_goals else None
            yield Row(name=f"{self.name}_over_limit", value=self.over(self.limit_s), unit="x", limit=1.0, goal=goal)
        if self.way.codec in ("fp16", "bf16") and self.fp16_hook_s is not None:
            goal = peer_goal if beats_hook else None
            yield Row(name=f"{self.name}_over_fp16_hook", value=self.over(self.fp16_hook_s), unit="x", goal=goal)
        if self.way.kind == "joint" and self.fastest_s is not None:
            goal = FASTEST_GOAL if with_goals else None
            yield Row(name=f"{self.name}_over_fastest", value=self.over(self.fastest_s), unit="x", goal=goal)
        if self.predicted_s is not None:
            error = abs(self.predicted_s / self.seconds - 1)
            goal = PREDICTION_GOAL if with_goals else None
            name = f"{self.name}_prediction"
            yield Row(name=name, value=self.predicted_s, unit="s", baseline=self.seconds, ratio=error, goal=goal)


def measure_step(
    options: StepOptions, network: StepNetwork, on_turn: Callable[[str, float], None]
) -> tuple[list[StepTiming], Mapping[str, Sequence[PhaseSpan]]]:
    """Time the ways on one network. Return their timings, and the timelines of the engine.

    on_turn  called after each turn of a way with its name and the fraction of turns done

    Raises ConfigError if the model cannot be read or needs more memory than there is; BenchError if a rank ends
    early; LabError if the lab cannot be made.
    """
    ways = options.ways_on(network)
    workload = Workload.load(options.model, backward_s=options.backward_s, num_ranks=options.num_ranks)
    workload.check_memory()
    job = {
        "model": options.model,
        "backward_s": options.backward_s,
        "network": asdict(network),
        "ways": [asdict(way) for way in ways],
        "num_rounds": options.num_rounds,
        "steps_per_turn": _STEPS_PER_TURN,
    }
    lines = run_ranks(
        "bench.step.rank",
        job,
        name=f"bench step on {network.name}",
        num_ranks=options.num_ranks,
        rate_bit_per_s=network.rate_bit_per_s,
        latency_s=network.latency_s,
    )
    record, done, num_turns = None, 0, options.num_rounds * len(ways)
    for line in lines:
        if line.startswith("{"):
            record = StepRecord.from_json(line)
        else:
            done += 1
            on_turn(f"{network.name}: {line}", done / num_turns)
    assert record is not None
    return timings_of(record, ways, network, workload), record.spans


def timings_of(
    record: StepRecord, ways: Sequence[StepWay], network: StepNetwork, workload: Workload
) -> list[StepTiming]:
    """Return one timing per way, compared with the others of the same run."""
    seconds = {name: median(steps) for name, steps in record.seconds.items()}
    exchanging = [seconds[way.name] for way in ways if way.kind != "noop"]
    fastest_s = min(exchanging) if len(ways) == len(WAYS) else None
    timings = []
    for way in ways:
        plan, noop_s = record.plans.get(way.name), seconds.get(f"noop{way.suffix}")
        limit_s = guess_s = None
        if network.link is not None and noop_s is not None:
            if way.kind != "noop":
                limit_s = workload.limit_s(way, noop_s=noop_s, link=network.link, plan=plan)
            if plan is not None:
                measured = workload.measured(link=network.link, codec_costs=record.codec_costs, compute_s=noop_s)
                guess_s = predicted_s(measured, plan)
        timings.append(
            StepTiming(
                way=way,
                network=network,
                seconds=seconds[way.name],
                ddp_s=seconds.get(f"ddp{way.suffix}"),
                fp16_hook_s=seconds.get("fp16_hook"),
                fastest_s=fastest_s,
                limit_s=limit_s,
                predicted_s=guess_s,
                plan=plan,
            )
        )
    return timings


def rows_of(options: StepOptions, timings: Sequence[StepTiming]) -> list[Row]:
    """Return the timings as rows, after those that say what was run."""
    return [
        Row(name="ranks", value=options.num_ranks, unit="processes"),
        Row(name="rounds", value=options.num_rounds, unit="rounds"),
        Row(name="backward", value=options.backward_s, unit="s"),
        *(row for timing in timings for row in timing.rows(with_goals=options.has_goals)),
    ]


def step_table(options: StepOptions, network: StepNetwork, timings: Sequence[StepTiming]) -> Table:
    """Return a table with one row per way: milliseconds of a step, and ratios within this run."""
    title = (
        f"{options.model}, {options.num_ranks} ranks, {1e3 * options.backward_s:g} ms of backward, {network.title}; "
        "slowest rank, median"
    )
    headings = ("", "ms", "/ DDP", "/ fp16 hook", "limit ms", "/ limit", "predicted ms", "groups")
    table = new_table(title, *headings, gap=0)
    for timing in timings:
        table.add_row(
            timing.way.name,
            _ms(timing.seconds),
            _ratio(timing.over(timing.ddp_s)),
            _ratio(timing.over(timing.fp16_hook_s)),
            _ms(timing.limit_s),
            _ratio(timing.over(timing.limit_s)),
            _ms(timing.predicted_s),
            "" if timing.plan is None else str(len(timing.plan.groups)),
        )
    return table


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.0f}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"

"""`python -m bench step`: seconds of a training step by the way gradients are averaged, on an emulated network.

Real sizes, codecs and exchange; backward sleeps, so that the ranks' "GPUs" fit on few cores. All ways take turns in
every round. A number is the median over all counted steps of the slowest rank's seconds, from the common start until it
holds the averages. The limit is the longer of the step without exchange and of a link that is busy from the first
bucket or group to the end. The prediction is the planner's, with the link as it was set, the step without exchange as
measured, and codec times measured on rank 0 before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click

from bench.shared.ranks import run_ranks
from bench.shared.runner import BenchRun, OnPart, bench_command
from bench.step.cases import (
    FASTEST_GOAL,
    LIMIT_GOALS,
    PEER_GOALS,
    PREDICTION_GOAL,
    SWEEP,
    WAYS,
    StepNetwork,
    StepOptions,
    StepWay,
    networks_of,
    quick_options,
)
from bench.step.workload import Workload, predicted_s
from cgx_ray.commands.options import FILE
from cgx_ray.engine.chrome_trace import PhaseSpan, chrome_trace
from cgx_ray.errors import ConfigError
from cgx_ray.lab.namespaces import Lab
from cgx_ray.plan import Plan
from cgx_ray.planner.candidates import CodecCost, CodecCosts
from cgx_ray.report.result import Row
from cgx_ray.report.show import write_json
from cgx_ray.units import parse_rate, parse_seconds

_STEPS_PER_TURN = 2


@bench_command(quick="A short check: ResNet18, two ranks, one round, few ways, no goals.")
@click.option("--model", default="resnet50", show_default=True, metavar="NAME|FILE", help="As for `cgx-ray plan`.")
@click.option("--backward", default="250ms", show_default=True, help="Backward of a step, which the layers share.")
@click.option("--rate", default="1gbit", show_default=True, help="Rate of every link, such as 100mbit.")
@click.option("--latency", default="0.5ms", show_default=True, help="Latency one way, such as 10ms.")
@click.option("--ranks", default=4, show_default=True, help="Processes, one per host of the lab; the goals are for 4.")
@click.option("--rounds", default=4, show_default=True, help="Rounds; each times two steps of every way.")
@click.option("--ways", metavar="NAME,...", help="Time these only, such as noop,ddp,joint.  [default: all]")
@click.option(
    "--sweep", is_flag=True, help="Sum 1/2, 1/4, ... of each bucket only: what compression can bring at most."
)
@click.option("--trace", type=FILE, help="Write one step's timeline per way of the engine, for ui.perfetto.dev.")
def step(
    run: BenchRun,
    model: str,
    backward: str,
    rate: str,
    latency: str,
    ranks: int,
    rounds: int,
    ways: str | None,
    sweep: bool,
    trace: Path | None,
) -> Iterable[Row]:
    """Time a step with DDP, torch's hooks and the engine.

    The engine runs with several codecs and with the planner's plan, on loopback and on an emulated network. Layers and
    sizes are those of a model; backward only sleeps.
    """
    if sweep and ways is not None:
        raise ConfigError("--sweep has ways of its own; leave --ways out")
    options = StepOptions(
        model=model,
        backward_s=parse_seconds("backward", backward),
        network=StepNetwork(rate_bit_per_s=parse_rate("rate", rate), latency_s=parse_seconds("latency", latency)),
        num_ranks=ranks,
        num_rounds=rounds,
        ways=tuple(SWEEP) if sweep else tuple(ways.split(",")) if ways else (),
    )
    options = quick_options(options) if run.quick else options
    run.title += f", {options.model}, {options.num_ranks} ranks, {1e3 * options.backward_s:g} ms of backward"
    lab_reason = Lab.available(rates_only=not options.network.latency_s)
    timings: list[StepTiming] = []
    spans: Mapping[str, Sequence[PhaseSpan]] = {}
    for network in networks_of(options, lab_reason):
        found, record = measure_step(options, network, options.ways_on(network), run.on_part)
        timings, spans = timings + found, record.spans
    rows = rows_of(options, timings)
    if options.is_whole:
        from cgx_ray.demo.engine_overhead import measure_overhead  # noqa: PLC0415 - it imports torch: 2 s

        run.on_part("the engine behind the demo's model", 1.0)
        rows += measure_overhead()
    if lab_reason is not None:
        run.print_text(f"Left out: the network of {options.network.title}; {lab_reason}.")
    if trace is not None:
        write_json(trace, chrome_trace(spans))
        run.print_text(f"timeline: {trace}")
    return rows


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
    codec_costs: CodecCosts
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
        if self.way.kind == "planned" and self.fastest_s is not None:
            goal = FASTEST_GOAL if with_goals else None
            yield Row(name=f"{self.name}_over_fastest", value=self.over(self.fastest_s), unit="x", goal=goal)
        if self.predicted_s is not None:
            error = abs(self.predicted_s / self.seconds - 1)
            goal = PREDICTION_GOAL if with_goals else None
            name = f"{self.name}_prediction"
            yield Row(name=name, value=self.predicted_s, unit="s", baseline=self.seconds, ratio=error, goal=goal)


def measure_step(
    options: StepOptions, network: StepNetwork, ways: Sequence[StepWay], on_turn: OnPart
) -> tuple[list[StepTiming], StepRecord]:
    """Time `ways` on one network. Return their timings, and what they were made from.

    on_turn  called after each turn of a way with its name and the fraction of turns done

    Raises ConfigError if the model cannot be read or needs more memory than there is; BenchError if a rank ends
    early; LabError if the lab cannot be made.
    """
    workload = Workload.load(
        options.model, backward_s=options.backward_s, num_ranks=options.num_ranks, divisor=options.divisor
    )
    workload.check_memory()
    job = {
        "model": options.model,
        "backward_s": options.backward_s,
        "divisor": options.divisor,
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
    return timings_of(record, ways, network, workload), record


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

"""`python -m bench collectives`: times of schemes between real processes, with Gloo's all-reduce and the bound.

Each time is the median over rounds of the slowest rank's time, from the common start until it holds the average, codecs
included. All cases take turns in every round. The bound is the alpha-beta cost at the set rate and latency. The rate
counts whole frames: 96 % of them is payload in labs with rates only, 99 % in labs with latency (larger frames).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import click

from bench.collectives.cases import (
    BOUND_GOALS,
    GOAL_RANKS,
    PEER,
    SPEEDUP_GOALS,
    Case,
    CollectiveOptions,
    Setting,
    settings_of,
)
from bench.shared.ranks import run_ranks
from bench.shared.runner import BenchRun, OnPart, bench_command
from cgx_ray.lab.namespaces import Lab
from cgx_ray.plan import CodecSpec, Scheme
from cgx_ray.planner.cost import Link, exchange_s
from cgx_ray.report.result import Row


@bench_command(quick="A short check: 4 MB, two rounds, not 100 Mbit/s, no goals.")
@click.option("--ranks", default=4, show_default=True, help="Processes, one per host of the lab; the goals are for 4.")
def collectives(run: BenchRun, ranks: int) -> Iterable[Row]:
    """Time schemes against Gloo and the bound.

    The schemes run over TCP connections of cgx_ray and over Gloo. Gloo's own all-reduce is the alternative.
    """
    options = CollectiveOptions(num_ranks=ranks, quick=run.quick)
    run.title += f", {ranks} ranks, fp32 gradients; slowest rank, median of the rounds"
    lab_reason, latency_reason = Lab.available(), Lab.available(rates_only=False)
    for note in notes(lab_reason, latency_reason):
        run.print_text(note)
    return rows_of(options, measure_collectives(options, settings_of(options, lab_reason, latency_reason), run.on_part))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one case at one setting.

    error    squared norm of what the average is off, over that of the average
    bound_s  seconds that the network alone would take
    """

    case: Case
    setting: Setting
    seconds: float
    error: float
    gloo_s: float
    bound_s: float | None

    def rows(self, *, with_goals: bool) -> list[Row]:
        place = (self.case.name, self.setting.name)
        name = "_".join(place)
        if self.case == PEER:
            return [Row(name=name, value=self.seconds, unit="s", limit=self.bound_s)]
        speedup = SPEEDUP_GOALS.get(place) if with_goals else None
        ratio = self.gloo_s / self.seconds
        rows = [
            Row(
                name=name,
                value=self.seconds,
                unit="s",
                baseline=self.gloo_s,
                limit=self.bound_s,
                ratio=ratio,
                goal=speedup,
            )
        ]
        if self.case.codec != "none":
            rows.append(Row(name=f"{name}_error", value=self.error, unit="of the average's squared norm"))
        if self.bound_s is not None:
            goal = BOUND_GOALS.get(place) if with_goals else None
            rows.append(
                Row(name=f"{name}_over_bound", value=self.seconds / self.bound_s, unit="x", limit=1.0, goal=goal)
            )
        return rows


def measure_collectives(options: CollectiveOptions, settings: Sequence[Setting], on_turn: OnPart) -> list[Timing]:
    """Measure the cases of all `settings`, which takes some 10 minutes.

    on_turn  called before each setting and after each turn of a case with its name and the fraction of turns done

    Raises BenchError if a rank ends early, LabError if the lab cannot be made.
    """
    timings = []
    num_turns = sum((1 + setting.num_rounds) * len(setting.cases) for setting in settings)
    done = 0
    for setting in settings:
        on_turn(setting.name, done / num_turns)
        columns: dict[str, list[float]] = {}
        lines = run_ranks(
            "bench.collectives.rank",
            {
                "numel": setting.numel,
                "num_rounds": setting.num_rounds,
                "cases": [asdict(case) for case in setting.cases],
            },
            name=setting.name,
            num_ranks=options.num_ranks,
            rate_bit_per_s=setting.rate_bit_per_s,
            latency_s=setting.latency_s,
        )
        for line in lines:
            if line.startswith("{"):
                columns = json.loads(line)
            else:
                done += 1
                on_turn(f"{setting.name}: {line}", done / num_turns)
        gloo_s = median(columns[PEER.name][1:])
        timings += [
            Timing(
                case=case,
                setting=setting,
                seconds=median(columns[case.name][1:]),
                error=columns[case.name][0],
                gloo_s=gloo_s,
                bound_s=_bound_s(case, setting, options.num_ranks),
            )
            for case in setting.cases
        ]
    return timings


def rows_of(options: CollectiveOptions, timings: Sequence[Timing]) -> list[Row]:
    """Return `timings` as rows, and the sizes and rounds of their settings."""
    with_goals = options.num_ranks == GOAL_RANKS and not options.quick
    rows = [Row(name="ranks", value=options.num_ranks, unit="processes")]
    for setting in dict.fromkeys(timing.setting for timing in timings):
        rows.append(Row(name=f"gradient_{setting.name}", value=4 * setting.numel, unit="bytes"))
        rows.append(Row(name=f"rounds_{setting.name}", value=setting.num_rounds, unit="rounds"))
    return rows + [row for timing in timings for row in timing.rows(with_goals=with_goals)]


def _bound_s(case: Case, setting: Setting, num_ranks: int) -> float | None:
    if setting.rate_bit_per_s is None:
        return None
    return exchange_s(
        Scheme(case.scheme),
        num_workers=num_ranks,
        dense_bytes=4 * setting.numel,
        wire_bytes=CodecSpec.parse(case.codec).payload_bytes(setting.numel),
        link=Link(alpha_s=setting.latency_s, beta_s_per_byte=8 / setting.rate_bit_per_s),
    )


def notes(lab_reason: str | None, latency_reason: str | None) -> list[str]:
    """Return a line per setting that is not measured, with the reason."""
    reasons = {"1 Gbit/s and 100 Mbit/s": lab_reason, "paths with latency": latency_reason}
    return [f"Left out: {what}; {reason}." for what, reason in reasons.items() if reason is not None]

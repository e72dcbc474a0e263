"""`cgx-ray bench collectives`: how long schemes take between real processes, against Gloo's all-reduce and the bound.

A time is the slowest rank's, from when all begin until it holds the average, codecs included; the median of the rounds.
All cases take turns in every round. The bound is the alpha-beta cost at the set rate and latency. The rate counts whole
frames, of which 96 % is payload in labs with rates only, and 99 % in those with latency, whose frames are larger.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from cgx_ray.errors import CGXError, ConfigError
from cgx_ray.lab.link import LinkChange
from cgx_ray.lab.namespaces import Lab
from cgx_ray.plan import CodecSpec, Scheme
from cgx_ray.planner.cost import Link, exchange_s
from cgx_ray.report.result import Row

GOAL_RANKS = 4
_GOAL_NUMEL = 25_000_000


class BenchError(CGXError, RuntimeError):
    """A rank did not get to its end; the message holds its last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured. `transport`: "tcp", "shm" or "gloo", of messages between ranks; "vendor": all is Gloo's."""

    name: str
    codec: str
    scheme: str
    transport: str


PEER = Case(name="gloo_allreduce", codec="none", scheme="dense", transport="vendor")
CASES = (
    PEER,
    *(
        Case(name=f"{name}_{transport}", codec=codec, scheme=scheme, transport=transport)
        for name, codec, scheme in (
            ("sra_qsgd", "qsgd:bits=4,bucket_size=128", "sra"),
            ("sra_none", "none", "sra"),
            ("allgather_topk", "topk:density=0.01", "allgather"),
        )
        for transport in ("tcp", "gloo")
    ),
)
# Of ranks that share memory, on loopback only: hosts of a lab do not.
SHARED = tuple(
    Case(name=f"{name}_shm", codec=codec, scheme=scheme, transport="shm")
    for name, codec, scheme in (
        ("dense", "none", "dense"),
        ("sra_qsgd", "qsgd:bits=4,bucket_size=128", "sra"),
        ("sra_none", "none", "sra"),
    )
)
# Schemes of our own with nothing compressed. Not broadcast: 600 MB cross the link of its root.
UNCOMPRESSED = (
    PEER,
    *(
        Case(name=f"{scheme}_none_tcp", codec="none", scheme=scheme, transport="tcp")
        for scheme in ("sra", "ring", "tree", "allgather")
    ),
)
DIRECT = (PEER, UNCOMPRESSED[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A network and what is sent over it.

    rate_bit_per_s  None is loopback, which has none to set
    latency_s       one way
    """

    name: str
    rate_bit_per_s: float | None
    numel: int
    num_rounds: int
    latency_s: float = 0.0
    cases: tuple[Case, ...] = CASES


LOOPBACK = Setting(name="loopback", rate_bit_per_s=None, numel=_GOAL_NUMEL, num_rounds=5, cases=(*CASES, *SHARED))
GIGABIT = Setting(name="1gbit", rate_bit_per_s=1e9, numel=_GOAL_NUMEL, num_rounds=5)
# A tenth of the gradient: the same seconds.
SLOW = Setting(name="100mbit", rate_bit_per_s=1e8, numel=_GOAL_NUMEL // 10, num_rounds=3)
# 1 MB and 40 MB of gradient, the rows.
FAR = Setting(name="1mb_10ms", rate_bit_per_s=1e9, numel=250_000, num_rounds=5, latency_s=0.01, cases=DIRECT)
FARTHER = Setting(name="40mb_25ms", rate_bit_per_s=1e9, numel=10_000_000, num_rounds=5, latency_s=0.025, cases=DIRECT)
GRID = tuple(
    Setting(
        name=f"{rate_name}_{latency_ms:g}ms",
        rate_bit_per_s=rate,
        numel=numel,
        num_rounds=3,
        latency_s=latency_ms / 1e3,
        cases=UNCOMPRESSED,
    )
    for rate_name, rate, numel in (("1gbit", 1e9, _GOAL_NUMEL), ("100mbit", 1e8, _GOAL_NUMEL // 10))
    for latency_ms in (0.05, 1, 10, 25)
)
SETTINGS = (LOOPBACK, GIGABIT, SLOW, FAR, FARTHER, *GRID)
QUICK = (
    *(replace(setting, numel=1 << 20, num_rounds=2) for setting in (LOOPBACK, GIGABIT)),
    replace(FAR, num_rounds=2),
)

# By case and setting, for GOAL_RANKS and whole gradients: times faster than Gloo's all-reduce, times the bound.
_SPEEDUP_GOALS = {
    ("dense_shm", "loopback"): ">= 2",
    ("sra_qsgd_tcp", "1gbit"): ">= 6.5",
    ("sra_none_tcp", FAR.name): ">= 4",
    ("sra_none_tcp", FARTHER.name): ">= 2.2",
}
_BOUND_GOALS = {
    ("sra_qsgd_tcp", "1gbit"): "<= 1.25",
    ("sra_none_tcp", "1gbit"): "<= 1.1",
    ("sra_none_tcp", "100mbit"): "<= 1.1",
    **{(case.name, setting.name): "<= 1.1" for setting in GRID for case in UNCOMPRESSED[1:]},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOptions:
    """What to measure: `num_ranks` processes, at every setting or, `quick`, small gradients and no goals."""

    num_ranks: int = GOAL_RANKS
    quick: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= 16:
            raise ConfigError(f"ranks {self.num_ranks} is not allowed; give 2 to 16, goals are for {GOAL_RANKS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one case at one setting, and those that the network alone would take at its rate."""

    case: Case
    setting: Setting
    seconds: float
    gloo_s: float
    bound_s: float | None

    def rows(self, *, with_goals: bool) -> list[Row]:
        place = (self.case.name, self.setting.name)
        name = "_".join(place)
        if self.case == PEER:
            return [Row(name=name, value=self.seconds, unit="s", limit=self.bound_s)]
        speedup = _SPEEDUP_GOALS.get(place) if with_goals else None
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
        if self.bound_s is not None:
            goal = _BOUND_GOALS.get(place) if with_goals else None
            rows.append(
                Row(name=f"{name}_over_bound", value=self.seconds / self.bound_s, unit="x", limit=1.0, goal=goal)
            )
        return rows


def settings_of(options: CollectiveOptions, lab_reason: str | None, latency_reason: str | None) -> tuple[Setting, ...]:
    """The settings to measure, without those that need a lab, or one with latency, if there is a reason against it."""

    def is_possible(setting: Setting) -> bool:
        return setting.rate_bit_per_s is None or (latency_reason if setting.latency_s else lab_reason) is None

    return tuple(setting for setting in (QUICK if options.quick else SETTINGS) if is_possible(setting))


def measure_collectives(
    options: CollectiveOptions, settings: Sequence[Setting], on_turn: Callable[[str, float], None]
) -> list[Timing]:
    """Measure the cases of all `settings`, some 10 minutes.

    on_turn  gets, before each setting and after each turn of a case, where it is and the share of turns that are done

    Raises BenchError if a rank ends before its time, LabError if the lab cannot be made.
    """
    timings = []
    num_turns = sum((1 + setting.num_rounds) * len(setting.cases) for setting in settings)
    done = 0
    for setting in settings:
        on_turn(setting.name, done / num_turns)
        columns: dict[str, list[float]] = {}
        for line in _run_ranks(options.num_ranks, setting):
            if line.startswith("{"):
                columns = json.loads(line)
            else:
                done += 1
                on_turn(f"{setting.name}: {line}", done / num_turns)
        gloo_s = median(columns[PEER.name])
        timings += [
            Timing(
                case=case,
                setting=setting,
                seconds=median(columns[case.name]),
                gloo_s=gloo_s,
                bound_s=_bound_s(case, setting, options.num_ranks),
            )
            for case in setting.cases
        ]
    return timings


def rows_of(options: CollectiveOptions, timings: Sequence[Timing]) -> list[Row]:
    """`timings` as rows, with what they were measured with."""
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


def _run_ranks(num_ranks: int, setting: Setting) -> Iterator[str]:
    """Start the ranks and give out the lines that rank 0 writes."""
    with tempfile.TemporaryDirectory() as folder:
        job: dict[str, Any] = {
            "world_size": num_ranks,
            "numel": setting.numel,
            "num_rounds": setting.num_rounds,
            # Hosts of a lab share the file system, but for their temporary folders.
            "store": str(Path(folder) / "store"),
            "is_loopback": setting.rate_bit_per_s is None,
            "cases": [asdict(case) for case in setting.cases],
        }
        with _starter(num_ranks, setting) as start, _logs(Path(folder), num_ranks) as logs:
            ranks = [
                start(
                    rank,
                    [sys.executable, "-m", "cgx_ray.bench.collective_rank", json.dumps({**job, "rank": rank})],
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=logs[rank],
                    text=True,
                )
                for rank in range(num_ranks)
            ]
            assert ranks[0].stdout is not None
            with ranks[0].stdout as lines:
                yield from (line.rstrip("\n") for line in lines)
            statuses = [process.wait() for process in ranks]
        for rank, status in enumerate(statuses):
            if status != 0:
                tail = "\n".join((Path(folder) / f"rank{rank}.log").read_text(errors="replace").splitlines()[-20:])
                raise BenchError(f"{setting.name}: rank {rank} ended with status {status}:\n{tail}")


@contextmanager
def _logs(folder: Path, num_ranks: int) -> Iterator[list[Any]]:
    logs = [(folder / f"rank{rank}.log").open("w") for rank in range(num_ranks)]
    try:
        yield logs
    finally:
        for log in logs:
            log.close()


@contextmanager
def _starter(num_ranks: int, setting: Setting) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """What starts the process of a rank, given rank, argv and options of `subprocess.Popen`; all end with it."""
    if setting.rate_bit_per_s is not None:
        # A lab with rates only is cheaper, and its frames are those of stock hosts.
        link = LinkChange(rate_bit_per_s=setting.rate_bit_per_s)
        if setting.latency_s:
            link["latency_s"] = setting.latency_s
        with Lab(num_ranks, **link) as lab:
            yield lab.popen
        return
    started: list[subprocess.Popen[str]] = []

    def start(rank: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(argv, **options))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()

"""Workloads and codecs that `python -m bench accuracy` trains, and its options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.adapt.lab_cases import RATE_DIVISOR
from bench.step.cases import ONE_BUCKET_MB, StepWay
from cgx_ray.errors import ConfigError
from cgx_ray.lab.schedule import Schedule, ScheduledAction
from cgx_ray.plan import DENSE, CodecSpec, Option, Scheme, check_period, preferred_scheme
from cgx_ray.planner.fidelity import Fidelity
from cgx_ray.planner.papers.cgx import METHODS as CGX_METHODS
from cgx_ray.session.settings import Settings

WORKLOADS = ("gpt_adamw", "gpt_sgd", "digits")
# Twelve times as large, so its dense steps take seconds at 100 Mbit/s.
LARGE_WORKLOAD = "gpt_demo"
# Targets without noise: the loss falls towards 0, and a codec's share of it grows with the steps.
REGRESSION = "regression"
ASKED_WORKLOADS = (LARGE_WORKLOAD, REGRESSION)
_ALL_WORKLOADS = (*WORKLOADS, *ASKED_WORKLOADS)
# Every codec family whose accuracy the documents state, and what the adaptive policy may choose.
CODECS = (
    "bf16",
    "qsgd:bits=8",
    "qsgd:bits=4",
    "qsgd:bits=3",
    "qsgd:bits=2,bucket_size=128",
    "qsgd:bits=2,bucket_size=64",
    "terngrad",
    "powersgd:rank=4",
    "topk:density=0.1",
    "topk:density=0.033",
    "topk:density=0.01",
    "topk:density=0.001",
    "topk:density=0.01 over artopk_ring",
    "dgc:density=0.01",
    "ef_signsgd",
)
# How the text of a codec ends that is used in rounds of so many steps: "..., every 8 steps".
_EVERY = re.compile(r",\s*every (\d+) steps$")
# The policy with its defaults, and with each other level of fidelity.
ADAPTIVE = ("adaptive", *(f"adaptive {level}" for level in Fidelity if level is not Fidelity.STRICT))
# Bits by layer as CGX chooses them during training, by each of its methods.
CGX = tuple(f"cgx {method}" for method in CGX_METHODS)
# Densities and collectives of top-k as Flexible Communication chooses them during training.
FLEXIBLE = "flexible"
POLICIES = (*ADAPTIVE, *CGX, FLEXIBLE)
# Torch's hooks, and its local SGD, whose gradients are averaged in as many first steps as ours.
TORCH_PEERS = {
    "torch fp16": StepWay(name="fp16", kind="fp16_hook"),
    "torch bf16": StepWay(name="bf16", kind="bf16_hook"),
    **{
        f"torch powersgd {rank}": StepWay(
            name="powersgd", kind="powersgd_hook", codec=f"powersgd:rank={rank}", bucket_cap_mb=ONE_BUCKET_MB
        )
        for rank in (4, 8)
    },
    **{f"torch local_sgd {period}": StepWay(name="local_sgd", kind="local_sgd", period=period) for period in (4, 16)},
}
# Seconds between two choices of bits: a training of the bench takes seconds.
_CGX_REVIEW_S = 5.0
_QUICK_CODECS = ("qsgd:bits=2,bucket_size=128", "topk:density=0.01")
_QUICK_STEPS = 60
# The learning rate warms up for 10 steps, and the loss is validated after each tenth of the steps.
_LEAST_STEPS = 20


def read_option(text: str) -> Option:
    """Read a codec, with its scheme after "over" if it is not the usual one: "topk:density=0.01 over artopk_ring"."""
    codec, has_scheme, scheme = text.strip().partition(" over ")
    if codec == "dense":
        return DENSE
    spec = CodecSpec.parse(codec)
    if has_scheme and scheme.strip() not in set(Scheme):
        raise ConfigError(f"{text!r}: unknown scheme {scheme.strip()!r}; known: {', '.join(Scheme)}")
    return Option(codec=spec, scheme=Scheme(scheme.strip()) if has_scheme else preferred_scheme(spec))


def read_way(text: str) -> tuple[Option, int]:
    """Read an option, and its period: "qsgd:bits=4, every 8 steps"."""
    found = _EVERY.search(text)
    option, period = read_option(_EVERY.sub("", text)), int(found[1]) if found else 1
    check_period(period)
    return option, period


def _canonical(text: str) -> str:
    option, period = read_way(text)
    return str(option) if period == 1 else f"{option}, every {period} steps"


def policy_settings(way: str, *, shared_memory: bool) -> Settings:
    """Return the settings of one of POLICIES."""
    policy, _, given = way.partition(" ")
    if way in CGX:
        return Settings(policy=policy, method=given, review_s=_CGX_REVIEW_S, shared_memory=shared_memory)
    return Settings(policy=policy, fidelity=given or None, shared_memory=shared_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyOptions:
    """Options of the bench.

    codecs          as `read_way` reads them, and those of POLICIES and TORCH_PEERS; dense always runs too
    num_seeds       of weights and batches: 0, 1, ...
    rate_bit_per_s  of the lab's links; None: loopback, where times mean nothing
    schedule        of the lab's links instead, in epochs: a file or "c1" or "c2", each training its whole length
    """

    workloads: tuple[str, ...] = WORKLOADS
    codecs: tuple[str, ...] = CODECS
    num_seeds: int = 3
    num_steps: int = 300
    num_ranks: int = 4
    rate_bit_per_s: float | None = None
    schedule: str | None = None

    def __post_init__(self) -> None:
        for name in self.workloads:
            if name not in _ALL_WORKLOADS:
                raise ConfigError(f"unknown workload {name!r}; known: {', '.join(_ALL_WORKLOADS)}")
        if not self.workloads:
            raise ConfigError(f"no workload is given; give some of {', '.join(_ALL_WORKLOADS)}")
        if self.num_seeds < 1:
            raise ConfigError(f"seeds {self.num_seeds} is not allowed; give 1 or more")
        if self.num_steps < _LEAST_STEPS:
            raise ConfigError(f"steps {self.num_steps} is not allowed; give {_LEAST_STEPS} or more")
        if not 2 <= self.num_ranks <= 16:
            raise ConfigError(f"ranks {self.num_ranks} is not allowed; give 2 to 16")
        if self.schedule is not None and self.rate_bit_per_s is not None:
            raise ConfigError("rate and schedule both say what the links are; give one of them")
        self.ways, self.schedule_of_a_training  # noqa: B018 - raise on codecs and schedules that are not allowed

    @property
    def is_timed(self) -> bool:
        return self.rate_bit_per_s is not None or self.schedule is not None

    @property
    def num_trainings(self) -> int:
        return self.num_seeds * len(self.workloads) * len(self.ways)

    @property
    def schedule_of_a_training(self) -> Schedule | None:
        """The schedule in steps, over the whole training, with its rates divided."""
        if self.schedule is None:
            return None
        read = Schedule.read(self.schedule)
        played = read.with_epoch(self.num_steps / read.end, "step")
        return replace(played, events=tuple(map(_with_divided_rate, played.events)))

    @property
    def schedule_of_all(self) -> Schedule | None:
        """The same, once for each training, one after the other."""
        one = self.schedule_of_a_training
        if one is None:
            return None
        begins = (index * self.num_steps for index in range(self.num_trainings))
        events = (replace(event, at=begin + event.at) for begin in begins for event in one.events)
        return replace(one, events=tuple(events))

    @property
    def ways(self) -> tuple[str, ...]:
        """Dense, then the codecs over their schemes, the policies and torch's hooks, each once, as text."""
        known = {*POLICIES, *TORCH_PEERS}
        given = (text if text in known else _canonical(text) for text in map(str.strip, self.codecs))
        return tuple(dict.fromkeys([str(DENSE), *given]))


def _with_divided_rate(event: ScheduledAction) -> ScheduledAction:
    change = event.change.copy()
    if "rate_bit_per_s" in change:
        change["rate_bit_per_s"] /= RATE_DIVISOR
    return replace(event, change=change)


def quick_options(options: AccuracyOptions) -> AccuracyOptions:
    """Return a check of minutes: one seed, few steps, and two codecs unless others were given."""
    codecs: Sequence[str] = _QUICK_CODECS if options.codecs == CODECS else options.codecs
    return replace(options, codecs=tuple(codecs), num_seeds=1, num_steps=min(options.num_steps, _QUICK_STEPS))

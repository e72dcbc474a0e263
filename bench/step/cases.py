"""Ways to average gradients that `python -m bench step` compares, the networks it does so on, and the goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cgx_ray.errors import ConfigError
from cgx_ray.planner.cost import Link
from cgx_ray.units import compact_rate, format_rate, format_seconds

# "local_sgd": torch's hook and averager of parameters; "truncated": the vendor sums a part of each bucket;
# "torchft_...": see `step.torchft_rounds`; "grace": see `step.grace`; "engine": with one codec; "planned": with a plan
# of `step.plans`.
Kind = Literal[
    "noop",
    "ddp",
    "fp16_hook",
    "bf16_hook",
    "powersgd_hook",
    "local_sgd",
    "truncated",
    "torchft_local_sgd",
    "torchft_diloco",
    "grace",
    "engine",
    "planned",
]
# No bucket ends before this many MB: one bucket for the whole model.
ONE_BUCKET_MB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWay:
    """A way to average gradients behind DistributedDataParallel.

    codec          of kinds "engine", "grace" and "powersgd_hook"
    scheme         of kind "engine"
    period         steps between two exchanges; with more than 1, a step is the mean one of a round
    planner        of kind "planned", a name in `step.plans.PLANNERS`
    bucket_cap_mb  None: DDP's default, a first bucket of 1 MiB and then 25 MiB
    share_sent     of kind "truncated": share of a bucket that is summed
    """

    name: str
    kind: Kind
    codec: str = "none"
    scheme: str = "dense"
    period: int = 1
    planner: str = ""
    bucket_cap_mb: int | None = None
    share_sent: float = 1.0

    @property
    def has_engine(self) -> bool:
        return self.kind in ("engine", "planned")

    @property
    def sends_after_backward(self) -> bool:
        """True if nothing is sent before backward has ended."""
        return self.period > 1 or self.kind == "grace"

    @property
    def suffix(self) -> str:
        """End of the name of the ways with the same buckets."""
        return "" if self.bucket_cap_mb in (None, ONE_BUCKET_MB) else f"_{self.bucket_cap_mb}mb"


_USUAL_BUCKETS = (
    StepWay(name="noop", kind="noop"),
    StepWay(name="ddp", kind="ddp"),
    StepWay(name="fp16_hook", kind="fp16_hook"),
    StepWay(name="bf16_hook", kind="bf16_hook"),
    # With several buckets it deadlocks on Gloo: its callbacks wait for other callbacks of the same thread.
    StepWay(name="powersgd_hook", kind="powersgd_hook", codec="powersgd:rank=4", bucket_cap_mb=ONE_BUCKET_MB),
    StepWay(name="engine_dense", kind="engine"),
    StepWay(name="engine_fp16", kind="engine", codec="fp16", scheme="allreduce"),
    StepWay(name="engine_bf16", kind="engine", codec="bf16", scheme="sra"),
    StepWay(name="engine_qsgd", kind="engine", codec="qsgd:bits=4,bucket_size=128", scheme="sra"),
    StepWay(name="engine_rounds", kind="engine", codec="qsgd:bits=4,bucket_size=128", scheme="sra", period=8),
    StepWay(name="engine_topk", kind="engine", codec="topk:density=0.01", scheme="allgather"),
    StepWay(name="joint", kind="planned", planner="joint"),
)
_IN_BOTH = ("noop", "ddp", "engine_dense", "engine_qsgd", "joint")
_SMALL_BUCKETS = tuple(
    replace(way, name=f"{way.name}_4mb", bucket_cap_mb=4) for way in _USUAL_BUCKETS if way.name in _IN_BOTH
)
WAYS = {way.name: way for way in (*_USUAL_BUCKETS, *_SMALL_BUCKETS)}
# What compression could bring at most: a codec that takes no time (CGX, Figure 1 and Table 8, which call this N/gamma).
SWEEP = {
    way.name: way
    for way in (
        WAYS["noop"],
        WAYS["ddp"],
        *(
            StepWay(name=f"sum_of_1_{gamma}", kind="truncated", share_sent=1 / gamma)
            for gamma in (2, 4, 8, 16, 32, 64, 256)
        ),
    )
}
# On loopback nothing limits the rate, so neither a limit nor a plan is known there.
LOOPBACK_WAYS = tuple(
    way for way in WAYS.values() if way.kind in ("noop", "ddp") or (way.kind, way.codec) == ("engine", "none")
)
_QUICK_WAYS = ("noop", "ddp", "engine_qsgd", "joint", "sum_of_1_4")

# Largest seconds of a way as multiples of another way's, and of its limit.
PEER_GOALS = {
    "engine_dense": ("ddp", "<= 1.03"),
    "engine_dense_4mb": ("ddp_4mb", "<= 1.03"),
    "engine_fp16": ("fp16_hook", "<= 1"),
    "engine_bf16": ("fp16_hook", "<= 1"),
}
LIMIT_GOALS = dict.fromkeys(("engine_qsgd", "engine_qsgd_4mb", "engine_topk"), "<= 1.25")
FASTEST_GOAL = "<= 1.02"
# Largest relative error of the planner's prediction.
PREDICTION_GOAL = "<= 0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNetwork:
    """A network between the ranks. `rate_bit_per_s`: None for loopback; `latency_s`: one way."""

    rate_bit_per_s: float | None
    latency_s: float = 0.0

    @property
    def name(self) -> str:
        if self.rate_bit_per_s is None:
            return "loopback"
        return f"{compact_rate(self.rate_bit_per_s)}_{1e3 * self.latency_s:g}ms"

    @property
    def title(self) -> str:
        if self.rate_bit_per_s is None:
            return "loopback"
        return f"{format_rate(self.rate_bit_per_s)}, {format_seconds(self.latency_s)} one way"

    @property
    def link(self) -> Link | None:
        """The link as it was set; None for loopback, whose rate nobody set."""
        if self.rate_bit_per_s is None:
            return None
        return Link(alpha_s=self.latency_s, beta_s_per_byte=8 / self.rate_bit_per_s)


LOOPBACK = StepNetwork(rate_bit_per_s=None)
GOAL_NETWORK = StepNetwork(rate_bit_per_s=1e9, latency_s=0.5e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Options of the bench.

    model       a name or file of `planner.models.load_model`
    backward_s  seconds of backward, which the layers share
    network     of the lab
    ways        names in `WAYS`; empty: all
    quick       small model, two ranks, one round, few ways, no goals
    divisor     layers have so many times fewer elements than the model's, and DDP's buckets too
    """

    model: str = "resnet50"
    backward_s: float = 0.25
    network: StepNetwork = GOAL_NETWORK
    num_ranks: int = 4
    num_rounds: int = 4
    ways: Sequence[str] = ()
    quick: bool = False
    divisor: float = 1.0

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= 16:
            raise ConfigError(f"ranks {self.num_ranks} is not allowed; give 2 to 16; goals are for 4")
        if self.num_rounds < 1:
            raise ConfigError(f"rounds {self.num_rounds} is not allowed; give 1 or more, such as 4")
        if not 0 < self.backward_s <= 60:
            raise ConfigError(f"backward {self.backward_s:g} s is not allowed; give more than 0 s and at most 60 s")
        if unknown := [name for name in self.ways if name not in WAYS | SWEEP]:
            raise ConfigError(f"unknown way {unknown[0]!r}; known: {', '.join(WAYS)}")

    @property
    def has_goals(self) -> bool:
        """True if the goals are for this model, network and number of ranks."""
        usual = StepOptions()
        asked = (self.model, self.backward_s, self.network, self.num_ranks)
        return not self.quick and asked == (usual.model, usual.backward_s, usual.network, usual.num_ranks)

    @property
    def is_whole(self) -> bool:
        """True if every goal is judged: all ways, on loopback too."""
        return self.has_goals and not self.ways

    def ways_on(self, network: StepNetwork) -> tuple[StepWay, ...]:
        """Return the ways to time on `network`, in the order of `WAYS`."""
        names = self.ways or (_QUICK_WAYS if self.quick else tuple(WAYS))
        possible = LOOPBACK_WAYS if network == LOOPBACK else tuple((WAYS | SWEEP).values())
        return tuple(way for way in possible if way.name in names)


def quick_options(options: StepOptions) -> StepOptions:
    """Return the options of a short check of the bench itself."""
    return replace(options, model="resnet18", backward_s=0.05, num_ranks=2, num_rounds=1, quick=True)


def networks_of(options: StepOptions, lab_reason: str | None) -> tuple[StepNetwork, ...]:
    """Return the networks to measure on: loopback too in a whole run, and alone if no lab works here.

    lab_reason  why no lab works here; None if it works
    """
    if lab_reason is not None:
        return (LOOPBACK,)
    return (LOOPBACK, options.network) if options.is_whole else (options.network,)

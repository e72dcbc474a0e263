"""Cases of `python -m bench collectives`: schemes, networks, sizes and goals."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cgx_ray.errors import ConfigError

GOAL_RANKS = 4
_GOAL_NUMEL = 25_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A codec and a scheme. `transport` carries messages: "tcp", "shm" or "gloo"; "vendor" is Gloo's all-reduce."""

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
# The schemes that CGX compares with sra (its Figure 10), with the same codec.
CODED = tuple(
    Case(name=f"{scheme}_qsgd_tcp", codec="qsgd:bits=4,bucket_size=128", scheme=scheme, transport="tcp")
    for scheme in ("ring", "tree", "allgather")
)
# For ranks that share memory: on loopback only, because hosts of a lab do not share any.
SHARED = tuple(
    Case(name=f"{name}_shm", codec=codec, scheme=scheme, transport="shm")
    for name, codec, scheme in (
        ("dense", "none", "dense"),
        ("sra_qsgd", "qsgd:bits=4,bucket_size=128", "sra"),
        ("sra_none", "none", "sra"),
    )
)
# Our own schemes without compression. Broadcast is left out: its root would send and receive 600 MB.
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
    """A network, the size of the gradient, and the cases to time there.

    rate_bit_per_s  None: loopback, which has no rate to set
    latency_s       one way
    """

    name: str
    rate_bit_per_s: float | None
    numel: int
    num_rounds: int
    latency_s: float = 0.0
    cases: tuple[Case, ...] = CASES


LOOPBACK = Setting(name="loopback", rate_bit_per_s=None, numel=_GOAL_NUMEL, num_rounds=5, cases=(*CASES, *SHARED))
GIGABIT = Setting(name="1gbit", rate_bit_per_s=1e9, numel=_GOAL_NUMEL, num_rounds=5, cases=(*CASES, *CODED))
# A tenth of the gradient, so that it takes the same time.
SLOW = Setting(name="100mbit", rate_bit_per_s=1e8, numel=_GOAL_NUMEL // 10, num_rounds=3)
# 1 MB and 40 MB of gradient.
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

# Goals by case and setting, for GOAL_RANKS and full sizes: speed-up over Gloo's all-reduce, and time over the bound.
SPEEDUP_GOALS = {
    ("dense_shm", "loopback"): ">= 2",
    ("sra_qsgd_tcp", "1gbit"): ">= 6.5",
    ("sra_none_tcp", FAR.name): ">= 4",
    ("sra_none_tcp", FARTHER.name): ">= 2.2",
}
BOUND_GOALS = {
    ("sra_qsgd_tcp", "1gbit"): "<= 1.25",
    ("sra_none_tcp", "1gbit"): "<= 1.1",
    ("sra_none_tcp", "100mbit"): "<= 1.1",
    **{(case.name, setting.name): "<= 1.1" for setting in GRID for case in UNCOMPRESSED[1:]},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOptions:
    """Options of the bench. `quick`: small gradients, few settings, no goals."""

    num_ranks: int = GOAL_RANKS
    quick: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= 16:
            raise ConfigError(f"ranks {self.num_ranks} is not allowed; give 2 to 16; goals are for {GOAL_RANKS}")


def settings_of(options: CollectiveOptions, lab_reason: str | None, latency_reason: str | None) -> tuple[Setting, ...]:
    """Return the settings to measure.

    lab_reason, latency_reason  why no lab, or no lab with latency, works here; None if it works
    """

    def is_possible(setting: Setting) -> bool:
        return setting.rate_bit_per_s is None or (latency_reason if setting.latency_s else lab_reason) is None

    return tuple(setting for setting in (QUICK if options.quick else SETTINGS) if is_possible(setting))

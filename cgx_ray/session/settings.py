"""Settings of a run, checked where the user writes them, before any worker starts."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from cgx_ray.collectives.transport.lifeline import SILENT_S
from cgx_ray.collectives.transport.simulated_link import SimulatedLink
from cgx_ray.collectives.transport.tcp import NUM_STREAMS
from cgx_ray.collectives.transport.transport import DEFAULT_TIMEOUT_S
from cgx_ray.errors import ConfigError
from cgx_ray.plan import (
    DEFAULT_GROUP_BYTES,
    DENSE,
    FIRST_GROUP_BYTES,
    NONE,
    CodecSpec,
    Given,
    Intra,
    Layer,
    Option,
    Plan,
    Scheme,
    as_option,
    make_plan,
)
from cgx_ray.planner.bits import QSGD, WIDTHS, bits_of
from cgx_ray.planner.fidelity import Fidelity, codecs_of
from cgx_ray.planner.papers.cgx import METHODS as CGX_METHODS
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.planner.papers.flexible import METHODS as FLEXIBLE_METHODS

POLICIES = ("adaptive", "cgx", "flexible", "static")
# Of the papers' policies, the default first.
METHODS = {"cgx": tuple(CGX_METHODS), "flexible": FLEXIBLE_METHODS}
# Policies that decide during training.
DECIDING = tuple(policy for policy in POLICIES if policy != "static")
TRANSPORTS = ("tcp", "gloo")
# Seconds. As `control.policy.REVIEW_S`, which is not imported here: sessions know no controller.
REVIEW_S = 60.0
# Steps between two comparisons of the weights: hashing 1 GB of them takes 0.1 s, which is 0.2 % of steps of 0.1 s.
WEIGHT_CHECK_STEPS = 500
# 31 years. Python and torch refuse to wait for some larger numbers of seconds.
MAX_TIMEOUT_S = 1e9


def is_timeout(timeout_s: object) -> bool:
    """Return True if `timeout_s` is a number of seconds that the run can wait."""
    return isinstance(timeout_s, int | float) and math.isfinite(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S


# Not frozen and not keyword-only: CGXConfig inherits these fields beside those of Ray's TorchConfig, which is neither.
@dataclass
class Settings:
    """Settings that all workers of a run share. Raises ConfigError on a value that is not allowed.

    policy          "adaptive": start dense, measure, decide, and decide again when the network changes. "static": use
                    `codec` over `scheme` for the whole run. "cgx" and "flexible": as these papers decide, qsgd with
                    bits by layer, or top-k with density and collective of the moment; they do not promise to be no
                    slower than dense
    method          for policy "cgx": "kmeans" (default), "linear", "bayes" or "dp"; for policy "flexible": "knee"
                    (default) or "nsga2", which needs pymoo
    review_s        policies "adaptive" and "cgx": seconds after a decision until they are asked again without any other
                    cause
    codec, scheme   for policy "static". The codec is a CodecSpec, or text for `CodecSpec.parse`
    intra           for policy "static": "dense" or "compressed" sums inside nodes first, see `collectives.hierarchical`
    fidelity        codecs that policy "adaptive" may choose, by the loss that they were measured to cost: "strict" at
                    most 1 % over dense, "balanced" 5 %, "fast" also top-k. See `planner.fidelity`
    densities       densities of top-k for fidelity "fast"; None: 0.1, 0.033, 0.011, 0.004 and 0.001
    value_bits      bits of the values of top-k at these densities: 32, 16, 8 or 4
    candidates      codecs that policy "adaptive" may choose, as text for `CodecSpec.parse`, in place of those of a
                    fidelity
    overrides       layer rules that every plan of every policy keeps: codecs, options, or tuples of codec, scheme and
                    optionally intra, by pattern of layer names as in a shell. The first pattern that matches counts.
                    What such layers lose is not judged
    exclude         patterns of layers that are never compressed; they come before `overrides`
    min_gain        policy "adaptive" leaves out codecs whose gain is smaller. For codecs without error feedback whose
                    loss was measured, dense's loss over theirs takes the place of the gain
    group_bytes     dense bytes that are encoded and sent together; None: 25 MiB, and dense groups as DDP's buckets if
                    those are smaller. Policies other than "static" use it until their first decision
    seed            of the codecs' random numbers
    transport       between two ranks: "tcp" is cgx_ray's own connections, "gloo" is torch.distributed's
    num_streams     with "tcp": number of connections between two ranks whose round trip takes 5 ms or more. Short
                    messages are spread over them. Ranks with a shorter round trip have one connection
    shared_memory   with "tcp": ranks of one host talk through shared memory where they can
    timeout_s       seconds until a peer that does not answer counts as gone; also the longest time between two
                    buckets of a step
    silent_s        seconds without a sign of life after which a rank counts as stopped, and the others raise an error.
                    A rank that computes, waits, or holds Python's lock for long gives signs of life; one that is
                    paused, or whose host is cut off or gone, does not
    weight_check_steps
                    DDP models: steps between two comparisons of the ranks' weights; 0 for none. Ranks that hold other
                    weights than the others train another model, so all ranks then raise ReplicaError, or warn if
                    rounding may be the cause. It hashes all weights once in so many steps, some 10 GB/s
    average_weights DDP models: if a comparison finds that the weights differ by rounding, replace them by their mean
                    before the next step but one, the same bits on all ranks. It sends them in float64, in the first
                    forward pass with gradients, so no rank may make one alone (validate under `torch.no_grad()`)
    trace_steps     first and last step of which every rank writes what its groups did when, in the format of Chrome's
                    and Perfetto's traces, to `trace-rankNNNNN.json` in the run's folder
    simulated_link  holds messages back as a slow link would; for demos and tests
    """

    policy: str = "adaptive"
    codec: str = "qsgd"
    scheme: str = "sra"
    intra: str = "flat"
    fidelity: str = Fidelity.STRICT.value
    densities: tuple[float, ...] | None = None
    value_bits: int = 32
    candidates: tuple[str, ...] | None = None
    overrides: Mapping[str, Given] | None = None
    exclude: tuple[str, ...] = ()
    min_gain: float = 0.8
    method: str | None = None
    review_s: float = REVIEW_S
    group_bytes: int | None = None
    seed: int = 0
    transport: str = "tcp"
    num_streams: int = NUM_STREAMS
    shared_memory: bool = True
    timeout_s: float = DEFAULT_TIMEOUT_S
    silent_s: float = SILENT_S
    weight_check_steps: int = WEIGHT_CHECK_STEPS
    average_weights: bool = False
    simulated_link: SimulatedLink | None = None
    trace_steps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        names = {
            "policy": POLICIES,
            "scheme": tuple(Scheme),
            "intra": tuple(Intra),
            "fidelity": tuple(Fidelity),
            "transport": TRANSPORTS,
        }
        for name, known in names.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        counts = ("group_bytes", "num_streams", "weight_check_steps", "seed")
        whole = {name: getattr(self, name) for name in counts}
        if whole["group_bytes"] is None:
            del whole["group_bytes"]
        for name, value in whole.items():
            if not isinstance(value, int):
                raise ConfigError(f"{name} {value!r} is not allowed; give a whole number")
            least = {"seed": -math.inf, "weight_check_steps": 0}.get(name, 1)
            if value < least:
                raise ConfigError(f"{name} {value!r} is not allowed; give {least} or more")
        if not isinstance(self.min_gain, int | float) or not 0 <= self.min_gain <= 1:
            raise ConfigError(
                f"min_gain {self.min_gain!r} is not in [0, 1]; 0.8 keeps 80 % of the gradient's squared norm"
            )
        if not isinstance(self.simulated_link, SimulatedLink | None):
            raise ConfigError(
                f"simulated_link {self.simulated_link!r} is not allowed; give a SimulatedLink, such as "
                "SimulatedLink(latency_s=1e-3, schedule=((0, 1e8),)) for 100 Mbit/s"
            )
        self._check_choice()
        self._check_method()
        self._check_transport()
        self._check_candidates()
        self._check_trace()
        self._check_rules()

    def _check_candidates(self) -> None:
        if self.densities is not None:
            if not isinstance(self.densities, tuple | list):
                raise ConfigError(f"densities {self.densities!r} is not allowed; give a tuple such as (0.1, 0.01)")
            for density in self.densities:
                CodecSpec(name="topk", density=density)
            if self.densities and self.fidelity != Fidelity.FAST:
                raise ConfigError(
                    f"densities {self.densities!r} are not allowed with fidelity {str(self.fidelity)!r}, which chooses "
                    "codecs by their measured loss; give fidelity='fast' to allow top-k at these densities, or leave "
                    "densities out"
                )
        if self.value_bits != 32:
            CodecSpec(name="topk", value_bits=self.value_bits)
            if self.fidelity != Fidelity.FAST or self.candidates is not None:
                raise ConfigError(
                    f"value_bits {self.value_bits!r} is for top-k at `densities`; give fidelity='fast', or name it "
                    f"among the candidates, such as 'topk:density=0.1,value_bits={self.value_bits}'"
                )
        if self.candidates is None:
            return
        if not isinstance(self.candidates, tuple | list) or not self.candidates:
            raise ConfigError(
                f"candidates {self.candidates!r} is not allowed; give one codec or more, such as "
                "('qsgd:bits=4', 'topk:density=0.1'), or None to choose by fidelity"
            )
        if self.densities:
            raise ConfigError(
                f"densities {self.densities!r} and candidates are both given; name the densities among the candidates, "
                f"such as 'topk:density={self.densities[0]:g}'"
            )
        # As text, so that settings that mean the same are the same.
        self.candidates = tuple(
            str(codec if isinstance(codec, CodecSpec) else CodecSpec.parse(codec)) for codec in self.candidates
        )

    def _check_method(self) -> None:
        allowed = METHODS.get(self.policy, ())
        if self.method is not None and self.method not in allowed:
            hint = f"give one of {', '.join(allowed)}" if allowed else "leave it out"
            raise ConfigError(f"method {self.method!r} is not allowed with policy {self.policy!r}; {hint}")
        if self.method == "nsga2" and importlib.util.find_spec("pymoo") is None:
            raise ConfigError("method 'nsga2' needs pymoo; pip install \"cgx-ray[nsga2]\", or give method='knee'")
        if self.policy in ("flexible", "static") and self.review_s != REVIEW_S:
            raise ConfigError(f"review_s is not used by policy {self.policy!r}; leave it out")
        if not is_timeout(self.review_s):
            raise ConfigError(f"review_s {self.review_s!r} is not allowed; give seconds above 0, such as {REVIEW_S:g}")
        is_chosen = self.candidates is not None or self.densities is not None or self.fidelity != Fidelity.STRICT
        if allowed and is_chosen:
            raise ConfigError(
                f"policy {self.policy!r} chooses among its own codecs; leave out fidelity, densities and candidates, "
                "or give policy='adaptive'"
            )

    @property
    def used_method(self) -> str:
        """`method`, or the default of a paper's policy."""
        return self.method or METHODS[self.policy][0]

    def codecs_by_layer(self) -> tuple[CodecSpec, ...]:
        """Return the codecs whose errors the policy needs by layer: qsgd with each number of bits to choose from."""
        if self.policy not in ("adaptive", "cgx"):
            return ()
        widths = WIDTHS if self.policy == "cgx" else bits_of(self.candidate_codecs())
        return tuple(replace(QSGD, bits=bits) for bits in widths)

    def gain_codecs(self) -> tuple[CodecSpec, ...]:
        """Return the codecs whose gains the policy needs; those of bits by layer follow from the errors."""
        codecs = (QSGD,) if self.policy == "cgx" else self.candidate_codecs()
        return tuple(codec for codec in codecs if codec != NONE) if self.decides else ()

    def _check_rules(self) -> None:
        """Turn the values of `overrides` into options, so that settings that mean the same are the same."""
        if not isinstance(self.exclude, tuple | list) or not all(isinstance(one, str) for one in self.exclude):
            raise ConfigError(
                f"exclude {self.exclude!r} is not allowed; give patterns of layers, such as ('lm_head*',)"
            )
        self.exclude = tuple(self.exclude)
        if self.overrides is None:
            return
        if not isinstance(self.overrides, Mapping) or not all(isinstance(one, str) for one in self.overrides):
            raise ConfigError(
                f"overrides {self.overrides!r} is not allowed; give codecs by pattern of layers, such as "
                "{'lm_head*': 'none', '*embedding*': ('topk:density=0.01', 'allgather')}"
            )
        self.overrides = {pattern: as_option(given) for pattern, given in self.overrides.items()}
        if twice := sorted(self.overrides.keys() & set(self.exclude)):
            raise ConfigError(f"pattern {twice[0]!r} is in overrides and in exclude; give it in one of them")
        if any(option.intra is not Intra.FLAT for option in self._rules().values()):
            self._check_shared_memory("an override with intra")

    def _rules(self) -> dict[str, Option]:
        """Return the option of each pattern of layer names; the first that matches counts."""
        overrides = {pattern: as_option(given) for pattern, given in (self.overrides or {}).items()}
        return dict.fromkeys(self.exclude, DENSE) | overrides

    @property
    def decides(self) -> bool:
        """True if the policy decides during training, so that it needs gains and codec times."""
        return self.policy in DECIDING

    def timed_codecs(self) -> tuple[CodecSpec, ...]:
        """Return the codecs whose times the policy needs: candidates, and those of layer rules."""
        return tuple(dict.fromkeys([*self.candidate_codecs(), *(option.codec for option in self._rules().values())]))

    def candidate_codecs(self) -> tuple[CodecSpec, ...]:
        """Return none, and the codecs that the policy may choose."""
        if self.policy == "cgx":
            return NONE, *self.codecs_by_layer()
        if self.policy == "flexible":
            return NONE, *(CodecSpec(name="topk", density=density) for density in CANDIDATE_DENSITIES)
        if self.candidates is not None:
            return tuple(dict.fromkeys([NONE, *map(CodecSpec.parse, self.candidates)]))
        return tuple(self._fidelity_codecs())

    def _fidelity_codecs(self) -> Iterator[CodecSpec]:
        for codec in codecs_of(self.fidelity, CANDIDATE_DENSITIES if self.densities is None else self.densities):
            yield codec if codec.value_bits is None else replace(codec, value_bits=self.value_bits)

    def _check_choice(self) -> None:
        if isinstance(self.codec, CodecSpec):
            self.codec = str(self.codec)
        codec, scheme, intra = CodecSpec.parse(self.codec), Scheme(self.scheme), Intra(self.intra)
        Option(codec=codec, scheme=scheme, intra=intra)
        if self.decides and (self.codec, scheme, intra) != ("qsgd", Scheme.SRA, Intra.FLAT):
            raise ConfigError(
                f"codec {self.codec!r} over {self.scheme!r}, intra {self.intra!r} is not allowed with policy "
                f"{self.policy!r}, which chooses for itself; leave them out, or give policy='static'"
            )

    def _check_transport(self) -> None:
        for name in ("shared_memory", "average_weights"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} {getattr(self, name)!r} is not allowed; give True or False")
        if self.average_weights and not self.weight_check_steps:
            raise ConfigError(
                "average_weights needs comparisons of the weights; give weight_check_steps above 0, such as "
                f"{WEIGHT_CHECK_STEPS}"
            )
        for name, usual in (("timeout_s", DEFAULT_TIMEOUT_S), ("silent_s", SILENT_S)):
            if not is_timeout(getattr(self, name)):
                raise ConfigError(
                    f"{name} {getattr(self, name)!r} is not allowed; give seconds above 0 and at most "
                    f"{MAX_TIMEOUT_S:g}, such as {usual:g}"
                )
        if self.intra != Intra.FLAT:
            self._check_shared_memory(f"intra {self.intra!r}")

    def _check_shared_memory(self, what: str) -> None:
        if not (self.transport == "tcp" and self.shared_memory):
            raise ConfigError(
                f"{what} needs ranks that share memory; give transport='tcp' and shared_memory=True, or intra='flat'"
            )

    def _check_trace(self) -> None:
        steps = self.trace_steps
        if steps is None:
            return
        is_pair = isinstance(steps, tuple | list) and len(steps) == 2 and all(isinstance(one, int) for one in steps)
        if not is_pair or not 0 <= steps[0] <= steps[1]:
            raise ConfigError(f"trace_steps {steps!r} is not allowed; give first and last step, such as (100, 110)")
        self.trace_steps = (steps[0], steps[1])

    def texts(self) -> dict[str, str]:
        """Return each setting as text, the same for values that mean the same."""
        plain = {
            "codec": str(CodecSpec.parse(self.codec)),
            "scheme": str(self.scheme),
            "intra": str(self.intra),
            "fidelity": str(self.fidelity),
            "timeout_s": float(self.timeout_s),
            "silent_s": float(self.silent_s),
        }
        return {field.name: repr(plain.get(field.name, getattr(self, field.name))) for field in fields(Settings)}

    def first_plan(self, layers: Sequence[Layer], world_size: int, bucket_bytes: int) -> Plan:
        """Return plan 0: dense, or with policy "static" `codec` over `scheme`, except where layer rules say otherwise.

        bucket_bytes  of DDP. Dense groups are its buckets: then they are summed in place, as early as DDP would
        """
        choice = (NONE, Scheme.DENSE, Intra.FLAT)
        if self.policy == "static":
            choice = (CodecSpec.parse(self.codec), Scheme(self.scheme), Intra(self.intra))
        codec, scheme, intra = choice
        group_bytes, first_bytes = self.group_bytes or DEFAULT_GROUP_BYTES, FIRST_GROUP_BYTES
        if self.group_bytes is None and scheme is Scheme.DENSE and bucket_bytes < DEFAULT_GROUP_BYTES:
            # The first bucket of DDP is smaller than the others only by default.
            group_bytes = first_bytes = bucket_bytes
        return make_plan(
            layers,
            version=0,
            world_size=world_size,
            codec=codec,
            scheme=scheme,
            intra=intra,
            group_bytes=group_bytes,
            first_bytes=first_bytes,
            overrides=self._rules(),
        )

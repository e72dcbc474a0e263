"""Settings of a run, checked where the user writes them, before any worker starts."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, fields, is_dataclass
from typing import Any

from cgx_ray.collectives.transport.lifeline import SILENT_S
from cgx_ray.collectives.transport.simulated_link import SimulatedLink
from cgx_ray.collectives.transport.tcp import NUM_STREAMS
from cgx_ray.collectives.transport.transport import DEFAULT_TIMEOUT_S
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.named_policies import as_policy
from cgx_ray.control.policies.policy import Policy, Static
from cgx_ray.errors import ConfigError, unknown
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
    is_known_everywhere,
    make_plan,
)
from cgx_ray.planner.bits import STATIC_BITS, bits_of

TRANSPORTS = ("tcp", "gloo")
# Steps between two comparisons of the weights: hashing 1 GB of them takes 0.1 s, which is 0.2 % of steps of 0.1 s.
WEIGHT_CHECK_STEPS = 500
# 31 years. Python and torch refuse to wait for some larger numbers of seconds.
MAX_TIMEOUT_S = 1e9
# Names the policy of a run in place of the one in its script.
VARIABLE = "CGX_POLICY"
# Arguments that mean the policy "static" where no policy is given.
OF_STATIC = tuple(field.name for field in fields(Static) if field.init)


@dataclass(frozen=True)
class Off(Static):
    """The policy of a run whose models are not attached: DDP averages its own gradients, as without cgx_ray."""


_NAMED: Mapping[str, Policy] = {"off": Off(scheme="dense"), "static": Static(), "adaptive": Adaptive()}


def policy_variable() -> str:
    """Return what CGX_POLICY names; "" if it is not set."""
    return os.environ.get(VARIABLE, "").strip()


def _chosen(policy: Policy) -> Policy:
    """Return `policy`, or that of CGX_POLICY if it is of another kind."""
    name = policy_variable()
    if name and name not in _NAMED:
        raise ConfigError(f"{VARIABLE} {name!r} is not allowed; give {', '.join(_NAMED)}, or unset it")
    return _NAMED[name] if name and not isinstance(policy, type(_NAMED[name])) else policy


def means_static(arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments of policies mean "static", where no policy is given.

    Raises ConfigError if others are given beside them.
    """
    given = [name for name, value in arguments.items() if value is not None]
    static, others = ([name for name in given if (name in OF_STATIC) is own] for own in (True, False))
    if static and others:
        remedy = "leave one of them out"
        if meant := _with_parameters(arguments.get("codec"), {name: arguments[name] for name in others}):
            remedy = f"did you mean codec={meant!r}?"
        raise ConfigError(f"{static[0]} means policy 'static', which has no {others[0]}; {remedy}")
    return bool(static)


def _with_parameters(codec: object, parameters: Mapping[str, object]) -> str | None:
    """Return the text of `codec` with more `parameters`, such as bits; None if it is no text, or does not take them."""
    if not isinstance(codec, str):
        return None
    added = ",".join(f"{name}={value}" for name, value in parameters.items())
    meant = f"{codec}{',' if ':' in codec else ':'}{added}"
    try:
        CodecSpec.parse(meant)
    except ConfigError:
        return None
    return meant


def is_timeout(timeout_s: object) -> bool:
    """Return True if `timeout_s` is a number of seconds that the run can wait."""
    return isinstance(timeout_s, int | float) and math.isfinite(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S


# Not frozen and not keyword-only: CGXConfig inherits these fields beside those of Ray's TorchConfig, which is neither.
@dataclass
class Settings:
    """Settings that all workers of a run share. Raises ConfigError on a value that is not allowed.

    policy          an object of `cgx_ray.policies`, or a `Policy` of your own; or a name. "adaptive": start dense,
                    measure, decide, and decide again when the network changes; codecs of FSDP2 models are tried.
                    "static": one option for the whole run. None: "static" if a codec, scheme, intra or period is
                    given, else "adaptive". "cgx", "flexible", "cupcake" and "bytecomp": as these papers decide; they
                    do not promise to be no slower than dense. Or a name that an installed package offers, see
                    `control.policies.named_policies`. The environment variable CGX_POLICY replaces a policy of another
                    kind: "off", "static" or "adaptive"
    codec, scheme, intra, period, fidelity, candidates, min_gain, review_s, periods, max_loss, method, alpha, bits,
    bucket_size, densities, prices
                    arguments of a policy that is given by its name: policy="static", codec="bf16" is Static("bf16").
                    They are not kept: `policy` is the policy that they make
    overrides       layer rules that every plan of every policy keeps: codecs, options, or tuples of codec, scheme and
                    optionally intra, by pattern of layer names as in a shell. The first pattern that matches counts.
                    What such layers lose is not judged
    exclude         patterns of layers that are never compressed; they come before `overrides`
    group_bytes     dense bytes that are encoded and sent together; None: as DDP's buckets, at most 25 MiB, and a
                    compressed gradient of less than 100 MiB in four groups. Policies other than "static" use it until
                    their first decision
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
                    rounding may be the cause. Each comparison hashes all weights, some 10 GB/s
    average_weights DDP models: if a comparison finds that the weights differ by rounding, replace them by their mean
                    before the next step but one, the same bits on all ranks. It sends them in float64, in the first
                    forward pass with gradients, so no rank may make one alone (validate under `torch.no_grad()`)
    trace_steps     first and last step of which every rank writes what its groups did when, in the format of Chrome's
                    and Perfetto's traces, to `trace-rankNNNNN.json` in the run's folder
    simulated_link  holds messages back as a slow link would; for demos and tests
    """

    policy: Policy | str | None = None
    codec: InitVar[CodecSpec | str | None] = None
    scheme: InitVar[str | None] = None
    intra: InitVar[str | None] = None
    period: InitVar[int | None] = None
    fidelity: InitVar[str | None] = None
    candidates: InitVar[Sequence[Given] | None] = None
    min_gain: InitVar[float | None] = None
    review_s: InitVar[float | None] = None
    periods: InitVar[Sequence[int] | None] = None
    max_loss: InitVar[float | None] = None
    method: InitVar[str | None] = None
    alpha: InitVar[float | None] = None
    bits: InitVar[Sequence[int] | None] = None
    bucket_size: InitVar[int | None] = None
    densities: InitVar[Sequence[float] | None] = None
    prices: InitVar[str | None] = None
    overrides: Mapping[str, Given] | None = None
    exclude: tuple[str, ...] = ()
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

    def __post_init__(self, *arguments: Any) -> None:
        given = dict(zip(POLICY_ARGUMENTS, arguments, strict=True))
        if self.policy is None:
            self.policy = "static" if means_static(given) else "adaptive"
        self.policy = _chosen(as_policy(self.policy, given))
        if self.transport not in TRANSPORTS:
            raise ConfigError(unknown("transport", self.transport, TRANSPORTS))
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
        if not isinstance(self.simulated_link, SimulatedLink | None):
            raise ConfigError(
                f"simulated_link {self.simulated_link!r} is not allowed; give a SimulatedLink, such as "
                "SimulatedLink(latency_s=1e-3, schedule=((0, 1e8),)) for 100 Mbit/s"
            )
        self._check_transport()
        self._check_trace()
        self._check_rules()
        self._check_codecs()

    @property
    def chosen_policy(self) -> Policy:
        """`policy`, as an object."""
        assert isinstance(self.policy, Policy)
        return self.policy

    def codecs_by_layer(self) -> tuple[CodecSpec, ...]:
        """Return the codecs whose errors the policy needs by layer: qsgd with each number of bits to choose from.

        And with 4, whose error all others are compared with.
        """
        policy = self.chosen_policy
        bits = bits_of(policy.timed_codecs)
        all_bits = sorted({*bits, STATIC_BITS}) if bits else ()
        return tuple(policy.codec_by_layer.replace(bits=each) for each in all_bits)

    def _check_codecs(self) -> None:
        """Raise ConfigError if the process that decides would not know a codec that it may choose."""
        names = {option.codec.name for option in self.chosen_policy.options} if self.decides else set()
        for name in sorted(names):
            if not is_known_everywhere(name):
                raise ConfigError(
                    f"policy {self.policy!r} may choose codec {name!r}, which was registered in this process only, and "
                    "decides in another one; bring the codec by an entry point 'cgx_ray.codecs' of a package, or keep "
                    "it with a Static"
                )

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
        return self.chosen_policy.decides

    def timed_codecs(self) -> tuple[CodecSpec, ...]:
        """Return the codecs whose times predictions need: none, those of the policy, and those of layer rules."""
        own = [self.policy.option.codec] if isinstance(self.policy, Static) else self.chosen_policy.timed_codecs
        rules = (option.codec for option in self._rules().values())
        return tuple(dict.fromkeys([NONE, *own, *rules]))

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
        if isinstance(self.policy, Static) and self.policy.option.intra is not Intra.FLAT:
            self._check_shared_memory(f"intra {self.policy.intra!r}")

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
            # Other objects have their address in their text.
            "policy": self.policy if is_dataclass(self.policy) else self.chosen_policy.recorded(),
            "timeout_s": float(self.timeout_s),
            "silent_s": float(self.silent_s),
        }
        names = (field.name for field in fields(Settings))
        return {name: repr(plain.get(name, getattr(self, name))) for name in names}

    def first_plan(self, layers: Sequence[Layer], world_size: int, bucket_bytes: int) -> Plan:
        """Return plan 0: dense, or the option of a `Static` policy, except where layer rules say otherwise.

        bucket_bytes  of DDP. Dense groups are its buckets: then they are summed in place, as early as DDP would
        """
        option = self.policy.option if isinstance(self.policy, Static) else DENSE
        group_bytes, first_bytes = self.group_bytes, FIRST_GROUP_BYTES
        if group_bytes is None and option.scheme is Scheme.DENSE and bucket_bytes < DEFAULT_GROUP_BYTES:
            # The first bucket of DDP is smaller than the others only by default.
            group_bytes = first_bytes = bucket_bytes
        return make_plan(
            layers,
            version=0,
            world_size=world_size,
            codec=option.codec,
            scheme=option.scheme,
            intra=option.intra,
            group_bytes=group_bytes,
            first_bytes=first_bytes,
            overrides=self._rules(),
            period=self.policy.period if isinstance(self.policy, Static) else 1,
        )


# Fields that are arguments of a policy's name, in the order in which `__post_init__` gets them.
POLICY_ARGUMENTS = tuple(name for name, kind in Settings.__annotations__.items() if kind.startswith("InitVar"))


def make_policy(settings: Settings) -> Policy:
    """Return a policy for one run: a copy of the one in `settings`, since a policy may remember what it saw."""
    return copy.deepcopy(settings.chosen_policy)

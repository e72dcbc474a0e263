"""Candidate options, the measured time of their codecs, and the progress that a gain allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from cgx_ray.errors import ConfigError
from cgx_ray.plan import DENSE, NONE, CodecSpec, Device, Option, options_of
from cgx_ray.planner.cost import check_seconds
from cgx_ray.planner.fidelity import measured_progress


def candidate_codecs(densities: Iterable[float]) -> tuple[CodecSpec, ...]:
    """Return none, bf16, qsgd 4/128, and topk of each density: what benches of the planner choose from."""
    sparse = {density: CodecSpec(name="topk", density=density) for density in densities}
    return (NONE, CodecSpec(name="bf16"), CodecSpec(name="qsgd", bits=4, bucket_size=128), *sparse.values())


def candidate_options(densities: Iterable[float]) -> tuple[Option, ...]:
    """Return dense, then all options of `candidate_codecs`."""
    return codec_options(candidate_codecs(densities))


def codec_options(codecs: Iterable[CodecSpec]) -> tuple[Option, ...]:
    """Return dense, then each of `codecs` over every scheme that can carry it, flat and hierarchical."""
    return DENSE, *(option for codec in codecs for option in options_of(codec) if option != DENSE)


def offloaded(options: Iterable[Option]) -> tuple[Option, ...]:
    """Return those of `options` that the host can take over from a GPU, offloaded."""
    moved = (option.on(Device.CPU) for option in options)
    return tuple(dict.fromkeys(option for option in moved if option.device == Device.CPU))


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """Measured codec time: a seconds per call plus b seconds per element of the dense group, also for top-k.

    encode_row_s, decode_row_s  seconds of each further message in the same call; None: as much as a call of its own
    """

    encode_a_s: float
    encode_b_s_per_element: float
    decode_a_s: float
    decode_b_s_per_element: float
    encode_row_s: float | None = None
    decode_row_s: float | None = None

    def __post_init__(self) -> None:
        for name, seconds in self.known().items():
            check_seconds(name, seconds)

    def known(self) -> dict[str, float]:
        """Return the times by name, without those of rows that were not measured."""
        times = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: seconds for name, seconds in times if seconds is not None}

    def encode_s(self, messages: float, numel: float, calls: float | None = None) -> float:
        """Return the seconds to encode `messages` of `numel` elements together; `calls`: if not each in its own."""
        return _calls_s(messages, calls, self.encode_a_s, self.encode_row_s) + numel * self.encode_b_s_per_element

    def decode_s(self, messages: float, numel: float, calls: float | None = None) -> float:
        """Return the seconds to decode `messages`; arguments as those of `encode_s`."""
        return _calls_s(messages, calls, self.decode_a_s, self.decode_row_s) + numel * self.decode_b_s_per_element

    def slowed(self, factor: float) -> CodecCost:
        """Return the cost with all times multiplied by `factor`."""
        return CodecCost(**{name: seconds * factor for name, seconds in self.known().items()})


def _calls_s(messages: float, calls: float | None, call_s: float, row_s: float | None) -> float:
    if calls is None or row_s is None:
        return messages * call_s
    return calls * call_s + (messages - calls) * row_s


# By `str(CodecSpec)`, else by the name of the codec.
CodecCosts = Mapping[str, CodecCost]
FREE = CodecCost(encode_a_s=0, encode_b_s_per_element=0, decode_a_s=0, decode_b_s_per_element=0)


def host_name(codec: CodecSpec | str) -> str:
    """Return the name of a codec's cost on the host, where another device holds the gradients."""
    return f"{codec} on cpu"


def codec_cost_of(costs: CodecCosts, codec: CodecSpec, *, on_host: bool = False) -> CodecCost:
    """Return the cost under `str(codec)`, else the first of these that is known:

    1. between those of the next densities, linear in the logarithm of the density
    2. under the codec's name
    3. the typical one; "none" is free

    on_host  the cost under `host_name` of text or name; none of 1 and 3 then

    Raises ConfigError if there is none.
    """
    names = [str(codec), codec.name]
    names = [host_name(name) for name in names] if on_host else names
    cost = costs.get(names[0])
    if cost is None and codec.density is not None and not on_host:
        cost = _cost_at_density(costs, codec, codec.density)
    cost = cost or costs.get(names[1])
    if cost is None and codec == NONE:
        return FREE
    if cost is None and not on_host and codec.record.typical_times is not None:
        return CodecCost(**codec.record.typical_times)
    if cost is None:
        known = ", ".join(sorted(costs)) or "none"
        raise ConfigError(f"no measured time for codec {names[0]}; known: {known}; measure it first")
    return cost


def _cost_at_density(costs: CodecCosts, codec: CodecSpec, density: float) -> CodecCost | None:
    """Return the cost between those at the next densities, beyond them that of the nearest; None if there is none."""
    own = f"{codec.name}:"
    names = (name for name in costs if name.startswith(own) and not name.endswith(host_name("")))
    timed = {CodecSpec.parse(name): costs[name].known() for name in names}
    points = sorted(
        (math.log(spec.density), seconds)
        for spec, seconds in timed.items()
        if spec.density is not None and spec.replace(density=density) == codec
    )
    if not points:
        return None
    logs, seconds = zip(*points, strict=True)
    at = math.log(density)
    common = [field for field in seconds[0] if all(field in one for one in seconds)]
    return CodecCost(**{field: float(np.interp(at, logs, [one[field] for one in seconds])) for field in common})


def efficiency(gain: float, codec: CodecSpec, loss_fall: float = 1.0) -> float:
    """Return the progress of a step with this gain as a share of a dense step's, in (0, 1].

    Codecs without feedback whose loss was measured: dense's loss over theirs (`fidelity.measured_progress`). Others:
    the gain itself (GraVAC: throughput times gain), or 1 / gain if it is above 1, which is a second moment that noise
    has raised. Departure from GraVAC, which has no such codecs and would reward the noise.
    """
    measured = measured_progress(codec, gain, loss_fall)
    return measured if measured is not None else min(gain, 1 / gain)

"""Profile of a device: fitted codec times and its network, in a JSON file, so that plans can be made elsewhere."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cgx_ray.errors import ConfigError
from cgx_ray.json_schema import Check, compile_check
from cgx_ray.planner.candidates import CodecCost, CodecCosts
from cgx_ray.planner.cost import Link
from cgx_ray.planner.engine_cost import HOST_ENGINE, EngineCost
from cgx_ray.untrusted import parse_json, read_bytes

FORMAT_VERSION = 1

_SECONDS = {"type": "number", "minimum": 0}
_PROFILE = compile_check(
    {
        "type": "object",
        "properties": {
            "format_version": {"const": FORMAT_VERSION},
            "package_version": {"type": "string"},
            "device": {"type": "string", "minLength": 1},
            "threads": {"type": "integer", "minimum": 1},
            "codec_costs": {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": {
                    "type": "object",
                    "properties": dict.fromkeys(CodecCost.__slots__, _SECONDS),
                    "required": [field.name for field in fields(CodecCost) if field.default is MISSING],
                    "additionalProperties": False,
                },
            },
            "engine": {
                "type": "object",
                "properties": {
                    **dict.fromkeys(("thread_s", "message_s", "byte_s"), _SECONDS),
                    "piece_bytes": {"type": "integer", "minimum": 1},
                    "codes_rows": {"type": "boolean"},
                    "vendor_window_bytes": {"type": ["integer", "null"], "minimum": 1},
                },
                "required": [field.name for field in fields(EngineCost)],
                "additionalProperties": False,
            },
            "link": {
                "type": ["object", "null"],
                "properties": {"alpha_s": _SECONDS, "beta_s_per_byte": {"type": "number", "exclusiveMinimum": 0}},
                "required": ["alpha_s", "beta_s_per_byte"],
                "additionalProperties": False,
            },
        },
        "required": ["format_version", "package_version", "device", "threads", "codec_costs", "link"],
        "additionalProperties": False,
    }
)
_PROBED = compile_check(
    {
        "type": "object",
        "properties": {
            "ways": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {"latency_s": _SECONDS, "bytes_per_s": {"type": "number", "exclusiveMinimum": 0}},
                    "required": ["latency_s", "bytes_per_s"],
                },
            }
        },
        "required": ["ways"],
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Codec times on one device, what groups cost the engine there and, if measured, its network.

    package_version  version of cgx_ray whose kernels were timed
    device           name of the processor or GPU
    threads          CPU threads, 1 for a GPU
    codec_costs      by codec name (its defaults) or `str(CodecSpec)`, as `Measured.codec_costs`
    """

    package_version: str
    device: str
    threads: int
    codec_costs: CodecCosts
    link: Link | None = None
    engine: EngineCost = HOST_ENGINE


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write `profile` as JSON."""
    content = {"format_version": FORMAT_VERSION, **asdict(profile)}
    content["codec_costs"] = {codec: cost.known() for codec, cost in profile.codec_costs.items()}
    if profile.engine == HOST_ENGINE:
        del content["engine"]
    Path(path).write_text(json.dumps(content, indent=2) + "\n")


def load_profile(path: str | Path) -> Profile:
    """Read a file of `save_profile`. Raises ConfigError if it cannot be read or is not of this format."""
    found = _read(path, _PROFILE, "no profile of this version; make one by `cgx-ray profile`")
    return Profile(
        package_version=found["package_version"],
        device=found["device"],
        threads=found["threads"],
        codec_costs={codec: CodecCost(**cost) for codec, cost in found["codec_costs"].items()},
        link=None if found["link"] is None else Link(**found["link"]),
        # Files of a host, and earlier ones, have none.
        engine=EngineCost(**found["engine"]) if "engine" in found else HOST_ENGINE,
    )


def load_link(path: str | Path) -> Link:
    """Return the link of a `cgx-ray probe` file: the longest latency and lowest bandwidth, which all wait for."""
    ways = _read(path, _PROBED, "not what `cgx-ray probe --json` writes")["ways"]
    return Link(
        alpha_s=max(way["latency_s"] for way in ways), beta_s_per_byte=1 / min(way["bytes_per_s"] for way in ways)
    )


def _read(path: str | Path, problem_of: Check, otherwise: str) -> Any:
    try:
        content = read_bytes(Path(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        found = parse_json(content)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}): {otherwise}") from error
    if problem := problem_of(found):
        raise ConfigError(f"{path}, {problem}: {otherwise}")
    return found


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (a, b), both 0 or more, of the line a + b size with the least sum of relative errors |a + b size - t| / t.

    Errors are relative, so that small sizes count, and not squared, so that a few disturbed times do not: a line
    through more than half of the points stays. The sum is least on a line through two points, or through one point with
    a = 0 or b = 0; all of these are tried.
    """
    points = list(zip(sizes, seconds, strict=True))
    if not points or not all(size > 0 and time_s > 0 for size, time_s in points):
        raise ConfigError(f"sizes and seconds {points} are not allowed; give one or more, all above 0")
    lines = [(0.0, time_s / size) for size, time_s in points] + [(time_s, 0.0) for _, time_s in points]
    for (size, time_s), (other_size, other_s) in itertools.combinations(points, 2):
        if size != other_size:
            b = (other_s - time_s) / (other_size - size)
            lines.append((time_s - b * size, b))

    def error(line: tuple[float, float]) -> float:
        return sum(abs(line[0] + line[1] * size - time_s) / time_s for size, time_s in points)

    return min((line for line in lines if min(line) >= 0), key=error)


def fit_cost(numels: Sequence[int], encode_s: Sequence[float], decode_s: Sequence[float]) -> CodecCost:
    """Fit the cost of a codec to the times of its encode and decode on gradients of these sizes."""
    (encode_a, encode_b), (decode_a, decode_b) = fit_line(numels, encode_s), fit_line(numels, decode_s)
    return CodecCost(
        encode_a_s=encode_a,
        encode_b_s_per_element=encode_b,
        decode_a_s=decode_a,
        decode_b_s_per_element=decode_b,
    )

"""Time codecs on this machine: for milliseconds before an adaptive run, for longer in `cgx-ray profile`.

`measure_errors` measures them on the gradients of a model instead, for bits by layer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from cgx_ray.codecs import Codec, make_codec
from cgx_ray.codecs.codec import HOST, PayloadRow
from cgx_ray.codecs.gain import NUM_TOP, norm_of_largest, squared_error
from cgx_ray.control.history import Registration
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.paper_policies import ByteComp
from cgx_ray.plan import DEFAULT_GROUP_BYTES, CodecSpec, Layer, Plan, Scheme, options_of
from cgx_ray.planner.bits import QSGD, LayerErrors
from cgx_ray.planner.candidates import CodecCost, CodecCosts, host_name
from cgx_ray.planner.cost import Link
from cgx_ray.planner.engine_cost import HOST_ENGINE
from cgx_ray.planner.profile import fit_cost
from cgx_ray.runtime_ext import ops
from cgx_ray.runtime_ext.streams import Streams, streams_of
from cgx_ray.session.engine_times import measure_engine
from cgx_ray.session.settings import Settings

Call = Callable[[], object]

# Long compared with the clock's resolution and a timer interrupt, short compared with other work on the machine.
TURN_S = 4e-3
_MAX_REPEATS = 1000
_LEAST_S = 1e-9


def best_seconds(
    calls: Sequence[Call], device: torch.device, *, num_rounds: int, turn_s: float = TURN_S
) -> list[float]:
    """Return seconds per call for each of `calls`: the shortest of `num_rounds` turns.

    A turn repeats its call for about `turn_s`, at least once. On a device two marks around a turn measure it, so each
    launch overlaps with the kernels before it.
    """
    time_turn = _turn_s_of_host if device == HOST else partial(_turn_s_of_device, streams_of(device))
    repeats = []
    for call in calls:
        call()  # warms up caches and compiles
        # A device's clock may not tell two marks around a short call apart.
        once_s = max(time_turn(call, 1), _LEAST_S)
        repeats.append(min(max(math.ceil(turn_s / once_s), 1), _MAX_REPEATS))
    best = [math.inf] * len(calls)
    for round_ in range(num_rounds):
        # A B C, then C B A: no call always has the better place.
        for which in range(len(calls)) if round_ % 2 == 0 else reversed(range(len(calls))):
            seconds = time_turn(calls[which], repeats[which]) / repeats[which]
            best[which] = min(best[which], seconds)
    return best


def _turn_s_of_host(call: Call, num_repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(num_repeats):
        call()
    return time.perf_counter() - start


def _turn_s_of_device(streams: Streams, call: Call, num_repeats: int) -> float:
    start = streams.mark()
    for _ in range(num_repeats):
        call()
    end = streams.mark()
    end.wait()
    return end.seconds_since(start)


# From sizes where the call takes most of the time to sizes where the elements do.
CALIBRATION_NUMELS = (1 << 10, 1 << 14, 1 << 18)
# The same on a device, which does 2^18 elements in less time than their launch takes.
DEVICE_NUMELS = (1 << 14, 1 << 18, 1 << 24)
NUM_ROUNDS = 5
# Messages in one call that show what a further one takes.
NUM_ROWS = 8
# Largest time of a codec over that of the median rank. More than other hardware takes: such a rank was busy meanwhile,
# and without a limit would make all codecs look slow for the whole run.
MAX_SLOWNESS = 3.0
# Elements of float32: a copy that shows the latency of the bus, and one that shows its rate.
BUS_NUMELS = (1 << 10, 1 << 22)


def calibrate(
    settings: Settings,
    layers: Sequence[Layer],
    first_plan: Plan,
    device: torch.device,
    costs: CodecCosts | None,
    *,
    step: int = 0,
) -> Registration:
    """Measure what the control loop needs to know of `device`, which holds the gradients; return its registration.

    costs  as `slowest` returns them; None for a sharded model, of which nothing is measured
    step   that the ranks begin with
    """
    known = Registration(
        layers=tuple(layers),
        first_plan=first_plan,
        step=step,
        is_sharded=costs is None,
        is_simulated=settings.simulated_link is not None,
    )
    if costs is None:
        return known
    return replace(
        known,
        codec_costs=costs,
        # On a CPU codecs take the cores that backward runs on.
        encodes_on="backward" if device == HOST else "device",
        bus=measure_bus(device) if may_offload(settings, device) else None,
        engine=HOST_ENGINE if device == HOST or not settings.decides else measure_engine(device),
    )


def measure_codecs(settings: Settings, device: torch.device) -> dict[str, CodecCost]:
    """Return the time of every codec of `Settings.timed_codecs` on this rank, by its text.

    device  that holds the gradients. Where plans may offload codecs from it, also the times on the host, by `host_name`
    """
    costs = {str(codec): measure_codec(codec, device=device) for codec in settings.timed_codecs()}
    if may_offload(settings, device):
        costs |= {host_name(codec): measure_codec(codec) for codec in settings.timed_codecs()}
    return costs


def slowest(costs: Sequence[CodecCosts]) -> dict[str, CodecCost]:
    """Return the times of each codec on the rank where a usual group takes longest: all others wait for it.

    They are MAX_SLOWNESS times those of the median rank at most. `costs`: by rank, of the same codecs as on the first
    rank, or none
    """
    numel = DEFAULT_GROUP_BYTES // 4

    def group_s(cost: CodecCost) -> float:
        return cost.encode_s(1, numel) + cost.decode_s(1, numel)

    found = {}
    for codec in costs[0]:
        ranks = sorted((one[codec] for one in costs if one), key=group_s)
        longest_s, allowed_s = group_s(ranks[-1]), MAX_SLOWNESS * group_s(ranks[(len(ranks) - 1) // 2])
        found[codec] = ranks[-1] if longest_s <= allowed_s else ranks[-1].slowed(allowed_s / longest_s)
    return found


def may_offload(settings: Settings, device: torch.device) -> bool:
    """Return whether plans may offload codecs from `device`: if it is no host, and the policy may choose that."""
    return device.type != "cpu" and isinstance(settings.policy, Adaptive | ByteComp)


def measure_bus(device: torch.device) -> Link:
    """Return the link between `device` and the host, as the engine copies gradients: one copy, and wait for it."""
    times = []
    for numel in BUS_NUMELS:
        grad_N = torch.zeros(numel, dtype=torch.float32, device=device)
        host_N = torch.zeros(numel, dtype=torch.float32, device=HOST, pin_memory=device.type == "cuda")
        copies = partial(_copy_and_wait, grad_N, host_N), partial(_copy_and_wait, host_N, grad_N)
        times.append(fmean(best_seconds(copies, HOST, num_rounds=NUM_ROUNDS, turn_s=0.0)))
    small_s, large_s = times
    num_bytes = 4 * (BUS_NUMELS[1] - BUS_NUMELS[0])
    # No copy is instantaneous: where the two readings say so, other work was in the way of the first.
    return Link(alpha_s=small_s, beta_s_per_byte=max(large_s - small_s, 0.1 * large_s) / num_bytes)


def _copy_and_wait(source_N: Tensor, target_N: Tensor) -> None:
    streams = streams_of(source_N.device if source_N.is_cuda else target_N.device)
    streams.copy_each([(source_N, target_N)])
    streams.mark().wait()


def measure_codec(
    spec: CodecSpec,
    *,
    device: torch.device | str = "cpu",
    numels: Sequence[int] | None = None,
    turn_s: float | None = None,
) -> CodecCost:
    """Time encode (with error feedback if the codec has it) and decode-add on normal gradients of `numels` elements.

    On a device also calls with several messages, as the engine makes them there over sra.

    numels  by default CALIBRATION_NUMELS or DEVICE_NUMELS
    turn_s  seconds of repeated calls between two readings of the clock. By default TURN_S on a device, and 0 on the
            host: one call, which is exact enough for plans
    """
    device = torch.device(device)
    codec = make_codec(spec, device=device)
    if numels is None:
        numels = CALIBRATION_NUMELS if device == HOST else DEVICE_NUMELS
    if turn_s is None:
        turn_s = 0.0 if device == HOST else TURN_S
    times = []
    for numel in numels:
        grad_N = _normal(numel, device)
        payload = torch.empty(codec.payload_bytes(numel), dtype=torch.uint8, device=device)
        calls = (
            partial(codec.encode, grad_N, payload, 0, codec.new_memory(numel, device)),
            partial(codec.decode, payload, torch.zeros_like(grad_N), add=True),
        )
        times.append(best_seconds(calls, device, num_rounds=NUM_ROUNDS, turn_s=turn_s))
    encode_s, decode_s = zip(*times, strict=True)
    cost = fit_cost(numels, encode_s, decode_s)
    if device == HOST or not any(option.scheme is Scheme.SRA for option in options_of(spec)):
        return cost
    encode_row_s, decode_row_s = _measure_rows(codec, cost, numels[0], turn_s)
    return replace(cost, encode_row_s=encode_row_s, decode_row_s=decode_row_s)


def _measure_rows(codec: Codec, cost: CodecCost, numel: int, turn_s: float) -> tuple[float, float]:
    """Return the seconds to encode, and to decode, one more message in a call. `numel`: of all messages of a call."""
    grad_N, memory = _normal(numel, codec.device), codec.new_memory(numel, codec.device)
    row_numel = numel // NUM_ROWS
    rows = [
        PayloadRow(
            grad_N[start : start + row_numel],
            torch.empty(codec.payload_bytes(row_numel), dtype=torch.uint8, device=codec.device),
            memory=memory.part(start, start + row_numel) if memory is not None else None,
        )
        for start in range(0, NUM_ROWS * row_numel, row_numel)
    ]
    calls = partial(codec.encode_rows, rows), partial(codec.decode_rows, rows)
    encode_s, decode_s = best_seconds(calls, codec.device, num_rounds=NUM_ROUNDS, turn_s=turn_s)
    encode_row_s = (encode_s - cost.encode_s(1, numel)) / (NUM_ROWS - 1)
    decode_row_s = (decode_s - cost.decode_s(1, numel)) / (NUM_ROWS - 1)
    return max(encode_row_s, 0.0), max(decode_row_s, 0.0)


def _normal(numel: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(numel, generator=generator, dtype=torch.float32, device=device)


def measure_errors(
    gradients: Sequence[Mapping[str, Tensor]], widths: Sequence[int] = range(1, 9), codec: CodecSpec = QSGD
) -> dict[str, LayerErrors]:
    """Return what `BitsProblem` needs of each layer: its errors with every number of bits in `widths`.

    gradients  of some steps, each flat float32 by layer, with the same layers; errors are summed over the steps
    codec      encodes them, with its bits replaced
    """
    errors = {}
    for index, name in enumerate(gradients[0]):
        steps = [gradient[name] for gradient in gradients]
        sum_N = torch.stack(steps).sum(0)
        errors[name] = LayerErrors(
            numel=steps[0].numel(),
            norm=math.sqrt(sum(float(grad_N.double().square().sum()) for grad_N in steps)),
            top_norm=float(norm_of_largest(sum_N, NUM_TOP)),
            squared_errors={
                bits: sum(
                    squared_error(make_codec(codec.replace(bits=bits)), grad_N, ops.message_key(0, step, index, 0, 0))
                    for step, grad_N in enumerate(steps)
                )
                for bits in widths
            },
        )
    return errors

"""Time codecs on this machine: for milliseconds before an adaptive run, for longer in `cgx-ray profile`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from cgx_ray.codecs import make_codec
from cgx_ray.plan import CodecSpec
from cgx_ray.planner.options import CodecCost
from cgx_ray.planner.profile import fit_cost
from cgx_ray.session.settings import Settings

Call = Callable[[], object]

# Long compared with the clock's resolution and a timer interrupt, short compared with other work on the machine.
TURN_S = 4e-3
_MAX_REPEATS = 1000


def best_seconds(
    calls: Sequence[Call], device: torch.device, *, num_rounds: int, turn_s: float = TURN_S
) -> list[float]:
    """Return seconds per call for each of `calls`: the shortest of `num_rounds` turns.

    A turn repeats its call for about `turn_s`, at least once. On a CUDA device two events around a turn measure it, so
    each launch overlaps with the kernels before it.
    """
    time_turn = _turn_s_cuda if device.type == "cuda" else _turn_s_cpu
    repeats = []
    for call in calls:
        call()  # warms up caches and compiles
        repeats.append(min(max(math.ceil(turn_s / time_turn(call, 1)), 1), _MAX_REPEATS))
    best = [math.inf] * len(calls)
    for round_ in range(num_rounds):
        # A B C, then C B A: no call always has the better place.
        for which in range(len(calls)) if round_ % 2 == 0 else reversed(range(len(calls))):
            seconds = time_turn(calls[which], repeats[which]) / repeats[which]
            best[which] = min(best[which], seconds)
    return best


def _turn_s_cpu(call: Call, num_repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(num_repeats):
        call()
    return time.perf_counter() - start


def _turn_s_cuda(call: Call, num_repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num_repeats):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


# From sizes where the call takes most of the time to sizes where the elements do.
CALIBRATION_NUMELS = (1 << 10, 1 << 14, 1 << 18)
NUM_ROUNDS = 5


def measure_codecs(settings: Settings, device: torch.device) -> dict[str, CodecCost]:
    """Return the time of every codec of `Settings.timed_codecs` on `device`, which holds the gradients, by its text.

    Policy "flexible" may choose other densities of top-k, so one of them stands for all, by name.
    """
    costs = {str(codec): measure_codec(codec, device=device) for codec in settings.timed_codecs()}
    return costs if settings.policy != "flexible" else costs | {"topk": next(reversed(costs.values()))}


def measure_codec(
    spec: CodecSpec,
    *,
    device: torch.device | str = "cpu",
    numels: Sequence[int] = CALIBRATION_NUMELS,
    turn_s: float = 0.0,
) -> CodecCost:
    """Time encode (with error feedback if the codec has it) and decode-add on normal gradients of `numels` elements.

    turn_s  seconds of repeated calls between two readings of the clock; 0 is one call, which is exact enough for plans
    """
    codec, device = make_codec(spec), torch.device(device)
    times = []
    for numel in numels:
        grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
        payload = torch.empty(codec.payload_bytes(numel), dtype=torch.uint8, device=device)
        calls = (
            partial(codec.encode, grad_N, payload, 0, codec.new_memory(numel, device)),
            partial(codec.decode, payload, torch.zeros_like(grad_N), add=True),
        )
        times.append(best_seconds(calls, device, num_rounds=NUM_ROUNDS, turn_s=turn_s))
    encode_s, decode_s = zip(*times, strict=True)
    return fit_cost(numels, encode_s, decode_s)

"""How long calls take that take turns: what slows the machine for a while slows all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

# Long against the clock's resolution and a timer interrupt, short against what else a machine does.
TURN_S = 4e-3
_MAX_REPEATS = 1000


def best_seconds(
    calls: Sequence[Call], device: torch.device, *, num_rounds: int, turn_s: float = TURN_S
) -> list[float]:
    """Seconds a call of each of `calls`, the best of `num_rounds` turns.

    A turn repeats its call for about `turn_s`, once at least. On a CUDA device two events around a turn give its time,
    so launches that follow each other overlap with the kernels before them.
    """
    time_turn = _turn_s_cuda if device.type == "cuda" else _turn_s_cpu
    repeats = []
    for call in calls:
        call()  # warms caches up and compiles
        repeats.append(min(max(math.ceil(turn_s / time_turn(call, 1)), 1), _MAX_REPEATS))
    best = [math.inf] * len(calls)
    for round_ in range(num_rounds):
        # A B C, then C B A: none of them always has the better place.
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

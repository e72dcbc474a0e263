"""What an engine's own thread takes from the training thread, and hands back."""

from __future__ import annotations

from collections import deque

import torch

from cgx_ray.monitors.sample import StepSample

MAX_KEPT_SAMPLES = 1024


def follow_num_threads(num_threads: int) -> None:
    """Let operators of the calling thread use as many threads as those of the training thread.

    The number is each thread's own.
    """
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def take_all(samples: deque[StepSample]) -> list[StepSample]:
    """Empty `samples`, oldest first, while another thread may add to them."""
    taken = []
    while samples:
        taken.append(samples.popleft())
    return taken

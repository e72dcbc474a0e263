"""Loss curves that can be compared: single steps of a small batch are mostly noise."""

from __future__ import annotations

from collections.abc import Sequence

from cgx_ray.report.record import StepLine

WINDOW_STEPS = 10


def smooth_losses(lines: Sequence[StepLine]) -> list[float]:
    """Mean of each step's loss and of up to 9 before it."""
    losses = [line.loss for line in lines]
    windows = [losses[max(0, end - WINDOW_STEPS) : end] for end in range(1, len(losses) + 1)]
    return [sum(window) / len(window) for window in windows]

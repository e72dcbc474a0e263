"""`cgx-ray bench accuracy`: validation loss after training with each codec, over dense, at equal steps.

Real trainings: four rank processes with one thread each, DistributedDataParallel and the engine over loopback. Every
codec gets the same weights, batches, learning rates and clipping as dense, so their losses are compared seed by seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from cgx_ray.bench.accuracy_cases import AccuracyOptions
from cgx_ray.bench.ranks import run_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One training.

    option      "dense", or codec over scheme
    points      (steps done, seconds of training, validation loss), ten of them; fewer if it has diverged
    wire_bytes  that one rank sends per step
    relative_error  largest of rank 0's messages at the points, without error feedback: squared error over |g|^2
    """

    workload: str
    option: str
    seed: int
    points: tuple[tuple[int, float, float], ...]
    has_diverged: bool
    wire_bytes: float
    relative_error: float


def measure_accuracy(options: AccuracyOptions, on_run: Callable[[TrainingRun, float], None]) -> list[TrainingRun]:
    """Train all cases.

    on_run  called after each training with it and the fraction of trainings done
    """
    job = {
        "workloads": options.workloads,
        "codecs": [str(option) for option in options.options],
        "num_seeds": options.num_seeds,
        "num_steps": options.num_steps,
    }
    lines = run_ranks(
        "cgx_ray.bench.accuracy_rank",
        job,
        name="bench accuracy",
        num_ranks=options.num_ranks,
        rate_bit_per_s=options.rate_bit_per_s,
    )
    num_runs = options.num_seeds * len(options.workloads) * len(options.options)
    runs = []
    for line in lines:
        runs.append(TrainingRun(**json.loads(line)))
        on_run(runs[-1], len(runs) / num_runs)
    return runs

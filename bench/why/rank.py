"""One rank of `python -m bench why`: trains a model that is observed and two that are not, in turns."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.shared.rank_process import run_rank
from cgx_ray_autoload.observing import Guard

# Layers, so that there are many hooks, and their size. A step takes some 30 ms on a core, which is short.
_NUM_LAYERS, _WIDTH, _BATCH = 40, 192, 64


def measure(job: dict[str, Any]) -> None:
    """Write the median steps of each, by turn, and the memory that the first observer took, as one line of JSON."""
    num_steps, turns = job["num_steps"], []
    with tempfile.TemporaryDirectory() as folder:
        _train(_model(), num_steps)
        # Here processors and allocators settle, too.
        _, extra_mib = _train_observed(Path(folder), num_steps)
        for turn in range(job["num_turns"]):
            ways = {
                "observed": lambda: _train_observed(Path(folder), num_steps)[0],
                "bare": lambda: _train(_model(), num_steps),
                "bare_again": lambda: _train(_model(), num_steps),
            }
            # Each comes first, second and last as often.
            names = [*ways][turn % len(ways) :] + [*ways][: turn % len(ways)]
            turns.append({name: ways[name]() for name in names})
    if dist.get_rank() == 0:
        print(json.dumps({"turns": turns, "extra_mib": extra_mib}), flush=True)


def _train_observed(folder: Path, num_steps: int) -> tuple[float, float]:
    """Return the median step, and the MiB that the process has grown by."""
    before = psutil.Process().memory_info().rss
    model, finish = _observed(folder, num_steps)
    step_s = _train(model, num_steps)
    extra_mib = (psutil.Process().memory_info().rss - before) / 2**20
    finish()
    return step_s, extra_mib


def _observed(folder: Path, num_steps: int) -> tuple[nn.Module, Any]:
    from cgx_ray.why.observer import Observer  # noqa: PLC0415 - its memory counts
    from cgx_ray.why.records import ObserverOptions  # noqa: PLC0415

    observer = Observer(Guard(folder / str(dist.get_rank())), ObserverOptions(num_steps=num_steps))
    model = _model()
    observer.add_model(model)
    return model, observer.finish


def _model() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS))))


def _train(model: nn.Module, num_steps: int) -> float:
    """Return the median step of `num_steps` after those to warm up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch_NI = torch.ones((_BATCH, _WIDTH), dtype=torch.float32, device="cpu")
    ends = [time.perf_counter()]
    for _ in range(num_steps + 5):
        optimizer.zero_grad()
        model(batch_NI).mean().backward()
        optimizer.step()
        ends.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(ends[5:]))


if __name__ == "__main__":
    run_rank(measure)

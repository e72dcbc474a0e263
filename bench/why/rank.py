"""One rank of `python -m bench why`: trains a model that is observed and two that are not, a step of each in turn."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
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
# More than the observer's own.
_NUM_WARM_STEPS = 10


def measure(job: dict[str, Any]) -> None:
    """Write the seconds of each step of the three, and what else the observer took, as one line of JSON.

    Its thread runs beside all three, so its time is counted apart.
    """
    num_steps, steps = job["num_steps"], []
    trained = {name: _model() for name in ("bare", "bare_again", "observed")}
    for model in trained.values():
        # Processors and allocators settle.
        _stepper(model)()
    with tempfile.TemporaryDirectory() as folder:
        before = psutil.Process().memory_info().rss
        finish = _observe(trained["observed"], Path(folder), _NUM_WARM_STEPS + num_steps)
        (thread,) = (one.native_id for one in threading.enumerate() if one.name == "cgx-why")
        begin_s = time.perf_counter()
        ways = [(name, _stepper(model)) for name, model in trained.items()]
        for step in range(_NUM_WARM_STEPS + num_steps):
            # Each comes first, second and last as often.
            order = ways[step % len(ways) :] + ways[: step % len(ways)]
            steps.append({name: train() for name, train in order})
        cores = _processor_s(thread) / (time.perf_counter() - begin_s)
        extra_mib = (psutil.Process().memory_info().rss - before) / 2**20
        finish()
    if dist.get_rank() == 0:
        print(json.dumps({"steps": steps[_NUM_WARM_STEPS:], "cores": cores, "extra_mib": extra_mib}), flush=True)


def _processor_s(thread: int | None) -> float:
    return next(one.user_time + one.system_time for one in psutil.Process().threads() if one.id == thread)


def _observe(model: DistributedDataParallel, folder: Path, num_steps: int) -> Callable[[], None]:
    from cgx_ray.why.observer import Observer  # noqa: PLC0415 - its memory counts
    from cgx_ray.why.records import ObserverOptions  # noqa: PLC0415

    observer = Observer(Guard(folder / str(dist.get_rank())), ObserverOptions(num_steps=num_steps))
    observer.add_model(model)
    return observer.finish


def _model() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS))))


def _stepper(model: nn.Module) -> Callable[[], float]:
    """Return what trains `model` for a step, and returns its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch_NI = torch.ones((_BATCH, _WIDTH), dtype=torch.float32, device="cpu")

    def train() -> float:
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        model(batch_NI).mean().backward()
        optimizer.step()
        return time.perf_counter() - begin_s

    return train


if __name__ == "__main__":
    run_rank(measure)

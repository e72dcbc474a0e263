"""Cost of the engine when it compresses nothing: rows of `python -m bench step` and of the demo.

Two copies of the demo's model train in the same processes, one as plain DDP and one through the engine with dense
gradients. They take turns, so that other load on the machine affects both.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.demo.gpt import BATCH_SIZE, StdlibBytes, build_gpt
from cgx_ray.report.result import Row

NUM_PROCESSES = 4
# DDP rebuilds its buckets after step 1, and the engine allocates residuals and buffers in step 2.
_WARMUP_STEPS = 3


def measure_overhead(*, num_rounds: int = 12, steps_per_round: int = 4) -> list[Row]:
    """Train both copies for `num_rounds` rounds on loopback; the goal is at most 1.03 times plain DDP.

    The overhead is the median of the rounds' ratios, because load that lasts longer than a round slows both.
    """
    # With port 0 the kernel picks a free port that no other process can take meanwhile.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_worker, args=(store.port, num_rounds, steps_per_round, results), nprocs=NUM_PROCESSES)
    rounds = results.get()
    plain, engine, compute = (statistics.median(column) for column in zip(*rounds, strict=True))
    overhead = statistics.median(round_[1] / round_[0] for round_ in rounds)
    return [
        Row(name="plain_ddp_step_s", value=plain, unit="s", limit=compute),
        Row(name="engine_dense_step_s", value=engine, unit="s", baseline=plain, limit=compute),
        Row(name="engine_overhead_dense", value=overhead, unit="x", baseline=1.0, goal="<= 1.03"),
    ]


def _worker(rank: int, port: int, num_rounds: int, steps_per_round: int, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_PROCESSES)
    plain = DistributedDataParallel(build_gpt(0))
    engine = DistributedDataParallel(build_gpt(0))
    handle = cgx_ray.attach(engine, codec="none", scheme="dense")
    steps = [_stepper(plain, rank), _stepper(engine, rank), _stepper(build_gpt(0), rank)]
    for step in steps:
        for _ in range(_WARMUP_STEPS):
            step()
    rounds = [_time_round(steps, index, steps_per_round) for index in range(num_rounds)]
    if rank == 0:
        results.put(rounds)
    dist.barrier()
    handle.close()
    dist.destroy_process_group()


def _time_round(steps: Sequence[Callable[[], None]], index: int, num_repeats: int) -> list[float]:
    """Return the median seconds of each of `steps`."""
    seconds = [0.0] * len(steps)
    # A B C, then C B A, so that none always runs first.
    for which in range(len(steps)) if index % 2 == 0 else reversed(range(len(steps))):
        dist.barrier()
        repeats = []
        for _ in range(num_repeats):
            start = time.perf_counter()
            steps[which]()
            repeats.append(time.perf_counter() - start)
        seconds[which] = statistics.median(repeats)
    return seconds


def _stepper(model: torch.nn.Module, rank: int) -> Callable[[], None]:
    """Return a function that does one training step of `model`."""
    data = StdlibBytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    count = 0

    def step() -> None:
        nonlocal count
        model(*data.train_batch(seed=0, step=count, rank=rank, batch_size=BATCH_SIZE)).backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1

    return step

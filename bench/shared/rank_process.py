"""One rank of a bench: a process in a host of the lab or on loopback, started by `ranks.run_ranks`."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def run_rank(measure: Callable[[dict[str, Any]], None]) -> None:
    """Join the other ranks on one thread, call `measure` with the job, and end the process: 1 if it raised."""
    job = json.loads(sys.argv[1])
    if job["is_loopback"]:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(job["store"], job["world_size"])
    dist.init_process_group("gloo", store=store, rank=job["rank"], world_size=job["world_size"])
    failed = False
    try:
        measure(job)
    except Exception:  # noqa: BLE001 - printed, and the exit status says so
        traceback.print_exc()
        failed = True
    # Not in a `finally`, where the exception's frames would still hold the group. Its threads free tensors; a thread
    # that enters Python while the interpreter ends is unwound, and then C++ ends the process with SIGABRT.
    dist.destroy_process_group()
    sys.exit(failed)


def start_together(lead_s: float) -> float:
    """Return at a time that all ranks agree on, and return that time, as of `time.perf_counter`.

    Ranks leave a barrier up to two latencies apart, and the first would wait for the last. All run on one machine, so
    they share a clock.

    lead_s  longer than the all-reduce that tells all ranks when to start
    """
    start = torch.tensor(time.perf_counter(), dtype=torch.float64)
    dist.all_reduce(start, op=dist.ReduceOp.MAX)
    begin = start.item() + lead_s
    time.sleep(max(0.0, begin - time.perf_counter()))
    return begin

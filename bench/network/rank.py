"""One rank of the job that `bench network` watches: the demo's GPT, trained in a host of the lab until killed.

Rank 0 answers each line of its input, a method of `WatchedLoop`, with a pickle of the result.
"""

from __future__ import annotations

import itertools
import json
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.network.watched_loop import WatchedLoop
from cgx_ray.demo.gpt import StdlibBytes, build_gpt
from cgx_ray.session.attach import attach_with
from cgx_ray.session.local_control import LocalControl
from cgx_ray.session.settings import Settings


def send(message: Any) -> None:
    """Write `message` for the process that has started this rank."""
    pickle.dump(message, sys.stdout.buffer)
    sys.stdout.buffer.flush()


def _answer(control: LocalControl) -> None:
    for line in sys.stdin:
        send(control.ask(line.strip()))


def main() -> None:
    job = json.loads(sys.argv[1])
    rank, world_size = job["rank"], job["world_size"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(job["store"], world_size), rank=rank, world_size=world_size)
    model = DistributedDataParallel(build_gpt(0), bucket_cap_mb=4)
    folder = Path(job["store"]).parent / "run"
    attachment = attach_with(model, Settings(policy="adaptive"), folder=folder, loop_type=WatchedLoop)
    if rank == 0:
        assert attachment.control is not None
        threading.Thread(target=_answer, args=(attachment.control,), daemon=True).start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = StdlibBytes()
    for step in itertools.count():
        model(*data.train_batch(seed=0, step=step, rank=rank, batch_size=1)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()

"""One rank of the job that `bench network` watches: the demo's GPT, trained in a host of the lab until killed.

Pipes replace Ray, see `pipe_session`.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from bench.pipe_session import PipeSession
from cgx_ray.demo.gpt import StdlibBytes, build_gpt
from cgx_ray.session.attachment import process
from cgx_ray.session.settings import Settings


def _receive(session: PipeSession) -> None:
    for line in sys.stdin:
        session.receive(line)


def main() -> None:
    job = json.loads(sys.argv[1])
    rank, world_size = job["rank"], job["world_size"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(job["store"], world_size), rank=rank, world_size=world_size)
    session = PipeSession(Settings(policy="adaptive"), rank, job["address"])
    threading.Thread(target=_receive, args=(session,), daemon=True).start()
    process.session = session
    model = DistributedDataParallel(build_gpt(0), bucket_cap_mb=4)
    cgx_ray.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = StdlibBytes()
    for step in itertools.count():
        model(*data.train_batch(seed=0, step=step, rank=rank, batch_size=1)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()

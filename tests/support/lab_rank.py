"""`python lab_rank.py RANK WORLD_SIZE STORE CODEC SCHEME SILENT_S STEPS`: a rank that trains in a host of a lab.

It writes a line of JSON per step, and at the end one with the hash of its weights or its error.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from support.branches import Branches, train


def main(rank: int, world_size: int, store: str, codec: str, scheme: str, silent_s: float, num_steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme, silent_s=silent_s)
    end: dict[str, object] = {}
    try:
        for step in range(num_steps):
            (end["hash"],) = train(model, rank, range(step, step + 1))
            print(json.dumps({"step": step}), flush=True)
            time.sleep(0.02)
    except (cgx_ray.CGXError, RuntimeError) as error:
        end = {"said": str(error), "at_s": time.monotonic()}
    print(json.dumps(end), flush=True)
    attachment.close()


if __name__ == "__main__":
    _rank, _world_size, _store, _codec, _scheme, _silent_s, _num_steps = sys.argv[1:]
    main(int(_rank), int(_world_size), _store, _codec, _scheme, float(_silent_s), int(_num_steps))

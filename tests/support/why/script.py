"""A training as users have them, which does not know cgx_ray: `torchrun script.py KIND [STEPS]`.

KIND: plain; late (DDP is built after 3 s of other work, twice); compiled; never (no DDP); alone (no process group);
input (each batch takes 50 ms); failing (ends with status 7)
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(kind: str, num_steps: int) -> None:
    if kind == "alone":
        print("nothing to exchange")
        return
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    if kind == "never":
        dist.all_reduce(torch.ones(1000))
        print("no model")
        dist.destroy_process_group()
        return
    model: nn.Module = DistributedDataParallel(net)
    if kind == "late":
        del model
        model = DistributedDataParallel(net)
    if kind == "compiled":
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(num_steps):
        if kind == "input":
            time.sleep(0.05)
        if kind == "failing" and step == 10:
            sys.exit(7)
        optimizer.zero_grad()
        loss = model(torch.full((32, 256), 0.1 * (step % 7))).square().mean()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 30)

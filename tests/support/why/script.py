"""A training as users have them, which does not know cgx_ray: `torchrun script.py [STEPS]`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(num_steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.full((32, 256), 0.1 * (step % 7))).square().mean()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Train a byte-level GPT with backend "cgx". A script like this need not import cgx_ray.

    torchrun --nproc-per-node 2 examples/backend_cgx.py --backend cgx
    torchrun --nproc-per-node 2 examples/backend_cgx.py --backend gloo     # the same, uncompressed

The environment variable CGX_COMPRESSION_QUANTIZATION_BITS sets the bits; docs/backend.md lists the other variables.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.demo.gpt import StdlibBytes, build_gpt  # only the model and its data


def main() -> None:
    args = parse_args()
    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    model = DistributedDataParallel(build_gpt(seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    data, began_s = StdlibBytes(), time.perf_counter()
    for step in range(args.steps):
        loss = model(*data.train_batch(seed=0, step=step, rank=rank, batch_size=args.batch_size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"{args.backend}: loss {loss.item():.3f} after {time.perf_counter() - began_s:.1f} s")
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cgx", choices=["cgx", "gloo"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()

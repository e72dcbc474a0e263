"""Train a byte-level GPT with compressed gradients and no Ray.

    torchrun --nproc-per-node 2 examples/torchrun_gpt_bytes.py --steps 50 --codec qsgd:bits=4 --scheme sra

With --checkpoint FILE, training continues from that file if it exists, and writes it at the end.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.demo.gpt import StdlibBytes, build_gpt


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = StdlibBytes()
    model = DistributedDataParallel(build_gpt(seed=args.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    handle = cgx_ray.attach(model, codec=args.codec, scheme=args.scheme)

    first_step = 0
    if args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        # Holds the residuals of all ranks; each rank takes a part of them if the number of ranks has changed.
        handle.load_state_dict(state["compression"])
        first_step = state["step"]

    for step in range(first_step, args.steps):
        loss = model(*data.train_batch(seed=args.seed, step=step, rank=rank, batch_size=args.batch_size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

    if args.checkpoint:
        compression = [None] * dist.get_world_size()
        dist.all_gather_object(compression, handle.state_dict())
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": args.steps}
            torch.save({**state, "compression": compression}, args.checkpoint)
    handle.close()
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--codec", default="qsgd:bits=4,bucket_size=128")
    parser.add_argument("--scheme", default="sra")
    parser.add_argument("--checkpoint", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

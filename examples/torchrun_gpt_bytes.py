"""Train a byte-level GPT with compressed gradients, without Ray.

    torchrun --nproc-per-node 2 examples/torchrun_gpt_bytes.py --steps 50

Without --codec, gradients are sent as 4-bit qsgd over the scheme sra; try also --codec topk:density=0.01. With
--policy adaptive, rank 0 measures the network and decides; its decisions are in --folder, for `cgx-ray report`. With
--checkpoint FILE, training continues from FILE if it exists, and writes FILE at the end. An existing DDP script needs
only the lines marked with `cgx_ray` below.
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
    # cgx_ray: from now on backward compresses
    attachment = cgx_ray.attach(model, policy=args.policy, folder=args.folder, codec=args.codec, scheme=args.scheme)

    first_step = 0
    if args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        # cgx_ray: load the states of all ranks. The number of ranks may have changed since they were saved.
        attachment.load_state_dict(state["compression"])
        first_step = state["step"]

    for step in range(first_step, args.steps):
        loss = model(*data.train_batch(seed=args.seed, step=step, rank=rank, batch_size=args.batch_size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

    if args.checkpoint:
        # cgx_ray: each rank has its own residuals, the gradient that compression has not sent yet. Save all of them.
        compression = [None] * dist.get_world_size()
        dist.all_gather_object(compression, attachment.state_dict())
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": args.steps}
            torch.save({**state, "compression": compression}, args.checkpoint)
    attachment.close()  # cgx_ray: before the process group is destroyed
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", help="adaptive, cgx or flexible; default: static, one codec")
    parser.add_argument("--folder", type=Path, help="of the decisions; default: cgx-ray-runs/<time> if they are made")
    parser.add_argument("--codec", help="such as bf16, qsgd:bits=4 or topk:density=0.01; default: qsgd, 4 bits")
    parser.add_argument("--scheme", help="such as sra or allgather; default: one that carries the codec")
    parser.add_argument("--checkpoint", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Train a byte-level GPT, sharded by FSDP2, with compressed gradients and without Ray.

    torchrun --nproc-per-node 2 examples/torchrun_fsdp2.py --steps 20

On the CPU; for GPUs see docs/fsdp2.md. An existing FSDP2 script needs only the line marked with `cgx_ray`.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cgx_ray
from cgx_ray.demo.gpt import StdlibBytes, build_gpt


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build_gpt(seed=0)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # cgx_ray: gradients in 4 bits, unbiased. With `parameters=` the gathered parameters are encoded too.
    attachment = cgx_ray.attach(model, codec="qsgd:bits=4", parameters=args.parameters)
    # Make the optimizer after fully_shard, which replaces the parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    data = StdlibBytes()
    for step in range(args.steps):
        loss = model(*data.train_batch(seed=0, step=step, rank=rank, batch_size=args.batch_size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sample = attachment.last_step
        if rank == 0 and sample is not None and (step + 1) % 5 == 0:
            sent, held = sample.wire_bytes / 1e6, sample.dense_bytes / 1e6
            print(f"step {step + 1}: loss {loss.item():.3f}, sent {sent:.1f} MB of {held:.1f} MB", flush=True)
    attachment.close()
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank")
    parser.add_argument("--parameters", help="such as qsgd:bits=8,rounding=nearest; default: sent as they are")
    return parser.parse_args()


if __name__ == "__main__":
    main()

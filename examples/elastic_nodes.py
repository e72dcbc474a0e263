"""Train on as many workers as the cluster has room for, and continue when a node leaves or joins.

    python examples/elastic_nodes.py --min-workers 2 --max-workers 8

To try it on one machine, start three nodes of a Ray cluster, each in a terminal of its own, and then end one of the
last two with Ctrl-C while it trains:

    ray start --block --head --num-cpus 1
    ray start --block --address 127.0.0.1:6379 --num-cpus 1
    ray start --block --address 127.0.0.1:6379 --num-cpus 1
    RAY_ADDRESS=127.0.0.1:6379 python examples/elastic_nodes.py --min-workers 1 --max-workers 3 --steps 200

Residuals are the part of the gradient that compression has not sent yet. The checkpoint holds them, and a worker group
of another size starts with residuals of the same sum. It also starts with the controller's knowledge of the network.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import cgx_ray
from cgx_ray.demo.gpt import GPTConfig, StdlibBytes, build_gpt


def train_fn(config: dict[str, Any]) -> None:
    """Train from the newest checkpoint on; every new worker group starts here."""
    context = ray.train.get_context()
    rank, num_workers = context.get_world_rank(), context.get_world_size()
    model = build_gpt(seed=0, config=GPTConfig(num_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    first_step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
    wrapped = ray.train.torch.prepare_model(model)
    cgx_ray.attach(wrapped)  # cgx_ray: loads the residuals from the checkpoint; a single worker exchanges nothing
    if rank == 0:
        print(f"{num_workers} workers begin at step {first_step}", flush=True)

    data = StdlibBytes()
    for step in range(first_step, config["steps"]):
        loss = wrapped(*data.train_batch(seed=0, step=step, rank=rank, batch_size=config["batch_size"]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % config["checkpoint_every"] == 0 or step + 1 == config["steps"]:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            report(rank, state, {"step": step + 1, "loss": loss.item(), "workers": num_workers})


def report(rank: int, state: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Report metrics and a checkpoint to Ray Train; call it on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
            print(f"step {metrics['step']}: {metrics['workers']} workers, loss {metrics['loss']:.3f}", flush=True)
        ray.train.report(metrics, checkpoint=cgx_ray.add_state(checkpoint))  # cgx_ray: each rank adds its residuals


def main() -> None:
    args = parse_args()
    result = TorchTrainer(
        train_fn,
        train_loop_config={name: getattr(args, name) for name in ("steps", "batch_size", "checkpoint_every")},
        torch_config=cgx_ray.CGXConfig(),  # cgx_ray
        # Two numbers, smallest and largest, make the run elastic. Ray Train looks for new nodes once a minute.
        scaling_config=ScalingConfig(num_workers=(args.min_workers, args.max_workers)),
        run_config=RunConfig(
            name=args.name,
            storage_path=str(args.storage.resolve()),  # a folder that all nodes share
            failure_config=FailureConfig(max_failures=-1),  # a lost node is a failure: allow any number of failures
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    assert result.metrics is not None
    print(f"done: {result.metrics['step']} steps, {result.metrics['workers']} workers at the end")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--max-workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per worker")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--storage", type=Path, default=Path("runs"))
    parser.add_argument("--name", default=time.strftime("elastic-%Y%m%d-%H%M%S"))
    return parser.parse_args()


if __name__ == "__main__":
    main()

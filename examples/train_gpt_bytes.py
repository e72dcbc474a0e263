"""Train a byte-level GPT with Ray Train and compressed gradients.

    python examples/train_gpt_bytes.py --workers 2 --steps 50
    ray job submit --working-dir . -- python examples/train_gpt_bytes.py --steps 50

An existing TorchTrainer script needs only the lines marked with `cgx_ray` below. To continue from the last checkpoint,
give the same --name and --storage again, with more --steps.
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
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import cgx_ray
from cgx_ray.demo.gpt import StdlibBytes, build_gpt


def train_fn(config: dict[str, Any]) -> None:
    """Train; runs on every worker."""
    rank = ray.train.get_context().get_world_rank()
    data = StdlibBytes()
    model = ray.train.torch.prepare_model(build_gpt(seed=config["seed"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    first_step = load_checkpoint(model, optimizer)
    attachment = cgx_ray.attach(model)  # cgx_ray: backward compresses from now on; with one worker it does nothing

    for step in range(first_step, config["steps"]):
        # B sequences per worker, T bytes
        input_BT, target_BT = data.train_batch(
            seed=config["seed"], step=step, rank=rank, batch_size=config["batch_size"]
        )
        loss = model(input_BT, target_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        is_last = step + 1 == config["steps"]
        if is_last or (step + 1) % config["checkpoint_every"] == 0:
            plan = attachment.plan.describe() if attachment.plan is not None else "one worker"
            report(model, optimizer, {"step": step + 1, "loss": loss.item(), "plan": plan})


def report(model: torch.nn.Module, optimizer: torch.optim.Optimizer, metrics: dict[str, Any]) -> None:
    """Report metrics and a checkpoint to Ray Train; call it on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            state = {"model": inner(model).state_dict(), "optimizer": optimizer.state_dict(), "step": metrics["step"]}
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        # cgx_ray: each rank adds a file with its residuals, the gradient that compression has not sent yet. `attach`
        # loads them when the run starts again.
        ray.train.report(metrics, checkpoint=cgx_ray.add_state(checkpoint))


def load_checkpoint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint of this run, if there is one, and return the next step."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / "state.pt", weights_only=True)
    inner(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def inner(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model without DDP, which `prepare_model` leaves out with one worker."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def main() -> None:
    args = parse_args()
    if args.codec is None:
        torch_config = cgx_ray.CGXConfig()  # cgx_ray: measure the network and decide
    else:
        torch_config = cgx_ray.CGXConfig(policy="static", codec=args.codec, scheme=args.scheme)
    names = ("steps", "seed", "batch_size", "checkpoint_every")
    result = TorchTrainer(
        train_fn,
        train_loop_config={name: getattr(args, name) for name in names},
        torch_config=torch_config,  # cgx_ray
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.use_gpu),
        run_config=RunConfig(
            name=args.name,
            storage_path=str(args.storage.resolve()),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    print(f"done: {result.metrics}")
    print(f"checkpoint: {result.checkpoint}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--codec", help="none, bf16, qsgd:bits=4, topk:density=0.01; default: chosen by measurements")
    parser.add_argument("--scheme", default="sra", help="dense, allgather, sra, artopk_ring; goes with --codec")
    parser.add_argument("--checkpoint-every", type=int, default=25, help="steps")
    parser.add_argument("--storage", type=Path, default=Path("runs"))
    parser.add_argument("--name", default=time.strftime("gpt-bytes-%Y%m%d-%H%M%S"))
    parser.add_argument("--use-gpu", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()

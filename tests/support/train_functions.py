"""Training functions for the Ray Train tests, in a module that workers can import."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cgx_ray


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))


def weights_hash(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def train_without_attach(config: dict[str, Any]) -> None:
    model = ray.train.torch.prepare_model(small_model())
    model(torch.ones(1, 64)).sum().backward()


def train(config: dict[str, Any]) -> None:
    """Train a small model and log every step to a file per rank.

    log          folder of the files
    steps        number of steps
    die_at       step at which rank 1 dies, in the first attempt only
    checkpoints  file that says which checkpoints Ray's controller has seen; rank 1 waits for it before it dies
    flip_at      step after which rank 1 changes the signs of a row of weights
    report_at    numbers of finished steps after which a checkpoint is reported
    pace         True: wait for the other ranks after every step
    stop         file that ends the training once it exists, with `pace`
    """
    context = ray.train.get_context()
    rank = context.get_world_rank()
    model = ray.train.torch.prepare_model(small_model())
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "model.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        first = saved["step"]
    attachment = cgx_ray.attach(model)
    restored = attachment.state_dict()
    log = Path(config["log"]) / f"rank{rank}-from{first}.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with log.open("w", buffering=1) as file:
        norms = {name: float(value.norm()) for name, value in restored["residuals"].items()}
        file.write(
            json.dumps({"first": first, "engine_step": restored["step"], "residuals": norms, "pid": os.getpid()}) + "\n"
        )
        for step in range(first, config["steps"]):
            if first == 0 and rank == 1 and step == config.get("die_at"):
                # Ray's controller polls for checkpoints and resumes only from one that it has seen.
                while not Path(config["checkpoints"]).exists():
                    time.sleep(0.1)
                os._exit(1)
            x_BD = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank))
            optimizer.zero_grad()
            (model(x_BD) - x_BD).square().mean().backward()
            optimizer.step()
            if rank == 1 and step == config.get("flip_at"):
                next(model.parameters()).data[0].neg_()
            sample = attachment.last_step
            line = {"step": step, "hash": weights_hash(model)}
            if sample is not None:
                line |= {
                    "plan": attachment.plan.describe(),
                    "plan_version": sample.plan_version,
                    "wire_bytes": sample.wire_bytes,
                    "dense_bytes": sample.dense_bytes,
                }
            file.write(json.dumps(line) + "\n")
            if step + 1 in config.get("report_at", ()):
                report(model, step + 1, rank)
            if config.get("pace") and _any_rank_sees(config.get("stop")):
                break


def train_sharded(config: dict[str, Any]) -> None:
    """Train an FSDP2 model until a codec was chosen, and write the plans of each rank, in order, to a file.

    log  folder of the files
    """
    rank = ray.train.get_context().get_world_rank()
    model = fully_shard(small_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    attachment = cgx_ray.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plans: list[str] = []
    num_left = 2000
    while _any_rank(num_left > 0):
        (model(torch.ones(16, 64)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert attachment.plan is not None
        plan = str(attachment.plan)
        plans += [plan] if plan not in plans else []
        is_chosen = len(plans) > 2 and attachment.plan.lease is None
        num_left = min(num_left - 1, 10) if is_chosen else num_left - 1
    (Path(config["log"]) / f"plans{rank}.json").write_text(json.dumps(plans))


def _any_rank_sees(path: str | None) -> bool:
    """Wait for the other ranks, and return whether the file exists for one of them."""
    return _any_rank(path is not None and Path(path).exists())


def _any_rank(has: bool) -> bool:
    """Wait for the other ranks, and return whether one of them `has` it."""
    found = torch.tensor(has, dtype=torch.float32)
    dist.all_reduce(found)
    return bool(found)


def train_elastically(config: dict[str, Any]) -> None:
    """Train with top-k on a number of workers that changes, and note the residuals at both ends of each worker group.

    log     folder of the notes: what each rank has restored, and what it has reported last
    sizes   number of workers of each worker group
    steps   steps of each worker group; then the last rank waits for another number of workers, or training ends
    """
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    model = ray.train.torch.prepare_model(small_model())
    number = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "model.pt", weights_only=True)
        _plain(model).load_state_dict(saved["model"])
        number = saved["step"]
    attachment = cgx_ray.attach(model)
    log = Path(config["log"])
    torch.save(attachment.state_dict(), log / f"group{number}-begin-rank{rank}-of-{size}.pt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(config["steps"]):
        x_BD = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * number + 100 * step + rank))
        optimizer.zero_grad()
        (model(x_BD) - x_BD).square().mean().backward()
        optimizer.step()
    torch.save(attachment.state_dict(), log / f"group{number}-end-rank{rank}-of-{size}.pt")
    report(_plain(model), number + 1, rank)
    if number + 1 < len(config["sizes"]):
        (log / f"group{number}-waits-rank{rank}").touch()
        # Until Ray ends this worker group for one of another size.
        while not (log / "stop").exists():
            time.sleep(0.5)


def _plain(model: nn.Module) -> nn.Module:
    return model.module if hasattr(model, "module") else model  # type: ignore[return-value]


def report(model: nn.Module, step: int, rank: int) -> None:
    """Report as many scripts do: rank 0 makes the checkpoint, the others pass None."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step}, Path(folder) / "model.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": step}, checkpoint=cgx_ray.add_state(checkpoint))

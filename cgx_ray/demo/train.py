"""The training loop of each worker: an ordinary Ray Train loop that also writes one line per step."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn

import cgx_ray
from cgx_ray.demo.gpt import StdlibBytes, build_gpt

LEARNING_RATE = 1e-3
WARMUP_STEPS = 10


def train_fn(config: Mapping[str, Any]) -> None:
    """Train the byte-level GPT for `config["steps"]` steps; rank 0 writes `steps.jsonl`.

    config  steps, seed, batch_size, attach (False: plain DDP, the baseline), run_dir
    """
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(config["seed"])
    data = StdlibBytes()
    model = ray.train.torch.prepare_model(build_gpt(config["seed"]))
    handle = cgx_ray.attach(model) if config["attach"] else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, config["steps"]))

    with StepLog(Path(config["run_dir"]), rank) as log:
        for step in range(config["steps"]):
            batch = data.train_batch(seed=config["seed"], step=step, rank=rank, batch_size=config["batch_size"])
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            log.step(step, loss.item(), handle)
        log.end(validation_loss(model, data), weight_hashes(model))


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Return the factor on the learning rate: a linear warm-up, then linearly down to almost 0.

    At a constant rate the last validation loss is mostly noise. After 48 steps with 14 % of noise on the gradients, the
    loss was 8 % lower than without noise; with the decay it was 0.3 % higher.
    """
    return min((step + 1) / WARMUP_STEPS, (num_steps - step) / max(1, num_steps - WARMUP_STEPS), 1.0)


class StepLog:
    """The file `steps.jsonl` of rank 0; other ranks write nothing."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = run_dir / "steps.jsonl" if rank == 0 else None
        self._file: TextIO | None = None

    def __enter__(self) -> StepLog:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Each line is one write, so a reader sees whole steps.
            self._file = self._path.open("w", buffering=1)
        self._last_end = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def step(self, step: int, loss: float, handle: cgx_ray.Attachment | None) -> None:
        now = time.perf_counter()
        line: dict[str, Any] = {"event": "step", "time": time.time(), "step": step, "loss": loss}
        line["step_s"] = now - self._last_end
        self._last_end = now
        sample = handle.last_step if handle is not None else None
        for part in ("compute_s", "encode_s", "exchange_s", "decode_s"):
            line[part] = getattr(sample, part) if sample is not None else None
        line["plan_version"] = sample.plan_version if sample is not None else None
        line["plan"] = handle.plan.describe() if handle is not None and handle.plan is not None else "dense"
        self._write(line)

    def end(self, validation_loss: float, hashes: list[str]) -> None:
        self._write(
            {
                "event": "end",
                "time": time.time(),
                "validation_loss": validation_loss,
                "weights_identical": len(set(hashes)) == 1,
                "weights_sha256": hashes,
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        """Write a line. JSON has no NaN, so the loss of a training that diverged is null."""
        if self._file is not None:
            finite = {
                key: None if isinstance(one, float) and not math.isfinite(one) else one for key, one in line.items()
            }
            self._file.write(json.dumps(finite) + "\n")


@torch.no_grad()
def validation_loss(model: nn.Module, data: StdlibBytes) -> float:
    """Return the mean loss over the validation set, of which each rank computes a part. A collective call."""
    rank, world_size = _rank_and_size()
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    inner.eval()
    batches = list(data.validation_batches())
    losses = [inner(*batch).item() for batch in batches[rank::world_size]]
    inner.train()
    everyone = _gather(losses)
    return sum(sum(part) for part in everyone) / len(batches)


def weight_hashes(model: nn.Module) -> list[str]:
    """Return the SHA-256 of each rank's weights. A collective call."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return _gather(digest.hexdigest())


def _rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _gather(value: Any) -> list[Any]:
    _, world_size = _rank_and_size()
    if world_size == 1:
        return [value]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, value)
    return everyone

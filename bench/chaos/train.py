"""The training loop of each worker in `python -m bench chaos`: the demo's, with a GradScaler and faults of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import Tensor, nn

import cgx_ray
from bench.chaos.faults import ChaosKind
from cgx_ray.demo.gpt import GPT, GPTConfig, StdlibBytes, build_gpt
from cgx_ray.demo.train import LEARNING_RATE, StepLog, learning_rate_factor, validation_loss, weight_hashes

_BATCH_SIZE = 1
# A NaN halves the scale; it doubles again after so many steps without one. The first scale is small enough for float32.
_FIRST_SCALE, _GROWTH_STEPS = 1024.0, 40
# Seconds that a slow rank adds to a step.
_SLOW_S = 0.3


def train_with_faults(config: Mapping[str, Any]) -> None:
    """Train the byte-level GPT for `config["steps"]` steps; rank 0 writes `steps.jsonl`.

    config  steps, seed, step_s, width, num_layers, log_dir; faults: `ChaosFault.fields` of those in the loop
    """
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(config["seed"])
    data = StdlibBytes()
    gpt = build_gpt(config["seed"], GPTConfig(width=config["width"], num_layers=config["num_layers"]))
    model = ray.train.torch.prepare_model(gpt, parallel_strategy_kwargs={"find_unused_parameters": True})
    handle = cgx_ray.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, config["steps"]))
    scaler = torch.amp.GradScaler("cpu", init_scale=_FIRST_SCALE, growth_interval=_GROWTH_STEPS)
    with StepLog(Path(config["log_dir"]), rank) as log:
        for step in range(config["steps"]):
            began_s = time.perf_counter()
            active = _active(config["faults"], step, rank)
            batch = data.train_batch(seed=config["seed"], step=step, rank=rank, batch_size=_BATCH_SIZE)
            with _unused_block(gpt, active):
                loss = model(*batch)
                scaler.scale(_faulty(loss, active)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            time.sleep(max(0.0, began_s + config["step_s"] - time.perf_counter()))
            log.step(step, loss.item(), handle)
        log.end(validation_loss(model, data), weight_hashes(model))


def _active(faults: Sequence[Mapping[str, Any]], step: int, rank: int) -> set[ChaosKind]:
    """Return the kinds of faults that this rank has in `step`."""
    now = [(ChaosKind[fault["kind"]], fault["rank"]) for fault in faults if fault["first"] <= step <= fault["last"]]
    return {kind for kind, target in now if target == rank or kind is ChaosKind.UNUSED}


def _faulty(loss: Tensor, active: set[ChaosKind]) -> Tensor:
    if ChaosKind.SLOW_RANK in active:
        time.sleep(_SLOW_S)
    return loss * float("nan") if ChaosKind.NAN in active else loss


@contextmanager
def _unused_block(gpt: GPT, active: set[ChaosKind]) -> Iterator[None]:
    """Let the data go around the last block, so that its parameters get no gradient."""
    with ExitStack() as stack:
        if active & {ChaosKind.UNUSED, ChaosKind.UNUSED_BY_ONE}:
            stack.enter_context(gpt.blocks[-1].register_forward_hook(_pass_on))
        yield


def _pass_on(block: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return inputs[0]

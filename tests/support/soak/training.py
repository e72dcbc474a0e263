"""A training of the soak test, for its driver in host 0 of the lab: `python -m support.soak.training ADDRESS`.

Each line on standard input is a `SoakRun`. The loop of each worker is the demo's, with a GradScaler and faults of its
own. The process ends when standard input ends.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn

import cgx_ray
from cgx_ray.demo.gpt import GPT, GPTConfig, StdlibBytes, build_gpt
from cgx_ray.demo.train import LEARNING_RATE, StepLog, learning_rate_factor, validation_loss, weight_hashes
from support.soak.faults import SoakKind

_BATCH_SIZE = 1
# Steps between two comparisons of the weights: often enough that a step which broke them is near.
_WEIGHT_CHECK_STEPS = 25
# A NaN halves the scale; it doubles again after _GROWTH_STEPS without one. The first scale is small enough for float32.
_FIRST_SCALE, _GROWTH_STEPS = 1024.0, 40
# Seconds that a slow rank adds to a step.
_SLOW_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRun:
    """One training, as a line of JSON. `config` is that of `train_with_faults`, without `log_dir`."""

    name: str
    num_workers: int
    storage_path: str
    config: dict[str, Any]

    @property
    def run_dir(self) -> Path:
        return Path(self.storage_path) / self.name

    @property
    def log_dir(self) -> Path:
        """Folder of `steps.jsonl`, apart from the journal, whose disk may be full."""
        return Path(self.storage_path) / f"{self.name}-steps"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def train_with_faults(config: Mapping[str, Any]) -> None:
    """Train the byte-level GPT for `config["steps"]` steps; rank 0 writes `steps.jsonl`.

    config  steps, seed, step_s, width, num_layers, log_dir; faults: `SoakFault.fields` of those in the loop
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


def _active(faults: Sequence[Mapping[str, Any]], step: int, rank: int) -> set[SoakKind]:
    """Return the kinds of faults that this rank has in `step`."""
    now = [(SoakKind[fault["kind"]], fault["rank"]) for fault in faults if fault["first"] <= step <= fault["last"]]
    return {kind for kind, target in now if target == rank or kind is SoakKind.UNUSED}


def _faulty(loss: Tensor, active: set[SoakKind]) -> Tensor:
    if SoakKind.SLOW_RANK in active:
        time.sleep(_SLOW_S)
    return loss * float("nan") if SoakKind.NAN in active else loss


@contextmanager
def _unused_block(gpt: GPT, active: set[SoakKind]) -> Iterator[None]:
    """Let the data go around the last block, so that its parameters get no gradient."""
    with ExitStack() as stack:
        if active & {SoakKind.UNUSED, SoakKind.UNUSED_BY_ONE}:
            stack.enter_context(gpt.blocks[-1].register_forward_hook(_pass_on))
        yield


def _pass_on(block: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return inputs[0]


def main() -> None:
    ray.init(address=sys.argv[1], logging_level=logging.WARNING)
    for line in sys.stdin:
        _fit(SoakRun(**json.loads(line)))


def _fit(run: SoakRun) -> None:
    TorchTrainer(
        train_with_faults,
        train_loop_config={**run.config, "log_dir": str(run.log_dir)},
        torch_config=cgx_ray.CGXConfig(seed=run.config["seed"], weight_check_steps=_WEIGHT_CHECK_STEPS),
        scaling_config=ScalingConfig(num_workers=run.num_workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name=run.name, storage_path=run.storage_path),
    ).fit()


if __name__ == "__main__":
    main()

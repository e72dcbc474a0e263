"""A training with DDP whose compute sleeps, so that many ranks fit on few processors: `python sleeping_training.py`.

It does not know cgx_ray, and takes its rank from the environment as `cgx-ray lab run` and torchrun set it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

NUM_LAYERS, NUM_COLUMNS = 8, 64


class _Sleep(Function):
    """Takes `seconds` in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, input_N: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return input_N.clone()

    @staticmethod
    def backward(ctx: Any, *grads_N: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads_N[0], None


class Sleeping(nn.Module):
    """`NUM_LAYERS` layers with `megabytes` of parameters, whose forward and backward take `compute_s` together."""

    def __init__(self, megabytes: float, compute_s: float) -> None:
        super().__init__()
        num_rows = round(megabytes * 1e6 / 4 / NUM_LAYERS / NUM_COLUMNS)
        self.layers = nn.ParameterList(torch.zeros(num_rows, NUM_COLUMNS) for _ in range(NUM_LAYERS))
        self.sleep_s = compute_s / 2 / NUM_LAYERS

    def forward(self, value_N: Tensor) -> Tensor:
        for layer in self.layers:
            value_N = _Sleep.apply(value_N, self.sleep_s) + layer.sum()
        return value_N


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--megabytes", type=float, default=4)
    parser.add_argument("--bucket-mb", type=float, default=0.5)
    parser.add_argument("--compute-s", type=float, default=0.1)
    parser.add_argument("--input-s", type=float, default=0, help="what each batch takes")
    parser.add_argument("--work-s", type=float, default=0, help="processor time of each step, besides")
    parser.add_argument("--crowded-rank", type=int, help="shares its processor with two busy programs; others do not")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if given.crowded_rank is not None:
            first, *others = sorted(os.sched_getaffinity(0))
            is_crowded = dist.get_rank() == given.crowded_rank
            os.sched_setaffinity(0, {first} if is_crowded else others)
            for _ in range(2 if is_crowded else 0):
                busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                stack.callback(busy.kill)
        train(given)
    dist.destroy_process_group()


def train(given: argparse.Namespace) -> None:
    model = DistributedDataParallel(Sleeping(given.megabytes, given.compute_s), bucket_cap_mb=given.bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(given.steps):
        time.sleep(given.input_s)
        optimizer.zero_grad()
        loss = model(torch.ones(1)).mean()
        end_s = time.thread_time() + given.work_s
        while time.thread_time() < end_s:
            pass
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()

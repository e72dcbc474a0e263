"""One rank of `python -m bench accuracy`: trains all cases, one after the other.

Rank 0 writes a `TrainingRun` as a line of JSON after each case.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from bench.accuracy.bits import BitsBesideStatic
from bench.accuracy.cases import POLICIES, TORCH_PEERS, policy_settings, read_way
from bench.accuracy.measure import TrainingRun
from bench.accuracy.workloads import Batch, TrainingTask, load_task
from bench.shared.rank_process import run_rank
from bench.step.averaging import Averaging, TorchRounds
from cgx_ray.codecs import make_codec
from cgx_ray.codecs.gain import squared_error
from cgx_ray.demo.train import learning_rate_factor
from cgx_ray.lab.schedule import STEP_FILE_VARIABLE, report_step
from cgx_ray.plan import SMALL_LAYER_NUMEL, STEPS_TOGETHER, Plan
from cgx_ray.planner.fidelity import expected_loss, loss_of
from cgx_ray.session.attach import attach_with

_MAX_NORM = 1.0
_NUM_POINTS = 10
# Seconds between two reports to the control loop, 0.5 in a training: the smallest of these take seconds in all.
_REPORT_S = 0.05


class _Sent:
    """Sums over the steps of a training.

    changes     steps at which the network changes
    wire_bytes  sum over the steps
    plans       steps by (network, plan, period)
    """

    def __init__(self, changes: Sequence[float]) -> None:
        self.wire_bytes = 0.0
        self.plans = Counter[tuple[int, str, int]]()
        self._changes = changes
        self._last: Plan | None = None

    def add_step(self, attachment: cgx_ray.Attachment, step: int) -> None:
        sample, plan = attachment.last_step, attachment.plan
        self.wire_bytes += sample.wire_bytes if sample is not None else 0
        if plan is not None:
            self.plans[bisect_right(self._changes, step) - 1, plan.describe(), plan.period] += 1
            self._last = plan

    @property
    def expected_loss(self) -> float:
        """Loss over dense's that is expected of the last plan, NaN if its codecs were not measured."""
        if (plan := self._last) is None:
            return math.nan
        replicas = dist.get_world_size()
        loss = expected_loss(loss_of(group.option.codec, plan.period, replicas) for group in plan.groups)
        return math.nan if loss is None else loss


def _measure(job: dict[str, Any]) -> None:
    if job["rank"] == 0 and "step_file" in job:
        os.environ[STEP_FILE_VARIABLE] = job["step_file"]
    tasks = {name: load_task(name) for name in job["workloads"]}
    cases = itertools.product(range(job["num_seeds"]), tasks.items(), job["ways"])
    for index, (seed, (workload, task), way) in enumerate(cases):
        run = _train(task, workload, way, seed, {**job, "first_step": index * job["num_steps"]})
        # Reducer and model hold each other: without this the memory of the cases adds up.
        gc.collect()
        if job["rank"] == 0:
            print(json.dumps(asdict(run)), flush=True)
    dist.barrier()


def _train(task: TrainingTask, workload: str, way: str, seed: int, job: dict[str, Any]) -> TrainingRun:
    """Train one case. It ends early at the first validation loss that is not finite."""
    num_steps = job["num_steps"]
    folder = Path(job["store"]).parent / f"{workload}-{way}-{seed}"
    peer = TORCH_PEERS.get(way)
    model = DistributedDataParallel(task.build(seed), bucket_cap_mb=peer.bucket_cap_mb if peer is not None else None)
    sent = _Sent(job["changes"])
    is_codec = peer is None and way not in POLICIES
    has_momentum = not is_codec or read_way(way)[0].codec.name != "dgc"
    optimizer = task.make_optimizer(model.parameters(), has_momentum)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, num_steps))
    points, errors, steps_s, beside = [], [], [], BitsBesideStatic()
    with closing(_attach(model, way, folder, shared_memory=job["is_loopback"])) as attachment:
        for step in range(num_steps):
            report_step(job["first_step"] + step)
            began_s = time.perf_counter()
            loss = model(*task.batch(seed, step, dist.get_rank()))
            loss.backward()
            if task.reports_loss and isinstance(attachment, cgx_ray.Attachment):
                attachment.observe(loss=loss)
            nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
            optimizer.step()
            if isinstance(attachment, Averaging):
                attachment.end_step()
            optimizer.zero_grad()
            schedule.step()
            steps_s.append(time.perf_counter() - began_s)
            if isinstance(attachment, cgx_ray.Attachment):
                sent.add_step(attachment, step)
            if (step + 1) * _NUM_POINTS // num_steps > step * _NUM_POINTS // num_steps:
                if isinstance(attachment, Averaging):
                    attachment.average_now()
                else:
                    attachment.end_round()
                validated = _validate(model.module, task.validation)
                if not math.isfinite(validated):
                    break
                points.append((step + 1, math.fsum(steps_s), validated))
                gradients = _gradients(model.module, task.batch(seed, step, dist.get_rank()))
                if is_codec:
                    errors.append(_relative_error(gradients, way))
                if not isinstance(attachment, Averaging) and attachment.plan is not None:
                    beside.add_step(attachment.plan, gradients, step)
    return TrainingRun(
        workload=workload,
        option=way,
        seed=seed,
        points=tuple(points),
        has_diverged=len(points) < _NUM_POINTS,
        wire_bytes=sent.wire_bytes / (step + 1) if peer is None else math.nan,
        relative_error=max(errors, default=math.nan),
        bytes_over_static=beside.bytes_share,
        error_over_static=beside.error_ratio,
        step_s=median(steps_s[len(steps_s) // 2 :]),
        expected_loss=sent.expected_loss,
        plans=tuple((*plan, num_steps) for plan, num_steps in sent.plans.items()),
    )


def _attach(
    model: DistributedDataParallel, way: str, folder: Path, *, shared_memory: bool
) -> cgx_ray.Attachment | Averaging:
    """Attach torch's hook, the codec, or the policy, whose journal is in `folder`.

    shared_memory  between ranks; in a lab it would go around the links
    """
    if (peer := TORCH_PEERS.get(way)) is not None:
        averaging = TorchRounds if peer.kind == "local_sgd" else Averaging
        return averaging(model, peer, first_alone=STEPS_TOGETHER)
    if way in POLICIES:
        return attach_with(model, policy_settings(way, shared_memory=shared_memory), folder=folder, report_s=_REPORT_S)
    option, period = read_way(way)
    return cgx_ray.attach(model, codec=option.codec, scheme=option.scheme, period=period, shared_memory=shared_memory)


@torch.no_grad()
def _validate(model: nn.Module, batches: tuple[Batch, ...]) -> float:
    """Return the mean loss, the same on all ranks, of which each computes a part. A collective call."""
    own = sum((model(*batch).item() for batch in _own(batches)), 0.0)
    total = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / len(batches)


def _relative_error(gradients: Mapping[str, Tensor], way: str) -> float:
    """Return |g - decode(encode(g))|^2 / |g|^2 of this rank's gradient g of the layers that are encoded."""
    large = [
        gradient.flatten()
        for gradient in gradients.values()
        if gradient.ndim > 1 and gradient.numel() >= SMALL_LAYER_NUMEL
    ]
    grad_N = torch.cat(large)
    return squared_error(make_codec(read_way(way)[0].codec), grad_N, key=0) / float(grad_N.double().square().sum())


def _gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return this rank's gradients by layer."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    # Not by `backward`, which would call DDP's hooks.
    return dict(zip(names, torch.autograd.grad(model(*batch), parameters), strict=True))


def _own(batches: tuple[Batch, ...]) -> Iterator[Batch]:
    yield from batches[dist.get_rank() :: dist.get_world_size()]


if __name__ == "__main__":
    run_rank(_measure)

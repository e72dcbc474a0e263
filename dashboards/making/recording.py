"""A real adaptive run on a local Ray cluster that Prometheus watches: what the boards' picture and their tests show."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import cgx_ray
from cgx_ray.collectives.transport.simulated_link import SimulatedLink
from cgx_ray.ray_train.config import CGXConfig
from cgx_ray.report.record import load_run
from dashboards.making.prometheus import PrometheusServer, prometheus

# Quotation marks and a backslash: names of runs come from users.
RUN_NAME = 'boards "a\\b"'
NUM_RANKS = 2
# Bits per second before and after the change, and the step and seconds of the change.
FAST_BIT_PER_S, SLOW_BIT_PER_S = 2e8, 2e7
# Steps that the run takes on each link: some 10 s on the fast one, 20 s on the slow one.
FAST_STEPS, SLOW_STEPS = 150, 150
# Codecs that the policy may choose. The gain of top-k is so small on random data that only a slow link makes up for it.
CANDIDATES = ("bf16", "topk:density=0.1")
# The ranks report twice in a second, the agent publishes each second, and Prometheus reads each second.
SETTLE_S = 4.0
_HIDDEN = 512
_COMPUTE_S = 0.02
_LEARNING_RATE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A finished run.

    start_s, end_s  seconds since 1970
    changed_s       the same, of the first step on the slow link
    steps_s         duration of each step of rank 0, by its own clock; the first also holds `attach`
    decisions       of the journal
    """

    server: PrometheusServer
    start_s: float
    end_s: float
    changed_s: float
    steps_s: list[float]
    decisions: list[dict[str, Any]]


@contextmanager
def ray_and_prometheus(folder: Path, rules: Path) -> Iterator[PrometheusServer]:
    """Start a local Ray cluster and a Prometheus that finds it through Ray's own file."""
    paths = os.pathsep.join([str(Path(cgx_ray.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    context = ray.init(
        num_cpus=NUM_RANKS + 1,
        include_dashboard=True,
        dashboard_port=0,
        log_to_driver=False,
        object_store_memory=128 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
        # Publish metrics each second instead of every ten.
        _system_config={"metrics_report_interval_ms": 1000},
    )
    try:
        discovery = Path(context.address_info["session_dir"]) / "prom_metrics_service_discovery.json"
        with prometheus(discovery, folder, rules=rules) as server:
            yield server
    finally:
        ray.shutdown()


def record(server: PrometheusServer, folder: Path) -> Recording:
    """Train on a simulated link that becomes ten times slower, and return when the run has ended."""
    link = SimulatedLink(latency_s=1e-4, schedule=((0, FAST_BIT_PER_S), (FAST_STEPS, SLOW_BIT_PER_S)))
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "steps.json"
    TorchTrainer(
        train,
        train_loop_config={"steps": FAST_STEPS + SLOW_STEPS, "log": str(log)},
        torch_config=CGXConfig(simulated_link=link, candidates=CANDIDATES, min_gain=0.1),
        scaling_config=ScalingConfig(num_workers=NUM_RANKS),
        run_config=RunConfig(name=RUN_NAME, storage_path=str(folder)),
    ).fit()
    # When the first step began, and when each ended.
    times_s = json.loads(log.read_text())
    return Recording(
        server=server,
        start_s=times_s[0] - 1,
        end_s=times_s[-1] + SETTLE_S,
        changed_s=times_s[FAST_STEPS],
        steps_s=[after - before for before, after in itertools.pairwise(times_s)],
        decisions=load_run(folder / RUN_NAME).decisions,
    )


def train(config: dict[str, Any]) -> None:
    """Train a small model; rank 0 writes when it began to attach and when each step ended to `config["log"]`."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 64)
    )
    model = ray.train.torch.prepare_model(net)
    times_s = [time.time()]
    attachment = cgx_ray.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    rank = ray.train.get_context().get_world_rank()
    for step in range(config["steps"]):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x_BD = torch.randn(16, 64, generator=generator, dtype=torch.float32, device="cpu")
        optimizer.zero_grad()
        time.sleep(_COMPUTE_S)
        loss = (model(x_BD) - x_BD).square().mean()
        loss.backward()
        optimizer.step()
        attachment.observe(loss=loss, lr=_LEARNING_RATE)
        dist.barrier()
        times_s.append(time.time())
    time.sleep(SETTLE_S)
    if rank == 0:
        Path(config["log"]).write_text(json.dumps(times_s))

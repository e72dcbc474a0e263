"""`python -m bench gpu`: does the engine keep out of a GPU's way? Two ranks share one GPU and exchange over loopback.

Backward lasts a known time, so what a step needs beyond it is the exchange. The ranks' process group is Gloo, because
NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch

from bench.gpu.rank import ALLOCATIONS, LAUNCHES, NUM_PARTS, WAITS, WATCHES, GpuRecord
from bench.shared.ranks import run_ranks
from bench.shared.runner import BenchRun, bench_command
from cgx_ray.errors import ConfigError
from cgx_ray.report.result import Row

NUM_RANKS = 2
# Seconds after its gradient until a group begins to encode.
PROMPT_S = 2e-3
_MIB = 1 << 20


@bench_command()
def gpu(run: BenchRun) -> Iterable[Row]:
    """Count calls of CUDA, and time steps on a GPU.

    Two ranks share the GPU. The model has 350 M parameters.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu: PyTorch sees no CUDA device here; run it where there is one")
    run.title += f", {NUM_RANKS} ranks, {torch.cuda.get_device_name()}"
    record = None
    lines = run_ranks("bench.gpu.rank", {}, name="bench gpu", num_ranks=NUM_RANKS)
    for index, line in enumerate(lines):
        if line.startswith("{"):
            record = GpuRecord(**json.loads(line))
        else:
            run.on_part(line, index / NUM_PARTS)
    assert record is not None
    return rows_of(record)


def rows_of(record: GpuRecord) -> list[Row]:
    """Return what was measured, with this project's goals."""
    prompt = sum(lag <= PROMPT_S for lag in record.lags_s)
    rows = [
        Row(name="prompt_groups", value=prompt, unit="groups", limit=len(record.lags_s), goal=">= 9"),
        Row(name="longest_lag", value=1e3 * max(record.lags_s), unit="ms"),
    ]
    kinds: dict[str, tuple[tuple[str, ...], str | None]] = {
        "waits": (WAITS, "<= 0"),
        "watches": (WATCHES, None),
        "allocations": (ALLOCATIONS, None),
        "launches": (LAUNCHES, "<= 3"),
        "copies_out": (("Memcpy DtoH (Device -> Pinned)",), "<= 2"),
        "copies_in": (("Memcpy HtoD (Pinned -> Device)",), "<= 2"),
        "pageable_copies": (("Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pageable -> Device)"), "<= 0"),
    }
    for name, (calls, goal) in kinds.items():
        count = sum(record.calls.get(call, 0) for call in calls)
        rows.append(Row(name=f"{name}_a_group", value=count / record.num_groups, unit="calls", goal=goal))
    ddp_s, noop_s = record.step_s["ddp"], record.step_s["noop"]
    for way, seconds in record.step_s.items():
        rows.append(Row(name=f"step_{way}", value=seconds, unit="s", baseline=ddp_s, ratio=seconds / ddp_s))
    limit_s = max(noop_s, record.wire_s)
    qsgd_s, dense_s = record.step_s["qsgd"], record.step_s["dense"]
    rows += [
        Row(name="dense_over_ddp", value=dense_s / ddp_s, unit="x", goal="<= 1.03"),
        Row(name="wire", value=record.wire_s, unit="s"),
        Row(name="qsgd_over_limit", value=qsgd_s / limit_s, unit="x", limit=1.0, goal="<= 1.15"),
        Row(name="groups_of_350m", value=record.num_groups_large, unit="groups"),
        Row(name="engine_thread_qsgd", value=1e3 * record.thread_s["qsgd"], unit="ms/step", goal="<= 15"),
        Row(name="engine_thread_dense", value=1e3 * record.thread_s["dense"], unit="ms/step"),
    ]
    for what, found in (("device", record.device_bytes), ("pinned", record.pinned_bytes)):
        added = (found["qsgd"] - found["noop"]) / _MIB
        rows.append(Row(name=f"{what}_memory_added", value=added, unit="MiB", goal="<= 256"))
    return rows

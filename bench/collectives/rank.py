"""One rank of `python -m bench collectives`: a process in a host of the lab or on loopback.

Rank 0 writes the name of a case after each of its turns. At the end it writes as JSON {case: [error, seconds of each
round ...]}, where the error is the squared norm of what the average is off, over that of the average; without meaning
for the vendor's sum.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.shared.rank_process import run_rank, start_together
from cgx_ray.codecs import make_codec
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Phases, Transport, make_exchange
from cgx_ray.collectives.transport.tcp import connect_mesh
from cgx_ray.plan import CodecSpec, Scheme

_TIMEOUT_S = 120.0
_LEAD_S = 0.4
# Replaces a gradient, (N,) float32, by the average (for the vendor the sum); gets the number of the turn too.
Collective = Callable[[Tensor, int], None]


def _measure(job: dict[str, Any]) -> None:
    rank, num_rounds = job["rank"], job["num_rounds"]
    assert dist.group.WORLD is not None
    transports = {"gloo": Transport(dist.group.WORLD)}
    for kind in ("tcp", "shm"):
        mesh = connect_mesh(dist.group.WORLD, _TIMEOUT_S, shared_memory=kind == "shm")
        transports[kind] = Transport(dist.group.WORLD, mesh=mesh, timeout_s=_TIMEOUT_S)
    names = [case["name"] for case in job["cases"]]
    collectives = [_collective(case, job["numel"], transports) for case in job["cases"]]
    grad_N, mean_N = _gradient(job["numel"], rank), _mean_gradient(job["numel"], dist.get_world_size())
    # The first round warms up memory and connections: its time is not counted, and its errors take that place.
    found_TC = torch.zeros(1 + num_rounds, len(names), dtype=torch.float64)
    for turn in range(1 + num_rounds):
        # A B C, then C B A, so that none always runs first.
        for which in range(len(names)) if turn % 2 == 0 else reversed(range(len(names))):
            result_N = grad_N.clone()
            seconds = _time(collectives[which], result_N, turn)
            found_TC[turn, which] = seconds if turn else _error(result_N, mean_N)
            if rank == 0:
                print(names[which], flush=True)
    dist.all_reduce(found_TC, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps(dict(zip(names, found_TC.T.tolist(), strict=True))), flush=True)
    dist.barrier()
    for transport in transports.values():
        transport.close()


def _gradient(numel: int, rank: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def _mean_gradient(numel: int, num_ranks: int) -> Tensor:
    mean_N = _gradient(numel, 0)
    for rank in range(1, num_ranks):
        mean_N += _gradient(numel, rank)
    return mean_N.div_(num_ranks)


def _error(result_N: Tensor, mean_N: Tensor) -> float:
    return float((result_N - mean_N).square_().sum() / mean_N.square().sum())


def _time(collective: Collective, grad_N: Tensor, turn: int) -> float:
    begin = start_together(_LEAD_S)
    collective(grad_N, turn)
    return time.perf_counter() - begin


def _collective(case: dict[str, Any], numel: int, transports: dict[str, Transport]) -> Collective:
    if case["transport"] == "vendor":
        return lambda grad_N, turn: dist.all_reduce(grad_N)
    codec = make_codec(CodecSpec.parse(case["codec"]))
    exchange = make_exchange(codec, Scheme(case["scheme"]), numel, 4, transports[case["transport"]])
    memory = codec.new_memory(numel)

    def run(grad_N: Tensor, turn: int) -> None:
        stamp = Stamp(plan_version=0, step=turn, group=0, codec=codec.spec.name)
        exchange.run(grad_N, memory, stamp, 0, Phases())

    return run


if __name__ == "__main__":
    run_rank(_measure)

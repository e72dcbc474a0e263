"""Processes that agree, for `python -m bench scale`: `python -m bench.scale.agreeing_ranks 256`.

They greet each other too, as engines do once per step: what both cost a rank grows with the number of ranks.

One process per rank, forked after the imports: each would need 200 MB of its own otherwise. All are on one machine and
talk by TCP over loopback, as ranks of many nodes do.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any, TextIO

import torch
from torch import Tensor

from cgx_ray.collectives.transport.greeting import Greetings, partners
from cgx_ray.errors import CGXError
from cgx_ray.runtime_ext.mesh import TOKEN_BYTES, Mesh

NUM_STEPS, NUM_WARM_UP = 20, 3
# Two cores connect 256 ranks in about half a minute.
TIMEOUT_S = 300.0
_HOST = "127.0.0.1"


def main() -> None:
    num_ranks = int(sys.argv[1])
    token = secrets.token_bytes(TOKEN_BYTES)
    torch.set_num_threads(1)
    links, pids = [], []
    for rank in range(num_ranks):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _end_with(partial(_run_rank, rank, num_ranks, token, theirs))
        theirs.close()
        links.append(ours.makefile("rw"))
        pids.append(pid)
    ports = [_receive(link) for link in links]
    for link in links:
        _send(link, ports)
    found = [_receive(link) for link in links]
    failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    if failed:
        raise CGXError(f"{len(failed)} of {num_ranks} processes failed; see the first error above")
    print(json.dumps({name: 1e3 * fmean(one[name] for one in found) for name in found[0]}))


def _end_with(work: Callable[[], None]) -> None:
    """End this process after `work`, without what Python does at its end: the parent has the same."""
    status = 1
    try:
        work()
        status = 0
    except Exception:  # noqa: BLE001 - printed, and the exit status says so
        traceback.print_exc()
    finally:
        os._exit(status)


def _run_rank(rank: int, num_ranks: int, token: bytes, link: socket.socket) -> None:
    mesh = Mesh(rank, num_ranks, 1, _HOST, token)
    with link.makefile("rw") as parent:
        _send(parent, mesh.port)
        mesh.connect([(_HOST, port) for port in _receive(parent)], TIMEOUT_S)
        greetings = Greetings(mesh, rank, num_ranks, channel=2)
        ways: dict[str, Callable[..., Tensor]] = {
            "in_rounds_ms": partial(_greet_and_agree, greetings),
            "to_all_ms": _agree_with_all,
        }
        _send(parent, {name: _cpu_s(partial(way, mesh, rank, num_ranks), rank) for name, way in ways.items()})
        # The others may still need this rank.
        _agree_with_all(mesh, rank, num_ranks, torch.zeros(8, dtype=torch.int64))
    mesh.close()


def _cpu_s(agree: Callable[[Tensor], Tensor], rank: int) -> float:
    """Return the processor seconds of all threads of this process per agreement on the least number of all ranks."""
    start_s = 0.0
    for step in range(NUM_WARM_UP + NUM_STEPS):
        if step == NUM_WARM_UP:
            start_s = time.process_time()
        values_K = torch.full((8,), 100 + step + rank)
        assert agree(values_K).tolist() == [100 + step] * 8
    return (time.process_time() - start_s) / NUM_STEPS


def _greet_and_agree(greetings: Greetings, mesh: Mesh, rank: int, num_ranks: int, values_K: Tensor) -> Tensor:
    """Greet others, and agree as the engine does."""
    greetings.receive(TIMEOUT_S)
    greetings.greet()
    mesh.wait(mesh.post_minimum(values_K, partners(rank, num_ranks), channel=0), TIMEOUT_S)
    return values_K


def _agree_with_all(mesh: Mesh, rank: int, num_ranks: int, values_K: Tensor) -> Tensor:
    received = {peer: torch.empty_like(values_K) for peer in range(num_ranks) if peer != rank}
    mesh.wait(mesh.post(dict.fromkeys(received, values_K), received, channel=1), TIMEOUT_S)
    return torch.stack([values_K, *received.values()]).amin(0)


def _send(link: TextIO, value: object) -> None:
    print(json.dumps(value), file=link, flush=True)


def _receive(link: TextIO) -> Any:
    return json.loads(link.readline())


if __name__ == "__main__":
    main()

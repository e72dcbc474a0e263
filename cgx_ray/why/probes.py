"""Probes between the nodes of a training, before its first step, by the monitors' own servers."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from cgx_ray.monitors.guarded_server import Address
from cgx_ray.monitors.probe import Prober
from cgx_ray.monitors.probe_schedule import rounds
from cgx_ray.sockets import tcp_sockets
from cgx_ray.why.records import ProbedPath

if TYPE_CHECKING:
    import torch.distributed as dist

_KEY = "cgx_ray_why/probe"
# Seconds that a rank waits for the others: they build their models at the same time, and a probe takes up to 20 s.
_WAIT_S = 120.0


def probe_ranks(store: dist.Store, rank: int, world_size: int) -> tuple[ProbedPath, ...]:
    """Probe the other nodes from this rank, if it is the first one of its node. All ranks call it.

    Every ordered pair of nodes has its turn, and no node takes part in two probes at a time. Raises RuntimeError if
    another rank does not come, OSError if a node does not answer.
    """
    wait = timedelta(seconds=_WAIT_S)
    host = own_address()
    store.set(f"{_KEY}/host/{rank}", host)
    hosts = [_text(store, f"{_KEY}/host/{other}", wait) for other in range(world_size)]
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    found: list[ProbedPath] = []
    if rank in firsts and len(firsts) > 1:
        prober = Prober(host)
        try:
            store.set(f"{_KEY}/servers/{rank}", json.dumps(prober.addresses()))
            for number, pairs in enumerate(rounds(len(firsts))):
                for at, to in pairs:
                    if firsts[at] == rank:
                        echo, bulk = json.loads(_text(store, f"{_KEY}/servers/{firsts[to]}", wait))
                        path = prober.probe(Address(*echo), Address(*bulk))
                        rates = {"bytes_per_s": path.bytes_per_s, "latency_s": path.latency_s}
                        found.append(ProbedPath(own=host, other=hosts[firsts[to]], **rates))
                _meet(store, f"{_KEY}/round/{number}", len(firsts), wait)
        finally:
            prober.close()
    _meet(store, f"{_KEY}/end", world_size, wait)
    return tuple(found)


def own_address() -> str:
    """Return the address at which most connections of this process end here: those of its process group."""
    found = Counter[str]()
    for opened in tcp_sockets():
        with suppress(OSError):  # it listens
            opened.getpeername()
            found[str(opened.getsockname()[0]).removeprefix("::ffff:")] += 1
    return max(found, key=lambda address: (not address.startswith("127."), found[address]), default="127.0.0.1")


def _text(store: dist.Store, key: str, wait: timedelta) -> str:
    store.wait([key], wait)
    return store.get(key).decode()


def _meet(store: dist.Store, name: str, number: int, wait: timedelta) -> None:
    """Return when `number` ranks have called it."""
    if store.add(f"{name}/here", 1) == number:
        store.set(f"{name}/all", "1")
    store.wait([f"{name}/all"], wait)

"""Probes between the nodes of a training, before its first step, over all cards, by the monitors' own servers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from cgx_ray.monitors.guarded_server import Address
from cgx_ray.monitors.probe import Prober
from cgx_ray.monitors.probe_schedule import rounds
from cgx_ray.sockets import tcp_sockets
from cgx_ray.why.meters import NodeMeter
from cgx_ray.why.records import ProbedPath, is_card

if TYPE_CHECKING:
    import torch.distributed as dist

_KEY = "cgx_ray_why/probe"
# Seconds that a rank waits for the others: they build their models at the same time, and a probe takes up to 20 s.
_WAIT_S = 120.0


def probe_ranks(store: dist.Store, rank: int, world_size: int) -> tuple[ProbedPath, ...]:
    """Probe the other nodes from this rank, if it is the first one of its node. All ranks call it.

    Every ordered pair of nodes has its turn, over each card that all nodes have under one name, and no node takes part
    in two probes at a time. Raises RuntimeError if another rank does not come, OSError if a node does not answer at the
    address that its process group uses.
    """
    wait = timedelta(seconds=_WAIT_S)
    host = own_address()
    store.set(f"{_KEY}/host/{rank}", json.dumps({"host": host, "cards": _cards()}))
    places = [json.loads(_text(store, f"{_KEY}/host/{other}", wait)) for other in range(world_size)]
    hosts = [place["host"] for place in places]
    firsts = [hosts.index(one) for one in dict.fromkeys(hosts)]
    found: list[ProbedPath] = []
    if rank in firsts and len(firsts) > 1:
        ways = [{first: hosts[first] for first in firsts}]
        for name in places[firsts[0]]["cards"]:
            addresses = {first: places[first]["cards"].get(name) for first in firsts}
            if all(addresses.values()) and addresses not in ways:
                ways.append(addresses)
        for number, addresses in enumerate(ways):
            found += _probe_nodes(store, rank, addresses, f"{_KEY}/way{number}", wait, is_needed=number == 0)
    _meet(store, f"{_KEY}/end", world_size, wait)
    return tuple(found)


def _probe_nodes(
    store: dist.Store, rank: int, addresses: Mapping[int, str], key: str, wait: timedelta, *, is_needed: bool
) -> Iterator[ProbedPath]:
    """Probe from this rank's address all others of `addresses`, in turns. Where none answers, the rate is 0."""
    firsts = list(addresses)
    prober = Prober(addresses[rank])
    try:
        store.set(f"{key}/servers/{rank}", json.dumps(prober.addresses()))
        for number, pairs in enumerate(rounds(len(firsts))):
            for other in (firsts[to] for at, to in pairs if firsts[at] == rank):
                echo, bulk = json.loads(_text(store, f"{key}/servers/{other}", wait))
                rates = {"bytes_per_s": 0.0, "latency_s": 0.0}
                try:
                    path = prober.probe(Address(*echo), Address(*bulk))
                    rates = {"bytes_per_s": path.bytes_per_s, "latency_s": path.latency_s}
                except OSError:
                    if is_needed:
                        raise
                yield ProbedPath(own=addresses[rank], other=addresses[other], **rates)
            _meet(store, f"{key}/round{number}", len(firsts), wait)
    finally:
        prober.close()


def _cards() -> dict[str, str]:
    """Return the first IPv4 address of each card by which other nodes may reach this one."""
    facts, _, _ = NodeMeter().read(asks_gpus=False)
    found = {card.name: [one for one in card.addresses if ":" not in one] for card in facts.cards if is_card(card)}
    return {name: addresses[0] for name, addresses in found.items() if addresses}


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

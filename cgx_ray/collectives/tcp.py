"""Connections between all ranks, beside torch.distributed: TCP between hosts, shared memory between ranks of one.

Messages are pushed, nobody asks first: Gloo's wait until the receiver says that it is ready, one more latency each.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch.distributed as dist

from cgx_ray.errors import ConfigError, TransportError
from cgx_ray.runtime_ext.mesh import TOKEN_BYTES, Mesh
from cgx_ray.runtime_ext.shm import Segment, host_key

logger = logging.getLogger(__name__)

# All ranks are there when they connect, so whoever takes longer cannot be reached.
MAX_CONNECT_S = 60.0


# To ranks that are far. At 10 ms one way four carry 250 KB in 12 ms, one in 32; eight cost more processor time.
NUM_STREAMS = 4

# Gives what it is given by every rank, in rank order; all ranks call it alike. Text, integers, None and lists of them.
Gather = Callable[[Any], list[Any]]


def connect_mesh(
    group: dist.ProcessGroup, timeout_s: float, num_streams: int = NUM_STREAMS, *, shared_memory: bool = True
) -> Mesh:
    """Connect every rank of `group` with every other. Call it on all of them; addresses travel through the group.

    timeout_s      at most a minute is waited for connections; it is also that of `Mesh.local`
    num_streams    connections to a rank that is far, see `Mesh`; short messages are spread over them
    shared_memory  let this rank share memory with others of its host that may too; if they cannot, that is logged

    Raises TransportError if a rank cannot be reached, ConfigError if this node has no usable address.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)

    def gather(value: Any) -> list[Any]:
        values = [None] * world_size
        dist.all_gather_object(values, value, group=group)
        return values

    way_out = 'go through torch.distributed with transport="gloo"'
    return _connect(rank, gather, timeout_s, num_streams, shared_memory=shared_memory, way_out=way_out)


def connect_mesh_by_store(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> Mesh:
    """As `connect_mesh`, for ranks that share a store of their own but no process group yet.

    store  its keys can be deleted. Whoever can read or write it is trusted: what it says decides where ranks connect
           to, and until they have, the run's secret is there
    """
    rounds = itertools.count()
    # Gloo keeps its addresses in the same store.
    store = dist.PrefixStore("cgx_ray", store)

    def gather(value: Any) -> list[Any]:
        round_ = next(rounds)
        store.set(f"{round_}/{rank}", json.dumps(value))
        values = [json.loads(store.get(f"{round_}/{peer}")) for peer in range(world_size)]
        # Who has come to this round has read the one before.
        if round_ > 0:
            store.delete_key(f"{round_ - 1}/{rank}")
        return values

    return _connect(rank, gather, timeout_s, NUM_STREAMS, shared_memory=True, way_out="use backend gloo")


def _connect(
    rank: int, gather: Gather, timeout_s: float, num_streams: int, *, shared_memory: bool, way_out: str
) -> Mesh:
    tokens = gather(secrets.token_hex(TOKEN_BYTES) if rank == 0 else None)
    mesh = Mesh(rank, len(tokens), num_streams, node_address(), bytes.fromhex(tokens[0]))
    try:
        addresses = [(host, port) for host, port in gather([mesh.address, mesh.port])]
        ranks, segment = _share_memory(rank, gather, shared_memory=shared_memory)
        problem = _dial(mesh, addresses, timeout_s, segment, ranks)
        # All of them learn of it: who got through to everyone would wait for those who gave up.
        problems, leaders = zip(*gather([problem, ranks[0]]), strict=True)
        if any(problems):
            told = "; ".join(
                f"rank {other} at {addresses[other][0]} cannot connect to the others ({problem})"
                for other, problem in enumerate(problems)
                if problem
            )
            raise TransportError(
                f"{told}; let TCP through between the nodes, set GLOO_SOCKET_IFNAME to the interface that they share, "
                f"or {way_out}"
            )
    except BaseException:
        mesh.close()
        raise
    mesh.nodes = [list(dict.fromkeys(leaders)).index(leader) for leader in leaders]
    if segment is not None:
        mesh.open_group(segment, ranks, timeout_s)
    return mesh


def _dial(
    mesh: Mesh,
    addresses: Sequence[tuple[str, int]],
    timeout_s: float,
    segment: Segment | None,
    sharers: Sequence[int],
) -> str | None:
    """Connect to all ranks, or hang up and return what went wrong."""
    try:
        mesh.connect(addresses, min(timeout_s, MAX_CONNECT_S), segment, sharers)
    except RuntimeError as error:
        mesh.close()
        return str(error)
    return None


def _share_memory(rank: int, gather: Gather, *, shared_memory: bool) -> tuple[list[int], Segment | None]:
    """The ranks that share memory with this one, ascending and with itself, and what they share."""
    keys = gather(host_key() if shared_memory else None)
    key = keys[rank]
    ranks = [other for other in range(len(keys)) if keys[other] == key] if key is not None else [rank]
    segment, offer, problem = None, None, None
    try:
        if rank == ranks[0] and len(ranks) > 1:
            try:
                segment = Segment(len(ranks))
                offer = [segment.name, segment.nonce.hex()]
            except RuntimeError as error:
                problem = str(error)
        offer = gather(offer)[ranks[0]]
        if rank != ranks[0] and offer is not None:
            try:
                name, nonce = offer
                segment = Segment(len(ranks), name, bytes.fromhex(nonce))
            except RuntimeError as error:
                problem = str(error)
        problems = gather(problem)
    finally:
        if segment is not None:
            segment.unlink()
    problem = next((problems[other] for other in ranks if problems[other] is not None), None)
    if problem is None:
        return ranks, segment
    if rank == ranks[0]:
        logger.warning("ranks %s share no memory and go over TCP: %s", ranks, problem)
    return [rank], None


def node_address() -> str:
    """The address that other nodes reach this one at, chosen as Gloo does, so that both use the same network.

    That of the interface GLOO_SOCKET_IFNAME, else the first of this host's name that is this machine's, else loopback.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    own = {
        name: [e.address for e in entries if e.family in _FAMILIES] for name, entries in psutil.net_if_addrs().items()
    }
    if interface:
        if not own.get(interface):
            known = ", ".join(sorted(name for name, found in own.items() if found))
            raise ConfigError(f"GLOO_SOCKET_IFNAME is {interface!r}, which has no IP address here; these do: {known}")
        return own[interface][0]
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    except socket.gaierror:
        found = []
    local = {address for addresses in own.values() for address in addresses}
    return next((address for address in found if address in local or address.startswith("127.")), "127.0.0.1")


_FAMILIES = (socket.AF_INET, socket.AF_INET6)

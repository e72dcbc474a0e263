"""Connections between all ranks beside torch.distributed: TCP between hosts, shared memory between ranks of one host.

Senders push their messages. Gloo's wait until the receiver says that it is ready, one more latency per message.

**TCP.** Ranks connect when they attach. Their addresses travel through torch.distributed or a store, and so does a
secret of 32 bytes: a rank that connects presents the first half and is answered with the other. Nothing is encrypted,
as in Gloo and NCCL. Before each message go its channel, its number on that channel and its length, so that two ends
that are not at the same message find out. A message that comes before its receive is posted, on a connection that is
read for another one, waits in memory of its own. One thread per rank moves all bytes, by edge-triggered epoll
(`runtime_ext/csrc/net`). Ranks whose round trip takes 5 ms or more when they connect have several connections, since
TCP begins with ten segments, also after a pause: messages up to 256 KiB are cut and spread over them, longer ones go to
the connection that was given the fewest bytes of their channel.

**Shared memory.** Ranks share a segment of POSIX shared memory if they see the same /dev/shm as the same user, have all
mapped the segment, and read its random number there. Otherwise they use TCP and log the reason with the size that the
segment takes (23 MiB for 8 ranks). The segment has a name only until all have mapped it, under a lock of its maker, so
the next start removes one that a killed run left. Messages go through a ring of bytes for each ordered pair; the TCP
connection of the pair is its sign of life. `runtime_ext.shm.LocalGroup` sums and gathers through slots in the segment.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import psutil
import torch.distributed as dist

from cgx_ray.collectives.transport.gathered import Gather
from cgx_ray.errors import ConfigError, LimitError, TransportError, limit_met
from cgx_ray.ports import ANY, REMEDY, port_range
from cgx_ray.runtime_ext.mesh import TOKEN_BYTES, Mesh
from cgx_ray.runtime_ext.shm import Segment, host_key

logger = logging.getLogger(__name__)

# All ranks are running when they connect, so a rank that takes longer than a minute cannot be reached.
MAX_CONNECT_S = 60.0

# Connections to a rank that is far. At 10 ms one way four carry 250 KB in 12 ms, one in 32; eight cost more processor
# time.
NUM_STREAMS = 4


def connect_mesh(
    group: dist.ProcessGroup,
    timeout_s: float,
    num_streams: int = NUM_STREAMS,
    *,
    shared_memory: bool = True,
    gather: Gather | None = None,
) -> Mesh:
    """Connect every rank of `group` with every other, by addresses that travel through the group. Call it on all ranks.

    timeout_s      also of `Mesh.local`; connecting takes at most half of it, and at most a minute
    num_streams    connections to a rank that is far
    shared_memory  let this rank share memory with other ranks of its host that may too; a failure is logged
    gather         over `group`; by default an error of one rank does not reach the others

    Raises TransportError if a rank cannot be reached, ConfigError if one has no usable address or port, LimitError if
    one may open no more files or start no more threads; on all ranks.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)

    def gather_alone(value: Any) -> list[Any]:
        values = [None] * world_size
        dist.all_gather_object(values, value, group=group)
        return values

    way_out = 'go through torch.distributed with transport="gloo"'
    gather = gather or gather_alone
    return _connect(rank, gather, timeout_s, num_streams, shared_memory=shared_memory, way_out=way_out)


def connect_mesh_by_store(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> Mesh:
    """Connect as `connect_mesh`, for ranks that share a store of their own but no process group yet.

    store  must be able to delete keys. Everyone who can read or write it is trusted: it says where ranks connect to,
           and contains the run's secret until they have
    """
    rounds = itertools.count()
    # The prefix keeps our keys apart from Gloo's addresses in the same store.
    store = dist.PrefixStore("cgx_ray", store)

    def gather(value: Any) -> list[Any]:
        round_ = next(rounds)
        store.set(f"{round_}/{rank}", json.dumps(value))
        values = [json.loads(store.get(f"{round_}/{peer}")) for peer in range(world_size)]
        # A rank that has come to this round has read the one before.
        if round_ > 0:
            store.delete_key(f"{round_ - 1}/{rank}")
        return values

    return _connect(rank, gather, timeout_s, NUM_STREAMS, shared_memory=True, way_out="use backend gloo")


def _connect(
    rank: int, gather: Gather, timeout_s: float, num_streams: int, *, shared_memory: bool, way_out: str
) -> Mesh:
    tokens = gather(secrets.token_hex(TOKEN_BYTES) if rank == 0 else None)
    mesh, place = _listen(rank, len(tokens), num_streams, bytes.fromhex(tokens[0]))
    try:
        # Tell all ranks: the others would wait for one that has given up.
        places = gather(place)
        if silent := [f"rank {other} {said}" for other, said in enumerate(places) if isinstance(said, str)]:
            raise (LimitError if any(map(_names_limit, silent)) else ConfigError)("; ".join(silent))
        assert mesh is not None
        addresses = [(host, port) for host, port in places]
        ranks, segment = _share_memory(rank, gather, shared_memory=shared_memory)
        problem = _dial(mesh, addresses, timeout_s, segment, ranks)
        # Tell all ranks: one that reached everyone would wait for those that gave up.
        problems, leaders = zip(*gather([problem, ranks[0]]), strict=True)
        if any(problems):
            text = "; ".join(
                f"rank {other} at {addresses[other][0]} cannot connect to the others ({problem})"
                for other, problem in enumerate(problems)
                if problem
            )
            if _names_limit(text):
                raise LimitError(text)
            raise TransportError(
                f"{text}; let TCP through between the nodes, set GLOO_SOCKET_IFNAME to the interface that they share, "
                f"or {way_out}"
            )
    except BaseException:
        if mesh is not None:
            mesh.close()
        raise
    mesh.nodes = [list(dict.fromkeys(leaders)).index(leader) for leader in leaders]
    if segment is not None:
        mesh.open_group(segment, ranks, timeout_s)
    return mesh


def _listen(rank: int, world_size: int, num_streams: int, token: bytes) -> tuple[Mesh | None, list[Any] | str]:
    """Return a mesh that listens, with its host and port; or None and the reason why this rank cannot."""
    try:
        ports = port_range()
        mesh = Mesh(rank, world_size, num_streams, node_address(), token, ports=ports)
    except ConfigError as error:
        return None, f"cannot be reached: {error}"
    except RuntimeError as error:
        remedy = limit_met(error) or (REMEDY if ports != ANY else None)
        return None, f"cannot be reached: {error}{f'; {remedy}' if remedy else ''}"
    return mesh, [mesh.address, mesh.port]


def _dial(
    mesh: Mesh,
    addresses: Sequence[tuple[str, int]],
    timeout_s: float,
    segment: Segment | None,
    sharers: Sequence[int],
) -> str | None:
    """Connect to all ranks. On an error hang up and return its message, else return None."""
    try:
        mesh.connect(addresses, connect_s(timeout_s), segment, sharers)
    except RuntimeError as error:
        mesh.close()
        met = limit_met(error)
        return f"{error}; {met}" if met and not _names_limit(str(error)) else str(error)
    return None


def connect_s(timeout_s: float) -> float:
    """Return how long to try to connect: ranks that gave up at once wait for the others' verdict, for `timeout_s`."""
    return min(timeout_s / 2, MAX_CONNECT_S)


def _names_limit(said: str) -> bool:
    return "ulimit" in said


def _share_memory(rank: int, gather: Gather, *, shared_memory: bool) -> tuple[list[int], Segment | None]:
    """Return the ranks that share memory with this one, ascending and with itself, and their segment."""
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
    """Return the address at which other nodes reach this one, chosen as Gloo does, so that both use the same network.

    It is that of the first interface in GLOO_SOCKET_IFNAME that has one, else the first address of this host's name
    that this machine has, else loopback.
    """
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    own = {
        name: [e.address for e in entries if e.family in _FAMILIES] for name, entries in psutil.net_if_addrs().items()
    }
    if interfaces:
        address = next((own[name][0] for name in interfaces if own.get(name)), None)
        if address is None:
            known = ", ".join(sorted(name for name, found in own.items() if found))
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME is {','.join(interfaces)!r}, which has no IP address here; these do: {known}"
            )
        return address
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    except socket.gaierror:
        found = []
    local = {address for addresses in own.values() for address in addresses}
    return next((address for address in found if address in local or address.startswith("127.")), "127.0.0.1")


_FAMILIES = (socket.AF_INET, socket.AF_INET6)

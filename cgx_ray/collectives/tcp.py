"""Connections between all ranks, beside torch.distributed: TCP between hosts, shared memory between ranks of one.

Messages are pushed, nobody asks first: Gloo's wait until the receiver says that it is ready, one more latency each.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from typing import TypeVar

import psutil
import torch.distributed as dist

from cgx_ray.errors import ConfigError, TransportError
from cgx_ray.runtime_ext.mesh import TOKEN_BYTES, Mesh
from cgx_ray.runtime_ext.shm import Segment, host_key

T = TypeVar("T")
logger = logging.getLogger(__name__)

# All ranks are there when they connect, so whoever takes longer cannot be reached.
MAX_CONNECT_S = 60.0


def connect_mesh(
    group: dist.ProcessGroup, timeout_s: float, num_streams: int = 1, *, shared_memory: bool = True
) -> Mesh:
    """Connect every rank of `group` with every other. Call it on all of them; addresses travel through the group.

    timeout_s      at most a minute is waited for connections; it is also that of `Mesh.local`
    num_streams    connections a pair; long messages are cut into one part for each
    shared_memory  let this rank share memory with others of its host that may too; if they cannot, that is logged

    Raises TransportError if a rank cannot be reached, ConfigError if this node has no usable address.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    token = [secrets.token_bytes(TOKEN_BYTES)]
    dist.broadcast_object_list(token, group=group, group_src=0)
    mesh = Mesh(rank, world_size, num_streams, node_address(), token[0])
    addresses = _gather((mesh.address, mesh.port), group)
    ranks, segment = _share_memory(host_key() if shared_memory else None, group)
    try:
        mesh.connect(addresses, min(timeout_s, MAX_CONNECT_S), segment, ranks)
    except RuntimeError as error:
        mesh.close()
        raise TransportError(
            f"rank {rank} at {mesh.address} cannot connect to the others ({error}); let TCP through between the nodes, "
            "set GLOO_SOCKET_IFNAME to the interface that they share, or go through torch.distributed with "
            'transport="gloo"'
        ) from error
    leaders = _gather(ranks[0], group)
    mesh.nodes = [list(dict.fromkeys(leaders)).index(leader) for leader in leaders]
    if segment is not None:
        mesh.open_group(segment, ranks, timeout_s)
    return mesh


def _share_memory(key: str | None, group: dist.ProcessGroup) -> tuple[list[int], Segment | None]:
    """The ranks that share memory with this one, ascending and with itself, and what they share."""
    rank = dist.get_rank(group)
    keys = _gather(key, group)
    ranks = [other for other in range(len(keys)) if keys[other] == key] if key is not None else [rank]
    segment, offer, problem = None, None, None
    try:
        if rank == ranks[0] and len(ranks) > 1:
            try:
                segment = Segment(len(ranks))
                offer = (segment.name, segment.nonce)
            except RuntimeError as error:
                problem = str(error)
        offer = _gather(offer, group)[ranks[0]]
        if rank != ranks[0] and offer is not None:
            try:
                segment = Segment(len(ranks), *offer)
            except RuntimeError as error:
                problem = str(error)
        problems = _gather(problem, group)
    finally:
        if segment is not None:
            segment.unlink()
    problem = next((problems[other] for other in ranks if problems[other] is not None), None)
    if problem is None:
        return ranks, segment
    if rank == ranks[0]:
        logger.warning("ranks %s share no memory and go over TCP: %s", ranks, problem)
    return [rank], None


def _gather(value: T, group: dist.ProcessGroup) -> list[T]:
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


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

"""TCP connections between all ranks, beside torch.distributed: messages are pushed, nobody asks first.

Gloo's point-to-point messages wait until the receiver says that it is ready: one more latency each.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence

import psutil
import torch.distributed as dist

from cgx_ray.errors import ConfigError, TransportError
from cgx_ray.runtime_ext.mesh import TOKEN_BYTES, Mesh

# All ranks are there when they connect, so whoever takes longer cannot be reached.
MAX_CONNECT_S = 60.0


def connect_mesh(group: dist.ProcessGroup, timeout_s: float, num_streams: int = 1) -> Mesh:
    """Connect every rank of `group` with every other. Call it on all of them; addresses travel through the group.

    timeout_s    at most a minute is waited for
    num_streams  connections a pair; long messages are cut into one part for each

    Raises TransportError if a rank cannot be reached, ConfigError if this node has no usable address.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    token = [secrets.token_bytes(TOKEN_BYTES)]
    dist.broadcast_object_list(token, group=group, group_src=0)
    mesh = Mesh(rank, world_size, num_streams, node_address(), token[0])
    addresses = [("", 0)] * world_size
    dist.all_gather_object(addresses, (mesh.address, mesh.port), group=group)
    _connect(mesh, rank, addresses, timeout_s, 'go through torch.distributed with transport="gloo"')
    return mesh


def connect_mesh_by_store(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> Mesh:
    """As `connect_mesh`, for ranks that share a store of their own but no process group yet."""
    if rank == 0:
        store.set("token", secrets.token_hex(TOKEN_BYTES))
    mesh = Mesh(rank, world_size, 1, node_address(), bytes.fromhex(store.get("token").decode()))
    try:
        store.set(f"address{rank}", json.dumps([mesh.address, mesh.port]))
        addresses = [tuple(json.loads(store.get(f"address{peer}"))) for peer in range(world_size)]
    except RuntimeError:
        mesh.close()
        raise
    _connect(mesh, rank, addresses, timeout_s, "use backend gloo")
    return mesh


def _connect(mesh: Mesh, rank: int, addresses: Sequence[tuple[str, int]], timeout_s: float, way_out: str) -> None:
    try:
        mesh.connect(addresses, min(timeout_s, MAX_CONNECT_S))
    except RuntimeError as error:
        mesh.close()
        raise TransportError(
            f"rank {rank} at {mesh.address} cannot connect to the others ({error}); let TCP through between the nodes, "
            f"set GLOO_SOCKET_IFNAME to the interface that they share, or {way_out}"
        ) from error


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

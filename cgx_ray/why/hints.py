"""Hints: what of nodes and paths is not as it should be, and cost the observed steps nothing that can be shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cgx_ray.units import format_bytes
from cgx_ray.why.paths import Path, way
from cgx_ray.why.records import NodeFacts, RankRecord

# /dev/shm of a container is 64 MiB unless it asks for more, and a rank of many needs a few thousand files.
_SHARED_BYTES, _OPEN_FILES = 256 << 20, 4096
# Share of the time in which a receiver may have no room, and round trip from which on that is the buffer's size and not
# a process that reads late.
_NO_ROOM, _FAR_S = 0.3, 5e-3


def hints(records: Sequence[RankRecord], paths: Sequence[Path]) -> tuple[str, ...]:
    """Return what is not as it should be and cost these steps nothing that can be shown."""
    # The first rank of a node has asked its GPUs.
    nodes = {record.node.name: record.node for record in reversed(records)}
    found = list(node_hints(nodes.values()))
    cards = sorted({(path.card.kind, path.card.name) for path in paths if path.card is not None})
    found += [
        f"gradients pass the {kind} {name}, which may be slower than the card below it"
        for kind, name in cards
        if kind in ("tunnel", "bridge")
    ]
    found += [
        f"{name} of {node} says half duplex: it cannot send and receive at the same time; `ethtool {name}` on both "
        "ends of the cable, and let both negotiate"
        for node, name in sorted(
            {(one.source, one.card.name) for one in paths if one.card is not None and one.card.duplex == "half"}
        )
    ]
    mtus = {path.card.mtu for path in paths if path.card is not None and path.source != path.target}
    if len(mtus) > 1:
        found.append(f"cards have different MTUs ({', '.join(map(str, sorted(mtus)))}): large packets may get lost")
    found += [
        f"{way(path)}: packets of at most {path.path_mtu} bytes pass, the card would send {path.card.mtu}"
        for path in paths
        if path.card is not None and 0 < path.path_mtu < path.card.mtu and path.source != path.target
    ]
    found += [
        f"{way(path)}: the receiver had no room for {path.receiver_limited_share:.0%} of the busy time: "
        "`sysctl -w net.ipv4.tcp_rmem='4096 131072 25165824'` there"
        for path in paths
        if path.receiver_limited_share > _NO_ROOM and (path.round_trip_s or 0.0) > _FAR_S
    ]
    for name in sorted({name for record in records for name in record.versions} - {"kernel"}):
        different = {record.versions.get(name, "none") for record in records}
        if len(different) > 1:
            found.append(f"nodes have different versions of {name}: {', '.join(sorted(different))}")
    return tuple(found)


def node_hints(nodes: Iterable[NodeFacts]) -> Iterator[str]:
    """Yield what of each node is not as it should be."""
    for node in nodes:
        if node.shared_bytes < _SHARED_BYTES:
            yield (
                f"{node.name}: /dev/shm has {format_bytes(node.shared_bytes)}; loaders and NCCL need more: "
                "`docker run --shm-size=8g`"
            )
        if node.max_open_files < _OPEN_FILES:
            yield f"{node.name}: a process may open {node.max_open_files} files; `ulimit -n 65536`"
        if node.fabrics and any(card.sent_bytes > 100 << 20 for card in node.cards if card.kind == "physical"):
            yield f"{node.name} has {', '.join(node.fabrics)}, yet gradients use sockets; `NCCL_DEBUG=INFO` says why"
        for gpu in node.gpus:
            fields = [field.strip() for field in gpu.split(",")]
            if len(fields) == 5 and fields[2] != fields[3]:
                yield f"{node.name}: {fields[1]} uses {fields[2]} of {fields[3]} PCIe lanes"

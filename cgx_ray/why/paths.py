"""Paths between nodes, from the connections of the ranks: both ends of a connection have each other's addresses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from cgx_ray.why.records import Connection, NetworkCard, RankRecord

# Share of the busiest path's bytes below which a path carries no gradients.
_CARRIES = 0.02
# A path below this share of the others' median rate is the slow one; else they are all alike.
SLOW = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One way from a node to another, or between ranks of one node, while steps were measured.

    source, target       names of nodes
    bytes_per_s          the best estimate of what it can carry: probed, else of the training's own messages; 0: unknown
    is_probed            True if it was probed
    sent_bytes           by the training, on all connections; 0 for a path that was only probed
    resent_share         of these, the share that was sent again
    round_trip_s         least round trip, None if unknown
    path_mtu             largest packet with headers, 0 if unknown
    num_timeouts         most time-outs in a row for the same data
    receiver_limited_share
                         share of the busy time in which the receiver had no room
    card                 of the source, by the connection's own address; None if it is not among its cards
    """

    source: str
    target: str
    bytes_per_s: float
    is_probed: bool
    sent_bytes: int
    resent_share: float
    round_trip_s: float | None
    path_mtu: int
    num_timeouts: int
    receiver_limited_share: float
    card: NetworkCard | None


def paths_of(records: Sequence[RankRecord]) -> tuple[Path, ...]:
    """Return the paths that carry gradients or were probed, those with the most bytes first."""
    node_of = {one.own: record.node.name for record in records for one in record.connections}
    found: defaultdict[tuple[str, str], list[tuple[RankRecord, Connection]]] = defaultdict(list)
    for record in records:
        for one in record.connections:
            if one.other in node_of:
                found[record.node.name, node_of[one.other]].append((record, one))
    most = max((sum(one.sent_bytes for _, one in both) for both in found.values()), default=0)
    probed = _probed(records)
    paths = [
        _path(ends, both, probed.get(ends))
        for ends, both in found.items()
        if ends in probed
        or any(one.num_timeouts for _, one in both)
        or sum(one.sent_bytes for _, one in both) > _CARRIES * most
    ]
    paths += [_path(ends, [], probe) for ends, probe in probed.items() if ends not in found]
    return tuple(sorted(paths, key=lambda path: -path.sent_bytes))


def slow_paths(paths: Sequence[Path]) -> list[Path]:
    """Return the paths that are much slower than the usual one; empty if all are alike, or rates are unknown."""
    rates = [path.bytes_per_s for path in paths if path.bytes_per_s > 0]
    if len(rates) < 2:
        return []
    limit = SLOW * median(rates)
    if len(rates) == 2:
        limit = SLOW * max(rates)
    return [path for path in paths if 0 < path.bytes_per_s < limit]


def common_end(slow: Sequence[Path], paths: Sequence[Path]) -> str:
    """Return which end all slow paths share, if other paths of the matrix show that it is that end: else ""."""
    for end, name in (("source", "uplink"), ("target", "downlink")):
        nodes = {getattr(path, end) for path in slow}
        if len(nodes) != 1:
            continue
        of_node = [path for path in paths if getattr(path, end) in nodes and path.bytes_per_s > 0]
        if len(of_node) > 1 and all(path in slow for path in of_node):
            return f"the {name} of {nodes.pop()}"
    return ""


def _probed(records: Sequence[RankRecord]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return bytes per second and latency by nodes."""
    node_of = {
        address: record.node.name for record in records for card in record.node.cards for address in card.addresses
    }
    return {
        (record.node.name, node_of.get(probe.other, probe.other)): (probe.bytes_per_s, probe.latency_s)
        for record in records
        for probe in record.probes
        # Others are of cards that the gradients do not pass.
        if probe.own in {one.own.rpartition(":")[0] for one in record.connections}
    }


def _path(
    ends: tuple[str, str], both: Sequence[tuple[RankRecord, Connection]], probe: tuple[float, float] | None
) -> Path:
    ones = [one for _, one in both]
    sent = sum(one.sent_bytes for one in ones)
    busy_s = sum(one.busy_s for one in ones)
    main = max(both, key=lambda pair: pair[1].sent_bytes, default=None)
    # Connections side by side share the path, so together they carry at least this.
    together = sent / max(one.busy_s for one in ones) if ones and busy_s else 0.0
    own_rate = max([together, *(one.bytes_per_s for one in ones if one.sent_bytes > _CARRIES * sent)])
    trips = [one.least_round_trip_s for one in ones if one.least_round_trip_s is not None]
    return Path(
        source=ends[0],
        target=ends[1],
        bytes_per_s=probe[0] if probe is not None else own_rate,
        is_probed=probe is not None,
        sent_bytes=sent,
        resent_share=sum(one.resent_bytes for one in ones) / sent if sent else 0.0,
        round_trip_s=2 * probe[1] if probe is not None else min(trips, default=None),
        path_mtu=main[1].path_mtu if main is not None else 0,
        num_timeouts=max((one.num_timeouts for one in ones), default=0),
        receiver_limited_share=sum(one.receiver_limited_s for one in ones) / busy_s if busy_s else 0.0,
        card=main[0].node.card_at(main[1].own.rpartition(":")[0]) if main is not None else None,
    )


def way(path: Path) -> str:
    """Return a path in words."""
    return f"from {path.source} to {path.target}"

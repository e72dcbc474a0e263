"""Records as `cgx-ray why` gets them: N ranks, one per node, in a ring, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from cgx_ray.why.records import Connection, NetworkCard, NodeFacts, ObservedLayer, RankRecord, StepTimes

# Seconds of a healthy step's parts.
FORWARD_S, BACKWARD_S = 0.1, 0.2
LAYERS = tuple(
    ObservedLayer(name=f"layer{index}", shape=(1024, 1024), dtype="float32", ready_s=0.3 - 0.02 * index)
    for index in range(10)
)
NUM_BYTES = sum(4 * math.prod(layer.shape) for layer in LAYERS)


def card(name: str = "eth0", address: str = "10.0.0.1", **given: Any) -> NetworkCard:
    usual: dict[str, Any] = {"bit_per_s": 1e9, "duplex": "full", "mtu": 1500, "kind": "physical", "num_errors": 0}
    return NetworkCard(name=name, addresses=(address,), **{**usual, "sent_bytes": 0, "received_bytes": 0, **given})


def connection(source: int, target: int, **given: Any) -> Connection:
    """Return the end at rank `source` of its connection with rank `target`."""
    usual: dict[str, Any] = {
        "sent_bytes": 10 * NUM_BYTES, "received_bytes": 0, "resent_bytes": 0, "bytes_per_s": 117e6, "busy_s": 4.0,
        "receiver_limited_s": 0.0, "round_trip_s": 4e-4, "least_round_trip_s": 2e-4, "path_mtu": 1500,
        "segment_bytes": 1448, "num_timeouts": 0,
    }  # fmt: skip
    own, other = f"10.0.0.{source + 1}:{40000 + target}", f"10.0.0.{target + 1}:{40000 + source}"
    return Connection(own=own, other=other, **{**usual, **given})


def record(
    rank: int, world_size: int, steps: Iterable[StepTimes], connections: Iterable[Connection], **given: Any
) -> RankRecord:
    usual: dict[str, Any] = {
        "num_processors": 8, "busy_share": 0.4, "stolen_share": 0.0, "throttled_s": 0.0, "shared_bytes": 8 << 30,
        "open_files": 50, "max_open_files": 65536,
    }  # fmt: skip
    ends = tuple(connections)
    own = card(
        address=f"10.0.0.{rank + 1}",
        sent_bytes=int(1.05 * sum(one.sent_bytes for one in ends)),
        received_bytes=int(1.05 * sum(one.received_bytes for one in ends)),
    )
    node = NodeFacts(name=f"node-{rank}", cards=(own,), **usual)
    usual = {
        "is_whole": True, "backend": "gloo", "device": "cpu", "num_models": 1, "num_warm": 5, "seen_s": 10.0,
        "bucket_bytes": (NUM_BYTES // 2,) * 2, "layers": LAYERS if rank == 0 else (),
        "node": replace(node, **given.pop("node", {})),
    }  # fmt: skip
    return RankRecord(rank=rank, world_size=world_size, steps=tuple(steps), connections=ends, **{**usual, **given})


def training(
    num_ranks: int = 4,
    *,
    network_s: float = 0.005,
    late: dict[int, dict[str, float]] | None = None,
    paths: dict[tuple[int, int], dict[str, Any]] | None = None,
    usual_path: dict[str, Any] | None = None,
    node: dict[int, dict[str, Any]] | None = None,
    **given: Any,
) -> list[RankRecord]:
    """Return the records of 20 steps.

    late        by rank, seconds by which parts of its steps are longer; the others wait for it
    paths       by source and target in the ring, what differs of its connection from `usual_path`
    node        by rank, what differs of its node
    given       of all records
    """
    late, paths, node = late or {}, paths or {}, node or {}
    parts = [
        {"input_s": 0.002, "forward_s": FORWARD_S, "backward_s": BACKWARD_S, "rest_s": 0.01, "hidden_s": 0.15}
        for _ in range(num_ranks)
    ]
    for rank, more in late.items():
        for name, seconds in more.items():
            parts[rank][name] += seconds
    before = [sum(one[name] for name in ("input_s", "forward_s", "backward_s", "rest_s")) for one in parts]
    steps = [
        StepTimes(**one, exposed_s=network_s + max(before) - own, processor_s=0.3)
        for one, own in zip(parts, before, strict=True)
    ]
    records = []
    for rank in range(num_ranks):
        after, earlier = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        moved = 10 * NUM_BYTES
        ends = [connection(rank, after, **{**(usual_path or {}), **paths.get((rank, after), {})})]
        back = {"sent_bytes": 0, "received_bytes": moved, "bytes_per_s": 0.0, "busy_s": 0.0}
        if num_ranks > 2:
            ends.append(connection(rank, earlier, **{**(usual_path or {}), **back}))
        records.append(record(rank, num_ranks, [steps[rank]] * 20, ends, node=node.get(rank, {}), **given))
    return records

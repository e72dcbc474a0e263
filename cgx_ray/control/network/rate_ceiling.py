"""Drops rates that no link can have had: of bytes that queued before they were timed, or of time stamps that bunch.

A burst is impossible if it came faster than the receiving node's card is, as its driver reports. A driver that reports
less than the card's counters have shown, as those of virtual cards do, is not believed. A burst is also impossible if
it came faster than every probe since the last change of the network, while most bursts of the step did not: if most
did, the probe shared the link with the training, or the link has become faster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cgx_ray.control.network.estimate import NOISE
from cgx_ray.control.network.traffic import StepTraffic
from cgx_ray.monitors.sample import Burst, HostLoad


class RateCeiling:
    """The highest rates that links can have. Pure.

    num_dropped  bursts so far that were impossible
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        # By node, bytes per second: as the fastest card's driver reports it, 0 if unknown, and as the cards showed it.
        self._reported: dict[str, float] = {}
        self._shown: dict[str, float] = defaultdict(float)

    def add_host(self, node_id: str, host: HostLoad) -> None:
        """Add what a node's cards report."""
        self._reported[node_id] = host.nic_speed_bits_per_s / 8
        self._shown[node_id] = max(self._shown[node_id], host.sent_bytes_per_s, host.received_bytes_per_s)

    def possible(self, traffic: StepTraffic, node_of: Mapping[int, str], probed: float | None) -> StepTraffic:
        """Return `traffic` without impossible bursts, which are counted.

        node_of  node by rank
        probed   highest rate of the probes since the last change, bytes per second; None without any
        """
        card = {rank: NOISE * self._card(node_of.get(rank)) for rank in traffic.bursts}
        bursts = {
            rank: found if card[rank] == math.inf else [burst for burst in found if burst.rate <= card[rank]]
            for rank, found in traffic.bursts.items()
        }
        if probed is not None:
            bursts = _under(bursts, NOISE * probed)
        num_dropped = _count(traffic.bursts) - _count(bursts)
        self.num_dropped += num_dropped
        return replace(traffic, bursts=bursts) if num_dropped else traffic

    def _card(self, node_id: str | None) -> float:
        """Return the bytes per second of a node's fastest card; infinite if they are unknown."""
        reported = self._reported.get(node_id, 0.0) if node_id is not None else 0.0
        return reported if node_id is not None and reported > self._shown[node_id] else math.inf


def _under(bursts: Mapping[int, Sequence[Burst]], limit: float) -> dict[int, Sequence[Burst]]:
    """Return `bursts` without those above `limit`, or all if those are most of the time."""
    seconds = [(burst.seconds, burst.rate > limit) for found in bursts.values() for burst in found]
    if 2 * sum(one for one, is_above in seconds if is_above) >= sum(one for one, _ in seconds):
        return dict(bursts)
    return {rank: [burst for burst in found if burst.rate <= limit] for rank, found in bursts.items()}


def _count(bursts: Mapping[int, Sequence[Burst]]) -> int:
    return sum(map(len, bursts.values()))

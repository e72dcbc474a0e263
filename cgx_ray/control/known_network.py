"""The network between workers, as the run's messages and the agents' probes show it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import TypeVar

from cgx_ray.control.link_estimate import Estimate, PassiveLink, Seen, slowest_rate
from cgx_ray.control.measured import latency_moved
from cgx_ray.control.topology import SilentNodes, slow_links
from cgx_ray.monitors.probe_schedule import BUDGET_S, ProbeSchedule
from cgx_ray.monitors.sample import NodeSample

# What agents say of latencies counts that long without a word of them.
PROBE_HOLDS_S = 2 * BUDGET_S
# And a probed rate: an even number of nodes has each one send and receive within three minutes, an odd one within five.
RATE_HOLDS_S = 5.5 * BUDGET_S
# Between workers of one host nobody measures latency: a loopback round trip.
DEFAULT_LATENCY_S = 50e-6

K = TypeVar("K")
T = TypeVar("T")


class KnownNetwork:
    """Pure: times are by the caller's clock, which drops what probes found, as a node may fall silent.

    probed_s     one-way latency by probes, the default before any
    num_changes  how often the network has changed
    """

    def __init__(self) -> None:
        self.probed_s = DEFAULT_LATENCY_S
        self.num_changes = 0
        self._link = PassiveLink()
        self._silent_nodes = SilentNodes()
        self._probes = ProbeSchedule()
        self._probed_of_node: dict[str, tuple[float, float]] = {}
        # By way, from a node to another.
        self._probed_rates: dict[tuple[str, str], tuple[float, float]] = {}
        self._ranks: dict[str, set[int]] = defaultdict(set)
        # What each node has said of latencies at last. From when the link changed on: what it had said by then, of
        # those that have not measured all of it anew.
        self._said: dict[str, Mapping[str, float]] = {}
        self._outdated: dict[str, Mapping[str, float]] = {}
        self._outdated_s = -math.inf

    def hear(self, sample: NodeSample, now_s: float) -> bool:
        """Take in what a node says of the others; returns whether exchanges before were read with a wrong latency."""
        self._silent_nodes.add(sample.node_id, sample.latency_s)
        was_probed = any(self._said.values())
        self._probed_of_node = _fresh(self._probed_of_node, now_s - PROBE_HOLDS_S)
        self._probed_rates = _fresh(self._probed_rates, now_s - RATE_HOLDS_S)
        self._probed_of_node.pop(sample.node_id, None)
        self._said[sample.node_id] = sample.latency_s
        outdated = self._outdated.get(sample.node_id, {})
        anew = {node: said_s for node, said_s in sample.latency_s.items() if said_s != outdated.get(node)}
        if anew:
            self._probed_of_node[sample.node_id] = now_s, median(anew.values())
        if len(anew) == len(sample.latency_s):
            self._outdated.pop(sample.node_id, None)
        if now_s - self._outdated_s > PROBE_HOLDS_S:
            # Who has not reported for so long is not waited for.
            self._outdated.clear()
        self._ranks[sample.node_id].update(step.rank for step in sample.steps)
        self._probed_rates |= {(sample.node_id, other): (now_s, rate) for other, rate in sample.bandwidth.items()}
        if not self._is_probed:
            return False
        before_s, self.probed_s = self.probed_s, median(found_s for _, found_s in self._probed_of_node.values())
        if self._link.latency_s is not None or not latency_moved(before_s, self.probed_s):
            return False
        self._link = PassiveLink()
        self._probed_rates.clear()
        self.num_changes += was_probed
        return True

    def add(self, seen: Seen, now_s: float) -> None:
        """Take in what all ranks saw in a step. After a change what probes said before it does not count."""
        num_changes = self._link.num_changes
        self._link.add(seen, self.probed_s)
        if self._link.num_changes > num_changes:
            self.num_changes += self._link.num_changes - num_changes
            self._probed_rates.clear()
            self._probed_of_node.clear()
            self._outdated = {node: said for node, said in self._said.items() if said}
            self._outdated_s = now_s

    def next_probe(self, node_id: str, now_s: float) -> str | None:
        """The node that `node_id` is to probe now, or None: messages tell enough, or it is not its turn."""
        if self._is_sure:
            return None
        return self._probes.grant(node_id, self._silent_nodes.known - self.silent_nodes, now_s)

    @property
    def bandwidth(self) -> Estimate | None:
        """What messages say; what probes say, where messages are not sure and nothing has changed since."""
        if not self._counts_probes:
            return self._link.bandwidth
        links = self._probed_links
        slow = slow_links(links)
        counted = list((slow or links).values())
        return Estimate(value=slowest_rate(links, slow), low=min(counted), high=max(counted), source="probes")

    @property
    def latency_s(self) -> float | None:
        """One way: the shorter of what messages and probes say, as full links and busy processors only add to it."""
        views = [self._link.latency_s.value] if self._link.latency_s is not None else []
        if self._is_probed:
            views.append(self.probed_s)
        return min(views, default=None)

    @property
    def slow(self) -> Mapping[int, float]:
        """Bytes a second of ranks whose link is much slower than the others', by what `bandwidth` is made from.

        A slow way does not tell which of its ends is slow, unless the other was fast on another way.
        """
        if not self._counts_probes:
            return self._link.slow
        slow, named = slow_links(self._probed_links), set()
        for source, target in self._probed_rates:
            suspects = slow.keys() & {("from", source), ("to", target)}
            if len(suspects) == 1:
                named |= suspects
        return {rank: slow[end, node] for end, node in sorted(named) for rank in self._ranks.get(node, ())}

    @property
    def silent_nodes(self) -> frozenset[str]:
        """Ids of nodes that have stopped to answer the others."""
        return self._silent_nodes.node_ids

    @property
    def _is_sure(self) -> bool:
        return self._link.bandwidth is not None and self._link.bandwidth.is_sure

    @property
    def _counts_probes(self) -> bool:
        return bool(self._probed_rates) and not self._is_sure

    @property
    def _probed_links(self) -> dict[tuple[str, str], float]:
        """What each node sends ("from") and receives ("to"): the most on any way, as another's end may be slow."""
        links: dict[tuple[str, str], float] = defaultdict(float)
        for (source, target), (_, rate) in self._probed_rates.items():
            for link in (("from", source), ("to", target)):
                links[link] = max(links[link], rate)
        return links

    @property
    def _is_probed(self) -> bool:
        """All nodes that answer have measured latencies since the link changed."""
        return bool(self._probed_of_node) and not self._outdated.keys() - self.silent_nodes


def _fresh(found: Mapping[K, tuple[float, T]], since_s: float) -> dict[K, tuple[float, T]]:
    """Of what was probed, at what time, that which still counts."""
    return {key: (found_s, what) for key, (found_s, what) in found.items() if found_s >= since_s}

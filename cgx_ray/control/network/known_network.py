"""The network between workers, from the training's messages (`link_estimate`) and the agents' probes.

Messages and probes are combined as follows:

1. Latency is the shorter of the two, since full links and busy processors can only add to it. After a change, the
   probed latencies count again when all nodes have measured again.
2. Bandwidth is that of the messages. Where it is not sure, probed bandwidths replace it until they are PROBE_HOLDS_S
   old or the network changes. A node's sending rate is the highest it reached to any node: on one path the other end
   may be the slow one. The same for receiving. The upper median counts, of sending or of receiving, whichever is
   slower: a probe shares the link with the training, which makes it slower more often than faster. So what the node's
   card carried meanwhile counts if that was more; what other programs usually take does not. Where all ranks send more
   slowly than they receive, the messages are not sure: all uplinks may be slower than all downlinks, as in clouds that
   limit what a machine sends, and then a rank receives from several others more than each can send. Nodes of one rank
   each show this, from three nodes on.
3. While the bandwidth of the messages is not sure, `next_probe` orders probes, from the second minute on. A node takes
   part in one probe per minute, of at most 1 % of what its link carries in that minute (`monitors.probe_schedule`), and
   a node that has sent receives next.
4. While messages show a slow link clearly, probes of other paths do not count; probes from and to its node may show
   that it is faster. A link that a probe shows as slow is not slow while messages show it faster: a probe that gets no
   processor may be ten times too slow. If the probed path between two nodes is slow, the slow node is named only if the
   other one was fast on another path.
5. Bursts that are faster than a card or the probes allow are dropped and counted (`rate_ceiling`).
6. A node that no longer answers any other node's round trips is silent.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from statistics import median, median_high
from typing import TypeVar

from cgx_ray.control.learned.measured import DEFAULT_INSIDE
from cgx_ray.control.network.changes import LINK_CHANGE, is_other_latency
from cgx_ray.control.network.estimate import FEW, NOISE, Estimate
from cgx_ray.control.network.link_estimate import PassiveLink
from cgx_ray.control.network.rate_ceiling import RateCeiling
from cgx_ray.control.network.rate_estimates import slowest_rate
from cgx_ray.control.network.topology import K, SilentNodes, slow_links
from cgx_ray.control.network.traffic import StepTraffic
from cgx_ray.monitors.probe_schedule import BUDGET_S, ProbeSchedule
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.planner.cost import Link

# Seconds for which a probed rate counts, and latencies of a node that reports no more. While messages are not sure,
# every node has sent and received within three minutes if the number of nodes is even, within five if it is odd.
PROBE_HOLDS_S = 5.5 * BUDGET_S
T = TypeVar("T")


class NodeLatencies:
    """Latencies by node, kept in order: every report asks for the median of all, and to sort them takes far longer."""

    def __init__(self) -> None:
        # By node, the time of its report and the latency in it.
        self._newest: dict[str, tuple[float, float]] = {}
        self._ordered: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._newest)

    @property
    def median_s(self) -> float:
        """Median of all, of which there must be one."""
        middle, is_odd = divmod(len(self._ordered), 2)
        return self._ordered[middle] if is_odd else (self._ordered[middle - 1] + self._ordered[middle]) / 2

    def add_latency(self, node_id: str, now_s: float, latency_s: float) -> None:
        """Replace what the node has reported before."""
        self.remove(node_id)
        self._newest[node_id] = now_s, latency_s
        bisect.insort(self._ordered, latency_s)

    def remove(self, node_id: str) -> None:
        """Forget what the node has reported, if it has."""
        if node_id in self._newest:
            _, latency_s = self._newest.pop(node_id)
            del self._ordered[bisect.bisect_left(self._ordered, latency_s)]

    def forget_before(self, since_s: float) -> None:
        """Forget what was reported before `since_s`."""
        for node_id in [node_id for node_id, (found_s, _) in self._newest.items() if found_s < since_s]:
            self.remove(node_id)

    def clear(self) -> None:
        """Forget all."""
        self._newest.clear()
        self._ordered.clear()


class KnownNetwork:
    """The current estimates. Pure: all times are by the caller's clock.

    probed_s        one-way latency by probes; that of DEFAULT_INSIDE before the first one, and between workers of one
                    host, where no probe runs
    num_changes     number of times that the network has changed
    num_impossible  rates so far that were dropped, as no link could have had them
    """

    def __init__(self) -> None:
        self.probed_s = DEFAULT_INSIDE.alpha_s
        self.num_changes = 0
        self._link = PassiveLink()
        self._ceiling = RateCeiling()
        self._silent_nodes = SilentNodes()
        self._probes = ProbeSchedule()
        # Of each node, the median latency in its last report.
        self._latencies = NodeLatencies()
        # By path (source node, target node), the time of the probe, and the rates at which the one's link sent and the
        # other's received.
        self._probed_rates: dict[tuple[str, str], tuple[float, tuple[float, float]]] = {}
        # What other programs take of each node's link, infinite if it is unknown.
        self._neighbours: dict[str, float] = {}
        self._ranks: dict[str, set[int]] = defaultdict(set)
        self._reported_s: dict[str, Mapping[str, float]] = {}
        # Latencies that were reported before the last change, by node, until the node has measured all of them again.
        self._outdated_s: dict[str, Mapping[str, float]] = {}
        self._changed_at_s = -math.inf
        self._expired_s = -math.inf

    def add_report(self, sample: NodeSample, ranks: Collection[int], now_s: float) -> bool:
        """Add what a node reports about the others; return whether earlier exchanges were read with a wrong latency.

        ranks  those on the node that have reported steps
        """
        self._silent_nodes.add_answers(sample.node_id, sample.latency_s)
        self._ceiling.add_host(sample.node_id, sample.host)
        was_probed = any(self._reported_s.values())
        self._expire(now_s)
        self._add_latencies(sample, now_s)
        self._ranks[sample.node_id].update(ranks)
        neighbour = sample.host.neighbour_bytes_per_s
        self._neighbours[sample.node_id] = math.inf if neighbour is None else neighbour
        for other, found in sample.bandwidth.items():
            cards = (found.sent, sample.node_id), (found.received, other)
            sent, received = (
                max(found.bytes_per_s, rate - self._neighbours.get(node, math.inf)) for rate, node in cards
            )
            self._probed_rates[sample.node_id, other] = now_s, (sent, received)
        if not self._is_probed:
            return False
        before_s, self.probed_s = self.probed_s, self._latencies.median_s
        if self._link.latency_s is not None or not is_other_latency(before_s, self.probed_s):
            return False
        self._link = PassiveLink()
        self._probed_rates.clear()
        self.num_changes += was_probed
        return True

    def _expire(self, now_s: float) -> None:
        """Forget what was measured too long ago. Once per second: every node reports so often."""
        if now_s < self._expired_s + 1:
            return
        self._expired_s = now_s
        self._probed_rates = _newer(self._probed_rates, now_s - PROBE_HOLDS_S)
        self._latencies.forget_before(now_s - PROBE_HOLDS_S)

    def _add_latencies(self, sample: NodeSample, now_s: float) -> None:
        self._latencies.remove(sample.node_id)
        self._reported_s[sample.node_id] = sample.latency_s
        outdated_s = self._outdated_s.get(sample.node_id, {})
        new_s = {node: latency_s for node, latency_s in sample.latency_s.items() if latency_s != outdated_s.get(node)}
        if new_s:
            self._latencies.add_latency(sample.node_id, now_s, median(new_s.values()))
        if len(new_s) == len(sample.latency_s):
            self._outdated_s.pop(sample.node_id, None)
        if now_s - self._changed_at_s > PROBE_HOLDS_S:
            # Nodes that have not reported since the change are not waited for any longer.
            self._outdated_s.clear()

    def add_step(self, traffic: StepTraffic, now_s: float, *, is_far_slower: bool = False) -> None:
        """Add what all ranks observed in a step. If the network has changed, forget the probes before the change.

        is_far_slower  the step took several times as long as those before
        """
        num_changes = self._link.num_changes
        node_of = {rank: node for node, ranks in self._ranks.items() for rank in ranks}
        probed = max((max(rates) for _, rates in self._probed_rates.values()), default=None)
        possible = self._ceiling.possible(traffic, node_of, probed)
        if not (is_far_slower and self._link.restart_if_slower(possible, self.probed_s)):
            self._link.add_traffic(possible, self.probed_s)
        if self._link.num_changes > num_changes:
            self.num_changes += self._link.num_changes - num_changes
            self._probed_rates.clear()
            self._latencies.clear()
            self._outdated_s = {node: reported for node, reported in self._reported_s.items() if reported}
            self._changed_at_s = now_s

    @property
    def _sends_slower(self) -> bool:
        """True if ranks send more slowly than they receive. Ranks that share a node's link do not show it.

        With uplinks of half the downlinks' rate, the ratio of both was 0.76 to 0.82, on other networks 0.93 or more.
        """
        sent, messages = self._link.usual_sent, self._link.bandwidth
        if sent is None or messages is None or self._link.slow or len(self._ranks) < FEW:
            return False
        if any(len(ranks) > 1 for ranks in self._ranks.values()):
            return False
        return NOISE * sent < messages.value

    def next_probe(self, node_id: str, now_s: float) -> str | None:
        """Return the node that `node_id` shall probe now; None if messages suffice or it is not its turn."""
        if self._sure is not None:
            return None
        return self._probes.grant(node_id, self._silent_nodes.known - self.silent_nodes, now_s)

    @property
    def num_impossible(self) -> int:
        return self._ceiling.num_dropped

    @property
    def bandwidth(self) -> Estimate | None:
        """Payload bytes per second of a worker's link, the slowest one's where some are slow; None if unknown."""
        return self._probed if self._uses_probes else self._link.bandwidth

    @property
    def latency_s(self) -> float | None:
        """One-way latency between workers; None if unknown."""
        known_s = [self._link.latency_s.value] if self._link.latency_s is not None else []
        if self._is_probed:
            known_s.append(self.probed_s)
        return min(known_s, default=None)

    @property
    def link(self) -> Link | None:
        """The link between workers; None while its bandwidth is unknown."""
        rate, latency_s = self.bandwidth, self.latency_s or self.probed_s
        return Link(alpha_s=latency_s, beta_s_per_byte=1 / rate.value) if rate is not None else None

    def link_after(self, before: Link) -> Link | None:
        """Return `link`, whose latency is that of `before` while it has not been measured since a change."""
        link = self.link
        return link if link is None or self.latency_s is not None else replace(link, alpha_s=before.alpha_s)

    def unless_guessed(self, now: Link, before: Link, num_changes: int) -> Link:
        """Return the link of `now`, with the bandwidth of `before` while it is a guess: guesses scatter by up to 3x.

        num_changes  at the time of `before`. Since another one, guesses count
        """
        is_guess = not self.is_known and self.num_changes == num_changes
        return replace(now, beta_s_per_byte=before.beta_s_per_byte) if is_guess else now

    @property
    def slow(self) -> Mapping[int, float]:
        """Bytes per second by rank, for ranks whose link is much slower than the others', from `bandwidth`'s source."""
        if not self._uses_probes:
            return self._link.slow
        slow, named = self._slow_of(self._probed_links), set()
        for source, target in self._probed_rates:
            suspects = slow.keys() & {("from", source), ("to", target)}
            if len(suspects) == 1:
                named |= suspects
        return {rank: slow[end, node] for end, node in sorted(named) for rank in self._ranks.get(node, ())}

    @property
    def silent_nodes(self) -> frozenset[str]:
        """Ids of nodes that no longer answer the others."""
        return self._silent_nodes.node_ids

    @property
    def _sure(self) -> Estimate | None:
        """Bandwidth of the messages; None if it is not sure."""
        messages = self._link.bandwidth
        return messages if messages is not None and messages.is_sure and not self._sends_slower else None

    @property
    def is_known(self) -> bool:
        """True if messages or probes show the bandwidth. Else it is a guess, which scatters by up to 3x."""
        return self._sure is not None or bool(self._probed_rates)

    @property
    def _uses_probes(self) -> bool:
        return bool(self._probed_rates) and self._sure is None and not self._has_slow_link

    @property
    def _probed(self) -> Estimate:
        """Bandwidth by probes, that of the slowest link where some are slow. There must be probes."""
        links = self._probed_links
        slow = self._slow_of(links)
        counted = list((slow or links).values())
        # Where all uplinks are slower than all downlinks, nodes receive from several others more than each can send.
        usual = min(median_high(own.values()) for own in _by_end(links).values())
        value = slowest_rate(usual, slow)
        return Estimate(value=value, low=min(counted), high=max(counted), source="probes")

    def _slow_of(self, links: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
        """Return the slow ones of `_probed_links`, without those that messages show to be faster."""
        shown = {"from": self._link.sent, "to": self._link.received}

        def is_faster(end: str, node: str, rate: float) -> bool:
            return any(shown[end].get(rank, 0.0) > LINK_CHANGE * rate for rank in self._ranks.get(node, ()))

        ends = _by_end(links).values()
        # Few links are compared with those of the other end too.
        is_comparable = any(len(own) >= FEW for own in ends)
        slow = {link: rate for own in (ends if is_comparable else [links]) for link, rate in slow_links(own).items()}
        return {(end, node): rate for (end, node), rate in slow.items() if not is_faster(end, node, rate)}

    @property
    def _has_slow_link(self) -> bool:
        """True if messages show a slow link clearly, and probes from and to its node do not show that it is faster."""
        slow, messages = self._link.slow, self._link.bandwidth
        if not slow or messages is None or messages.high > LINK_CHANGE * messages.low:
            return False
        probed, faster = self._probed_links, set[int]()
        for node, ranks in self._ranks.items():
            shown = min(probed.get(("from", node), 0.0), probed.get(("to", node), 0.0))
            faster |= {rank for rank in ranks if shown > LINK_CHANGE * slow.get(rank, math.inf)}
        return not slow.keys() <= faster

    @property
    def _probed_links(self) -> dict[tuple[str, str], float]:
        """Highest probed rate at which each node sends, by ("from", node), and receives, by ("to", node)."""
        links: dict[tuple[str, str], float] = defaultdict(float)
        for (source, target), (_, (sent, received)) in self._probed_rates.items():
            for link, rate in ((("from", source), sent), (("to", target), received)):
                links[link] = max(links[link], rate)
        return links

    @property
    def _is_probed(self) -> bool:
        """True if all nodes that answer have measured latencies since the last change."""
        return bool(self._latencies) and not self._outdated_s.keys() - self.silent_nodes


def _by_end(links: Mapping[tuple[str, str], float]) -> dict[str, dict[tuple[str, str], float]]:
    """Return `_probed_links` of senders and of receivers."""
    ends: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for link, rate in links.items():
        ends[link[0]][link] = rate
    return ends


def _newer(found: Mapping[K, tuple[float, T]], since_s: float) -> dict[K, tuple[float, T]]:
    """Return the entries (time, value) of `found` that are not older than `since_s`."""
    return {key: (found_s, value) for key, (found_s, value) in found.items() if found_s >= since_s}

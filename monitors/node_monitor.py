"""A node's monitor: gathers the steps of its ranks, its load, and its latencies and rates to other nodes.

It imports no Ray: `agent` makes an actor of it, and without Ray `session.local_control` runs it in a rank.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from cgx_ray.monitors.guarded_server import Address
from cgx_ray.monitors.host import HostMonitor
from cgx_ray.monitors.probe import BulkServer, measure_beside_training
from cgx_ray.monitors.round_trip import EchoServer, Peers
from cgx_ray.monitors.sample import Bandwidth, NodeSample, StepSample, counted_offsets

logger = logging.getLogger(__name__)

# Seconds between two measurements of round trips to all other nodes.
LATENCY_INTERVAL_S = 5.0
# Seconds within which all ranks of a node report a step that took longer than the interval of reports.
GATHER_S = 0.1
# Seconds in which the control loop decides about such a step.
DECIDED_S = 0.15
# Steps that are kept for a controller that is slow to answer: 8 ranks at 10 steps per second for a minute.
MAX_KEPT_STEPS = 5000


class NodeMonitor(ABC):
    """Measures a node from `start_measuring` to `stop`.

    The constructor starts the servers, so all addresses are known before any monitor starts measuring. Two threads do
    all other work, so `report` never waits for the network.

    orders  ids of nodes to probe, oldest first; whoever appends to it orders a probe
    """

    def __init__(
        self,
        node_id: str,
        host: str,
        *,
        interval_s: float,
        latency_interval_s: float = LATENCY_INTERVAL_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Listen on `host`. Raises OSError if it is not an address of this node.

        interval_s  seconds between two calls of `_deliver`, of shorter steps
        """
        self._node_id, self._clock = node_id, clock
        self._server = EchoServer(host)
        self._bulk_server = BulkServer(host)
        self._host = HostMonitor()
        self._steps: deque[StepSample] = deque(maxlen=MAX_KEPT_STEPS)
        # `meet` replaces each of these objects as a whole, so the threads need no lock: they use the object they read.
        self._peers = Peers({})
        self._bulk: Mapping[str, Address] = {}
        self._own = OwnBytes(has_peers=False)
        self.orders: deque[str] = deque()
        self._found: deque[tuple[str, Bandwidth]] = deque()
        self._logged: set[tuple[str, type[Exception]]] = set()
        self._stopping = threading.Event()
        self._interval_s, self._delivered_s = interval_s, 0.0
        # Set when steps are there that shall not wait for the next interval.
        self._hurries = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(work, wait), name=name, daemon=True)
            for name, work, wait in (
                ("cgx-ray-publish", self._publish, self._wait_for_steps),
                ("cgx-ray-latency", self._measure, partial(self._stopping.wait, latency_interval_s)),
            )
        ]

    @abstractmethod
    def _deliver(self, steps: tuple[StepSample, ...], rest: NodeSample) -> None:
        """Take all that was measured since the last call: `steps` of the node's ranks, and a sample without steps."""

    def address(self) -> Address:
        """Return where other nodes measure their latency to this one."""
        return self._server.address

    def bulk_address(self) -> Address:
        """Return where other nodes probe their bandwidth to this one."""
        return self._bulk_server.address

    def start_measuring(self, peers: Mapping[str, Address], bulk: Mapping[str, Address] | None = None) -> None:
        """Start the threads, or go on with other peers.

        peers  addresses by node id; this node's own is ignored
        bulk   `bulk_address` by id of each node that may be probed
        """
        self.meet(peers, bulk)
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def meet(self, peers: Mapping[str, Address], bulk: Mapping[str, Address] | None = None) -> None:
        """Go on with other addresses, as in `start_measuring`: a monitor that was started again has new ones.

        With more than 17 nodes each measures its latency to 16: the work of all must not grow with their square.
        """
        self._bulk = bulk or {}
        others = {node_id: peers[node_id] for node_id in measured_nodes(self._node_id, peers)}
        self._peers, self._own = Peers(others), OwnBytes(has_peers=bool(others))

    def is_started(self) -> bool:
        """Return whether it measures; False after Ray has started this agent's process again."""
        return self._threads[0].ident is not None

    def report(self, samples: Sequence[StepSample]) -> None:
        """Add samples of a rank on this node. Returns at once. The oldest are lost if it never starts."""
        self._steps.extend(samples)
        if samples and time.monotonic() - self._delivered_s >= self._interval_s:
            self._hurries.set()

    def stop(self) -> None:
        """End the threads and the servers. Waits for a running probe."""
        self._stopping.set()
        self._hurries.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._server.close()
        self._bulk_server.close()

    def _wait_for_steps(self) -> None:
        if self._hurries.is_set():
            # Such a step was delivered just now. The plan that answers it comes with the answer to the next report.
            self._hurries.clear()
            self._stopping.wait(DECIDED_S)
        elif self._hurries.wait(self._interval_s):
            # The other ranks of the node report at about the same time.
            self._stopping.wait(GATHER_S)

    def _repeat(self, work: Callable[[], None], wait: Callable[[], object]) -> None:
        """Call `work`, then `wait`, until `stop`, also after errors. Log the first error of each type."""
        while not self._stopping.is_set():
            try:
                work()
            except Exception as error:
                thread = threading.current_thread().name
                if (thread, type(error)) not in self._logged:
                    self._logged.add((thread, type(error)))
                    logger.warning(
                        "node %s: thread %s failed (%r) and goes on; later errors of this type are not logged",
                        self._node_id,
                        thread,
                        error,
                        exc_info=error,
                    )
            wait()

    def _measure(self) -> None:
        self._peers.measure(self._stopping)
        bulk = self._bulk
        while self.orders and not self._stopping.is_set():
            target = self.orders.popleft()
            if target not in bulk:
                continue
            try:
                found = measure_beside_training(bulk[target])
            except OSError as error:
                logger.warning("node %s could not be probed: %s", target, error)
            else:
                self._found.append((target, found))

    def _publish(self) -> None:
        steps = tuple(self._steps.popleft() for _ in range(len(self._steps)))
        if steps:
            self._delivered_s = time.monotonic()
        rest = NodeSample(
            node_id=self._node_id,
            time_s=self._clock(),
            steps=(),
            latency_s=self._peers.latency_s,
            host=self._host.read(self._own.of(steps)),
            bandwidth=dict(self._found.popleft() for _ in range(len(self._found))),
        )
        self._deliver(steps, rest)


def measured_nodes(node_id: str, nodes: Collection[str]) -> list[str]:
    """Return the nodes that `node_id` measures its latency to: all others of a few, else 16 far apart."""
    names = sorted(nodes)
    if node_id not in names:
        return names
    place, count = names.index(node_id), len(names)
    steps = [distance for offset in counted_offsets(0, count) for distance in (offset, -offset)]
    return [name for name in dict.fromkeys(names[(place + step) % count] for step in steps) if name != node_id]


class OwnBytes:
    """Bytes that the ranks of this training send from the node."""

    def __init__(self, *, has_peers: bool) -> None:
        self._has_peers = has_peers
        self._ranks: set[int] = set()

    def of(self, steps: Sequence[StepSample]) -> int | None:
        """Return the bytes sent in `steps`, or None if it is unknown.

        Ranks of a node that share no memory also count what they send to each other.
        """
        self._ranks.update(step.rank for step in steps)
        if not self._has_peers:
            return 0
        if any(step.num_local < len(self._ranks) for step in steps):
            return None
        return sum(step.card_bytes for step in steps)

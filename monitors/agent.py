"""The agent, one actor per node: gathers measurements of ranks and links, reports them, and takes plans for ranks."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from cgx_ray.monitors.guarded_server import Address
from cgx_ray.monitors.host import HostMonitor
from cgx_ray.monitors.node_metrics import NodeMetrics
from cgx_ray.monitors.node_step import node_steps
from cgx_ray.monitors.plan_relay import PlanRelay
from cgx_ray.monitors.probe import BulkServer, measure_beside_training
from cgx_ray.monitors.ray_sink import RaySink
from cgx_ray.monitors.round_trip import EchoServer, Peers
from cgx_ray.monitors.sample import Bandwidth, HostLoad, NodeSample, StepSample, counted_offsets
from cgx_ray.plan import Plan

logger = logging.getLogger(__name__)

# Seconds between two reports to the controller, and between two settings of all metrics.
INTERVAL_S = 1.0
# Seconds between two measurements of round trips to all other nodes.
LATENCY_INTERVAL_S = 5.0
# Options of the actor. Reports of ranks, two per second from each, would fill Ray's list of tasks.
ACTOR_OPTIONS: Mapping[str, Any] = {"num_cpus": 0, "enable_task_events": False}
# Steps that are kept for a controller that is slow to answer: 8 ranks at 10 steps per second for a minute.
MAX_KEPT_STEPS = 5000


class NodeAgent:
    """A plain class. Its user makes it an actor with ACTOR_OPTIONS that is pinned to its node.

    The constructor starts the echo server, so that all addresses are known before any agent starts measuring. Two
    threads do all other work, so that `report` never waits for the network. `plans_after` does wait: the actor needs a
    thread for each rank of the node, and some for other calls (`max_concurrency`).
    """

    def __init__(
        self,
        node_id: str,
        run_name: str,
        host: str,
        *,
        run_id: str = "",
        interval_s: float = INTERVAL_S,
        latency_interval_s: float = LATENCY_INTERVAL_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Listen on `host`. Raises OSError if it is not an address of this node."""
        self._node_id, self._run_name, self._run_id, self._clock = node_id, run_name, run_id, clock
        self._server = EchoServer(host)
        self._bulk_server = BulkServer(host)
        self._host = HostMonitor()
        self._steps: deque[StepSample] = deque(maxlen=MAX_KEPT_STEPS)
        # `start` replaces each of these objects as a whole, so the threads need no lock: they use the object they read.
        self._peers = Peers({})
        self._bulk: Mapping[str, Address] = {}
        self._own = OwnBytes(has_peers=False)
        self._metrics = NodeMetrics(RaySink(), run_name, run_id)
        self._relay = PlanRelay(has_controller=False)
        self._outbox = _Outbox(None, node_id, self._relay)
        self._found: deque[tuple[str, Bandwidth]] = deque()
        self._logged: set[tuple[str, type[Exception]]] = set()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(work, every_s), name=name, daemon=True)
            for name, work, every_s in (
                ("cgx-ray-publish", self._publish, interval_s),
                ("cgx-ray-latency", self._measure, latency_interval_s),
            )
        ]

    def address(self) -> Address:
        """Return where other nodes measure their latency to this one."""
        return self._server.address

    def bulk_address(self) -> Address:
        """Return where other nodes probe their bandwidth to this one."""
        return self._bulk_server.address

    def start(
        self,
        peers: Mapping[str, Address],
        controller: Any = None,
        bulk: Mapping[str, Address] | None = None,
    ) -> None:
        """Start measuring, or go on with other peers and another controller after a restart of the workers.

        peers       addresses by node id; this node's own is ignored
        controller  handle of an actor with `observe` as that of `Controller`. None: samples are only exported
        bulk        `bulk_address` by id of each node that may be probed
        """
        self.meet(peers, bulk)
        self._metrics = NodeMetrics(RaySink(), self._run_name, self._run_id)
        self._relay = PlanRelay(has_controller=controller is not None)
        self._outbox = _Outbox(controller, self._node_id, self._relay)
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def meet(self, peers: Mapping[str, Address], bulk: Mapping[str, Address] | None = None) -> None:
        """Go on with other addresses of the nodes, as in `start`: an agent that was started again has new ones.

        With more than 17 nodes each measures its latency to 16: the work of all must not grow with their square.
        """
        self._bulk = bulk or {}
        others = {node_id: peers[node_id] for node_id in measured_nodes(self._node_id, peers)}
        self._peers, self._own = Peers(others), OwnBytes(has_peers=bool(others))

    def is_started(self) -> bool:
        """Return whether `start` was called; False after Ray has started this agent's process again."""
        return self._threads[0].ident is not None

    def report(self, samples: Sequence[StepSample]) -> None:
        """Add samples of a rank on this node. Returns at once. The oldest are lost if `start` was never called."""
        self._steps.extend(samples)

    def take_plans(self, plans: bytes, known: int) -> None:
        """Keep new plans of the controller, pickled, for the ranks. See `PlanRelay.take_push`."""
        self._relay.take_push(pickle.loads(plans), known)

    def plans_after(self, version: int, timeout_s: float) -> list[Plan] | None:
        """Return the controller's plans newer than `version`, see `PlanRelay.after`."""
        return self._relay.after(version, timeout_s)

    def stop(self) -> None:
        """End the threads and the servers. Waits for a running probe."""
        self._stopping.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._server.close()
        self._bulk_server.close()

    def _repeat(self, work: Callable[[], None], every_s: float) -> None:
        """Call `work` until `stop`, also after errors. Log the first error of each type."""
        while not self._stopping.is_set():
            try:
                work()
            except Exception as error:
                if work == self._publish:
                    # Perhaps no report is sent any more, whose answer could bring plans. Ranks ask the controller.
                    self._relay.take_answer(None)
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
            self._stopping.wait(every_s)

    def _measure(self) -> None:
        self._peers.measure(self._stopping)
        outbox, bulk = self._outbox, self._bulk
        while outbox.orders and not self._stopping.is_set():
            target = outbox.orders.popleft()
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
        latency_s, host = self._peers.latency_s, self._host.read(self._own.of(steps))
        found = dict(self._found.popleft() for _ in range(len(self._found)))
        self._metrics.export(steps, latency_s, host)
        self._outbox.send(steps, lambda kept: self._sample(kept, latency_s, host, found))

    def _sample(
        self,
        steps: Sequence[StepSample],
        latency_s: Mapping[str, float],
        host: HostLoad,
        bandwidth: Mapping[str, Bandwidth],
    ) -> NodeSample:
        return NodeSample(
            node_id=self._node_id,
            time_s=self._clock(),
            steps=node_steps(steps),
            latency_s=latency_s,
            host=host,
            bandwidth=bandwidth,
        )


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


class _Outbox:
    """Sends reports to the controller, one at a time; steps are collected meanwhile.

    orders  nodes to probe, of its answers. The plans in these go to the relay
    """

    def __init__(self, controller: Any, node_id: str, relay: PlanRelay) -> None:
        self._controller = controller
        self._node_id, self._relay = node_id, relay
        self._pending: Any = None
        self._steps: deque[StepSample] = deque(maxlen=MAX_KEPT_STEPS)
        self._has_warned = False
        self.orders: deque[str] = deque()

    def send(self, steps: Sequence[StepSample], make: Callable[[Sequence[StepSample]], NodeSample]) -> None:
        """Send what `make` makes of all steps that were not sent before, unless the last call has no answer yet."""
        if self._controller is None:
            return
        self._steps.extend(steps)
        if not self._is_answered():
            return
        if self._controller is not None:
            # A report that cannot be made costs its own steps only.
            unsent = tuple(self._steps)
            self._steps.clear()
            # Pickled here, since the process that it is for is behind the controller's.
            report = pickle.dumps(make(unsent), pickle.HIGHEST_PROTOCOL)
            self._pending = self._controller.observe.remote(self._node_id, report, self._relay.newest)

    def _is_answered(self) -> bool:
        if self._pending is None:
            return True
        done, _ = ray.wait([self._pending], timeout=0)
        if not done:
            return False
        pending, self._pending = self._pending, None
        try:
            order, plans = ray.get(pending) or (None, ())
            self._relay.take_answer(plans)
            if order is not None:
                self.orders.append(order)
        except RayActorError as error:
            # Ranks that ask the controller themselves meet the error too, and say so.
            self._relay.take_answer(None)
            if not isinstance(error, ActorUnavailableError):
                self._controller = None
            self._warn_once("the controller does not answer; ranks keep their plan and metrics go on", error)
        except RayError as error:
            self._relay.take_answer(())
            # The text of a RayTaskError is the remote traceback.
            cause = error.cause if isinstance(error, RayTaskError) else error
            self._warn_once("the controller could not use a sample; sending goes on", cause)
        return True

    def _warn_once(self, message: str, error: BaseException) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s: %s", message, str(error).strip().partition("\n")[0])

"""The agent, a Ray actor on each node: reports what it measures, and takes the controller's plans for ranks."""

from __future__ import annotations

import logging
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from cgx_ray.logs import show_lines
from cgx_ray.monitors.guarded_server import Address
from cgx_ray.monitors.node_metrics import NodeMetrics
from cgx_ray.monitors.node_monitor import LATENCY_INTERVAL_S, MAX_KEPT_STEPS, NodeMonitor
from cgx_ray.monitors.plan_relay import PlanRelay
from cgx_ray.monitors.ray_sink import RaySink
from cgx_ray.monitors.sample import NodeSample, StepSample, node_steps
from cgx_ray.plan import Plan

logger = logging.getLogger(__name__)

# Seconds between two reports to the controller, and between two settings of all metrics.
INTERVAL_S = 1.0
# Longest wait for the answer to a report, in seconds. It comes in milliseconds, and may bring plans; a later one is
# taken before the next report.
ANSWER_S = 0.25
# Options of the actor. Reports of ranks, two per second from each, would fill Ray's list of tasks.
ACTOR_OPTIONS: Mapping[str, Any] = {"num_cpus": 0, "enable_task_events": False}


class NodeAgent(NodeMonitor):
    """A plain class. Its user makes it an actor with ACTOR_OPTIONS that is pinned to its node.

    `plans_after` waits: the actor needs a thread for each rank of the node, and some for other calls
    (`max_concurrency`).
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
        show_lines()
        super().__init__(node_id, host, interval_s=interval_s, latency_interval_s=latency_interval_s, clock=clock)
        self._run_name, self._run_id = run_name, run_id
        self._metrics = NodeMetrics(RaySink(), run_name, run_id)
        self._relay = PlanRelay(has_controller=False)
        self._outbox = _Outbox(None, node_id, self._relay, self.orders)

    def start(
        self,
        peers: Mapping[str, Address],
        controller: Any = None,
        bulk: Mapping[str, Address] | None = None,
    ) -> None:
        """Start measuring, or go on with other peers and another controller after a restart of the workers.

        controller  handle of an actor with `observe` as that of `Controller`. None: samples are only exported

        The other arguments are those of `start_measuring`.
        """
        self._metrics = NodeMetrics(RaySink(), self._run_name, self._run_id)
        self._relay = PlanRelay(has_controller=controller is not None)
        self._outbox = _Outbox(controller, self._node_id, self._relay, self.orders)
        self.start_measuring(peers, bulk)

    def plans_after(self, version: int, timeout_s: float) -> list[Plan] | None:
        """Return the controller's plans newer than `version`, see `PlanRelay.after`."""
        return self._relay.after(version, timeout_s)

    def _publish(self) -> None:
        try:
            super()._publish()
        except Exception:
            # Perhaps no report is sent any more, whose answer could bring plans. Ranks ask the controller.
            self._relay.take_answer(None)
            raise

    def _deliver(self, steps: tuple[StepSample, ...], rest: NodeSample) -> None:
        self._metrics.export(steps, rest.latency_s, rest.host)
        self._outbox.send(steps, rest)


class _Outbox:
    """Sends reports to the controller, one at a time; steps are collected meanwhile."""

    def __init__(self, controller: Any, node_id: str, relay: PlanRelay, orders: deque[str]) -> None:
        """`relay` gets the plans of the controller's answers, `orders` the nodes to probe."""
        self._controller = controller
        self._node_id, self._relay, self._orders = node_id, relay, orders
        self._pending: Any = None
        self._steps: deque[StepSample] = deque(maxlen=MAX_KEPT_STEPS)
        self._has_warned = False

    def send(self, steps: Sequence[StepSample], rest: NodeSample) -> None:
        """Send `rest` with all steps that were not sent before, unless the last call has no answer yet."""
        if self._controller is None:
            return
        self._steps.extend(steps)
        if not self._is_answered(within_s=0):
            return
        if self._controller is not None:
            # A report that cannot be made costs its own steps only.
            unsent = tuple(self._steps)
            self._steps.clear()
            # Pickled here, since the process that it is for is behind the controller's.
            report = pickle.dumps(replace(rest, steps=node_steps(unsent)), pickle.HIGHEST_PROTOCOL)
            self._pending = self._controller.observe.remote(self._node_id, report, self._relay.newest)
            self._is_answered(within_s=ANSWER_S)

    def _is_answered(self, within_s: float) -> bool:
        """Return whether no report waits for its answer; take the one that comes `within_s`."""
        if self._pending is None:
            return True
        done, _ = ray.wait([self._pending], timeout=within_s)
        if not done:
            return False
        pending, self._pending = self._pending, None
        try:
            order, plans = ray.get(pending) or (None, ())
            self._relay.take_answer(plans)
            if order is not None:
                self._orders.append(order)
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

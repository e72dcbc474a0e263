"""The agents of a worker group, and a watch over them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cgx_ray.monitors.agent import ACTOR_OPTIONS, NodeAgent
from cgx_ray.ray_train.compat import RunFacts

logger = logging.getLogger(__name__)

# Restarts of one actor by Ray. Enough for a crash a day over months; endless ones would hide an error.
MAX_RESTARTS = 100
# Calls to an agent at the same time, besides one long poll per rank of its node.
OTHER_CALLS = 8
# Seconds between two looks at the agents. Steps are joined without a lost agent after three.
WATCH_S = 2.0
# Longest wait for an answer while watching, in seconds. Calls to an agent that Ray starts again wait until it has.
ANSWER_S = 10.0
# Longest wait for an agent's process to start, in seconds. It takes some seconds on a busy machine.
START_S = 60.0


def node_addresses() -> dict[str, str]:
    """Return the address of each living node, by id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def start_agents(facts: RunFacts, controller: Any, *, probes: bool) -> AgentWatch:
    """Start an agent on each node of the run.

    probes  agents also measure bandwidth; useless with a simulated link, which they would not see
    """
    addresses = node_addresses()
    agents = {
        node_id: ray.remote(NodeAgent)
        .options(
            **ACTOR_OPTIONS,
            max_restarts=MAX_RESTARTS,
            max_concurrency=num_ranks + OTHER_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(node_id, facts.name, addresses[node_id], run_id=facts.run_id)
        for node_id, num_ranks in Counter(facts.node_ids).items()
    }
    watch = AgentWatch(agents, controller, probes=probes)
    watch.start()
    return watch


class AgentWatch:
    """Starts agents, and starts those again whose process Ray has replaced: they know neither peers nor controller.

    agents  by node id
    """

    def __init__(self, agents: Mapping[str, Any], controller: Any, *, probes: bool) -> None:
        self.agents = agents
        self._controller = controller
        self._probes = probes
        self._ending = threading.Event()
        # Nodes whose agent did not answer the last call.
        self._unwatched: set[str] = set()
        self._thread = threading.Thread(target=self._watch, name="cgx-ray-agent-watch", daemon=True)

    def start(self) -> None:
        """Start all agents, then watch them until `end`. A node whose agent cannot start goes without monitors."""
        self._start(list(self.agents), START_S)
        self._thread.start()

    def end(self) -> None:
        """Stop watching, before the agents are ended on purpose. Does not wait: an agent may not answer any more."""
        self._ending.set()

    def _start(self, node_ids: list[str], timeout_s: float) -> list[str]:
        """Start the agents of `node_ids`, and send the others their addresses. Return the nodes that have started."""
        echoes = self._ask("address", timeout_s)
        # Those that have not answered are not waited for again.
        bulk = self._ask("bulk_address", timeout_s, echoes) if self._probes else {}
        known = {node_id: agent for node_id, agent in self.agents.items() if node_id in echoes}
        others = {node_id: agent for node_id, agent in known.items() if node_id not in node_ids}
        calls = {
            node_id: known[node_id].start.remote(echoes, self._controller, bulk)
            for node_id in node_ids
            if node_id in known
        }
        started = self._results(calls, timeout_s)
        self._results({node_id: agent.meet.remote(echoes, bulk) for node_id, agent in others.items()}, timeout_s)
        return list(started)

    def _ask(self, method: str, timeout_s: float, nodes: Collection[str] | None = None) -> dict[str, Any]:
        """Return what `method` of the agents of `nodes`, or of all, returns, without those that do not answer."""
        asked = {node: agent for node, agent in self.agents.items() if nodes is None or node in nodes}
        return self._results({node: getattr(agent, method).remote() for node, agent in asked.items()}, timeout_s)

    def _results(self, calls: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the results of `calls` by node id, without those that fail or do not come within `timeout_s`."""
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
        results = {}
        for node_id, call in calls.items():
            try:
                results[node_id] = ray.get(call, timeout=0)
                self._unwatched.discard(node_id)
            except RayError as error:
                # Said once until it answers. Ray may be starting it again, or the node is gone.
                if node_id not in self._unwatched and not self._ending.is_set():
                    self._unwatched.add(node_id)
                    logger.warning(
                        "the monitors of node %s do not answer: training goes on, without its loads and latencies (%s)",
                        node_id,
                        str(error).strip().rpartition("\n")[2] or type(error).__name__,
                    )
        return results

    def _watch(self) -> None:
        while not self._ending.wait(WATCH_S):
            new = [node_id for node_id, is_started in self._ask("is_started", ANSWER_S).items() if not is_started]
            if new and not self._ending.is_set() and (started := self._start(new, ANSWER_S)):
                logger.warning("the monitors of nodes %s have ended and were started again", ", ".join(started))

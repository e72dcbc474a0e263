"""`cgx-ray doctor --cluster`: what of the nodes of a Ray cluster differs, or bounds a training that uses them all."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cgx_ray.commands.cluster import connect
from cgx_ray.commands.finding import Finding
from cgx_ray.errors import ConfigError
from cgx_ray.ports import VARIABLE, free_port
from cgx_ray.units import format_bytes, format_rate, format_seconds
from cgx_ray.why.hints import node_hints
from cgx_ray.why.meters import NodeMeter
from cgx_ray.why.network_costs import is_faster
from cgx_ray.why.records import NetworkCard, NodeFacts

# Difference of two clocks from which on logs of nodes cannot be read side by side.
MAX_OFFSET_S = 0.5
# Longest wait for the next node's answer, in seconds.
_WAIT_S = 60.0
_PACKAGES = ("cgx-ray", "torch", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One node, as a task there sees it.

    address   by which Ray knows it
    ports     of CGX_PORTS, "any" if it is not set
    refusal   why no port can be listened at; "" if one can
    offset_s  of its clock against the clock here, with an error of half of `answer_s`
    """

    address: str
    facts: NodeFacts
    versions: dict[str, str]
    ports: str
    refusal: str
    offset_s: float
    answer_s: float

    @property
    def card(self) -> NetworkCard | None:
        """The card with the address, by which other nodes reach it."""
        return self.facts.card_at(self.address)


def cluster_findings(address: str) -> list[Finding]:
    """Return the findings of all nodes of the Ray cluster at `address`.

    Raises ConfigError if there is no cluster, or a node does not answer.
    """
    connect(address)
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    _ask(nodes)  # the first call starts a process on each node, which takes seconds
    return findings_of(_ask(nodes))


def findings_of(reports: Sequence[NodeReport]) -> list[Finding]:
    """Return a finding per node, then what must be the same on all of them, then what else is odd."""
    found = [_about(report) for report in reports]
    for name, value_of, remedy in _COMPARED:
        values = {report.address: value_of(report) for report in reports}
        if len(set(values.values())) > 1:
            each = ", ".join(f"{value} on {node}" for node, value in values.items())
            found.append(Finding(name=name, found=each, problem="nodes differ", remedy=remedy))
        else:
            found.append(Finding(name=name, found=next(iter(values.values()))))
    hints = [(report.address, hint) for report in reports for hint in node_hints([report.facts])]
    return found + [Finding(name=f"note on {address}", found=hint) for address, hint in hints]


def _about(report: NodeReport) -> Finding:
    card, problems, remedies = report.card, [], []
    if card is not None and card.duplex == "half":
        problems.append(f"{card.name} cannot send and receive at the same time")
        remedies.append(f"ethtool {card.name}, on both ends of the cable")
    faster = [one for one in report.facts.cards if card is not None and is_faster(one, card)]
    if faster:
        problems.append(f"{faster[0].name} is faster ({format_rate(faster[0].bit_per_s)})")
        remedies.append(f"GLOO_SOCKET_IFNAME={faster[0].name} NCCL_SOCKET_IFNAME={faster[0].name} if all nodes have it")
    if abs(report.offset_s) - report.answer_s / 2 > MAX_OFFSET_S:
        problems.append(f"its clock is {format_seconds(abs(report.offset_s))} off")
        remedies.append("run chrony or ntpd on all nodes")
    if report.refusal:
        problems.append(report.refusal)
        remedies.append(f"set {VARIABLE} to free ports that the firewall lets through")
    shown = "no card has its address" if card is None else f"{card.name} ({card.kind}), {_speed(card)}, MTU {card.mtu}"
    return Finding(
        name=f"{report.address} ({report.facts.name})",
        found=f"{shown}; ports {report.ports}; /dev/shm {format_bytes(report.facts.shared_bytes)}",
        problem="; ".join(problems),
        remedy="; ".join(remedies),
    )


def _speed(card: NetworkCard) -> str:
    speed = format_rate(card.bit_per_s) if card.bit_per_s else "speed unknown"
    return f"{speed}, {card.duplex} duplex" if card.duplex else speed


# What must be the same on all nodes: name, value, remedy.
_COMPARED: tuple[tuple[str, Callable[[NodeReport], str], str], ...] = (
    ("MTU", lambda report: str(report.card.mtu if report.card else "-"), "ip link set CARD mtu N, alike on all nodes"),
    *(
        (name, lambda report, name=name: report.versions[name], f"install the same {name} on all nodes")
        for name in ("python", *_PACKAGES)
    ),
)


def _ask(nodes: Mapping[str, str]) -> list[NodeReport]:
    """Return the reports of `nodes`, which are asked at once. `nodes`: Ray's id of each by its address.

    Raises ConfigError if a node does not answer.
    """
    task, asked = ray.remote(_report), dict[ray.ObjectRef[Any], tuple[str, float]]()
    for host, node_id in nodes.items():
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        asked[task.options(num_cpus=0, scheduling_strategy=there).remote(host)] = host, time.time()
    waiting, reports = list(asked), []
    while waiting:
        # In this thread, so that Ctrl-C ends the wait.
        answered, waiting = ray.wait(waiting, timeout=_WAIT_S)
        if not answered:
            silent = ", ".join(asked[one][0] for one in waiting)
            raise ConfigError(f"no answer of {silent} for {_WAIT_S:g} s; look at `ray status`, and ask again")
        host, start_s = asked[answered[0]]
        answer_s = time.time() - start_s
        try:
            report, there_s = ray.get(answered[0])
        except ray.exceptions.RayError as error:
            raise ConfigError(f"node {host} does not answer ({error}); is cgx_ray installed there?") from error
        reports.append(NodeReport(**report, offset_s=there_s - (start_s + answer_s / 2), answer_s=answer_s))
    return sorted(reports, key=lambda report: report.address)


def _report(host: str) -> tuple[dict[str, Any], float]:
    """Return the node's part of a `NodeReport`, and its time. Runs there."""
    facts, _, _ = NodeMeter().read(asks_gpus=True)
    refusal = ""
    try:
        free_port(host)
    except (ConfigError, OSError) as error:
        refusal = str(error)
    packages = {name: version(name) for name in _PACKAGES}
    report = {
        "address": host,
        "facts": facts,
        "versions": {"python": platform.python_version(), **packages},
        "ports": os.environ.get(VARIABLE, "any"),
        "refusal": refusal,
    }
    return report, time.time()

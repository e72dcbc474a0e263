"""`cgx-ray probe`: latency and bandwidth between all nodes of a running Ray cluster, as a table, a picture and JSON."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from matplotlib.figure import Figure
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cgx_ray.errors import ConfigError
from cgx_ray.monitors.probe import NodePath, Prober
from cgx_ray.monitors.probe_schedule import rounds

Ways = Mapping[tuple[str, str], NodePath]

CONNECT_TIMEOUT_S = 5.0


def probe_command(address: str, console: Console, json_path: str | None, plot: Path, *, counts_hops: bool) -> None:
    """Probe every pair of nodes, show what came out, and write JSON if `json_path` is given.

    Raises ConfigError if there is no cluster at `address`, or if it has one node.
    """
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():
            # Ray itself would try for minutes.
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False)
    except OSError as error:
        raise ConfigError(f"no Ray cluster at {address!r} ({error}); start one, or give its --address") from error
    node_of_host = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    hosts = list(node_of_host)
    if len(hosts) < 2:
        raise ConfigError(f"the cluster has one node, {hosts[0]}: there is nothing to probe; add another node")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(hosts) * (len(hosts) - 1))
        ways = probe_nodes(
            node_of_host,
            lambda pair: progress.update(task, description=" to ".join(pair), advance=1),
            counts_hops=counts_hops,
        )
    console.print(way_table(hosts, ways))
    plot_ways(hosts, ways, plot)
    console.print(f"picture: {plot}", highlight=False, soft_wrap=True)
    if json_path is not None:
        text = json.dumps(describe_ways(hosts, ways), indent=2) + "\n"
        if json_path == "-":
            sys.stdout.write(text)
        else:
            Path(json_path).write_text(text)


def probe_nodes(
    node_of_host: Mapping[str, str], on_done: Callable[[tuple[str, str]], None], *, counts_hops: bool = False
) -> dict[tuple[str, str], NodePath]:
    """Probe every ordered pair of hosts, by rounds in which no node takes part twice.

    node_of_host  Ray's node id by address; Ray must be initialised. Each gets an actor, without a CPU, while this lasts

    Raises the OSError of a probe that failed, as a RayTaskError.
    """
    hosts = list(node_of_host)
    actors = [
        ray.remote(Prober)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote(host)
        for host, node_id in node_of_host.items()
    ]
    try:
        addresses = ray.get([actor.addresses.remote() for actor in actors])
        ways = {}
        for pairs in rounds(len(hosts)):
            iperf3 = ray.get([actors[to].start_iperf3.remote() for _, to in pairs])
            found = [
                actors[at].probe.remote(*addresses[to], where, counts_hops=counts_hops)
                for (at, to), where in zip(pairs, iperf3, strict=True)
            ]
            for (at, to), way in zip(pairs, ray.get(found), strict=True):
                ways[hosts[at], hosts[to]] = way
                on_done((hosts[at], hosts[to]))
            ray.get([actors[to].stop_iperf3.remote() for _, to in pairs])
        return ways
    finally:
        for actor in actors:
            ray.kill(actor)


def describe_ways(hosts: list[str], ways: Ways) -> dict[str, Any]:
    """The matrix as JSON has it."""
    return {"hosts": hosts, "ways": [{"from": at, "to": to, **asdict(way)} for (at, to), way in ways.items()]}


def way_table(hosts: list[str], ways: Ways) -> Table:
    """From the hosts of the rows to those of the columns."""
    table = Table(title="Mbit/s, error; one-way ms, hops", title_justify="left", box=SIMPLE, padding=(0, 1))
    table.add_column("from \\ to", no_wrap=True)
    for host in hosts:
        table.add_column(host, justify="right", no_wrap=True)
    for at in hosts:
        table.add_row(at, *("" if at == to else _cell(ways[at, to]) for to in hosts))
    return table


def _cell(way: NodePath) -> str:
    hops = f", {way.hops}" if way.hops is not None else ""
    return f"{8e-6 * way.bytes_per_s:.0f} ±{way.error:.0%}\n{way.latency_s * 1e3:.2f}{hops}"


def plot_ways(hosts: list[str], ways: Ways, path: Path) -> None:
    """Write a PNG: bandwidth and latency as heat maps."""
    figure = Figure(figsize=(4 + 1.2 * len(hosts), 2 + 0.6 * len(hosts)), dpi=130, layout="constrained")
    panels: list[tuple[str, str, Callable[[NodePath], float]]] = [
        ("Mbit/s", "viridis", lambda way: 8e-6 * way.bytes_per_s),
        ("one-way ms", "viridis_r", lambda way: way.latency_s * 1e3),
    ]
    for axes, (title, colors, value) in zip(figure.subplots(1, 2), panels, strict=True):
        cells = [[value(ways[at, to]) if at != to else float("nan") for to in hosts] for at in hosts]
        figure.colorbar(axes.imshow(cells, cmap=colors), ax=axes, shrink=0.8)
        axes.set_title(title)
        axes.set_xticks(range(len(hosts)), hosts, rotation=45, ha="right")
        axes.set_yticks(range(len(hosts)), hosts)
        axes.set_xlabel("to")
        axes.set_ylabel("from")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)

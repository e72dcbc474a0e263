"""`cgx-ray probe`: latency and bandwidth between all nodes of a running Ray cluster, as a table, a picture and JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.table import Table

from cgx_ray.commands.cluster import address_option, connect
from cgx_ray.commands.options import console_for, json_option, plot_option
from cgx_ray.errors import ConfigError
from cgx_ray.monitors.probe import NodePath, Prober
from cgx_ray.monitors.probe_schedule import rounds
from cgx_ray.report.show import new_table, print_line, progress_bar, write_json

Ways = Mapping[tuple[str, str], NodePath]


@click.command()
@address_option
@click.option("--hops", is_flag=True, help="Count network hops as well, which takes up to a second per hop.")
@json_option("the matrix")
@plot_option("network.png")
def probe(address: str, hops: bool, json_path: str | None, plot: Path) -> None:
    """Measure latency and bandwidth between all nodes of a Ray cluster."""
    console = console_for(json_path)
    connect(address)
    node_of_host = _nodes()
    hosts = list(node_of_host)
    if len(hosts) < 2:
        raise ConfigError(f"the cluster has one node, {hosts[0]}: there is nothing to probe; add another node")
    done: list[tuple[str, str]] = []
    with progress_bar(console) as on_part:

        def on_done(pair: tuple[str, str]) -> None:
            done.append(pair)
            on_part(" to ".join(pair), len(done) / (len(hosts) * (len(hosts) - 1)))

        ways = probe_nodes(node_of_host, on_done, counts_hops=hops)
    console.print(way_table(hosts, ways))
    plot_ways(hosts, ways, plot)
    print_line(console, f"picture: {plot}")
    if json_path is not None:
        write_json(json_path, describe_ways(hosts, ways))


def _nodes() -> dict[str, str]:
    """Return Ray's node id per host."""
    return {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}


def probe_nodes(
    node_of_host: Mapping[str, str], on_done: Callable[[tuple[str, str]], None], *, counts_hops: bool = False
) -> dict[tuple[str, str], NodePath]:
    """Probe every ordered pair of hosts, in rounds in which no node takes part twice.

    node_of_host  Ray's node id per address; Ray must be initialised. Each node runs an actor, without a CPU, meanwhile

    Raises ConfigError for the first probe that failed.
    """
    hosts = list(node_of_host)
    actors = [
        ray.remote(Prober)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote(host)
        for host, node_id in node_of_host.items()
    ]
    try:
        addresses = [
            _result(actor.addresses.remote(), f"{host} cannot be probed")
            for host, actor in zip(hosts, actors, strict=True)
        ]
        ways = {}
        for pairs in rounds(len(hosts)):
            iperf3 = ray.get([actors[to].start_iperf3.remote(hosts[at]) for at, to in pairs])
            found = [
                actors[at].probe.remote(*addresses[to], where, counts_hops=counts_hops)
                for (at, to), where in zip(pairs, iperf3, strict=True)
            ]
            for (at, to), way in zip(pairs, found, strict=True):
                ways[hosts[at], hosts[to]] = _result(way, f"the probe from {hosts[at]} to {hosts[to]} failed")
                on_done((hosts[at], hosts[to]))
            ray.get([actors[to].stop_iperf3.remote() for _, to in pairs])
        return ways
    finally:
        for actor in actors:
            ray.kill(actor)


def _result(call: Any, event: str) -> Any:
    """Wait for the answer of a prober. Raises ConfigError with `event` and its cause if there is none."""
    try:
        return ray.get(call)
    except RayError as error:
        # The text of a RayTaskError is the remote traceback.
        cause = error.cause if isinstance(error, RayTaskError) else error
        lines = str(cause).strip().splitlines() or [repr(cause)]
        # An actor that could not start has the traceback of its constructor, which ends with the error.
        text = lines[-1] if "creation task" in lines[0] else lines[0]
        raise ConfigError(f"{event}: {text}; check that both nodes are up and that no firewall is between") from error


def describe_ways(hosts: list[str], ways: Ways) -> dict[str, Any]:
    """Return the matrix for JSON."""
    return {"hosts": hosts, "ways": [{"from": at, "to": to, **asdict(way)} for (at, to), way in ways.items()]}


def way_table(hosts: list[str], ways: Ways) -> Table:
    """Return a table with a sender per row and a receiver per column."""
    table = new_table("Mbit/s, error; one-way ms, hops", "from \\ to", *hosts)
    for at in hosts:
        table.add_row(at, *("" if at == to else _cell(ways[at, to]) for to in hosts))
    return table


def _cell(way: NodePath) -> str:
    hops = f", {way.hops}" if way.hops is not None else ""
    return f"{8e-6 * way.bytes_per_s:.0f} ±{way.error:.0%}\n{way.latency_s * 1e3:.2f}{hops}"


def plot_ways(hosts: list[str], ways: Ways, path: Path) -> None:
    """Write a picture of bandwidth and latency as heat maps."""
    from cgx_ray.report.style import new_figure, save_figure  # noqa: PLC0415 - the extra plots

    figure = new_figure(4 + 1.2 * len(hosts), 2 + 0.6 * len(hosts))
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
    save_figure(figure, path)

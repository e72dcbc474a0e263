"""`cgx-ray collective`: which collective is the fastest for a top-k gradient, and the cost of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import click

from cgx_ray.commands.options import console_for, json_option
from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec, Scheme
from cgx_ray.planner.cost import Link, exchange_s
from cgx_ray.planner.papers.flexible import allgather_tree_s, artopk_tree_s
from cgx_ray.report.show import new_table, write_json
from cgx_ray.units import parse_elements, parse_rate, parse_seconds, parse_share


def parse_link(latency: str, bandwidth: str) -> Link:
    """Return the link of texts such as "4ms" and "10gbps". Raises ConfigError for a text that is neither."""
    return Link.from_rates(
        bandwidth_gbps=parse_rate("bandwidth", bandwidth) / 1e9, latency_ms=1e3 * parse_seconds("latency", latency)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Milliseconds of one exchange by scheme, without codec time, and the fastest scheme.

    costs_ms  with 4 bytes of value and 4 of index per element, and the collectives of the literature (Flexible
              Communication, table 6): allgather by recursive doubling, artopk_tree with all values at each level, dense
              over a ring
    ours_ms   as this package sends top-k: indices packed, all pairs at once, trees by halving
    """

    scheme: str
    costs_ms: Mapping[str, float]
    ours_ms: Mapping[str, float]


def compare_schemes(*, numel: int, density: float, num_workers: int, link: Link) -> Comparison:
    """Compare schemes that average `numel` float32, of which each worker sends the share `density`.

    With one worker all cost nothing, and the fastest is dense. Raises ConfigError for a value that is not allowed.
    """
    if numel < 1:
        raise ConfigError(f"numel {numel!r} is not allowed; give the number of elements, 1 or more")
    codec = CodecSpec(name="topk", density=density)
    dense_bytes, wire_bytes = 4 * numel, 8 * numel * density

    def cost_s(scheme: Scheme, wire_bytes: float, index_bytes: float) -> float:
        return exchange_s(
            scheme,
            num_workers=num_workers,
            dense_bytes=dense_bytes,
            wire_bytes=wire_bytes,
            index_bytes=index_bytes,
            link=link,
        )

    costs_s = {
        "dense": cost_s(Scheme.DENSE, dense_bytes, 0),
        "allgather": allgather_tree_s(num_workers, wire_bytes, link),
        "artopk_ring": cost_s(Scheme.ARTOPK_RING, wire_bytes, wire_bytes / 2),
        "artopk_tree": artopk_tree_s(num_workers, wire_bytes, link, wire_bytes / 2),
    }
    ours = (Scheme.DENSE, Scheme.ALLGATHER, Scheme.ARTOPK_RING, Scheme.ARTOPK_TREE)
    return Comparison(
        scheme=min(costs_s, key=lambda scheme: costs_s[scheme]),
        costs_ms={scheme: 1e3 * seconds for scheme, seconds in costs_s.items()},
        ours_ms={
            str(scheme): 1e3 * cost_s(scheme, codec.payload_bytes(numel), codec.index_bytes(numel)) for scheme in ours
        },
    )


@click.command()
@click.option("--numel", required=True, help="Elements of the gradient, float32, such as 25M or 25000000.")
@click.option("--density", required=True, help="Share of elements that is sent, such as 1% or 0.01.")
@click.option("--workers", type=int, required=True)
@click.option("--latency", required=True, help="Latency one way, such as 4ms or 50us.")
@click.option("--bandwidth", required=True, help="Bandwidth of each worker's link, such as 10gbps or 100mbit.")
@json_option()
def collective(numel: str, density: str, workers: int, latency: str, bandwidth: str, json_path: str | None) -> None:
    """Compare collectives for a top-k gradient on a link.

    Prints the predicted milliseconds of each: for the algorithms of the literature, and as cgx_ray implements them.
    """
    link = parse_link(latency, bandwidth)
    result = compare_schemes(
        numel=parse_elements("numel", numel), density=parse_share("density", density), num_workers=workers, link=link
    )
    table = new_table(f"fastest: {result.scheme}", "scheme", "literature, ms", "here, ms")
    for scheme, cost_ms in sorted(result.costs_ms.items(), key=lambda item: item[1]):
        table.add_row(scheme, f"{cost_ms:.2f}", f"{result.ours_ms[scheme]:.2f}")
    console_for(json_path).print(table)
    if json_path:
        write_json(json_path, {"scheme": result.scheme, "costs_ms": result.costs_ms, "ours_ms": result.ours_ms})

"""From samples to what the planner asks for, and plans and measurements as they are journalled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cgx_ray.plan import DENSE, CodecSpec, Layer, Option, Plan
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.options import CodecCost
from cgx_ray.planner.prediction import Measured

# What ranks that share memory take for a sum is not measured in a run: 100 MB among 4 took 90 ms on 2 cores (LOG.md).
INSIDE = Link.from_rates(bandwidth_gbps=16, latency_ms=0.05)
# Of a step's compute, before the first gradient: backward costs twice as much.
FORWARD_SHARE = 1 / 3
# What counts as another network.
LINK_CHANGE = 1.5
LATENCY_CHANGE = 2.0
MIN_LATENCY_CHANGE_S = 1e-3


def beside_dense(plan: Plan) -> frozenset[Option]:
    """The options of a plan but for what DDP does, sums by the vendor over all ranks. Hierarchical sums are in it."""
    options = {group.option for group in plan.groups}
    return frozenset(option for option in options if option != DENSE)


def codecs_in_use(plan: Plan) -> frozenset[CodecSpec]:
    """Those of `beside_dense`."""
    return frozenset(option.codec for option in beside_dense(plan))


def layer_times(layers: Sequence[Layer], plan: Plan, ready_s: Sequence[float]) -> tuple[float, ...]:
    """Backward seconds of each layer, in the order of backward, from when each group of `plan` was ready.

    A group is ready with its last layer; between these layers time passes by elements. Forward, which is part of the
    first layer's, takes `FORWARD_SHARE` of the time until the last group is ready, or all until the first one is.
    """
    place = {layer.name: index for index, layer in enumerate(reversed(layers))}
    ends = sorted(
        (max(place[name] for name in group.layers), ready) for group, ready in zip(plan.groups, ready_s, strict=True)
    )
    numels = [layer.numel for layer in reversed(layers)]
    forward_s = min(max(ready_s) * FORWARD_SHARE, ends[0][1])
    seconds: list[float] = []
    passed_s = forward_s
    for end, ready in ends:
        members = numels[len(seconds) : end + 1]
        total = sum(members)
        lasts_s = max(ready - passed_s, 0.0)
        seconds += [lasts_s * numel / total for numel in members]
        passed_s += lasts_s
    return forward_s + seconds[0], *seconds[1:]


def network_of(world_size: int, num_local: int, between: Link) -> Network:
    """Of ranks that all share memory it is that link which was measured."""
    if num_local in (1, world_size):
        return Network.flat(world_size, between)
    return Network(num_nodes=world_size // num_local, ranks_per_node=num_local, between=between, inside=INSIDE)


def describe_plan(plan: Plan) -> dict[str, Any]:
    """A plan as it is journalled: in a word, and how many groups and layers each option has."""
    options: dict[str, dict[str, int]] = {}
    for group in plan.groups:
        counts = options.setdefault(str(group.option), {"groups": 0, "layers": 0})
        counts["groups"] += 1
        counts["layers"] += len(group.layers)
    return {"version": plan.version, "plan": plan.describe(), "options": options}


def describe_measured(measured: Measured) -> dict[str, Any]:
    """What a decision was made on, as it is journalled."""
    network = measured.network
    return {
        "world_size": network.num_workers,
        "ranks_per_node": network.ranks_per_node,
        "bandwidth_gbps": network.between.bandwidth_gbps,
        "latency_ms": network.between.alpha_s * 1e3,
        "compute_s": measured.compute_s,
        "dense_bytes": sum(layer.dense_bytes for layer in measured.layers),
        "gain": dict(measured.gain),
    }


def is_dense(plan: Plan) -> bool:
    return not beside_dense(plan)


def slowed(cost: CodecCost, factor: float) -> CodecCost:
    return CodecCost(**{name: getattr(cost, name) * factor for name in CodecCost.__slots__})


def network_cause(old: Link, new: Link) -> str | None:
    """In which way `new` is another network, or None."""
    if latency_moved(old.alpha_s, new.alpha_s):
        return f"latency {old.alpha_s * 1e3:.1f} -> {new.alpha_s * 1e3:.1f} ms"
    if not 1 / LINK_CHANGE < new.bandwidth_gbps / old.bandwidth_gbps < LINK_CHANGE:
        return f"bandwidth {_rate(old.bandwidth_gbps)} -> {_rate(new.bandwidth_gbps)}"
    return None


def latency_moved(old_s: float, new_s: float) -> bool:
    return abs(new_s - old_s) > MIN_LATENCY_CHANGE_S and not 1 / LATENCY_CHANGE < new_s / old_s < LATENCY_CHANGE


def _rate(gbps: float) -> str:
    return f"{gbps:.2f} Gbit/s" if gbps >= 1 else f"{gbps * 1e3:.0f} Mbit/s"

"""Conversion of measurements and plans into the terms of the planner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from cgx_ray.monitors.sample import InsideLink, StepValues
from cgx_ray.plan import DENSE, NONE, CodecSpec, Layer, Option, Plan
from cgx_ray.planner.bits import QSGD
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.fidelity import expected_loss
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured

# Link between two ranks that share memory where they have not measured it: 100 MB among 4 ranks took 90 ms on 2 cores
# (docs/log/2026-11-21.md).
DEFAULT_INSIDE = Link.from_rates(bandwidth_gbps=16, latency_ms=0.05)
# Fraction of a step's compute before the first gradient, assumed because backward costs about twice as much as forward.
FORWARD_SHARE = 1 / 3
# Least ratio of two falls of the loss that calls for a new decision.
FALL_CHANGE = 1.2


def non_dense_options(plan: Plan) -> frozenset[Option]:
    """Return the options of `plan` except plain dense, the sums of DDP. Hierarchical dense sums are included.

    Here and below options of fixed groups are left out: no policy has chosen them, and none can leave them.
    """
    return frozenset(group.option for group in plan.groups if group.option != DENSE and not group.is_fixed)


def compressing_options(plan: Plan) -> frozenset[Option]:
    """Return the options of `plan` with a codec."""
    return frozenset(option for option in non_dense_options(plan) if option.codec != NONE)


def costliest(in_use: Iterable[Option], options: Iterable[Option], measured: Measured) -> set[Option]:
    """Return those of `in_use` that keep the least, and those of `options` with a codec that keep no more."""
    kept = {option: measured.efficiency(option) or 0.0 for option in in_use}
    least = min(kept.values(), default=0.0)
    known = {option: measured.efficiency(option) for option in options if option.codec != NONE}
    less = {option for option, share in known.items() if share is not None and share <= least}
    return less | {option for option, share in kept.items() if share == least}


def fallen(in_use: Iterable[Option], before: Measured, now: Measured, share: float) -> set[Option]:
    """Return those of `in_use` whose efficiency is more than `share` under what it was before."""
    both = {option: (before.efficiency(option), now.efficiency(option)) for option in in_use}
    return {one for one, (then, new) in both.items() if then is not None and new is not None and new < then - share}


def timed_options(plan: Plan) -> frozenset[Option]:
    """Return the options of `plan` with a codec that takes time, with those of fixed groups."""
    return frozenset(group.option for group in plan.groups if group.option.codec != NONE)


def bits_by_layer(plan: Plan, codec: CodecSpec = QSGD) -> dict[str, int]:
    """Return the bits of each layer that has `codec`, with any number of bits. Fixed groups are left out."""
    return {
        name: group.option.codec.bits
        for group in plan.groups
        if group.option.codec.name == codec.name
        and group.option.codec.bits is not None
        and not group.is_fixed
        and group.option.codec.replace(bits=codec.bits) == codec
        for name in group.layers
    }


def is_dense(plan: Plan) -> bool:
    """Return whether `plan` has nothing but plain dense groups, as DDP, and fixed ones."""
    return plan.period == 1 and not non_dense_options(plan)


def dense_groups(plan: Plan) -> Plan:
    """Return `plan` with the same groups, all of them plain dense except fixed ones."""
    groups = (group if group.is_fixed else replace(group, option=DENSE) for group in plan.groups)
    return replace(plan, groups=tuple(groups), lease=None, period=1)


def compute_times(
    layers: Sequence[Layer], plan: Plan, steps: Sequence[StepValues], slowdown: float, before: Measured | None
) -> tuple[tuple[float, ...], float]:
    """Return the compute of a dense step: backward seconds of each layer as in `Measured`, and what comes after.

    steps     the newest ones under `plan`
    slowdown  of their compute by codecs, see `ComputeSlowdown`
    before    measurements before `plan`. A round tells nothing of when gradients are ready, so they do
    """
    compute_s = median(one.compute_s for one in steps) / slowdown
    if plan.period > 1 and before is not None:
        scaled = at_compute(before, compute_s)
        return scaled.backward_s, scaled.after_s
    ready_s = [median(times) / slowdown for times in zip(*(one.ready_s for one in steps), strict=True)]
    backward_s = layer_times(layers, plan, ready_s)
    return backward_s, max(0.0, compute_s - sum(backward_s))


def layer_times(layers: Sequence[Layer], plan: Plan, ready_s: Sequence[float]) -> tuple[float, ...]:
    """Return backward seconds of each layer, in the order of backward, from the times at which groups were ready.

    ready_s  for each group of `plan`, seconds from the start of the step until its last layer was ready

    The time between two ready groups is divided among the layers in between by their number of elements. Forward
    takes FORWARD_SHARE of the time until the last group is ready, at most until the first group is ready; it is part of
    the first layer's time.
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
        group_s = max(ready - passed_s, 0.0)
        seconds += [group_s * numel / total for numel in members]
        passed_s += group_s
    return forward_s + seconds[0], *seconds[1:]


def on_link(measured: Measured, between: Link) -> Measured:
    """Return `measured` with another link between nodes."""
    return replace(measured, network=replace(measured.network, between=between))


def period_cause(decided: Measured, now: Measured, plan: Plan) -> str | None:
    """Return in words how the longest period has changed since the last decision; None if that is nothing to `plan`."""
    before, most = decided.max_period, now.max_period
    if most == before or before > most >= plan.period:
        return None
    return f"exchanges up to {most} steps apart are allowed now" if most > 1 else "every step must exchange again"


def loss_cause(worse: str | None, decided: Measured, now: Measured, plan: Plan) -> str | None:
    """Return `worse`, or in words that the loss has fallen further, so that codecs cost more of it.

    None if that is nothing to `plan`.
    """
    if not compressing_options(plan):
        return worse if plan.period > 1 else None
    if worse is not None or now.loss_fall <= FALL_CHANGE * decided.loss_fall:
        return worse
    options = {group.option for group in plan.groups}
    before, costs = (expected_loss(one.loss_of(option, 1, 1) for option in options) for one in (decided, now))
    costs_more = before is not None and costs is not None and costs > before
    return f"loss has fallen to {1 / now.loss_fall:.2g} of the first losses" if costs_more else None


def at_compute(measured: Measured, compute_s: float) -> Measured:
    """Return `measured` with all compute times scaled, so that a step's compute takes `compute_s`."""
    factor = compute_s / measured.compute_s
    backward_s = tuple(factor * seconds for seconds in measured.backward_s)
    return replace(measured, backward_s=backward_s, after_s=factor * measured.after_s)


def inside_of(link: InsideLink | None) -> tuple[Link | None, bool]:
    """Return the link of a sample in the planner's terms, and whether it is that of GPUs."""
    if link is None:
        return None, False
    return Link(alpha_s=link.alpha_s, beta_s_per_byte=link.beta_s_per_byte), link.is_of_device


def network_of(node_sizes: Sequence[int], between: Link, inside: Link | None, *, device_sums: bool = False) -> Network:
    """Return the network of nodes with `node_sizes` ranks. `inside`: None if it was not measured.

    device_sums  as in `Network`

    If all ranks share memory, `between` was measured inside their node, so the network is flat with that link.
    """
    if len(node_sizes) == 1 or max(node_sizes) == 1:
        return Network.flat(sum(node_sizes), between)
    return Network.of_nodes(node_sizes, between, inside or DEFAULT_INSIDE, device_sums=device_sums)


def resized(network: Network, num_workers: int) -> Network:
    """Return `network` with another number of workers, in nodes as before where these are alike and filled."""
    if network.num_workers == num_workers:
        return network
    size = 1 if network.node_sizes or num_workers % network.ranks_per_node else network.ranks_per_node
    sizes = [size] * (num_workers // size)
    return network_of(sizes, network.between, network.inside, device_sums=network.device_sums)


def dense_shares(groups: Sequence[PlannedGroup]) -> dict[Option, float]:
    """Return each option's share of the dense bytes."""
    whole = sum(group.dense_bytes for group in groups)
    shares: dict[Option, float] = {}
    for group in groups:
        shares[group.option] = shares.get(group.option, 0.0) + group.dense_bytes / whole
    return shares

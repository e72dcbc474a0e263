"""Model of a step as a pipeline of two resources: the device that runs backward, and the network.

Layers come in backward order. A group is one or more consecutive layers under one option. It first takes the device:
backward of its layers, then its encoding, before the backward of the next group. Then it takes the network, which
serves groups in order, one at a time. With D' for the network finish of the group before, x for the group's elements,
and each of the lower-case times a + b x:

    compute finish  C := C + backward + compute
    network finish  D := max(D', C + lead) + network
    done            max(D' + network + tail, C + alone)

The step ends when the last group is done. Without lead and tail, and with alone = network, this is the model of Cupcake
(Wang et al. 2023, section 4.1).

Groups are under way side by side, so the network stands here for what a group cannot share: the busiest of the engine's
thread, the links inside nodes, and those between them. Others use the rest meanwhile. Seconds of a group by itself:

    alone  all its seconds after C, hops included
    lead   how much later the busiest resource is done than `network` after C: for example, what is encoded first
    tail   how much later the group is done than `network` after that resource began: hops, and what is decoded last
    gap    time between, in which the resource waits for the group; it is part of lead and of tail

A toll is what a group's lost progress counts as, in seconds: the sum of its layers', which differ by option. Nothing
hides it: all tolls are added to the end of the step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cgx_ray.errors import ConfigError
from cgx_ray.plan import Option
from cgx_ray.planner.candidates import FREE, CodecCost
from cgx_ray.planner.cost import Link, Network, check_seconds
from cgx_ray.planner.engine_cost import HOST_ENGINE, EngineCost
from cgx_ray.planner.legs import EncodesOn, Leg, copy_s, legs, thread_s, works_on
from cgx_ray.planner.scheme_costs import Overlap
from cgx_ray.planner.timeline import Resource


class GroupEnd(NamedTuple):
    """Group from the end of the one before it up to, not including, layer `end`. `option`: index of a cost."""

    end: int
    option: int


Groups = tuple[GroupEnd, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """Seconds of a group of x elements under one option: a + b x for each time of the module's docstring."""

    compute_a_s: float
    compute_b_s_per_element: float
    network_a_s: float
    network_b_s_per_element: float
    lead_a_s: float = 0.0
    lead_b_s_per_element: float = 0.0
    tail_a_s: float = 0.0
    tail_b_s_per_element: float = 0.0
    gap_a_s: float = 0.0
    gap_b_s_per_element: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check_seconds(name, getattr(self, name))

    @property
    def terms(self) -> tuple[float, ...]:
        """Return a and b of compute, network, lead, tail and alone.

        A cost with larger terms is never better, unless its toll is smaller for some layer.
        """
        return (
            *(self.compute_a_s, self.compute_b_s_per_element),
            *(self.network_a_s, self.network_b_s_per_element),
            *(self.lead_a_s, self.lead_b_s_per_element),
            *(self.tail_a_s, self.tail_b_s_per_element),
            self.lead_a_s + self.network_a_s + self.tail_a_s - self.gap_a_s,
            self.lead_b_s_per_element
            + self.network_b_s_per_element
            + self.tail_b_s_per_element
            - self.gap_b_s_per_element,
        )

    def compute_s(self, numel: float) -> float:
        return self.compute_a_s + self.compute_b_s_per_element * numel

    def network_s(self, numel: float) -> float:
        return self.network_a_s + self.network_b_s_per_element * numel

    def lead_s(self, numel: float) -> float:
        return self.lead_a_s + self.lead_b_s_per_element * numel

    def tail_s(self, numel: float) -> float:
        return self.tail_a_s + self.tail_b_s_per_element * numel

    def alone_s(self, numel: float) -> float:
        gap_s = self.gap_a_s + self.gap_b_s_per_element * numel
        return self.lead_s(numel) + self.network_s(numel) + self.tail_s(numel) - gap_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Layers to group, and the options to choose from.

    backward_s  of each layer, in backward order; the first includes forward
    numel       elements of each layer
    costs       of the options that every group may choose
    after_s     seconds that the step takes at least after the network is done with the last layer: groups that follow
    tolls_s     by option, the toll of each layer; empty if there are none
    """

    backward_s: tuple[float, ...]
    numel: tuple[int, ...]
    costs: tuple[GroupCost, ...]
    after_s: float = 0.0
    tolls_s: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.numel or len(self.backward_s) != len(self.numel):
            raise ConfigError(
                f"{len(self.backward_s)} backward times and {len(self.numel)} layers; give one each, for at least one"
            )
        if not self.costs:
            raise ConfigError("no option to choose from; give at least one, such as dense")
        check_seconds("after_s", self.after_s)
        if self.tolls_s and [len(row) for row in self.tolls_s] != [len(self.numel)] * len(self.costs):
            raise ConfigError(f"{len(self.tolls_s)} rows of tolls; give one toll per layer for each of the options")
        for option, row in enumerate(self.tolls_s):
            # There may be 100,000 tolls, so they are not looked at one by one.
            check_seconds(f"the sum of the tolls of option {option}", math.fsum(row))
            check_seconds(f"the least toll of option {option}", min(row))
        for index, (backward_s, numel) in enumerate(zip(self.backward_s, self.numel, strict=True)):
            check_seconds(f"backward_s of layer {index}", backward_s)
            if numel < 1:
                raise ConfigError(f"layer {index} has {numel} elements; need at least one")

    @property
    def num_layers(self) -> int:
        return len(self.numel)

    def finish_s(self, groups: Sequence[GroupEnd]) -> float:
        """Return when the step with `groups` ends, plus all tolls.

        Raises ConfigError unless they hold every layer once, in order.
        """
        ends = [0, *(group.end for group in groups)]
        if ends[-1] != self.num_layers or any(end <= start for start, end in itertools.pairwise(ends)):
            raise ConfigError(f"groups end before {ends[1:]}; give rising ends, the last of them {self.num_layers}")
        compute_s = network_s = done_s = 0.0
        for start, group in zip(ends, groups, strict=False):
            cost, numel = self.costs[group.option], sum(self.numel[start : group.end])
            compute_s += math.fsum(self.backward_s[start : group.end]) + cost.compute_s(numel)
            own_s = cost.network_s(numel)
            done_s = max(done_s, network_s + own_s + cost.tail_s(numel), compute_s + cost.alone_s(numel))
            network_s = max(network_s, compute_s + cost.lead_s(numel)) + own_s
        return max(done_s, network_s + self.after_s) + self.toll_s(groups)

    def toll_s(self, groups: Sequence[GroupEnd]) -> float:
        """Return the tolls of `groups`."""
        if not self.tolls_s:
            return 0.0
        starts = [0, *(group.end for group in groups)]
        return math.fsum(
            toll_s
            for start, group in zip(starts, groups, strict=False)
            for toll_s in self.tolls_s[group.option][start : group.end]
        )


class _Elapsed(NamedTuple):
    """Time since a group began: hops, and seconds that grow with its elements."""

    hops_s: float
    work_s: float

    def minus(self, other: _Elapsed) -> _Elapsed:
        return _Elapsed(self.hops_s - other.hops_s, self.work_s - other.work_s)


@dataclass(slots=True)
class _Use:
    """Use of one resource by a group alone: its seconds, and when it begins and ends."""

    seconds: float
    first: _Elapsed
    last: _Elapsed


def _uses(parts: Sequence[Leg], codec_cost: CodecCost, copied_s: float) -> tuple[dict[Resource, _Use], _Elapsed]:
    """Return the use of each resource by a group alone, and when the group is done.

    copied_s  seconds of one copy between a GPU and the host, before and after all else
    """
    uses: dict[Resource, _Use] = {}

    def use(resource: Resource, seconds: float, first: _Elapsed, last: _Elapsed) -> None:
        if seconds > 0:
            found = uses.setdefault(resource, _Use(0.0, first, last))
            found.seconds, found.last = found.seconds + seconds, last

    hops_s, work_s = 0.0, copied_s
    use(Resource.CODEC, copied_s, _Elapsed(0.0, 0.0), _Elapsed(0.0, copied_s))
    for leg in parts:
        encode_s = codec_cost.encode_s(0, leg.encode[1]) + leg.bytes_s(leg.encode[1])
        decode_s = codec_cost.decode_s(0, leg.decode[1]) + leg.bytes_s(leg.decode[1])
        link_s = leg.num_bytes * leg.link.beta_s_per_byte
        start = _Elapsed(hops_s, work_s)
        sends_s = work_s if leg.overlap is Overlap.CODING else work_s + encode_s
        hops_s, work_s = hops_s + leg.hops * leg.link.alpha_s, work_s + leg.overlap.seconds(encode_s, link_s, decode_s)
        end = _Elapsed(hops_s, work_s)
        if leg.overlap is Overlap.CODING:
            end = _Elapsed(start.hops_s, start.work_s + encode_s + decode_s)
        use(Resource.CODEC, encode_s, start, _Elapsed(start.hops_s, start.work_s + encode_s))
        use(leg.resource, link_s, _Elapsed(start.hops_s, sends_s), _Elapsed(start.hops_s, sends_s + link_s))
        use(Resource.CODEC, decode_s, _Elapsed(end.hops_s, end.work_s - decode_s), end)
        if leg.overlap is Overlap.DECODING:
            # Nothing hides the decoding of the last message.
            work_s += decode_s / leg.decode[0]
    done = _Elapsed(hops_s, work_s + copied_s)
    use(Resource.CODEC, copied_s, _Elapsed(hops_s, work_s), done)
    return uses, done


def group_cost(
    option: Option,
    *,
    network: Network,
    codec_cost: CodecCost,
    item_bytes: float = 4,
    encodes_on: EncodesOn = "thread",
    shares_time: bool = True,
    numel: int = 1 << 24,
    bus: Link | None = None,
    engine: EngineCost = HOST_ENGINE,
) -> GroupCost:
    """Return the cost of `option` for groups of any size. With one worker it is 0.

    encodes_on   "backward": encoding and decoding delay backward (a codec on the processor that trains). Both count
                 before the group's messages, since later groups only see their sum. "thread": they do not. "device":
                 the part that grows with the elements does, beside its time on the codec's stream
    shares_time  False: all that a group takes by itself, except hops, counts as network time, as if groups could not
                 use different resources at the same time
    numel        elements for which the cost is exact. Wire bytes count as proportional to the elements. That ignores
                 rounding up, and powersgd, whose bytes grow with the square root.
    bus, engine  as in `Measured`. Where each piece costs as much as a group, the first one counts as the group's, and
                 the others grow with the elements

    The time of one piece, which nothing hides, is left out. `thread_s` and the calls of the codec count as network time
    even if a link is the busiest resource.
    """
    if network.num_workers == 1:
        return GroupCost(compute_a_s=0, compute_b_s_per_element=0, network_a_s=0, network_b_s_per_element=0)
    parts = legs(option, network, numel, item_bytes, engine, bus)
    calls_s = sum(leg.calls_s(codec_cost) for leg in parts)
    coded_s = sum(codec_cost.encode_s(0, leg.encode[1]) + codec_cost.decode_s(0, leg.decode[1]) for leg in parts)
    where = works_on(option, network, encodes_on, bus)
    is_beside = where != "backward"
    copy_a_s = copy_s(option, network, 0, bus)
    copied_s = copy_s(option, network, numel * item_bytes, bus) - copy_a_s
    uses, done = _uses(parts, codec_cost if is_beside else FREE, copied_s)
    start = _Elapsed(0.0, 0.0)
    busiest = max(uses.values(), key=lambda use: use.seconds, default=_Use(0.0, start, start))
    if not shares_time:
        busiest = _Use(done.work_s, start, _Elapsed(0.0, done.work_s))
    lead = busiest.last.minus(_Elapsed(0.0, busiest.seconds))
    tail = done.minus(busiest.first).minus(_Elapsed(0.0, busiest.seconds))
    gap = lead.minus(busiest.first)
    num_pieces = parts[0].num_pieces
    fixed_s = thread_s(parts) + 2 * copy_a_s + (calls_s if is_beside else 0.0)
    return GroupCost(
        compute_a_s=0.0 if is_beside else calls_s,
        compute_b_s_per_element=0.0 if where == "thread" else coded_s / numel,
        network_a_s=fixed_s / num_pieces,
        network_b_s_per_element=(busiest.seconds + fixed_s * (1 - 1 / num_pieces)) / numel,
        lead_a_s=lead.hops_s,
        lead_b_s_per_element=max(lead.work_s, 0.0) / numel,
        tail_a_s=tail.hops_s,
        tail_b_s_per_element=max(tail.work_s, 0.0) / numel,
        gap_a_s=gap.hops_s,
        gap_b_s_per_element=max(gap.work_s, 0.0) / numel,
    )


def undominated(costs: Sequence[GroupCost], toll_CL: NDArray[np.float64] | None = None) -> list[int]:
    """Return the indices of `costs` that no other one beats or equals at every size and in every layer's toll.

    Of equals it is the first one. `toll_CL`: of C costs in L layers, if there are any.
    """
    terms = np.array([cost.terms for cost in costs])
    toll_CL = np.zeros((len(costs), 0)) if toll_CL is None else toll_CL
    # A cost that beats another one comes before it.
    order = np.lexsort((toll_CL.sum(axis=1), *terms.T[::-1]))
    ordered = np.hstack([terms, toll_CL])[order]
    kept: list[int] = []
    for place, own in enumerate(ordered):
        if not (ordered[kept] <= own).all(axis=1).any():
            kept.append(place)
    return [int(order[place]) for place in kept]


def cheapest(costs: Sequence[GroupCost], numel: int) -> int:
    """Return the index of the cost with the least time for a group of `numel` elements by itself."""
    totals = []
    for cost in costs:
        compute_a_s, compute_b_s, *_, alone_a_s, alone_b_s = cost.terms
        totals.append(compute_a_s + alone_a_s + (compute_b_s + alone_b_s) * numel)
    return totals.index(min(totals))

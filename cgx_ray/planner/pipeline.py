"""Model of a step as a pipeline of two resources: the device that runs backward, and the network.

Layers come in backward order. A group is one or more consecutive layers under one option. It first takes `compute_s` on
the device: backward of its layers, then its encoding, before the backward of the next group. Then it takes `network_s`
on the network, which serves groups in order, one at a time:

    compute finish  C := C + backward + compute_a + compute_b x        x elements in the group
    network finish  D := max(D, C) + network_a + network_b x

The step ends at the last D. This is the model of Cupcake (Wang et al. 2023, section 4.1), which leaves out decoding;
here `network_s` includes it. `network_s` also includes codec work that does not slow down backward, done by the
engine's thread or by a CPU beside the GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cgx_ray.errors import ConfigError
from cgx_ray.plan import Option
from cgx_ray.planner.cost import Network, check_seconds
from cgx_ray.planner.legs import legs
from cgx_ray.planner.options import CodecCost


class GroupEnd(NamedTuple):
    """Group from the end of the one before it up to, not including, layer `end`. `option`: index of a cost."""

    end: int
    option: int


Groups = tuple[GroupEnd, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """Seconds of a group of x elements under one option: a + b x on each resource of the module's docstring."""

    compute_a_s: float
    compute_b_s_per_element: float
    network_a_s: float
    network_b_s_per_element: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check_seconds(name, getattr(self, name))

    def compute_s(self, numel: float) -> float:
        return self.compute_a_s + self.compute_b_s_per_element * numel

    def network_s(self, numel: float) -> float:
        return self.network_a_s + self.network_b_s_per_element * numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Layers to group, and the options to choose from.

    backward_s  of each layer, in backward order; the first includes forward
    numel       elements of each layer
    costs       of the options that every group may choose
    """

    backward_s: tuple[float, ...]
    numel: tuple[int, ...]
    costs: tuple[GroupCost, ...]

    def __post_init__(self) -> None:
        if not self.numel or len(self.backward_s) != len(self.numel):
            raise ConfigError(
                f"{len(self.backward_s)} backward times and {len(self.numel)} layers; give one each, for at least one"
            )
        if not self.costs:
            raise ConfigError("no option to choose from; give at least one, such as dense")
        for index, (backward_s, numel) in enumerate(zip(self.backward_s, self.numel, strict=True)):
            check_seconds(f"backward_s of layer {index}", backward_s)
            if numel < 1:
                raise ConfigError(f"layer {index} has {numel} elements; need at least one")

    @property
    def num_layers(self) -> int:
        return len(self.numel)

    def finish_s(self, groups: Sequence[GroupEnd]) -> float:
        """Return when the step with `groups` ends. Raises ConfigError unless they hold every layer once, in order."""
        ends = [0, *(group.end for group in groups)]
        if ends[-1] != self.num_layers or any(end <= start for start, end in itertools.pairwise(ends)):
            raise ConfigError(f"groups end before {ends[1:]}; give rising ends, the last of them {self.num_layers}")
        compute_s = network_s = 0.0
        for start, group in zip(ends, groups, strict=False):
            cost, numel = self.costs[group.option], sum(self.numel[start : group.end])
            compute_s += math.fsum(self.backward_s[start : group.end]) + cost.compute_s(numel)
            network_s = max(network_s, compute_s) + cost.network_s(numel)
        return network_s


def group_cost(
    option: Option,
    *,
    network: Network,
    codec_cost: CodecCost,
    item_bytes: int = 4,
    encodes_on: Literal["backward", "thread"] = "thread",
    numel: int = 1 << 24,
) -> GroupCost:
    """Return the cost of `option` for groups of any size.

    encodes_on  "backward": encoding delays backward (a codec on the GPU that trains); "thread": it does not (the
                engine's thread, as today)
    numel       elements for which the cost is exact. Wire bytes count as proportional to the elements. That ignores
                rounding up, and powersgd, whose bytes grow with the square root.

    An element takes the longer of codec and network where they overlap (`Overlap.seconds`). The time until the first
    piece arrives is left out.
    """
    compute_a = compute_b = network_a = network_b = 0.0
    for leg in legs(option, network, numel, item_bytes):
        encode_a_s, decode_a_s = codec_cost.encode_s(leg.encode[0], 0), codec_cost.decode_s(leg.decode[0], 0)
        encode_b_s, decode_b_s = codec_cost.encode_s(0, leg.encode[1]), codec_cost.decode_s(0, leg.decode[1])
        if encodes_on == "backward":
            compute_a, compute_b = compute_a + encode_a_s, compute_b + encode_b_s
            encode_a_s = encode_b_s = 0.0
        link_b_s = leg.num_bytes * leg.link.beta_s_per_byte
        network_a += leg.hops * leg.link.alpha_s + encode_a_s + decode_a_s
        network_b += leg.overlap.seconds(encode_b_s, link_b_s, decode_b_s)
    return GroupCost(
        compute_a_s=compute_a,
        compute_b_s_per_element=compute_b / numel,
        network_a_s=network_a,
        network_b_s_per_element=network_b / numel,
    )


def undominated(costs: Sequence[GroupCost]) -> list[int]:
    """Return the indices of `costs` that no other cost beats or equals at every size; the first one of equals."""

    def terms(index: int) -> tuple[float, ...]:
        cost = costs[index]
        return cost.compute_a_s, cost.compute_b_s_per_element, cost.network_a_s, cost.network_b_s_per_element

    kept: list[int] = []
    for index in sorted(range(len(costs)), key=terms):
        if not any(all(a <= b for a, b in zip(terms(other), terms(index), strict=True)) for other in kept):
            kept.append(index)
    return kept


def cheapest(costs: Sequence[GroupCost], numel: int) -> int:
    """Return the index of the cost with the least time for a group of `numel` elements by itself."""
    totals = [
        cost.compute_a_s + cost.network_a_s + (cost.compute_b_s_per_element + cost.network_b_s_per_element) * numel
        for cost in costs
    ]
    return totals.index(min(totals))

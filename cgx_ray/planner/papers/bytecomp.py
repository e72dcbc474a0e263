"""ByteComp, later Espresso (Wang et al. 2022): an option for every tensor, from a tree of all ways to average one.

**Greedy choice** (`bytecomp`), one group per layer:

1. Algorithm 1 tries all options on the layers, from the largest to the smallest, among equals from the last in
   backward. It passes over uncompressed layers that are sent before a gap in the network's time.
2. Algorithm 2 takes each set of equal layers with equal options, and tries how many of them, from the first in
   backward, to move to the CPU.

**Decision tree** (section 4.2; `paths`, `option_of`, `path_cost`). A path from start to end decides: compress or not,
on GPU or CPU, flat or hierarchical, with divisible or indivisible schemes, by which routines, and where to compress and
decompress. It is a sequence of moves (one collective routine in one scope) with codec tasks between them:

    pattern       one whole move, or a first and a second one that pair; hierarchically, first and second inside nodes
                  with one of these patterns between nodes in the middle
    connections   before a move of uncompressed tensors the tensor is uncompressed, before one of compressed tensors
                  compressed; what arrives compressed may go on as it is, or be decompressed, summed and compressed
    start, end    uncompressed

That makes 4,341 paths, the number that the paper states. The engine runs 21 of them, for the 18 options with a codec
that all schemes carry, three of which are done in two ways; ring, trees and AR-Topk are not in the tree. Moves of these
paths cost what they do for the option.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cgx_ray.errors import ConfigError
from cgx_ray.plan import NONE, CodecSpec, Device, Intra, Option, Scheme, options_of
from cgx_ray.planner.candidates import CodecCost
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.pipeline import GroupCost, GroupEnd, Groups, Pipeline

# More than any model takes that is known here.
MAX_TRIALS = 1_000_000
# Combinations that algorithm 2 tries at most.
_MAX_COMBINATIONS = 4096


def bytecomp(
    pipeline: Pipeline,
    *,
    dense: int,
    compressing: Sequence[int],
    offloaded: Mapping[int, int],
    max_trials: int = MAX_TRIALS,
) -> Groups:
    """Return one group per layer: options chosen greedily (algorithm 1), then some moved to the CPU (algorithm 2).

    dense        option of layers that are not compressed
    compressing  options that compress where backward runs (the paper's GPU options)
    offloaded    for such an option, the one that does the same on the CPU, see `twins`

    Departures: if algorithm 2 has more than 4,096 combinations, it decides one set of layers after the other. Both
    algorithms together try `max_trials` choices at most: smaller layers then stay dense, and sets where they are.
    """
    if not pipeline.costs[dense].compute_a_s == pipeline.costs[dense].compute_b_s_per_element == 0:
        raise ConfigError(f"option {dense} takes compute time, dense does not; give the option that encodes nothing")
    chosen, num_trials = _compress(pipeline, (dense, *compressing), max_trials)
    return _one_by_one(_offload(pipeline, chosen, offloaded, max_trials - num_trials))


def tree_options(codec: CodecSpec) -> tuple[Option, ...]:
    """Return the options that encode with `codec` and are in the tree, flat and hierarchical."""
    schemes = {*_SCHEMES.values()} - {Scheme.DENSE}
    return tuple(option for option in options_of(codec) if option.scheme in schemes)


def twins(options: Sequence[Option]) -> dict[int, int]:
    """Return for each of `options` whose codec the engine can move to the CPU the place of the one that does so."""
    moved = ((index, option.on(Device.CPU)) for index, option in enumerate(options) if option.device == Device.AUTO)
    return {index: options.index(twin) for index, twin in moved if twin.device == Device.CPU and twin in options}


def _one_by_one(options: Sequence[int]) -> Groups:
    return tuple(GroupEnd(end, option) for end, option in enumerate(options, start=1))


def _compress(pipeline: Pipeline, options: Sequence[int], max_trials: int) -> tuple[list[int], int]:
    """Algorithm 1: return an option for every layer, and the number of trials. Layers begin with the first option."""
    chosen, num_trials = [options[0]] * pipeline.num_layers, 0
    last_gap = _last_gap(pipeline, chosen)
    for layer in sorted(range(pipeline.num_layers), key=lambda layer: (-pipeline.numel[layer], -layer)):
        if layer < last_gap:
            continue
        num_trials += len(options)
        if num_trials > max_trials:
            return chosen, max_trials
        trials = [[*chosen[:layer], option, *chosen[layer + 1 :]] for option in options]
        chosen = min(trials, key=lambda trial: pipeline.finish_s(_one_by_one(trial)))
        last_gap = _last_gap(pipeline, chosen)
    return chosen, num_trials


def _offload(pipeline: Pipeline, chosen: Sequence[int], offloaded: Mapping[int, int], max_trials: int) -> Sequence[int]:
    """Algorithm 2: in each set of equal layers with equal options, move the first few to the CPU."""
    alike: dict[tuple[int, int], list[int]] = {}
    for layer, option in enumerate(chosen):
        if option in offloaded:
            alike.setdefault((pipeline.numel[layer], option), []).append(layer)
    sets = list(alike.values())

    def moved(counts: Iterable[int]) -> list[int]:
        to_cpu = {layer for layers, count in zip(sets, counts, strict=True) for layer in layers[:count]}
        return [offloaded[option] if layer in to_cpu else option for layer, option in enumerate(chosen)]

    def finish_s(counts: Iterable[int]) -> float:
        return pipeline.finish_s(_one_by_one(moved(counts)))

    if math.prod(len(layers) + 1 for layers in sets) <= min(max_trials, _MAX_COMBINATIONS):
        return moved(min(itertools.product(*(range(len(layers) + 1) for layers in sets)), key=finish_s))
    counts = (0,) * len(sets)
    for index, layers in enumerate(sets):
        max_trials -= len(layers) + 1
        if max_trials < 0:
            break
        trials = [(*counts[:index], count, *counts[index + 1 :]) for count in range(len(layers) + 1)]
        counts = min(trials, key=finish_s)
    return moved(counts)


def _last_gap(pipeline: Pipeline, options: Sequence[int]) -> int:
    """Return the last layer for which the network has to wait if layers are sent one by one, 0 if it never waits."""
    computed_s = sent_s = 0.0
    last = 0
    for layer, option in enumerate(options):
        cost, numel = pipeline.costs[option], pipeline.numel[layer]
        computed_s += pipeline.backward_s[layer] + cost.compute_s(numel)
        if computed_s > sent_s:
            last = layer
        sent_s = max(computed_s, sent_s) + cost.network_s(numel)
    return last


class MoveScope(StrEnum):
    """Ends of a move: all ranks, the ranks of one node, or nodes."""

    FLAT = "flat"
    INSIDE = "inside"
    BETWEEN = "between"


class CodecDevice(StrEnum):
    GPU = "gpu"
    CPU = "cpu"


class MovePart(StrEnum):
    """Share of the work in one move: all of it in an indivisible scheme, or one half of a divisible one."""

    WHOLE = "whole"
    FIRST = "first"
    SECOND = "second"


class Move(NamedTuple):
    """Collective routine. `is_rooted`: through one rank, instead of each rank having a share of the tensor."""

    scope: MoveScope
    part: MovePart
    is_rooted: bool
    is_compressed: bool

    @property
    def routine(self) -> str:
        """Name in tables 2 and 3 of the paper."""
        if self.part is MovePart.WHOLE:
            return "allgather" if self.is_compressed else "allreduce"
        if self.part is MovePart.SECOND:
            return "broadcast" if self.is_rooted else "allgather"
        if self.is_compressed:
            return "gather" if self.is_rooted else "alltoall"
        return "reduce" if self.is_rooted else "reduce_scatter"


class CodecTask(NamedTuple):
    """Codec work on one device. `task`: "compress", or "decompress", which sums all copies of each element."""

    task: str
    device: CodecDevice


TreePath = tuple[Move | CodecTask, ...]
_Pattern = tuple[tuple[MoveScope, MovePart, bool], ...]

# Key: is the tensor compressed, and does the next move want it compressed.
_CONNECTIONS: dict[tuple[bool, bool], tuple[tuple[str, ...], ...]] = {
    (False, False): ((),),
    (False, True): (("compress",),),
    (True, False): (("decompress",),),
    (True, True): ((), ("decompress", "compress")),
}


def paths() -> Iterator[TreePath]:
    """Yield every valid path once."""
    for pattern in _patterns():
        for is_compressed in itertools.product((False, True), repeat=len(pattern)):
            moves = [Move(*step, state) for step, state in zip(pattern, is_compressed, strict=True)]
            states = (False, *is_compressed, False)
            between = [_CONNECTIONS[pair] for pair in itertools.pairwise(states)]
            for tasks in itertools.product(*between):
                yield from _on_devices(moves, tasks)


def _patterns() -> Iterator[_Pattern]:
    def either(scope: MoveScope) -> Iterator[_Pattern]:
        yield ((scope, MovePart.WHOLE, False),)
        for is_rooted in (False, True):
            yield ((scope, MovePart.FIRST, is_rooted), (scope, MovePart.SECOND, is_rooted))

    yield from either(MoveScope.FLAT)
    for is_rooted, between in itertools.product((False, True), either(MoveScope.BETWEEN)):
        yield ((MoveScope.INSIDE, MovePart.FIRST, is_rooted), *between, (MoveScope.INSIDE, MovePart.SECOND, is_rooted))


def _on_devices(moves: Sequence[Move], tasks: Sequence[tuple[str, ...]]) -> Iterator[TreePath]:
    """Yield the paths with `tasks` before each of `moves` and after the last, on each combination of devices."""
    choices = [
        itertools.product(*([CodecTask(task, device) for device in CodecDevice] for task in here)) for here in tasks
    ]
    for codes in itertools.product(*choices):
        yield tuple(
            task for here, move in itertools.zip_longest(codes, moves) for task in (*here, *((move,) if move else ()))
        )


# Our schemes that are in the tree, by the names of their tasks.
_SCHEMES: dict[tuple[str, ...], Scheme] = {
    ("allreduce",): Scheme.DENSE,
    ("reduce_scatter", "allgather"): Scheme.SRA,
    ("reduce", "broadcast"): Scheme.BROADCAST,
    ("compress", "allgather", "decompress"): Scheme.ALLGATHER,
    ("compress", "alltoall", "decompress", "compress", "allgather", "decompress"): Scheme.SRA,
    ("compress", "gather", "decompress", "compress", "broadcast", "decompress"): Scheme.BROADCAST,
}
_INSIDE: dict[Intra, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Intra.DENSE: (("reduce_scatter",), ("allgather",)),
    Intra.COMPRESSED: (("compress", "alltoall", "decompress"), ("compress", "allgather", "decompress")),
}


def option_of(path: TreePath, codec: CodecSpec) -> Option | None:
    """Return the engine's option that does `path` with `codec`, which every scheme must carry; None if there is none.

    The engine does all codec work of a group on one device. That is the CPU if the group is hierarchical, or the GPU if
    NCCL can sum inside nodes.
    """
    names = tuple(task.task if isinstance(task, CodecTask) else task.routine for task in path)
    devices = {task.device for task in path if isinstance(task, CodecTask)}
    if len(devices) > 1:
        return None
    used = codec if devices else NONE
    if all(isinstance(task, CodecTask) or task.scope is MoveScope.FLAT for task in path):
        if names not in _SCHEMES:
            return None
        option = Option(codec=used, scheme=_SCHEMES[names])
        return option.on(Device.CPU) if devices == {CodecDevice.CPU} else option
    for intra, (head, tail) in _INSIDE.items():
        middle = names[len(head) : -len(tail)]
        is_one = middle in _SCHEMES and names == (*head, *middle, *tail)
        if is_one and (intra is Intra.DENSE or "compress" in middle):
            option = Option(codec=used, scheme=_SCHEMES[middle], intra=intra)
            is_possible = devices != {CodecDevice.GPU} or not option.needs_host(device_sums=True)
            return option if is_possible else None
    return None


@dataclass(slots=True)
class _TensorState:
    """Part of the tensor that one rank holds between two tasks.

    share   fraction of the elements
    copies  copies of each element that are not summed yet
    pieces  number of messages that they came in
    ranks   number of ranks per node that hold a part
    """

    share: float = 1.0
    copies: int = 1
    pieces: int = 1
    ranks: int = 1


def path_cost(
    path: TreePath, network: Network, codec: CodecSpec, costs: Mapping[CodecDevice, CodecCost], numel: int = 1 << 24
) -> GroupCost:
    """Return the cost of a float32 group on `path`, one task after the other.

    costs  of `codec` on either device
    numel  as in `pipeline.group_cost`

    Compressing on the GPU before the first move holds up backward; all else is network time, as in `Pipeline`. A move
    costs what `Network.terms` has for its scheme. Unlike the engine, a rank also encodes and decodes its own chunk, and
    nothing overlaps.
    """
    tensor = _TensorState()
    compute_a = compute_b = network_a = network_b = 0.0
    has_sent = False
    for index, task in enumerate(path):
        if isinstance(task, CodecTask):
            a_s, b_s = _code_s(task, path[index + 1 : index + 2], tensor, network, costs[task.device])
            if task.device is CodecDevice.GPU and not has_sent:
                compute_a, compute_b = compute_a + a_s, compute_b + b_s
                continue
        else:
            item_bytes = codec.payload_bytes(numel) / numel if task.is_compressed else 4.0
            a_s, b_s = _move_s(task, tensor, network, item_bytes)
            has_sent = True
        network_a, network_b = network_a + a_s, network_b + b_s
    return GroupCost(
        compute_a_s=compute_a,
        compute_b_s_per_element=compute_b,
        network_a_s=network_a,
        network_b_s_per_element=network_b,
    )


def _num_ranks(scope: MoveScope, network: Network) -> int:
    return {
        MoveScope.FLAT: network.num_workers,
        MoveScope.INSIDE: network.ranks_per_node,
        MoveScope.BETWEEN: network.num_nodes,
    }[scope]


def _code_s(
    task: CodecTask, after: TreePath, tensor: _TensorState, network: Network, cost: CodecCost
) -> tuple[float, float]:
    """Return seconds, and seconds per element of the whole tensor. A move that scatters takes one piece per rank."""
    if task.task == "decompress":
        seconds = cost.decode_s(tensor.pieces, 0), cost.decode_s(0, tensor.copies * tensor.share)
        tensor.copies = tensor.pieces = 1
        return seconds
    (move,) = after
    assert isinstance(move, Move)
    is_scattered = move.part is MovePart.FIRST and not move.is_rooted
    calls = _num_ranks(move.scope, network) if is_scattered else 1
    return cost.encode_s(calls, 0), cost.encode_s(0, tensor.share)


def _move_s(move: Move, tensor: _TensorState, network: Network, item_bytes: float) -> tuple[float, float]:
    """Return seconds, and seconds per element of the whole tensor."""
    p = _num_ranks(move.scope, network)
    if p == 1:
        return 0.0, 0.0
    held, hops = tensor.share * tensor.copies * item_bytes, 1.0
    link, crossing = _link(move, tensor, network)
    if move.part is MovePart.WHOLE and not move.is_compressed:
        # The vendor's ring where all ranks take part, else direct.
        hops, num_bytes = (2.0 * (p - 1) if p == network.num_workers else 2.0), 2 * (p - 1) / p * held
    elif move.part is MovePart.FIRST and not move.is_rooted:
        num_bytes = (p - 1) / p * held
        tensor.share /= p
        tensor.ranks = p if move.scope is MoveScope.INSIDE else tensor.ranks
    else:
        num_bytes = (p - 1) * held
        if move.part is MovePart.SECOND and not move.is_rooted:
            tensor.share *= p
            tensor.pieces *= p
    if move.is_compressed and move.part is not MovePart.SECOND:
        tensor.copies *= p
        tensor.pieces *= p
    return hops * link.alpha_s, crossing * num_bytes * link.beta_s_per_byte


def _link(move: Move, tensor: _TensorState, network: Network) -> tuple[Link, float]:
    """Return the link that a move waits for, and how often it carries a rank's bytes, as in `Network.terms`."""
    n, L, N = network.num_nodes, network.ranks_per_node, network.num_workers
    if network.inside is not None and (move.scope is MoveScope.INSIDE or n == 1):
        return network.inside, 1.0
    if move.scope is MoveScope.BETWEEN:
        return network.between, tensor.ranks
    if L == 1 or (move.part is MovePart.WHOLE and not move.is_compressed):
        return network.between, 1.0
    return network.between, (N - L) / (N - 1) * (1 if move.is_rooted else L)

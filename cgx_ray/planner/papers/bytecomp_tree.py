"""ByteComp's decision tree (Wang et al. 2022, section 4.2): every way to average a tensor, compressed or not.

A path from the tree's start to its end decides: compress or not, on GPU or CPU, flat or hierarchical, with divisible or
indivisible schemes, by which routines, and where to compress and decompress. It is a sequence of moves (one collective
routine in one place) with codec tasks between them. What may follow what:

    pattern       one whole move, or a first and a second one that pair; hierarchically, first and second inside nodes
                  with either of that between nodes in the midst
    connections   before a move of uncompressed tensors the tensor is uncompressed, before one of compressed tensors
                  compressed; what arrives compressed may go on as it is, or be decompressed, summed and compressed
    start, end    uncompressed

That makes 4,341 paths, which is the number that the paper states.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cgx_ray.plan import NONE, CodecSpec, Intra, Option, Scheme
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.options import CodecCost
from cgx_ray.planner.pipeline import GroupCost


class Place(StrEnum):
    """Between whom a move goes: all ranks, ranks of a node, or nodes."""

    FLAT = "flat"
    INSIDE = "inside"
    BETWEEN = "between"


class Device(StrEnum):
    GPU = "gpu"
    CPU = "cpu"


class Part(StrEnum):
    """What a move does: average at once, in an indivisible scheme, or be a half of a divisible one."""

    WHOLE = "whole"
    FIRST = "first"
    SECOND = "second"


class Move(NamedTuple):
    """A collective routine. `is_rooted`: by way of one rank, instead of each having a share of the tensor."""

    place: Place
    part: Part
    is_rooted: bool
    is_compressed: bool

    @property
    def routine(self) -> str:
        """As tables 2 and 3 of the paper name it."""
        if self.part is Part.WHOLE:
            return "allgather" if self.is_compressed else "allreduce"
        if self.part is Part.SECOND:
            return "broadcast" if self.is_rooted else "allgather"
        if self.is_compressed:
            return "gather" if self.is_rooted else "alltoall"
        return "reduce" if self.is_rooted else "reduce_scatter"


class Code(NamedTuple):
    """`task` is "compress" or "decompress"; decompressing sums what is there of each element."""

    task: str
    device: Device


Path = tuple[Move | Code, ...]
_Pattern = tuple[tuple[Place, Part, bool], ...]

# By whether the tensor is compressed and whether the next move wants it so.
_CONNECTIONS: dict[tuple[bool, bool], tuple[tuple[str, ...], ...]] = {
    (False, False): ((),),
    (False, True): (("compress",),),
    (True, False): (("decompress",),),
    (True, True): ((), ("decompress", "compress")),
}


def paths() -> Iterator[Path]:
    """Every valid path, each once."""
    for pattern in _patterns():
        for is_compressed in itertools.product((False, True), repeat=len(pattern)):
            moves = [Move(*step, state) for step, state in zip(pattern, is_compressed, strict=True)]
            states = (False, *is_compressed, False)
            between = [_CONNECTIONS[pair] for pair in itertools.pairwise(states)]
            for tasks in itertools.product(*between):
                yield from _on_devices(moves, tasks)


def _patterns() -> Iterator[_Pattern]:
    def either(place: Place) -> Iterator[_Pattern]:
        yield ((place, Part.WHOLE, False),)
        for is_rooted in (False, True):
            yield ((place, Part.FIRST, is_rooted), (place, Part.SECOND, is_rooted))

    yield from either(Place.FLAT)
    for is_rooted, between in itertools.product((False, True), either(Place.BETWEEN)):
        yield ((Place.INSIDE, Part.FIRST, is_rooted), *between, (Place.INSIDE, Part.SECOND, is_rooted))


def _on_devices(moves: Sequence[Move], tasks: Sequence[tuple[str, ...]]) -> Iterator[Path]:
    """`tasks` before each of `moves` and after the last, on each combination of devices."""
    choices = [itertools.product(*([Code(task, device) for device in Device] for task in here)) for here in tasks]
    for codes in itertools.product(*choices):
        yield tuple(
            task for here, move in itertools.zip_longest(codes, moves) for task in (*here, *((move,) if move else ()))
        )


# Those of our schemes that the tree has, by the names of their tasks.
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


def option_of(path: Path, codec: CodecSpec) -> Option | None:
    """How the engine does `path` with `codec`, one that every scheme carries; None if it does not.

    All of a group's codec work is on one device, and on the CPU if the group is hierarchical.
    """
    names = tuple(task.task if isinstance(task, Code) else task.routine for task in path)
    devices = {task.device for task in path if isinstance(task, Code)}
    if len(devices) > 1:
        return None
    used = codec if devices else NONE
    if all(isinstance(task, Code) or task.place is Place.FLAT for task in path):
        return Option(codec=used, scheme=_SCHEMES[names]) if names in _SCHEMES else None
    for intra, (head, tail) in _INSIDE.items():
        middle = names[len(head) : -len(tail)]
        is_one = middle in _SCHEMES and names == (*head, *middle, *tail) and devices != {Device.GPU}
        if is_one and (intra is Intra.DENSE or "compress" in middle):
            return Option(codec=used, scheme=_SCHEMES[middle], intra=intra)
    return None


@dataclass(slots=True)
class _Tensor:
    """What a rank has on the way.

    share   of the elements
    copies  of each element that are not summed yet
    pieces  messages
    ranks   of a node that have some
    """

    share: float = 1.0
    copies: int = 1
    pieces: int = 1
    ranks: int = 1


def path_cost(
    path: Path, network: Network, codec: CodecSpec, costs: Mapping[Device, CodecCost], numel: int = 1 << 24
) -> GroupCost:
    """Seconds of a float32 group on `path`, one task after the other.

    costs  of `codec` on either device
    numel  as in `pipeline.group_cost`

    Compressing on the GPU before anything is sent holds up backward; all else is the network's time, as in `Pipeline`.
    Moves cost what `Network.terms` has for the scheme that they are part of. A rank's own chunk is encoded and decoded
    like the others, which the engine leaves out where it can; nothing overlaps, which it does where it can.
    """
    tensor = _Tensor()
    compute_a = compute_b = network_a = network_b = 0.0
    has_sent = False
    for index, task in enumerate(path):
        if isinstance(task, Code):
            a_s, b_s = _code_s(task, path[index + 1 : index + 2], tensor, network, costs[task.device])
            if task.device is Device.GPU and not has_sent:
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


def _num_ranks(place: Place, network: Network) -> int:
    return {
        Place.FLAT: network.num_workers,
        Place.INSIDE: network.ranks_per_node,
        Place.BETWEEN: network.num_nodes,
    }[place]


def _code_s(task: Code, after: Path, tensor: _Tensor, network: Network, cost: CodecCost) -> tuple[float, float]:
    """Seconds, and seconds an element of the whole tensor. What is scattered next is compressed in as many pieces."""
    if task.task == "decompress":
        seconds = cost.decode_s(tensor.pieces, 0), cost.decode_s(0, tensor.copies * tensor.share)
        tensor.copies = tensor.pieces = 1
        return seconds
    (move,) = after
    assert isinstance(move, Move)
    is_scattered = move.part is Part.FIRST and not move.is_rooted
    calls = _num_ranks(move.place, network) if is_scattered else 1
    return cost.encode_s(calls, 0), cost.encode_s(0, tensor.share)


def _move_s(move: Move, tensor: _Tensor, network: Network, item_bytes: float) -> tuple[float, float]:
    """Seconds, and seconds an element of the whole tensor."""
    p = _num_ranks(move.place, network)
    if p == 1:
        return 0.0, 0.0
    held, hops = tensor.share * tensor.copies * item_bytes, 1.0
    link, crossing = _link(move, tensor, network)
    if move.part is Part.WHOLE and not move.is_compressed:
        # The vendor's ring where all ranks take part, else direct.
        hops, num_bytes = (2.0 * (p - 1) if p == network.num_workers else 2.0), 2 * (p - 1) / p * held
    elif move.part is Part.FIRST and not move.is_rooted:
        num_bytes = (p - 1) / p * held
        tensor.share /= p
        tensor.ranks = p if move.place is Place.INSIDE else tensor.ranks
    else:
        num_bytes = (p - 1) * held
        if move.part is Part.SECOND and not move.is_rooted:
            tensor.share *= p
            tensor.pieces *= p
    if move.is_compressed and move.part is not Part.SECOND:
        tensor.copies *= p
        tensor.pieces *= p
    return hops * link.alpha_s, crossing * num_bytes * link.beta_s_per_byte


def _link(move: Move, tensor: _Tensor, network: Network) -> tuple[Link, float]:
    """The link that a move waits for, and how many times a rank's bytes go through it, as `Network.terms` has it."""
    n, L, N = network.num_nodes, network.ranks_per_node, network.num_workers
    if network.inside is not None and (move.place is Place.INSIDE or n == 1):
        return network.inside, 1.0
    if move.place is Place.BETWEEN:
        return network.between, tensor.ranks
    if L == 1 or (move.part is Part.WHOLE and not move.is_compressed):
        return network.between, 1.0
    return network.between, (N - L) / (N - 1) * (1 if move.is_rooted else L)

"""What the controller can choose from, and what each choice makes of a group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cgx_ray.errors import ConfigError
from cgx_ray.plan import DENSE, NONE, PIECE_BYTES, CodecSpec, Intra, Option, Scheme, options_of
from cgx_ray.planner.cost import Link, Network, check_seconds
from cgx_ray.planner.timeline import Resource, Stage


def candidate_codecs(densities: Iterable[float]) -> tuple[CodecSpec, ...]:
    """None, bf16, qsgd 4/128, and topk of each density."""
    sparse = {density: CodecSpec(name="topk", density=density) for density in densities}
    return (NONE, CodecSpec(name="bf16"), CodecSpec(name="qsgd", bits=4, bucket_size=128), *sparse.values())


def candidate_options(densities: Iterable[float]) -> tuple[Option, ...]:
    """Those of `candidate_codecs`; dense comes first."""
    return codec_options(candidate_codecs(densities))


def codec_options(codecs: Iterable[CodecSpec]) -> tuple[Option, ...]:
    """Dense, and each of `codecs` over every scheme that can carry it, flat and hierarchical."""
    return DENSE, *(option for codec in codecs for option in options_of(codec) if option != DENSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """Measured codec time: a seconds a call plus b seconds an element of the dense group, top-k included."""

    encode_a_s: float
    encode_b_s_per_element: float
    decode_a_s: float
    decode_b_s_per_element: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check_seconds(name, getattr(self, name))

    def encode_s(self, calls: float, numel: float) -> float:
        return calls * self.encode_a_s + numel * self.encode_b_s_per_element

    def decode_s(self, calls: float, numel: float) -> float:
        return calls * self.decode_a_s + numel * self.decode_b_s_per_element


FREE = CodecCost(encode_a_s=0, encode_b_s_per_element=0, decode_a_s=0, decode_b_s_per_element=0)


def codec_cost_of(costs: Mapping[str, CodecCost], codec: CodecSpec) -> CodecCost:
    """By `str(CodecSpec)` or name, the former first; "none" is free if left out. Raises ConfigError if unknown."""
    cost = costs.get(str(codec)) or costs.get(codec.name)
    if cost is None and codec.name == "none":
        return FREE
    if cost is None:
        known = ", ".join(sorted(costs)) or "none"
        raise ConfigError(f"no measured time for codec {codec}; known: {known}; measure it first")
    return cost


def efficiency(gain: float) -> float:
    """Share of a dense step's progress that a step with this gain makes, in (0, 1].

    Below 1 it is the gain itself (GraVAC: throughput times gain). Stochastic codecs have gains above 1, the
    excess being noise that they add: the second moment grows to `gain` times the gradient's, so progress
    shrinks to 1 / gain. Departure from GraVAC, which has no such codec and would reward the noise.
    """
    return min(gain, 1 / gain)


def exchange_stages(
    option: Option, network: Network, cost: CodecCost, numel: int, item_bytes: int = 4
) -> tuple[Stage, ...]:
    """A group's way under `option`, for `timeline.simulate`, overlapped inside the exchange as the engine does it.

    sra encodes, sends, sums and sends back piece by piece; allgather decodes messages while later ones come. Such an
    exchange lasts as long as the longer of codec and network, and one piece or message more. In ring, tree and
    broadcast a piece is coded or travels, while others do either: one piece is all of the shorter that is not hidden.
    Hierarchical groups are summed inside nodes before, and given out there after.
    """
    return tuple(stage for leg in legs(option, network, numel, item_bytes) for stage in _stages(leg, cost))


def _stages(leg: Leg, cost: CodecCost) -> tuple[Stage, ...]:
    encode_s, decode_s = leg.encode_s(cost), leg.decode_s(cost)
    latency_s, network_s = leg.hops * leg.link.alpha_s, leg.num_bytes * leg.link.beta_s_per_byte
    codec_s, N, n = encode_s + decode_s, leg.num_ranks, leg.numel
    encode = Stage(name="encode", busy_s={Resource.CODEC: encode_s})
    both_s = {Resource.CODEC: codec_s, leg.resource: network_s}
    if N > 1 and leg.scheme is Scheme.SRA:
        piece = min(n / N, PIECE_BYTES * n / leg.wire_bytes)
        waits_s = latency_s + cost.encode_s(1, piece) + cost.decode_s(1, piece)
        return (Stage(name=leg.name, busy_s=both_s, latency_s=waits_s),)
    if N > 1 and leg.scheme is Scheme.ALLGATHER:
        busy_s = {Resource.CODEC: decode_s, leg.resource: network_s}
        return encode, Stage(name=leg.name, busy_s=busy_s, latency_s=latency_s + cost.decode_s(1, n))
    if N > 1 and leg.scheme in (Scheme.RING, Scheme.TREE, Scheme.BROADCAST):
        num_chunks = {Scheme.RING: N, Scheme.TREE: 1 << (N.bit_length() - 1), Scheme.BROADCAST: 1}[leg.scheme]
        num_pieces = math.ceil(leg.wire_bytes / num_chunks / PIECE_BYTES)
        return (Stage(name=leg.name, busy_s=both_s, latency_s=latency_s + min(codec_s, network_s) / num_pieces),)
    return (
        encode,
        Stage(name=leg.name, busy_s={leg.resource: network_s}, latency_s=latency_s),
        Stage(name="decode", busy_s={Resource.CODEC: decode_s}),
    )


class Leg(NamedTuple):
    """A group's exchange over one kind of link: all of a flat one, a third of a hierarchical one.

    numel, wire_bytes  of what a rank exchanges here with `num_ranks` - 1 others
    hops, num_bytes    on `link`
    encode, decode     calls, and elements that a rank encodes or decodes
    """

    name: str
    scheme: Scheme
    num_ranks: int
    numel: float
    wire_bytes: float
    resource: Resource
    link: Link
    hops: float
    num_bytes: float
    encode: tuple[float, float]
    decode: tuple[float, float]

    def encode_s(self, cost: CodecCost) -> float:
        return cost.encode_s(*self.encode)

    def decode_s(self, cost: CodecCost) -> float:
        return cost.decode_s(*self.decode)


def legs(option: Option, network: Network, numel: int, item_bytes: int = 4) -> tuple[Leg, ...]:
    """How a group of `numel` elements goes through `network` under `option`: one leg, or three if it is hierarchical.

    Codec work between nodes is that of a chunk, an L-th of the group; inside, if compressed, that of the halves of sra.
    Sums in shared memory are part of what the link inside takes.
    """
    codec, n, L = option.codec, network.num_nodes, network.ranks_per_node
    wire_bytes = codec.payload_bytes(numel, item_bytes)
    inside, between = network.terms(
        option.scheme, option.intra, numel * item_bytes, wire_bytes, codec.index_bytes(numel)
    )

    def exchange(num_ranks: int, numel: float, wire_bytes: float, *, crosses: bool) -> Leg:
        calls = codec_work(option, num_ranks, numel)
        hops, num_bytes = between if crosses else inside
        return Leg(
            "exchange", option.scheme, num_ranks, numel, wire_bytes, Resource.INTER if crosses else Resource.INTRA,
            network.between if crosses or network.inside is None else network.inside, hops, num_bytes,
            calls[:2], calls[2:],
        )  # fmt: skip

    if network.is_flat(option.intra):
        return (exchange(network.num_workers, numel, wire_bytes, crosses=n > 1 or L == 1),)
    link = network.inside
    assert link is not None
    is_sra = option.intra is Intra.COMPRESSED

    def half(name: str, encode: tuple[float, float], decode: tuple[float, float]) -> Leg:
        nothing = (0.0, 0.0)
        return Leg(
            name, Scheme.SRA if is_sra else Scheme.DENSE, L, numel, wire_bytes, Resource.INTRA, link,
            inside[0] / 2, inside[1] / 2, encode if is_sra else nothing, decode if is_sra else nothing,
        )  # fmt: skip

    foreign = (L - 1.0, (L - 1) * numel / L)
    reduce = half("reduce", foreign, foreign)
    share = half("share", (1, numel / L), (L, numel))
    return reduce, exchange(n, numel / L, wire_bytes / L, crosses=True), share


def codec_work(option: Option, N: int, n: float) -> tuple[float, float, float, float]:
    """Calls and elements that one rank encodes, then decodes, for a group of n elements among N workers; none alone."""
    if N == 1:
        return 0, 0, 0, 0
    match option.scheme:
        case Scheme.ALLGATHER:
            return 1, n, N, N * n
        case Scheme.SRA | Scheme.RING:
            # Encode N-1 foreign chunks and the sum of the own one; decode-add N-1 chunks, decode all N sums.
            return N, n, 2 * N - 1, (N - 1) * n / N + n
        case Scheme.TREE:
            # The same with P chunks; before it a guest encodes all of its own and its host decodes that.
            P = 1 << (N.bit_length() - 1)
            folds = 1 if P < N else 0
            return (1 + folds) * P, (1 + folds) * n, (2 + folds) * P - 1, (P - 1) * n / P + (1 + folds) * n
        case Scheme.BROADCAST:
            # One after the other: all but the root encode, it decode-adds N-1 of them and encodes the average, all
            # decode that.
            return 2, 2 * n, N, N * n
        case _:
            # dense packs and unpacks, allreduce encodes and decodes one message; AR-Topk selects once and writes
            # one sum, the cost of one decode.
            return 1, n, 1, n

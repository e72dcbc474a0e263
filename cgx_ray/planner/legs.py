"""Exchange of one group as legs, one per kind of link, and as stages for the timeline."""

from __future__ import annotations

import math
from typing import NamedTuple

from cgx_ray.plan import PIECE_BYTES, Intra, Option, Scheme
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.options import CodecCost
from cgx_ray.planner.scheme_costs import Overlap, SchemeCost, Work, cost_of_scheme
from cgx_ray.planner.timeline import Resource, Stage

NO_WORK = Work(encode=(0, 0), decode=(0, 0))


class Leg(NamedTuple):
    """Part of a group's exchange over one kind of link: all of a flat exchange, one of three of a hierarchical one.

    numel, wire_bytes  of the elements that a rank exchanges here with `num_ranks` - 1 others
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

    @property
    def cost(self) -> SchemeCost:
        return cost_of_scheme(self.scheme)

    @property
    def overlap(self) -> Overlap:
        """Work that hides behind the network; nothing if there is no other rank."""
        return self.cost.overlap if self.num_ranks > 1 else Overlap.NOTHING

    def encode_s(self, cost: CodecCost) -> float:
        return cost.encode_s(*self.encode)

    def decode_s(self, cost: CodecCost) -> float:
        return cost.decode_s(*self.decode)


def legs(option: Option, network: Network, numel: int, item_bytes: int = 4) -> tuple[Leg, ...]:
    """Return the legs of a group of `numel` elements under `option`: one, or three if it is hierarchical.

    Between nodes, a rank encodes and decodes its chunk, an L-th of the group. Inside a node, if compressed, it does the
    work of one half of sra at either end. The link inside includes the time of sums in shared memory.
    """
    codec, n, L = option.codec, network.num_nodes, network.ranks_per_node
    wire_bytes = codec.payload_bytes(numel, item_bytes)
    inside, between = network.terms(
        option.scheme, option.intra, numel * item_bytes, wire_bytes, codec.index_bytes(numel)
    )

    def exchange(num_ranks: int, numel: float, wire_bytes: float, *, crosses: bool) -> Leg:
        work = cost_of_scheme(option.scheme).work(num_ranks, numel) if num_ranks > 1 else NO_WORK
        hops, num_bytes = between if crosses else inside
        return Leg(
            "exchange", option.scheme, num_ranks, numel, wire_bytes, Resource.INTER if crosses else Resource.INTRA,
            network.between if crosses or network.inside is None else network.inside, hops, num_bytes,
            work.encode, work.decode,
        )  # fmt: skip

    if network.is_flat(option.intra):
        return (exchange(network.num_workers, numel, wire_bytes, crosses=n > 1 or L == 1),)
    link = network.inside
    assert link is not None
    is_sra = option.intra is Intra.COMPRESSED

    def half(name: str, work: Work) -> Leg:
        encode, decode = work if is_sra else NO_WORK
        return Leg(
            name, Scheme.SRA if is_sra else Scheme.DENSE, L, numel, wire_bytes, Resource.INTRA, link,
            inside[0] / 2, inside[1] / 2, encode, decode,
        )  # fmt: skip

    foreign = (L - 1.0, (L - 1) * numel / L)
    reduce = half("reduce", Work(encode=foreign, decode=foreign))
    share = half("share", Work(encode=(1, numel / L), decode=(L, numel)))
    return reduce, exchange(n, numel / L, wire_bytes / L, crosses=True), share


def exchange_stages(
    option: Option, network: Network, cost: CodecCost, numel: int, item_bytes: int = 4
) -> tuple[Stage, ...]:
    """Return the stages of a group under `option` for `timeline.simulate`, overlapped as the engine overlaps them.

    sra encodes, sends, sums and sends back piece by piece; allgather decodes messages while later ones arrive. Such an
    exchange lasts as long as the longer of codec and network, plus one piece or message. In ring, tree and broadcast
    one piece is coded while another travels; one piece of the shorter of codec and network stays visible.
    Hierarchical groups are summed inside nodes before the exchange, and shared there after it.
    """
    return tuple(stage for leg in legs(option, network, numel, item_bytes) for stage in _stages(leg, cost))


def _stages(leg: Leg, cost: CodecCost) -> tuple[Stage, ...]:
    encode_s, decode_s = leg.encode_s(cost), leg.decode_s(cost)
    latency_s, network_s = leg.hops * leg.link.alpha_s, leg.num_bytes * leg.link.beta_s_per_byte
    codec_s, N, n = encode_s + decode_s, leg.num_ranks, leg.numel
    encode = Stage(name="encode", busy_s={Resource.CODEC: encode_s})
    both_s = {Resource.CODEC: codec_s, leg.resource: network_s}
    match leg.overlap:
        case Overlap.CODING:
            piece = min(n / N, PIECE_BYTES * n / leg.wire_bytes)
            waits_s = latency_s + cost.encode_s(1, piece) + cost.decode_s(1, piece)
            return (Stage(name=leg.name, busy_s=both_s, latency_s=waits_s),)
        case Overlap.DECODING:
            busy_s = {Resource.CODEC: decode_s, leg.resource: network_s}
            return encode, Stage(name=leg.name, busy_s=busy_s, latency_s=latency_s + cost.decode_s(1, n))
        case Overlap.PIECES:
            num_pieces = math.ceil(leg.wire_bytes / leg.cost.num_chunks(N) / PIECE_BYTES)
            return (Stage(name=leg.name, busy_s=both_s, latency_s=latency_s + min(codec_s, network_s) / num_pieces),)
        case Overlap.NOTHING:
            return (
                encode,
                Stage(name=leg.name, busy_s={leg.resource: network_s}, latency_s=latency_s),
                Stage(name="decode", busy_s={Resource.CODEC: decode_s}),
            )

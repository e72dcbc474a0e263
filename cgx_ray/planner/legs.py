"""Exchange of one group as legs, one per kind of link, and as stages for the timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from cgx_ray.plan import PIECE_BYTES, Intra, Option, Scheme
from cgx_ray.planner.candidates import CodecCost
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.scheme_costs import Overlap, SchemeCost, Work, cost_of_scheme
from cgx_ray.planner.timeline import Resource, Stage

NO_WORK = Work(encode=(0, 0), decode=(0, 0))
# Seconds that the engine's thread needs besides encoding and decoding, per group and per message that it takes in:
# Python between the turns, posts of messages. Processor time of 2 to 64 groups of 64 KB and more over sra was 0.31 ms
# per group with 2 ranks (3 messages) and 0.77 ms with 4 (7 messages), AMD EPYC, Zen 5.
THREAD_S = 1e-4
MESSAGE_S = 1e-4
# Bytes that the vendor has under way between two ranks at most: TCP's default windows. Over Gloo with 1 Gbit/s and
# 10 ms one way, 102 MB in 5 groups took 1.6 s where the bytes alone take 1.2; one group of 100 MB 2.3 s, with 25 ms
# 4.5 s. Our own connections are set up for long paths.
VENDOR_WINDOW_BYTES = 2 << 20
# "thread": codecs work beside backward. "backward": they take the processor from it.
EncodesOn = Literal["backward", "thread"]


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

    @property
    def num_messages(self) -> float:
        """Messages that the engine's thread takes in; the vendor's have a thread of their own."""
        if self.scheme is Scheme.DENSE or self.num_ranks == 1:
            return 0.0
        return self.decode[0] + self.cost.num_raw(self.num_ranks)


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
        link = network.between if crosses or network.inside is None else network.inside
        if cost_of_scheme(option.scheme).is_vendor_ring and network.is_flat(option.intra):
            link = _of_vendor(link)
        return Leg(
            "exchange", option.scheme, num_ranks, numel, wire_bytes, Resource.INTER if crosses else Resource.INTRA,
            link, hops, num_bytes, work.encode, work.decode,
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


def _of_vendor(link: Link) -> Link:
    """Return `link` as the vendor's library uses it: at most a window of bytes per round trip."""
    return replace(link, beta_s_per_byte=max(link.beta_s_per_byte, 2 * link.alpha_s / VENDOR_WINDOW_BYTES))


def thread_s(parts: Sequence[Leg]) -> float:
    """Return the seconds that a group of these legs takes the engine's thread besides encoding and decoding."""
    if all(leg.num_ranks == 1 for leg in parts):
        return 0.0
    return THREAD_S + MESSAGE_S * sum(leg.num_messages for leg in parts)


def copy_s(option: Option, network: Network, num_bytes: float, bus: Link | None) -> float:
    """Return the seconds for which the engine's thread copies a group from a GPU to the host, and as long back.

    0 if the codec works where the gradients are. `bus` as in `Measured`.
    """
    return (
        bus.seconds(1, num_bytes) if bus is not None and network.needs_host(option) and network.num_workers > 1 else 0.0
    )


def works_on(option: Option, network: Network, encodes_on: EncodesOn, bus: Link | None) -> EncodesOn:
    """Return where the codec of `option` works. On the host of a GPU it takes nothing from backward."""
    return "thread" if bus is not None and network.needs_host(option) else encodes_on


def exchange_stages(
    option: Option,
    network: Network,
    cost: CodecCost,
    numel: int,
    item_bytes: int = 4,
    encodes_on: EncodesOn = "thread",
    bus: Link | None = None,
) -> tuple[Stage, ...]:
    """Return the stages of a group under `option` for `timeline.simulate`, overlapped as the engine overlaps them.

    sra encodes, sends, sums and sends back piece by piece; allgather decodes messages while later ones arrive. Such an
    exchange lasts as long as the longer of codec and network, plus one piece or message. In ring, tree and broadcast
    one piece is coded while another travels; one piece of the shorter of codec and network stays visible.
    Hierarchical groups are summed inside nodes before the exchange, and shared there after it.

    The first encoding includes `thread_s`. With one worker a group takes no time at all.

    encodes_on  "backward": encoding and decoding take the codec and compute at once
    bus         as in `Measured`. The engine's thread copies what the host encodes, before and after all else
    """
    stages: list[Stage] = []
    parts = legs(option, network, numel, item_bytes)
    for leg in parts:
        stages += _stages(leg, cost, 0.0 if stages else thread_s(parts), works_on(option, network, encodes_on, bus))
    copied_s = copy_s(option, network, numel * item_bytes, bus)
    if copied_s == 0:
        return tuple(stages)
    copy = Stage(name="copy", busy_s={Resource.CODEC: copied_s})
    return copy, *stages, copy


def _stages(leg: Leg, cost: CodecCost, first_s: float, encodes_on: EncodesOn) -> tuple[Stage, ...]:
    """Return the stages of `leg`. `first_s`: seconds of the thread before it encodes."""
    encode_s, decode_s = leg.encode_s(cost), leg.decode_s(cost)
    latency_s, network_s = leg.hops * leg.link.alpha_s, leg.num_bytes * leg.link.beta_s_per_byte
    overlap, N, n = leg.overlap, leg.num_ranks, leg.numel
    # Nothing hides one more piece or message.
    piece_s = 0.0
    if overlap is Overlap.CODING:
        piece = min(n / N, PIECE_BYTES * n / leg.wire_bytes)
        piece_s = cost.encode_s(1, piece) + cost.decode_s(1, piece)
    elif overlap is Overlap.DECODING:
        piece_s = cost.decode_s(1, n)
    elif overlap is Overlap.PIECES:
        num_pieces = math.ceil(leg.wire_bytes / leg.cost.num_chunks(N) / PIECE_BYTES)
        piece_s = min(encode_s + decode_s, network_s) / num_pieces
    decodes_later = overlap is Overlap.NOTHING
    return (
        Stage(name="encode", busy_s={**_coding_s(encode_s, encodes_on), Resource.CODEC: first_s + encode_s}),
        Stage(
            name=leg.name,
            busy_s={leg.resource: network_s},
            latency_s=latency_s if decodes_later else 0.0,
            overlaps=overlap in (Overlap.CODING, Overlap.PIECES),
        ),
        Stage(
            name="decode",
            busy_s=_coding_s(decode_s, encodes_on),
            latency_s=0.0 if decodes_later else latency_s + piece_s,
            overlaps=not decodes_later,
        ),
    )


def _coding_s(seconds: float, encodes_on: EncodesOn) -> dict[Resource, float]:
    """Return the resources that encode or decode for `seconds`. With nothing to do, nothing waits for compute."""
    taken = {Resource.CODEC: seconds}
    return {**taken, Resource.COMPUTE: seconds} if encodes_on == "backward" and seconds > 0 else taken

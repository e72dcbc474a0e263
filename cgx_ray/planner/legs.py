"""Exchange of one group as legs, one per kind of link, and as stages for the timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from cgx_ray.plan import Intra, Option, Scheme
from cgx_ray.planner.candidates import CodecCost
from cgx_ray.planner.cost import Link, Network, num_foreign
from cgx_ray.planner.engine_cost import HOST_ENGINE, EngineCost
from cgx_ray.planner.scheme_costs import Overlap, SchemeCost, Work, cost_of_scheme
from cgx_ray.planner.timeline import Resource, Stage

NO_WORK = Work(encode=(0, 0), decode=(0, 0))
# "thread": codecs work beside backward. "backward": they take the processor from it. "device": what they do with
# elements takes the GPU from it, and their calls a thread of the host, which takes nothing.
EncodesOn = Literal["backward", "thread", "device"]


class Leg(NamedTuple):
    """Part of a group's exchange over one kind of link: all of a flat exchange, one of three of a hierarchical one.

    numel, wire_bytes  of the elements that a rank exchanges here with `num_ranks` - 1 others
    hops, num_bytes    on `link`
    encode, decode     messages, and elements that a rank encodes or decodes
    engine             of the device that encodes
    num_pieces         that messages are counted for; 1 on the host, where pieces add no time of their own
    byte_s             seconds per byte that is encoded or decoded: those of the engine's thread, and of copies
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
    engine: EngineCost = HOST_ENGINE
    num_pieces: int = 1
    byte_s: float = 0.0

    @property
    def cost(self) -> SchemeCost:
        return cost_of_scheme(self.scheme)

    @property
    def overlap(self) -> Overlap:
        """Work that hides behind the network; nothing if there is no other rank."""
        return self.cost.overlap if self.num_ranks > 1 else Overlap.NOTHING

    def encode_s(self, cost: CodecCost) -> float:
        return cost.encode_s(*self.encode, self._calls[0]) + self.bytes_s(self.encode[1])

    def decode_s(self, cost: CodecCost) -> float:
        return cost.decode_s(*self.decode, self._calls[1]) + self.bytes_s(self.decode[1])

    def calls_s(self, cost: CodecCost) -> float:
        """Return the part of `encode_s` and `decode_s` that no element adds to."""
        encode_calls, decode_calls = self._calls
        return cost.encode_s(self.encode[0], 0, encode_calls) + cost.decode_s(self.decode[0], 0, decode_calls)

    def bytes_s(self, numel: float) -> float:
        """Return the seconds of `byte_s` for `numel` elements."""
        return self.byte_s * self.wire_bytes * numel / self.numel if self.byte_s else 0.0

    @property
    def _calls(self) -> tuple[float | None, float | None]:
        """Calls that encode and decode all messages; None if each has its own."""
        if not self.engine.codes_rows or self.cost.row_calls is None:
            return None, None
        encode_calls, decode_calls = self.cost.row_calls
        return encode_calls * self.num_pieces, decode_calls * self.num_pieces

    @property
    def num_messages(self) -> float:
        """Messages that the engine's thread takes in; the vendor's have a thread of their own."""
        if self.scheme is Scheme.DENSE or self.num_ranks == 1:
            return 0.0
        return self.decode[0] + self.cost.num_raw(self.num_ranks)


def legs(
    option: Option,
    network: Network,
    numel: int,
    item_bytes: float = 4,
    engine: EngineCost = HOST_ENGINE,
    bus: Link | None = None,
) -> tuple[Leg, ...]:
    """Return the legs of a group of `numel` elements under `option`: one, or three if it is hierarchical.

    engine  of the device that holds the gradients
    bus     as in `Measured`; read only where that device codes rows

    Between nodes, a rank encodes and decodes its chunk, a C-th of the group with C ranks or more on each node. Inside
    a node, if compressed, it does the work of one half of sra at either end: the work of the rank that has the most of
    it, on the node with the most ranks. The link inside includes the time of sums in shared memory.
    """
    codec, n, C, L = option.codec, network.num_nodes, network.ranks_per_node, network.most_ranks
    engine = HOST_ENGINE if network.needs_host(option) else engine
    wire_bytes = codec.payload_bytes(numel, item_bytes)
    inside, between = network.terms(
        option.scheme, option.intra, numel * item_bytes, wire_bytes, codec.index_bytes(numel)
    )

    def exchange(num_ranks: int, numel: float, wire_bytes: float, *, crosses: bool) -> Leg:
        cost = cost_of_scheme(option.scheme)
        work = cost.work(num_ranks, numel) if num_ranks > 1 else NO_WORK
        num_pieces = _num_pieces(option, num_ranks, wire_bytes, engine) if engine.codes_rows else 1
        sends = engine.codes_rows and num_ranks > 1 and not cost.is_vendor_ring
        byte_s = engine.byte_s + (bus.beta_s_per_byte if bus is not None else 0.0) if sends else 0.0
        hops, num_bytes = between if crosses else inside
        link = network.between if crosses or network.inside is None else network.inside
        if cost.is_vendor_ring and network.is_flat(option.intra):
            link = _of_vendor(link, engine.vendor_window_bytes)
        (encoded, encoded_numel), (decoded, decoded_numel) = work
        return Leg(
            "exchange", option.scheme, num_ranks, numel, wire_bytes, Resource.INTER if crosses else Resource.INTRA,
            link, hops, num_bytes, (encoded * num_pieces, encoded_numel), (decoded * num_pieces, decoded_numel),
            engine, num_pieces, byte_s,
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

    encoded, decoded = num_foreign(C, L), L - 1
    work = Work(encode=(encoded, encoded * numel / C), decode=(decoded, decoded * numel / C))
    reduce, share = half("reduce", work), half("share", Work(encode=(1, numel / C), decode=(C, numel)))
    return reduce, exchange(n, numel / C, wire_bytes / C, crosses=True), share


def _of_vendor(link: Link, window_bytes: int | None) -> Link:
    """Return `link` as the vendor's library uses it: at most a window of bytes per round trip."""
    if window_bytes is None:
        return link
    return replace(link, beta_s_per_byte=max(link.beta_s_per_byte, 2 * link.alpha_s / window_bytes))


def _num_pieces(option: Option, num_ranks: int, wire_bytes: float, engine: EngineCost) -> int:
    """Return the pieces that the engine cuts a group of `wire_bytes` into."""
    cost = cost_of_scheme(option.scheme)
    # Only codecs that may be encoded again may encode parts of a gradient by themselves.
    is_whole = cost.overlap is Overlap.DECODING and not option.codec.record.is_reencoded
    if num_ranks == 1 or cost.overlap is Overlap.NOTHING or is_whole:
        return 1
    return max(1, math.ceil(wire_bytes / cost.num_chunks(num_ranks) / engine.piece_bytes))


def thread_s(parts: Sequence[Leg]) -> float:
    """Return the seconds that a group of these legs takes the engine's thread besides encoding and decoding."""
    if all(leg.num_ranks == 1 for leg in parts):
        return 0.0
    engine = parts[0].engine
    return engine.thread_s * parts[0].num_pieces + engine.message_s * sum(leg.num_messages for leg in parts)


def copy_s(option: Option, network: Network, num_bytes: float, bus: Link | None) -> float:
    """Return the seconds for which the engine's thread copies a group from a GPU to the host, and as long back.

    0 if the codec works where the gradients are. `bus` as in `Measured`.
    """
    return (
        bus.seconds(1, num_bytes) if bus is not None and network.needs_host(option) and network.num_workers > 1 else 0.0
    )


def works_on(option: Option, network: Network, encodes_on: EncodesOn, bus: Link | None) -> EncodesOn:
    """Return where the codec of `option` works. On the host of a GPU it takes nothing from backward."""
    is_beside = network.needs_host(option) and (bus is not None or encodes_on == "device")
    return "thread" if is_beside else encodes_on


def exchange_stages(
    option: Option,
    network: Network,
    cost: CodecCost,
    numel: int,
    item_bytes: float = 4,
    encodes_on: EncodesOn = "thread",
    bus: Link | None = None,
    engine: EngineCost = HOST_ENGINE,
) -> tuple[Stage, ...]:
    """Return the stages of a group under `option` for `timeline.simulate`, overlapped as the engine overlaps them.

    sra encodes, sends, sums and sends back piece by piece; allgather decodes messages while later ones arrive. Such an
    exchange lasts as long as the longer of codec and network, plus one piece or message. In ring, tree and broadcast
    one piece is coded while another travels; one piece of the shorter of codec and network stays visible.
    Hierarchical groups are summed inside nodes before the exchange, and shared there after it.

    The first encoding includes `thread_s`. With one worker a group takes no time at all.

    Where the engine codes rows, the messages of a piece wait for each other, so only pieces overlap. One piece of the
    shorter of codec and network stays visible there too.

    encodes_on  "backward": encoding and decoding take the codec and compute at once. "device": of their time, only that
                of elements takes compute
    bus         as in `Measured`. The engine's thread copies what the host encodes, before and after all else
    engine      as in `Measured`
    """
    stages: list[Stage] = []
    parts = legs(option, network, numel, item_bytes, engine, bus)
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
    overlap, N, n, piece_bytes = leg.overlap, leg.num_ranks, leg.numel, leg.engine.piece_bytes
    # Nothing hides one more piece or message.
    piece_s = 0.0
    if overlap is Overlap.CODING and not leg.engine.codes_rows:
        piece = min(n / N, piece_bytes * n / leg.wire_bytes)
        piece_s = cost.encode_s(1, piece) + cost.decode_s(1, piece)
    elif overlap is Overlap.DECODING:
        piece_s = cost.decode_s(1, n / leg.num_pieces)
    elif overlap is not Overlap.NOTHING:
        num_pieces = math.ceil(leg.wire_bytes / leg.cost.num_chunks(N) / piece_bytes)
        piece_s = min(encode_s + decode_s, network_s) / num_pieces
    decodes_later = overlap is Overlap.NOTHING
    if encodes_on == "device":
        on_compute_s = cost.encode_s(0, leg.encode[1]), cost.decode_s(0, leg.decode[1])
    else:
        on_compute_s = (encode_s, decode_s) if encodes_on == "backward" else (0.0, 0.0)
    return (
        Stage(name="encode", busy_s=_busy_s(first_s + encode_s, on_compute_s[0])),
        Stage(
            name=leg.name,
            busy_s={leg.resource: network_s},
            latency_s=latency_s if decodes_later else 0.0,
            overlaps=overlap in (Overlap.CODING, Overlap.PIECES),
        ),
        Stage(
            name="decode",
            busy_s=_busy_s(decode_s, on_compute_s[1]),
            latency_s=0.0 if decodes_later else latency_s + piece_s,
            overlaps=not decodes_later,
        ),
    )


def _busy_s(codec_s: float, compute_s: float) -> dict[Resource, float]:
    """Return the use of both resources. With nothing to do, nothing waits for compute."""
    taken = {Resource.CODEC: codec_s}
    return {**taken, Resource.COMPUTE: compute_s} if compute_s > 0 else taken

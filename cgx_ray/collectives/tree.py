"""Tree: reduce-scatter by recursive halving, then allgather by recursive doubling (Rabenseifner 2004), compressed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.parcel import Parcel, Step, chunk_bounds, cut, parts_of, run_lanes
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Handle, Transport


@dataclass(frozen=True, slots=True)
class _Halving:
    """One exchange of the way down: chunks [start, stop) that go to `peer`, and those that come and stay."""

    peer: int
    given: tuple[int, int]
    kept: tuple[int, int]


def _num_places(world_size: int) -> int:
    """The largest power of two that is not above `world_size`: so many ranks halve, the others are their guests."""
    return 1 << (world_size.bit_length() - 1)


def _rank_at(place: int, world_size: int) -> int:
    """Of the first ranks every second one is a guest of the next, so that a guest is next to its host."""
    num_guests = world_size - _num_places(world_size)
    return 2 * place + 1 if place < num_guests else place + num_guests


def _halvings(place: int, world_size: int) -> list[_Halving]:
    start, stop = 0, _num_places(world_size)
    halvings = []
    while stop - start > 1:
        distance = (stop - start) // 2
        lower, upper = (start, start + distance), (start + distance, stop)
        given, kept = (lower, upper) if place & distance else (upper, lower)
        halvings.append(_Halving(_rank_at(place ^ distance, world_size), given, kept))
        start, stop = kept
    return halvings


class Tree:
    """Cost 2a log N + 2(N-1)/N m b for N a power of two; else, P the next one below, 2a log P + 2(P-1)/P m b and the
    fold, 2a + 2 m b: N - P guests give their gradients to hosts first and get the average from them at the end.

    Each of P ranks owns one chunk of P. On the way down it exchanges halves of what it still has: it gives one away and
    adds what comes to the other, until only its chunk is left; on the way up the same peers give it everything back.
    Division, encodings, feedback and pieces are those of `Ring`: chunk by chunk, so that what `prefix` keeps of one is
    the same at each level.
    """

    def __init__(self, codec: Codec, numel: int, transport: Transport) -> None:
        self._transport = transport
        place = _Place(transport.rank, transport.world_size)
        pieces = cut(codec, chunk_bounds(numel, len(place.owners), codec.granule), transport)
        self._lanes = [
            _Lane(index, len(pieces), bounds, place, codec, transport) for index, bounds in enumerate(pieces)
        ]
        self.sent_bytes = sum(lane.sent_bytes for lane in self._lanes)

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        step = Step(grad_N=grad_N, memory=memory, stamp=stamp, seed=seed, phases=phases)
        run_lanes([lane.down_and_up(step) for lane in self._lanes], self._transport, phases)


class _Place:
    """Where a rank is in the tree.

    owners  the rank that owns each chunk
    host    of a guest, the next rank; a guest has no place of its own
    guest   of a host, the rank before, if it has one
    own     the chunk that this rank owns
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.owners = [_rank_at(place, world_size) for place in range(_num_places(world_size))]
        self.host = rank + 1 if rank not in self.owners else None
        self.guest = rank - 1 if rank > 0 and rank - 1 not in self.owners else None
        self.own = self.owners.index(rank) if self.host is None else 0
        self.halvings = _halvings(self.own, world_size) if self.host is None else []


class _Lane:
    """The same piece of every chunk, on its way down and up the tree."""

    def __init__(
        self,
        index: int,
        num_pieces: int,
        bounds: Sequence[tuple[int, int]],
        place: _Place,
        codec: Codec,
        transport: Transport,
    ) -> None:
        self._index, self._num_pieces = index, num_pieces
        self._bounds = bounds
        self._place = place
        self._transport = transport
        # By chunk: with this rank's part on its way out, and then from its owner; and what is added to that part.
        self._of_chunk = [Parcel(codec, stop - start) for start, stop in bounds]
        self._coming = [Parcel(codec, stop - start) for start, stop in bounds]
        sizes = [parcel.num_bytes for parcel in self._of_chunk]
        exchanged = sum(sum(sizes[slice(*run)]) for h in place.halvings for run in (h.given, h.kept))
        self.sent_bytes = exchanged + sum(sizes) * ((place.host is not None) + (place.guest is not None))

    def down_and_up(self, step: Step) -> Iterator[Handle]:
        """Take the piece through both phases; gives out what it waits for."""
        for bounds, parcel in zip(self._bounds, self._of_chunk, strict=True):
            run_N = step.run_of(bounds).div_(self._transport.world_size)
            parcel.borrow(run_N)
        place, everything, second = self._place, (0, len(self._bounds)), replace(step.stamp, phase=1)
        if place.host is not None:
            self._encode(everything, step, step.stamp)
            yield self._exchange(place.host, self._of_chunk, [])
            yield self._exchange(place.host, [], self._of_chunk)
            self._take_over(everything, step, second)
            return
        yield from self._reduce(step)
        self._encode((place.own, place.own + 1), step, second)
        self._of_chunk[place.own].use(step.run_of(self._bounds[place.own]))
        for halving in reversed(place.halvings):
            kept, given = slice(*halving.kept), slice(*halving.given)
            yield self._exchange(halving.peer, self._of_chunk[kept], self._of_chunk[given])
            self._take_over(halving.given, step, second)
        if place.guest is not None:
            yield self._exchange(place.guest, self._of_chunk, [])

    def _reduce(self, step: Step) -> Iterator[Handle]:
        """Add to the own chunk what all others have of it."""
        if self._place.guest is not None:
            yield self._exchange(self._place.guest, [], self._coming)
            self._add((0, len(self._bounds)), step, self._place.guest)
        for halving in self._place.halvings:
            self._encode(halving.given, step, step.stamp)
            kept, given = slice(*halving.kept), slice(*halving.given)
            yield self._exchange(halving.peer, self._of_chunk[given], self._coming[kept])
            self._add(halving.kept, step, halving.peer)

    def _exchange(self, peer: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Handle:
        if self._index == 0:
            self._transport.begin_round()
        sent, received = ({peer: parts_of(parcels)} if parcels else {} for parcels in (sends, receives))
        return self._transport.start(sent, received)

    def _encode(self, run: tuple[int, int], step: Step, stamp: Stamp) -> None:
        rank, world_size = self._transport.rank, self._transport.world_size
        for chunk in range(*run):
            # A rank encodes each piece of a chunk once a step: which one it is tells random numbers apart.
            key, bounds = step.key(rank, chunk * self._num_pieces + self._index), self._bounds[chunk]
            self._of_chunk[chunk].encode_share(step.run_of(bounds), stamp, key, step.memory_of(bounds), world_size)
        step.phases.lap("encode")

    def _add(self, run: tuple[int, int], step: Step, sender: int) -> None:
        for chunk in range(*run):
            run_N = step.run_of(self._bounds[chunk])
            self._coming[chunk].decode(run_N, step.stamp, self._transport.ranks[sender], add=True)
        step.phases.lap("decode")

    def _take_over(self, run: tuple[int, int], step: Step, stamp: Stamp) -> None:
        for chunk in range(*run):
            owner = self._transport.ranks[self._place.owners[chunk]]
            self._of_chunk[chunk].decode(step.run_of(self._bounds[chunk]), stamp, owner, add=False)
        step.phases.lap("decode")

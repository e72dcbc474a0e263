"""Tree: reduce-scatter by recursive halving, then all-gather by recursive doubling (Rabenseifner 2004), compressed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.exchange import Exchange
from cgx_ray.collectives.parcel import Parcel, Step, parts_of
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.pieces import Piece, chunk_bounds, cut, take_turns
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike


class Tree(Exchange):
    """Cost 2a log N + 2(N-1)/N m b if N is a power of two.

    P is the largest power of two that is not above N. P ranks own one chunk each.

    1. Down, in log P exchanges: a rank exchanges halves of the chunks that it still has. It gives one half away and
       adds what comes to the other, until only its own chunk is left.
    2. Up, in reverse order: the same peers give each other the chunks that they have by then.

    The other N - P ranks are guests: each gives its whole gradient to a host before step 1 and gets the average from it
    after step 2. With guests the cost is 2a (log P + 1) + (2(P-1)/P + 2) m b.

    Division, encodings, feedback and pieces are those of `Ring`. Each chunk is encoded by itself, so that `prefix`
    keeps the same elements of it at each level.
    """

    def __init__(self, codec: Codec, numel: int, transport: TransportLike) -> None:
        super().__init__(transport)
        position = _TreePosition(transport.rank, transport.world_size)
        pieces = cut(codec, chunk_bounds(numel, len(position.owners), codec.granule), transport)
        self._lanes = [_TreeLane(piece, position, codec, transport) for piece in pieces]
        self.sent_bytes = sum(lane.sent_bytes for lane in self._lanes)

    def turns(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> Iterator[Handle]:
        """See `Exchange.turns`."""
        step = Step(grad_N=grad_N, memory=memory, stamp=stamp, seed=seed, phases=phases)
        return take_turns([lane.down_and_up(step) for lane in self._lanes], phases)


@dataclass(frozen=True, slots=True)
class _Halving:
    """One exchange on the way down: the chunks [start, stop) that go to `peer`, and those that come and stay."""

    peer: int
    given: tuple[int, int]
    kept: tuple[int, int]


class _TreePosition:
    """Position of one rank in the tree.

    owners    by chunk, the rank that owns it
    host      on a guest, the next rank, which is its host; else None
    guest     on a host, the rank before, which is its guest; else None
    own       the chunk that this rank owns; guests own none
    halvings  this rank's exchanges on the way down
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.owners = [_owner_of(chunk, world_size) for chunk in range(_num_owners(world_size))]
        self.host = rank + 1 if rank not in self.owners else None
        self.guest = rank - 1 if rank > 0 and rank - 1 not in self.owners else None
        self.own = self.owners.index(rank) if self.host is None else 0
        self.halvings = _halvings(self.own, world_size) if self.host is None else []


def _num_owners(world_size: int) -> int:
    """Return the largest power of two that is not above `world_size`."""
    return 1 << (world_size.bit_length() - 1)


def _owner_of(chunk: int, world_size: int) -> int:
    """Return the rank that owns `chunk`. Every second one of the first ranks is a guest, next to its host."""
    num_guests = world_size - _num_owners(world_size)
    return 2 * chunk + 1 if chunk < num_guests else chunk + num_guests


def _halvings(own: int, world_size: int) -> list[_Halving]:
    start, stop = 0, _num_owners(world_size)
    halvings = []
    while stop - start > 1:
        distance = (stop - start) // 2
        lower, upper = (start, start + distance), (start + distance, stop)
        given, kept = (lower, upper) if own & distance else (upper, lower)
        halvings.append(_Halving(_owner_of(own ^ distance, world_size), given, kept))
        start, stop = kept
    return halvings


class _TreeLane:
    """One piece of every chunk, on its way down and up the tree. Runs of chunks are [start, stop)."""

    def __init__(self, piece: Piece, position: _TreePosition, codec: Codec, transport: TransportLike) -> None:
        self._piece = piece
        self._bounds = piece.bounds
        self._position = position
        self._transport = transport
        # By chunk: the sum so far, encoded by this rank, then the owner's message with the whole sum.
        self._of_chunk = [Parcel(codec, stop - start) for start, stop in self._bounds]
        # By chunk: another rank's message, to be added.
        self._coming = [Parcel(codec, stop - start) for start, stop in self._bounds]
        sizes = [parcel.num_bytes for parcel in self._of_chunk]
        exchanged = sum(sum(sizes[slice(*run)]) for h in position.halvings for run in (h.given, h.kept))
        num_whole = (position.host is not None) + (position.guest is not None)
        self.sent_bytes = exchanged + sum(sizes) * num_whole

    def down_and_up(self, step: Step) -> Iterator[Handle]:
        """Take the piece through both phases; yield the handles to wait for."""
        for bounds, parcel in zip(self._bounds, self._of_chunk, strict=True):
            run_N = step.run_of(bounds).div_(self._transport.world_size)
            parcel.borrow(run_N)
        position, everything, second = self._position, (0, len(self._bounds)), replace(step.stamp, phase=1)
        if position.host is not None:
            self._encode(everything, step, step.stamp)
            yield self._exchange(position.host, self._of_chunk, [])
            yield self._exchange(position.host, [], self._of_chunk)
            self._take_over(everything, step, second)
            return
        yield from self._reduce(step)
        self._encode((position.own, position.own + 1), step, second)
        self._of_chunk[position.own].use(step.run_of(self._bounds[position.own]))
        for halving in reversed(position.halvings):
            kept, given = slice(*halving.kept), slice(*halving.given)
            yield self._exchange(halving.peer, self._of_chunk[kept], self._of_chunk[given])
            self._take_over(halving.given, step, second)
        if position.guest is not None:
            yield self._exchange(position.guest, self._of_chunk, [])

    def _reduce(self, step: Step) -> Iterator[Handle]:
        """Replace the own chunk by its sum over ranks."""
        if self._position.guest is not None:
            yield self._exchange(self._position.guest, [], self._coming)
            self._add((0, len(self._bounds)), step, self._position.guest)
        for halving in self._position.halvings:
            self._encode(halving.given, step, step.stamp)
            kept, given = slice(*halving.kept), slice(*halving.given)
            yield self._exchange(halving.peer, self._of_chunk[given], self._coming[kept])
            self._add(halving.kept, step, halving.peer)

    def _exchange(self, peer: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Handle:
        sent, received = ({peer: parts_of(parcels)} if parcels else {} for parcels in (sends, receives))
        return self._transport.start(sent, received)

    def _encode(self, run: tuple[int, int], step: Step, stamp: Stamp) -> None:
        rank, world_size = self._transport.rank, self._transport.world_size
        for chunk in range(*run):
            # A rank encodes each piece of each chunk once per step, so its number makes the random numbers unique.
            key, bounds = step.key(rank, self._piece.number(chunk)), self._bounds[chunk]
            self._of_chunk[chunk].encode_share(step.run_of(bounds), stamp, key, step.memory_of(bounds), world_size)
        step.phases.lap("encode")

    def _add(self, run: tuple[int, int], step: Step, sender: int) -> None:
        for chunk in range(*run):
            run_N = step.run_of(self._bounds[chunk])
            self._coming[chunk].decode(run_N, step.stamp, self._transport.ranks[sender], add=True)
        step.phases.lap("decode")

    def _take_over(self, run: tuple[int, int], step: Step, stamp: Stamp) -> None:
        for chunk in range(*run):
            owner = self._transport.ranks[self._position.owners[chunk]]
            self._of_chunk[chunk].decode(step.run_of(self._bounds[chunk]), stamp, owner, add=False)
        step.phases.lap("decode")

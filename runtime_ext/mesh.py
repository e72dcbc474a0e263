"""Messages between all ranks of a run, over TCP or through shared memory, moved by threads of their own in C++."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from .checks import native
from .shm import LocalGroup, Segment

TOKEN_BYTES: int = native.Mesh.TOKEN_BYTES
# What goes to a rank or comes from it: a tensor, or several that go one after the other as messages of their own.
Parts = Tensor | tuple[Tensor, ...]
# Round trip from which more initial windows of TCP pay: with one, 250 KB take three times the latency.
FAR_S = 0.005


class Mesh:
    """Tensors in, tensors out. Messages are pushed as soon as they are posted; the n-th receive from a rank takes its
    n-th send.

    num_streams  connections to each rank whose round trip, when they connect, takes `far_s` seconds or more; to nearer
                 ones and those that share memory there is one
    address      numeric IP address to listen on, at `port`, which the kernel picks
    token        TOKEN_BYTES secret bytes that all ranks of the run have; whoever does not present them is hung up on

    nodes    index of the node of every rank; ranks of one node share memory
    local    the ranks of this node; None if this rank shares memory with no other

    Raises RuntimeError if the address is not this machine's.
    """

    local: LocalGroup | None = None

    def __init__(
        self, rank: int, world_size: int, num_streams: int, address: str, token: bytes, far_s: float = FAR_S
    ) -> None:
        self._rank = rank
        self.address = address
        self.nodes = list(range(world_size))
        self._native = native.Mesh(rank, world_size, num_streams, address, token, far_s)
        self._posted: dict[int, object] = {}
        _meshes.add(self)

    @property
    def port(self) -> int:
        return self._native.port

    def connect(
        self,
        addresses: Sequence[tuple[str, int]],
        timeout_s: float,
        segment: Segment | None = None,
        sharers: Sequence[int] = (),
    ) -> None:
        """Connect to all ranks at `addresses`, by rank. Raises RuntimeError that names those who did not come.

        segment  has been mapped by `sharers`, ascending, this rank among them; messages between them go through it, and
                 one connection a pair is left as a sign of life
        """
        self._native.connect(list(addresses), timeout_s, segment, list(sharers))

    def open_group(self, segment: Segment, ranks: Sequence[int], timeout_s: float) -> None:
        """Make `local` of those who have mapped `segment`. An operation of it that fails hangs up."""
        # Of the native mesh: a cycle with this one would keep connections open after the last use.
        self.local = LocalGroup(segment, ranks.index(self._rank), ranks, timeout_s, self._native.close)

    def post(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> int:
        """Begin to send and receive contiguous CPU tensors, by rank, and return a ticket for `wait`.

        Sent tensors must stay as they are until `wait` returns.
        """
        ticket = self._native.post(_parts(sends), _parts(receives))
        self._posted[ticket] = (sends, receives)
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> list[float]:
        """Return when everything posted under `ticket` is done: by rank, the seconds from `post` to when the kernel got
        the end of its last message; less than 0 if that was before, 0 without a message.

        Raises RuntimeError that names the ranks that did not answer within `timeout_s`, hung up, or sent a message of
        another size; all connections are closed then.
        """
        arrived_s = self._native.wait(ticket, timeout_s)
        del self._posted[ticket]
        return arrived_s

    def take_bursts(self) -> list[tuple[int, int, float]]:
        """(rank, bytes, seconds) of what arrived in long messages since the last call, some 50 ms each.

        By the kernel's time stamps, so neither late ranks nor busy processors count. Rank -1 is all of them together,
        which is what this rank's link carries. The newest 1,024 if nobody called for long.
        """
        return self._native.take_bursts()

    def close(self) -> None:
        """Hang up. What is under way fails, on both ends."""
        self._native.close()


_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _close_copies() -> None:
    for mesh in _meshes:
        mesh._native.close_copies()


# Workers of a DataLoader are forked, and outlive a rank that is killed: with their copies nobody would notice its end.
os.register_at_fork(after_in_child=_close_copies)


def flat(messages: Mapping[int, Parts]) -> Iterator[tuple[int, Tensor]]:
    """Every tensor of `messages` with its rank."""
    for rank, parts in messages.items():
        for part in (parts,) if isinstance(parts, Tensor) else parts:
            yield rank, part


def _parts(messages: Mapping[int, Parts]) -> list[tuple[int, int, int]]:
    found = []
    for rank, part in flat(messages):
        if part.device.type != "cpu" or not part.is_contiguous():
            raise ValueError(f"the message for rank {rank} is on {part.device} or strided; give contiguous CPU tensors")
        found.append((rank, part.data_ptr(), part.numel() * part.element_size()))
    return found

"""Messages between all ranks of a run, over TCP or through shared memory, moved by C++ threads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .checks import native
from .shm import LocalGroup, Segment

TOKEN_BYTES: int = native.Mesh.TOKEN_BYTES
# The header of a message with a checksum.
SEALED_BYTES: int = native.Mesh.SEALED_BYTES
# Messages to or from one rank: a tensor, or several that go one after the other, each as its own message.
Parts = Tensor | tuple[Tensor, ...]
# Round trip in seconds from which several connections per rank pay: each brings its own initial TCP window. With one
# connection, 250 KB take three times the latency.
FAR_S = 0.005
# Channels are numbered from 0 and cost nothing until they are used.
NUM_CHANNELS = 1 << 32


class Mesh:
    """Connections to all ranks of a run. On each channel, the n-th receive from a rank takes its n-th send.

    Messages on different channels are independent: ranks may post them in different orders.

    Messages are sent as soon as they are posted, even if the receiver has not posted yet. A connection is read while a
    receive is posted on it or a send on it is not done. If another channel's message comes first, it is kept in memory
    of its own until its receive is posted, and costs a copy.

    Several threads may use a mesh at the same time, if one thread posts on a channel and one waits for a ticket.

    num_streams  connections to each rank whose round trip is `far_s` seconds or more at the time of connecting; to
                 nearer ranks and to those that share memory there is one connection
    address      numeric IP address to listen on, at `port`
    token        TOKEN_BYTES secret bytes that all ranks of the run have; peers that do not present them are hung up on
    ports        first and last of the ports to listen at, of which the first free one is taken; (0, 0): any

    nodes  index of the node of every rank; ranks of one node share memory
    local  the ranks of this node; None if this rank shares memory with no other

    Raises RuntimeError if this machine does not have the address, or if all ports are in use.
    """

    local: LocalGroup | None = None

    def __init__(
        self,
        rank: int,
        world_size: int,
        num_streams: int,
        address: str,
        token: bytes,
        far_s: float = FAR_S,
        ports: tuple[int, int] = (0, 0),
    ) -> None:
        self._rank = rank
        self.address = address
        self.nodes = list(range(world_size))
        self._native = native.Mesh(rank, world_size, num_streams, address, token, far_s, ports)
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
        """Connect to all ranks at `addresses`, by rank. Raises RuntimeError that names the ranks that did not come.

        segment  shared memory that `sharers` have mapped; their messages to each other go through it
        sharers  ranks in ascending order, with this rank; one connection per pair stays open, so that each notices when
                 the other ends
        """
        self._native.connect(list(addresses), timeout_s, segment, list(sharers))

    def open_group(self, segment: Segment, ranks: Sequence[int], timeout_s: float) -> None:
        """Set `local` to the group of `ranks`, which have mapped `segment`. An operation of it that fails hangs up."""
        # The native mesh's `close`: a reference to this object would be a cycle and keep connections open after use.
        self.local = LocalGroup(segment, ranks.index(self._rank), ranks, timeout_s, self._native.close)

    def post(
        self, sends: Mapping[int, Parts], receives: Mapping[int, Parts], channel: int = 0, *, is_sealed: bool = False
    ) -> int:
        """Begin to send and receive contiguous CPU tensors, by rank, and return a ticket for `wait`.

        Sent tensors must stay as they are until `wait` returns.

        channel    0 to NUM_CHANNELS - 1, the same at both ends; ranks that use different ones time out
        is_sealed  each tensor begins with SEALED_BYTES bytes, of which a thread beside this one writes the last four,
                   the CRC-32C of all others, before it sends the message. Of a received message whose checksum is wrong
                   it overwrites the first two bytes with 0. Sends that are under way at once on one channel to one rank
                   must be all of this kind or none, else they may overtake each other
        """
        if not 0 <= channel < NUM_CHANNELS:
            raise ValueError(f"channel {channel} is not allowed; give 0 to {NUM_CHANNELS - 1}")
        ticket = self._native.post(_parts(sends), _parts(receives), channel, is_sealed)
        self._posted[ticket] = (sends, receives)
        return ticket

    def post_minimum(self, values_K: Tensor, rounds: Sequence[Sequence[int]], channel: int) -> int:
        """Begin an element-wise minimum over ranks, in place, and return a ticket for `wait`.

        Threads of the mesh pass it on from round to round, so no rank waits for what another one does meanwhile.

        values_K  int64 or uint8, contiguous, on the CPU; leave it alone until `wait` returns
        rounds    other ranks that each round sends to and receives from, as `minimum.partners` returns them
        channel   as in `post`; nothing else may use it meanwhile
        """
        if values_K.dtype not in (torch.int64, torch.uint8):
            raise ValueError(f"a minimum of {values_K.dtype} is not possible; give int64 or uint8")
        ((_, address, num_bytes),) = _parts({self._rank: values_K})
        ticket = self._native.post_minimum(address, num_bytes, values_K.dtype == torch.int64, rounds, channel)
        self._posted[ticket] = values_K
        return ticket

    def wait(self, ticket: int, timeout_s: float, waited_s: float = 0.0) -> list[float]:
        """Wait until everything posted under `ticket` is done.

        waited_s  the part of `timeout_s` that has passed

        Returns, by rank, the seconds from `post` until the kernel had received the end of its last message: negative if
        that was before `post`, 0 without a message.

        Raises RuntimeError that names the ranks that did not answer within `timeout_s`, hung up, or sent a message of
        another size. Then all connections are closed.
        """
        arrived_s = self._native.wait(ticket, timeout_s, waited_s)
        del self._posted[ticket]
        return arrived_s

    def wait_any(self, tickets: Sequence[int], timeout_s: float) -> int | None:
        """Wait until one of `tickets` is done or has failed, and return the first such in the given order.

        Then call `wait` for it, which returns or raises at once. Until that, the ticket counts as over in later calls.

        Returns None after `timeout_s`, and if `wake` or `close` was called since the last None. A ticket that is over
        comes first: the next call that finds none returns None at once, so no wake-up is lost. Several may count as
        one. Without tickets it waits for a wake-up.
        """
        return self._native.wait_any(list(tickets), timeout_s)

    def is_over(self, ticket: int) -> bool:
        """Return True if `ticket` is done or has failed. Unlike `wait_any` without a time-out it uses up no wake-up."""
        return self._native.is_over(ticket)

    def has_failed(self, ticket: int) -> bool:
        """Return True if `wait` would raise. Unlike `wait` it leaves the connections open."""
        return self._native.has_failed(ticket)

    def wake(self) -> None:
        """Have `wait_any` return None in the thread that is in it, or at its next call. Call it from any thread."""
        self._native.wake()

    def take_bursts(self) -> list[tuple[int, int, float]]:
        """Return and forget (rank, bytes, seconds) of the bursts in which long messages arrived, about 50 ms each.

        The kernel's time stamps are used, so late ranks and busy processors do not count. Rank -1 is all ranks
        together: the traffic on this rank's link. At most the newest 1,024 bursts are kept.
        """
        return self._native.take_bursts()

    def close(self) -> None:
        """Hang up. Transfers that are not done fail on both ends, and threads that wait here are woken."""
        self._native.close()


_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _close_copies() -> None:
    for mesh in _meshes:
        mesh._native.close_copies()


# Workers of a DataLoader are forked and outlive a rank that is killed. Their copies of its connections would stay open,
# so other ranks would not notice its end.
os.register_at_fork(after_in_child=_close_copies)


def flat(messages: Mapping[int, Parts]) -> Iterator[tuple[int, Tensor]]:
    """Yield every tensor of `messages` with its rank."""
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

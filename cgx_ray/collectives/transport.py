"""Moving bytes between ranks: messages over a mesh, the vendor's collectives over a torch.distributed group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from cgx_ray.collectives.simulated_link import LinkDelay, SimulatedLink
from cgx_ray.collectives.transport_like import Handle
from cgx_ray.errors import CGXError, TransportError
from cgx_ray.runtime_ext import shm
from cgx_ray.runtime_ext.mesh import Mesh, Parts, flat

# Torch's own time-out for Gloo: half an hour.
DEFAULT_TIMEOUT_S = 1800.0

# The channel of minima, which no group has.
_AGREEMENT_CHANNEL = 2**32 - 1


class Transport:
    """A `TransportLike` of all ranks of one engine. Only the engine's communication thread uses it.

    takes_many         False over Gloo, which has hung with some dozens of messages
    ranks              every rank is called by its own number
    nodes              by rank, the index of its node; ranks of one node share memory
    local              collectives among the ranks of this node; None if it has one rank, or with a simulated link
    step, group_index  the exchange under way, for error messages
    timeout_s          seconds after which a peer that does not answer counts as gone
    lag_s              by rank, seconds from this rank's last `start_minimum` until the other's came; over TCP only
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        link: SimulatedLink | None = None,
        mesh: Mesh | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        cuda_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Build on a group of this engine alone.

        group       Gloo's, with a time-out of its own; without `mesh` messages go through it as well
        cuda_group  has the same ranks and sums CUDA tensors; left out, `group` does, by way of the host
        """
        self._group = group
        self._cuda_group = cuda_group if cuda_group is not None else group
        self._delay = LinkDelay(link) if link is not None else None
        self._mesh = mesh
        self.timeout_s = timeout_s
        self.takes_many = mesh is not None
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self.ranks: Sequence[int] = range(self.world_size)
        shares = mesh is not None and link is None
        self.nodes = mesh.nodes if mesh is not None and shares else list(range(self.world_size))
        self.local = mesh.local if mesh is not None and shares else None
        self.step = 0
        self.group_index = 0
        self.lag_s: tuple[float, ...] = ()
        self._card_bytes = 0

    def begin_round(self) -> None:
        """See `TransportLike.begin_round`."""
        if self._delay is not None:
            self._delay.begin_round()

    def start(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        """See `TransportLike.start`."""
        if self._delay is not None:
            self._delay.hold_round(self.step, _total_bytes(sends), _total_bytes(receives))
        self._card_bytes += _total_bytes({peer: parts for peer, parts in sends.items() if self._is_away(peer)})
        try:
            if self._mesh is not None:
                return self._mesh.post(sends, receives, channel=self.group_index)
            works = [dist.irecv(part, group=self._group, group_src=peer) for peer, part in flat(receives)]
            works += [dist.isend(part, group=self._group, group_dst=peer) for peer, part in flat(sends)]
        except RuntimeError as error:
            raise self._broken("a message", error) from error
        return works

    def finish(self, handle: Handle) -> None:
        """See `TransportLike.finish`."""
        try:
            if isinstance(handle, int):
                assert self._mesh is not None
                self._mesh.wait(handle, self.timeout_s)
                return
            for work in handle:
                assert work is not None
                work.wait()
        except RuntimeError as error:
            raise self._broken("a message", error) from error

    def all_reduce(self, values_N: Tensor) -> None:
        """Sum over ranks, in place: through shared memory if all ranks are on one host, else by the vendor's ring.

        The vendor always sums CUDA tensors.
        """
        ring = 2 * (self.world_size - 1)
        num_bytes = ring * values_N.numel() * values_N.element_size() // self.world_size
        self._hold(ring, num_bytes)
        # Gloo's ring sends to the rank before. NCCL's leaves each node once, as this if a node's ranks are in a row.
        self._card_bytes += num_bytes * self._is_away(self.rank - 1)
        is_local = self.local is not None and self.local.size == self.world_size
        try:
            if self.local is not None and is_local and values_N.is_cpu and values_N.dtype in shm.DTYPES:
                self.local.all_reduce(values_N)
                return
            dist.all_reduce(values_N, group=self._cuda_group if values_N.is_cuda else self._group)
            if values_N.is_cuda:
                # NCCL only queues the sum on the stream; the caller measures the network.
                torch.cuda.current_stream(values_N.device).synchronize()
        except RuntimeError as error:
            raise self._broken("an all-reduce", error) from error

    def broadcast(self, message: Tensor, root: int) -> None:
        """See `TransportLike.broadcast`; by the vendor's tree."""
        hops = math.log2(self.world_size)
        self._hold(hops, hops * message.numel())
        self._card_bytes += message.numel() * sum(
            map(self._is_away, _binomial_children(self.rank, root, self.world_size))
        )
        try:
            dist.broadcast(message, group=self._group, group_src=root)
        except RuntimeError as error:
            raise self._broken("a broadcast", error) from error

    def start_minimum(self, values_K: Tensor, *, notes_lag: bool = True) -> Callable[[], Tensor]:
        """Begin an element-wise minimum over ranks and return a function that waits for it.

        Do not change `values_K` before that function has returned. Without `notes_lag`, `lag_s` stays as it is.
        """
        if self._mesh is None:
            work = dist.all_reduce(values_K, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
            assert work is not None
            return lambda: self._minimum_of(work.wait, [values_K])
        mesh, received = self._mesh, {peer: torch.empty_like(values_K) for peer in self.peers}
        ticket = mesh.post(dict.fromkeys(received, values_K), received, channel=_AGREEMENT_CHANNEL)

        def wait() -> None:
            lag_s = mesh.wait(ticket, self.timeout_s)
            if notes_lag:
                self.lag_s = tuple(lag_s) if self._delay is None else ()

        return lambda: self._minimum_of(wait, [values_K, *received.values()])

    def _minimum_of(self, wait: Callable[[], object], values: Sequence[Tensor]) -> Tensor:
        try:
            wait()
        except RuntimeError as error:
            raise self._broken("the agreement", error) from error
        return torch.stack(list(values)).amin(0)

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Turn a library's RuntimeError within the block into a TransportError with rank, step and group."""
        try:
            yield
        except CGXError:
            raise
        except RuntimeError as error:
            raise self._broken(what, error) from error

    def take_bursts(self) -> list[tuple[int, int, float]]:
        """See `Mesh.take_bursts`. Empty over torch.distributed and on a simulated link: bytes come at full speed."""
        return self._mesh.take_bursts() if self._mesh is not None and self._delay is None else []

    @property
    def num_local(self) -> int:
        """Number of ranks on this node, with this one."""
        return self.nodes.count(self.nodes[self.rank])

    def take_card_bytes(self) -> int:
        """Return the bytes that this rank has sent to other nodes since the last call, in messages and collectives.

        The agreement's 48 bytes per rank and step are left out.
        """
        taken, self._card_bytes = self._card_bytes, 0
        return taken

    def close(self) -> None:
        """Hang up. Peers that still wait for this rank fail at once."""
        if self._mesh is not None:
            self._mesh.close()

    def _is_away(self, peer: int) -> bool:
        return self.nodes[peer] != self.nodes[self.rank]

    def _hold(self, num_hops: float, num_bytes: float) -> None:
        if self._delay is not None:
            self._delay.hold(self.step, num_hops, num_bytes)

    def _broken(self, what: str, error: RuntimeError) -> TransportError:
        return TransportError(
            f"rank {self.rank}, step {self.step}, group {self.group_index}: {what} did not get through ({error}); "
            "look at the log of the other ranks for the first error"
        )


def _binomial_children(rank: int, root: int, world_size: int) -> list[int]:
    """Return the ranks that `rank` passes a broadcast of `root` on to, in order, in a binomial tree as Gloo's."""
    place = (rank - root) % world_size
    reaches = (1 << level for level in range(world_size.bit_length()))
    return [(rank + reach) % world_size for reach in reaches if place < reach and place + reach < world_size]


def _total_bytes(messages: Mapping[int, Parts]) -> int:
    return sum(part.numel() * part.element_size() for _, part in flat(messages))

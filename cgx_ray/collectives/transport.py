"""Moving bytes between ranks: messages over a mesh, vendor collectives over a torch.distributed group of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from cgx_ray.errors import CGXError, ConfigError, TransportError
from cgx_ray.runtime_ext import shm
from cgx_ray.runtime_ext.mesh import Mesh, Parts, flat

# Torch's own for Gloo: half an hour.
DEFAULT_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLink:
    """A link in software: messages are held back by latency and rate. For machines that cannot shape a real one.

    It is between any two ranks: every rank counts as a node of its own, and hierarchical plans are flat.

    latency_s  one way
    schedule   (first step, bit/s) pairs, ascending by step, the first for step 0
    """

    latency_s: float
    schedule: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.schedule]
        rates = [rate for _, rate in self.schedule]
        if self.latency_s < 0 or not math.isfinite(self.latency_s):
            raise ConfigError(f"simulated latency {self.latency_s!r} s is not allowed; give 0 or more")
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise ConfigError(f"simulated schedule starts at steps {steps}; they must ascend from 0")
        if not all(rate > 0 for rate in rates):
            raise ConfigError(f"simulated rates {rates} bit/s are not allowed; give positive ones")

    def delay_s(self, step: int, num_hops: float, num_bytes: float) -> float:
        """How long a link of this kind holds `num_bytes` in `num_hops` rounds."""
        rate = next(rate for first, rate in reversed(self.schedule) if step >= first)
        return self.latency_s * num_hops + num_bytes * 8 / rate


# A ticket of the mesh, or what torch.distributed waits on.
Handle = int | list[dist.Work | None]


@dataclass(slots=True)
class _Round:
    """What a simulated link carries and has held back of messages that are under way together."""

    sent_bytes: int = 0
    received_bytes: int = 0
    held_bytes: int = 0
    hops_left: int = 1


class Transport:
    """Point-to-point and vendor collectives of one engine. Used by its communication thread alone.

    takes_many         many messages between two ranks may be under way at once; Gloo has hung with some dozens
    peers              the other ranks, the next one first: where every rank starts with another
    ranks              what each rank is called in messages of errors: itself, but see `Subset`
    nodes              index of the node of every rank: those of one node share memory
    local              the ranks of this node, if they are several; none on a simulated link, which is between any two
    step, group_index  what is under way, for messages of errors
    lag_s              by rank, from this rank's last `start_minimum` to when the other's came; over TCP only
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        link: SimulatedLink | None = None,
        mesh: Mesh | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        cuda_group: dist.ProcessGroup | None = None,
    ) -> None:
        """
        group       Gloo's; without `mesh` messages go through it as well. It has a time-out of its own
        cuda_group  the same ranks', for sums of what is on CUDA devices; `group` copies it to the host
        """
        self._group = group
        self._cuda_group = cuda_group if cuda_group is not None else group
        self._link = link
        self._mesh = mesh
        self._timeout_s = timeout_s
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
        self._round = _Round()
        self._card_bytes = 0

    def begin_round(self) -> None:
        """What is started from now on is one round of messages: a simulated link counts one hop a round."""
        self._round = _Round()

    def start(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        """Begin to send and receive, by rank, in that order, and return at once with what `finish` takes.

        The n-th receive from a rank takes its n-th send. What is sent must stay as it is, and what is received into
        must not be used, until `finish`.

        Raises TransportError if a peer is gone.
        """
        if self._link is not None:
            self._hold_round(_total_bytes(sends), _total_bytes(receives))
        self._card_bytes += _total_bytes({peer: parts for peer, parts in sends.items() if self._is_away(peer)})
        try:
            if self._mesh is not None:
                return self._mesh.post(sends, receives)
            works = [dist.irecv(part, group=self._group, group_src=peer) for peer, part in flat(receives)]
            works += [dist.isend(part, group=self._group, group_dst=peer) for peer, part in flat(sends)]
        except RuntimeError as error:
            raise self._broken("a message", error) from error
        return works

    def finish(self, handle: Handle) -> None:
        """Return when everything that `start` began under `handle` is done. Once a handle.

        Raises TransportError if a peer is gone or does not answer within the time-out.
        """
        try:
            if isinstance(handle, int):
                assert self._mesh is not None
                self._mesh.wait(handle, self._timeout_s)
                return
            for work in handle:
                assert work is not None
                work.wait()
        except RuntimeError as error:
            raise self._broken("a message", error) from error

    def exchange(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> None:
        """Send to and receive from every peer at once; returns when all of it is done. Keys are ranks.

        Raises as `start` and `finish` do.
        """
        self.begin_round()
        self.finish(self.start(sends, receives))

    def all_reduce(self, values_N: Tensor) -> None:
        """Sum over ranks, in place: through shared memory if all ranks are on one host, else by the vendor's ring.

        What is on a CUDA device always by the vendor.
        """
        ring = 2 * (self.world_size - 1)
        num_bytes = ring * values_N.numel() * values_N.element_size() // self.world_size
        self._hold(ring, num_bytes)
        # Gloo's ring sends to the rank before. NCCL's leaves a node once, as this does if its ranks are in a row.
        self._card_bytes += num_bytes * self._is_away(self.rank - 1)
        is_local = self.local is not None and self.local.size == self.world_size
        try:
            if self.local is not None and is_local and values_N.is_cpu and values_N.dtype in shm.DTYPES:
                self.local.all_reduce(values_N)
                return
            dist.all_reduce(values_N, group=self._cuda_group if values_N.is_cuda else self._group)
            if values_N.is_cuda:
                # NCCL only puts it on the stream: what is measured here is the network.
                torch.cuda.current_stream(values_N.device).synchronize()
        except RuntimeError as error:
            raise self._broken("an all-reduce", error) from error

    def broadcast(self, message: Tensor, root: int) -> None:
        """Give everyone the message of `root`, by the vendor's tree."""
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
        """Begin an element-wise minimum over ranks and return at once; what is returned waits for it.

        `values_K` must stay as it is until then. Without `notes_lag` it leaves `lag_s` alone.
        """
        if self._mesh is None:
            work = dist.all_reduce(values_K, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
            assert work is not None
            return lambda: self._minimum_of(work.wait, [values_K])
        mesh, received = self._mesh, {peer: torch.empty_like(values_K) for peer in self.peers}
        ticket = mesh.post(dict.fromkeys(received, values_K), received)

        def wait() -> None:
            lag_s = mesh.wait(ticket, self._timeout_s)
            if notes_lag:
                self.lag_s = tuple(lag_s) if self._link is None else ()

        return lambda: self._minimum_of(wait, [values_K, *received.values()])

    def _minimum_of(self, wait: Callable[[], object], values: Sequence[Tensor]) -> Tensor:
        try:
            wait()
        except RuntimeError as error:
            raise self._broken("the agreement", error) from error
        return torch.stack(list(values)).amin(0)

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Raise TransportError, with rank, step and group, in place of a library's error within."""
        try:
            yield
        except CGXError:
            raise
        except RuntimeError as error:
            raise self._broken(what, error) from error

    def take_bursts(self) -> list[tuple[int, int, float]]:
        """See `Mesh.take_bursts`. Empty over torch.distributed or a simulated link, whose bytes come at full speed."""
        return self._mesh.take_bursts() if self._mesh is not None and self._link is None else []

    @property
    def num_local(self) -> int:
        """Ranks of this node, this one among them."""
        return self.nodes.count(self.nodes[self.rank])

    def take_card_bytes(self) -> int:
        """Bytes of messages and collectives that this rank has sent to other nodes since the last call.

        The agreements' 48 bytes a rank and step are left out.
        """
        taken, self._card_bytes = self._card_bytes, 0
        return taken

    def close(self) -> None:
        """Hang up: peers that still wait for this rank find out at once."""
        if self._mesh is not None:
            self._mesh.close()

    def _is_away(self, peer: int) -> bool:
        return self.nodes[peer] != self.nodes[self.rank]

    def _hold(self, num_hops: float, num_bytes: float) -> None:
        # Before sending, not after receiving: a late sender then also delays its peers, as on a real link.
        if self._link is not None:
            time.sleep(self._link.delay_s(self.step, num_hops, num_bytes))

    def _hold_round(self, sent_bytes: int, received_bytes: int) -> None:
        """Hold back one hop a round, and what its fuller direction carries. Receives posted ahead wait for a send."""
        round_ = self._round
        round_.sent_bytes += sent_bytes
        round_.received_bytes += received_bytes
        if round_.sent_bytes > 0:
            due_bytes = max(round_.sent_bytes, round_.received_bytes)
            self._hold(round_.hops_left, due_bytes - round_.held_bytes)
            round_.hops_left, round_.held_bytes = 0, due_bytes

    def _broken(self, what: str, error: RuntimeError) -> TransportError:
        return TransportError(
            f"rank {self.rank}, step {self.step}, group {self.group_index}: {what} did not get through ({error}); "
            "look at the log of the other ranks for the first error"
        )


def _binomial_children(rank: int, root: int, world_size: int) -> list[int]:
    """To whom a rank passes on what `root` broadcasts by a binomial tree, as Gloo does, first ones first."""
    place = (rank - root) % world_size
    reaches = (1 << level for level in range(world_size.bit_length()))
    return [(rank + reach) % world_size for reach in reaches if place < reach and place + reach < world_size]


def _total_bytes(messages: Mapping[int, Parts]) -> int:
    return sum(part.numel() * part.element_size() for _, part in flat(messages))

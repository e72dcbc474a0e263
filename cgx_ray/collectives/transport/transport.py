"""Moving bytes between ranks: messages over a mesh, the vendor's collectives over a torch.distributed group."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch import Tensor

from cgx_ray.collectives.transport.gloo_sockets import GlooSockets
from cgx_ray.collectives.transport.greeting import Greetings, partners
from cgx_ray.collectives.transport.lifeline import WORDS_S, Lifeline
from cgx_ray.collectives.transport.simulated_link import LinkDelay, SimulatedLink
from cgx_ray.collectives.transport.training_sums import TrainingSums
from cgx_ray.collectives.transport.transport_like import Handle, Held, VendorCall, binomial_children, ring_bytes
from cgx_ray.collectives.transport.vendor_group import VendorGroup
from cgx_ray.errors import CGXError, PeerTimeoutError, TransportError
from cgx_ray.runtime_ext import shm
from cgx_ray.runtime_ext.mesh import Mesh, Parts, flat
from cgx_ray.runtime_ext.streams import Mark, Waiter, streams_of

# Torch's own time-out for Gloo: half an hour.
DEFAULT_TIMEOUT_S = 1800.0

# Channels that no group has: of the agreement, of minima within a step, and of greetings. Two minima that are under way
# at once may go through their rounds in different orders.
_AGREEMENT_CHANNEL, _STEP_CHANNEL, _GREETING_CHANNEL = 2**32 - 1, 2**32 - 2, 2**32 - 3

# Seconds after a step in which links send what it has left in their queues: at 30 Mbit/s 110 KB.
DRAIN_S = 3e-2

# Seconds in which a collective of Gloo ends with an error of its own after `abort`. It takes less than 1 ms.
HUNG_UP_S = 0.2
# Seconds that an exchange may go on after a rank has hung up, if its part was done. NCCL does not notice it.
LOST_S = 5.0


class Transport:
    """A `TransportLike` of all ranks of one engine. Only the engine's communication thread uses it, except `wake`.

    takes_many         False over Gloo, which has hung with some dozens of messages
    ranks              every rank is called by its own number
    nodes              by rank, the index of its node; ranks of one node share memory
    local              collectives among the ranks of this node; None if it has one rank, or with a simulated link
    inside             the same in the memory of a device, on all ranks or on none; None if the host makes them
    training_sums      for another thread
    step, group_index  the exchange that runs, for error messages; its messages go on a channel of the group's number
    timeout_s          seconds after which a peer that does not answer counts as gone
    sums_on_device     True if the vendor sums tensors of a device without a copy on the host
    enqueues_sums      True if a device sums its tensors by itself: neither the host nor a simulated link takes part
    has_given_up       True after `abort`: because of an error of this rank, or of another one
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        link: SimulatedLink | None = None,
        mesh: Mesh | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        cuda_group: dist.ProcessGroup | None = None,
        *,
        lifeline: Lifeline | None = None,
        sockets: GlooSockets | None = None,
    ) -> None:
        """Build on a group of this engine alone.

        group       Gloo's, with a time-out of its own; without `mesh` messages go through it as well
        cuda_group  has the same ranks and sums CUDA tensors; left out, `group` does, by way of the host
        lifeline    knows when another rank has failed, and informs others; left out, each rank finds out by itself
        sockets     those of `group`; left out, its collectives cannot be interrupted
        """
        self._group = group
        self._cuda_group = cuda_group if cuda_group is not None else group
        self.sums_on_device = cuda_group is not None
        self.enqueues_sums = self.sums_on_device and link is None
        self._delay = LinkDelay(link) if link is not None else None
        self._mesh = mesh
        self._lifeline, self._sockets = lifeline, sockets
        self.has_given_up, self._end_s = False, math.inf
        if lifeline is not None:
            lifeline.call_on_verdict(self.abort)
            lifeline.call_on_loss(self._note_loss)
        self.timeout_s = timeout_s
        self.takes_many = self.seals = mesh is not None
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self.ranks: Sequence[int] = range(self.world_size)
        shares = mesh is not None and link is None
        self.nodes = mesh.nodes if mesh is not None and shares else list(range(self.world_size))
        self.local = mesh.local if mesh is not None and shares else None
        self.inside: VendorGroup | None = None
        self.training_sums = TrainingSums(
            self.nodes, (group, self._cuda_group), timeout_s, lambda: self.has_lost_ranks, self._broken
        )
        self.step, self.group_index = 0, 0
        self._greetings = Greetings(mesh, self.rank, self.world_size, _GREETING_CHANNEL) if mesh is not None else None
        self._card_bytes = 0
        # Held back by the simulated link, in the order of calls.
        self._held: list[Held] = []
        self._waiter = Waiter(self.wake)

    def start(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        """See `TransportLike.start`."""
        return self._start(sends, receives, is_sealed=False)

    def start_sealed(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        """See `TransportLike.start_sealed`."""
        return self._start(sends, receives, is_sealed=True)

    def _start(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts], *, is_sealed: bool) -> Handle:
        post = partial(self._post, sends, receives, self.group_index, is_sealed=is_sealed)
        self._card_bytes += _total_bytes({peer: parts for peer, parts in sends.items() if self._is_away(peer)})
        return self._later(1, _total_bytes(sends), post) if sends else post()

    def _post(
        self, sends: Mapping[int, Parts], receives: Mapping[int, Parts], channel: int, *, is_sealed: bool
    ) -> Handle:
        try:
            if self._mesh is not None:
                return self._mesh.post(sends, receives, channel=channel, is_sealed=is_sealed)
            works = [dist.irecv(part, group=self._group, group_src=peer) for peer, part in flat(receives)]
            works += [dist.isend(part, group=self._group, group_dst=peer) for peer, part in flat(sends)]
        except RuntimeError as error:
            raise self._broken("a message", error) from error
        return works

    def _later(self, num_hops: float, num_bytes: float, post: Callable[[], Handle]) -> Handle:
        """Call `post`; with a simulated link, when it would have carried the bytes.

        In the order of calls, because collectives of the vendor must start in the same order on all ranks.
        """
        if self._delay is None:
            return post()
        held = Held(self._delay.due_s(self.step, num_hops, num_bytes), post)
        if self._held:
            held.due_s = max(held.due_s, self._held[-1].due_s)
        self._held.append(held)
        return held

    def _post_due(self) -> float:
        """Post what the simulated link would have carried by now, in order. Return when the next is due, else inf."""
        while self._held and self._held[0].due_s <= time.perf_counter():
            held = self._held.pop(0)
            held.handle = held.post()
        return self._held[0].due_s if self._held else math.inf

    def finish(self, handle: Handle, waited_s: float = 0.0) -> None:
        """See `TransportLike.finish`."""
        # Other ranks may wait for what is held back, so it goes out before this rank waits.
        while self._held and not self._is_over(handle):
            time.sleep(max(self._held[0].due_s - time.perf_counter(), 0.0))
            self._post_due()
        if isinstance(handle, Held):
            assert handle.handle is not None
            self.finish(handle.handle, waited_s)
            return
        if isinstance(handle, Mark):
            self._wait_for_mark(handle, waited_s)
            return
        name = handle.name if isinstance(handle, VendorCall) else "a message"
        began_s = time.perf_counter() - waited_s
        try:
            if isinstance(handle, int):
                assert self._mesh is not None
                self._mesh.wait(handle, self.timeout_s, waited_s)
                return
            if isinstance(handle, VendorCall):
                self._wait_for_call(handle)
                return
            for work in handle:
                assert work is not None
                work.wait()
        except RuntimeError as error:
            raise self._broken(name, error, began_s) from error

    def _wait_for_mark(self, mark: Mark, waited_s: float) -> None:
        what, began_s = "work of the device", time.perf_counter() - waited_s
        while not mark.is_done and not self.has_given_up:
            left_s = min(began_s + self.timeout_s, self._end_s) - time.perf_counter()
            if left_s <= 0:
                raise self._broken(what, RuntimeError("it is not done in time"), began_s)
            if self._mesh is None:
                self.watch(mark)
                time.sleep(1e-3)
            else:
                self.wait_any([mark], left_s)
        # Aborted sums of NCCL end too, without a result.
        if self.has_given_up:
            raise self._broken(what, RuntimeError("the connections are closed"))

    def _wait_for_call(self, call: VendorCall) -> None:
        """Wait for a collective of the vendor. Raise RuntimeError if it does not end after `abort`.

        Gloo misses the end of a connection now and then, and would wait for its time-out. In its TCP transport
        `Pair::signalException` passes over messages that are being read or wait to be written.
        """
        while not call.ended.wait(HUNG_UP_S):
            if self.has_given_up:
                raise RuntimeError("the connections are closed")
        call.work.wait()

    def wait_any(self, handles: Sequence[Handle], timeout_s: float) -> int | None:
        """Wait until one of `handles` is done and return the place of the first such; `finish` then returns at once.

        Returns None after `timeout_s` or sooner, if `wake` is called meanwhile or was called since the last return.
        Over Gloo, whose messages cannot be asked, it returns 0 at once: there `finish` waits.

        Raises TransportError after `abort`, and LOST_S after a rank has hung up.
        """
        if self.has_given_up:
            raise self._broken("the exchange", RuntimeError("the connections are closed"))
        if self._mesh is None:
            return 0
        timeout_s = min(timeout_s, min(self._post_due(), self._end_s) - time.perf_counter())
        posted = [one.handle if isinstance(one, Held) else one for one in handles]
        for one in posted:
            if isinstance(one, Mark):
                self.watch(one)
        ended = [place for place, one in enumerate(posted) if not isinstance(one, int) and self._is_over(one)][:1]
        tickets = [one for one in posted if isinstance(one, int)]
        found = self._mesh.wait_any(tickets, 0.0 if ended else max(timeout_s, 0.0))
        if found is not None:
            ended.append(posted.index(found))
        if handles and not ended and time.perf_counter() >= self._end_s:
            raise self._broken("the exchange", RuntimeError("a rank has hung up"))
        return min(ended, default=None)

    def _note_loss(self) -> None:
        self._end_s = min(self._end_s, time.perf_counter() + LOST_S)
        self.wake()

    def _is_over(self, handle: Handle | None) -> bool:
        """Return True if `finish` would return at once. Gloo's messages cannot be asked."""
        if isinstance(handle, Held):
            return self._is_over(handle.handle)
        if isinstance(handle, VendorCall):
            return handle.ended.is_set()
        if isinstance(handle, Mark):
            return handle.is_done
        return handle == [] or (isinstance(handle, int) and self._mesh is not None and self._mesh.is_over(handle))

    def watch(self, mark: Mark) -> None:
        """Call `wake` once the device has come to `mark`. `wait_any` does so with those that it is given."""
        self._waiter.watch(mark)

    def wake(self) -> None:
        """End the wait of another thread in `wait_any`, now or the next one."""
        if self._mesh is not None:
            self._mesh.wake()

    def all_reduce(self, values_N: Tensor) -> Iterator[Handle]:
        """Sum over ranks, in place: through shared memory if all ranks are on one host, else by the vendor's ring.

        The vendor always sums CUDA tensors, after all that this thread has enqueued for them. The handle is done when
        the device has their sum.
        """
        yield self._later(2 * (self.world_size - 1), self.count_sum(values_N), partial(self._start_sum, values_N))

    def count_sum(self, values_N: Tensor) -> int:
        """Count the card bytes of a sum by the vendor's ring, and return the bytes that this rank sends for it."""
        num_bytes = ring_bytes(values_N.numel() * values_N.element_size(), self.world_size)
        # Gloo's ring sends to the rank before. NCCL's leaves each node once, as this if a node's ranks are in a row.
        self._card_bytes += num_bytes * self._is_away(self.rank - 1)
        return num_bytes

    def _start_sum(self, values_N: Tensor) -> Handle:
        is_local = self.local is not None and self.local.size == self.world_size
        began_s = time.perf_counter()
        try:
            if self.local is not None and is_local and values_N.is_cpu and values_N.dtype in shm.DTYPES:
                self.local.all_reduce(values_N)
                return []
            if values_N.is_cuda:
                return self._enqueue_sum(values_N)
            return self.watched("an all-reduce", dist.all_reduce(values_N, group=self._group, async_op=True))
        except RuntimeError as error:
            raise self._broken("an all-reduce", error, began_s) from error

    def _enqueue_sum(self, values_N: Tensor) -> Mark:
        streams = streams_of(values_N.device)
        # Apart, because a sum takes as long as the network does: codecs of other groups must not wait for it.
        with streams.apart():
            dist.all_reduce(values_N, group=self._cuda_group)
            return streams.mark()

    def broadcast(self, message: Tensor, root: int) -> Iterator[Handle]:
        """See `TransportLike.broadcast`; by the vendor's tree."""
        hops = math.log2(self.world_size)
        self._card_bytes += message.numel() * sum(
            map(self._is_away, binomial_children(self.rank, root, self.world_size))
        )
        yield self._later(hops, hops * message.numel(), partial(self._start_broadcast, message, root))

    def _start_broadcast(self, message: Tensor, root: int) -> Handle:
        try:
            work = dist.broadcast(message, group=self._group, group_src=root, async_op=True)
            return self.watched("a broadcast", work)
        except RuntimeError as error:
            raise self._broken("a broadcast", error) from error

    def watched(self, name: str, work: dist.Work | None) -> VendorCall:
        """Let the end of `work`, a collective of the vendor, wake `wait_any`, and return its handle. For any thread."""
        assert work is not None
        ended = threading.Event()

        def end(done: object) -> None:
            ended.set()
            self.wake()

        work.get_future().add_done_callback(end)
        return VendorCall(name, work, ended)

    @property
    def lag_s(self) -> Mapping[int, float]:
        """Return the lags of the last greeting (`Greetings`), plus a simulated link's latency; none without a mesh."""
        later_s = self._delay.latency_s if self._delay is not None else 0.0
        return {peer: lag + later_s for peer, lag in self._greetings.lag_s.items()} if self._greetings else {}

    def greet(self, is_urgent: Callable[[], bool]) -> None:
        """Greet other ranks, see `Greetings.greet`.

        is_urgent  the next step begins; `wake` was called after that. Else this waits for DRAIN_S before it sends

        Call it between steps, on all ranks: no gradients queue in front of the bytes then, so the lags of two ranks to
        each other add up to one round trip of an idle link.
        """
        if self._greetings is None:
            return
        send_s = time.perf_counter() + DRAIN_S
        while not is_urgent() and (left_s := send_s - time.perf_counter()) > 0:
            self.wait_any([], left_s)
        self._greetings.greet()

    def receive_greetings(self) -> None:
        """Take the greetings that were sent before this step, for `lag_s`. Call it after each step, on all ranks."""
        if self._greetings is not None:
            with self.reporting("a greeting between steps"):
                self._greetings.receive(self.timeout_s)

    def start_minimum(self, values_K: Tensor, *, within_step: bool = False) -> Callable[[], Tensor]:
        """Begin an element-wise minimum over ranks, of int64 or uint8, and return a function that waits for it.

        Do not use `values_K` before that function has returned. One minimum `within_step` and another one may be under
        way at once.
        """
        with self.reporting("the agreement"):
            if self._mesh is None:
                work = dist.all_reduce(values_K, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
                return partial(self._finish_vendor_minimum, self.watched("the agreement", work), values_K)
            channel = _STEP_CHANNEL if within_step else _AGREEMENT_CHANNEL
            ticket = self._mesh.post_minimum(values_K, partners(self.rank, self.world_size), channel)
            return partial(self._finish_minimum, self._mesh, ticket, values_K)

    def _finish_vendor_minimum(self, call: VendorCall, values_K: Tensor) -> Tensor:
        with self.reporting(call.name):
            self._wait_for_call(call)
        return values_K

    def _finish_minimum(self, mesh: Mesh, ticket: int, values_K: Tensor) -> Tensor:
        with self.reporting("the agreement"):
            mesh.wait(ticket, self.timeout_s)
        return values_K

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Turn a library's RuntimeError within the block into a TransportError with rank, step and group."""
        began_s = time.perf_counter()
        try:
            yield
        except CGXError:
            raise
        except RuntimeError as error:
            raise self._broken(what, error, began_s) from error

    def take_bursts(self) -> list[tuple[int, int, float]]:
        """See `Mesh.take_bursts`, with a simulated link `LinkDelay.take_bursts`; else empty over torch.distributed."""
        source = self._delay or self._mesh
        return source.take_bursts() if source is not None else []

    @property
    def num_local(self) -> int:
        """Number of ranks on this node, with this one."""
        return self.nodes.count(self.nodes[self.rank])

    @property
    def has_lost_ranks(self) -> bool:
        """True once a rank has failed, is silent, or has hung up without a goodbye, as far as this one knows."""
        return self.has_given_up or (self._lifeline is not None and self._lifeline.lost is not None)

    def take_card_bytes(self) -> int:
        """Return the bytes that this rank has sent to other nodes since the last call, in messages and collectives.

        Minima are left out.
        """
        taken, self._card_bytes = self._card_bytes, 0
        return taken

    def close(self) -> None:
        """Disconnect. Peers that still wait for this rank fail at once, except in collectives of the vendor."""
        self._waiter.close()
        if self._mesh is not None:
            self._mesh.close()

    def give_up(self, why: str) -> None:
        """Send the reason to all ranks, then `abort`."""
        if self._lifeline is not None:
            self._lifeline.report_failure(why)
        self.abort()

    def abort(self) -> None:
        """Disconnect from all ranks, also in collectives of the vendor. What is under way fails. For any thread."""
        self.has_given_up = True
        self.close()
        if self._sockets is not None:
            self._sockets.shut_down()
        if self._cuda_group is not self._group:
            self._cuda_group.abort()
        if self.inside is not None:
            self.inside.abort()

    def explained(self, error: RuntimeError) -> TransportError:
        """Return the error that stands for `error`, which came after `abort`: with the first error of all ranks."""
        return self._broken("the exchange", error)

    def _is_away(self, peer: int) -> bool:
        return self.nodes[peer] != self.nodes[self.rank]

    def _broken(self, what: str, error: RuntimeError, began_s: float = math.inf) -> TransportError:
        """Return the error to raise. `began_s`: when this rank began to wait, by `time.perf_counter`, if it did."""
        # Gloo and NCCL raise the same type whatever has failed. Clocks of other libraries differ a little.
        is_late = time.perf_counter() - began_s >= 0.99 * self.timeout_s
        cause = self._lifeline.wait(WORDS_S) if self._lifeline is not None else None
        hint = (
            f"the first error: {cause}"
            if cause is not None
            else "look at the log of the other ranks for the first error"
        )
        return (PeerTimeoutError if is_late else TransportError)(
            f"rank {self.rank}, step {self.step}, group {self.group_index}: {what} did not get through ({error}); "
            f"{hint}"
        )


def _total_bytes(messages: Mapping[int, Parts]) -> int:
    return sum(part.numel() * part.element_size() for _, part in flat(messages))

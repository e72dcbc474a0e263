"""AR-Topk: one rank's top-k indices, and the sum of all ranks' values at them (Flexible Communication, Alg. 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import HOST, Codec, Memory, is_finite, nan_if_not_finite
from cgx_ray.codecs.sparse import Selection, Sparse
from cgx_ray.codecs.wire import HEADER_BYTES, Message, Room, Stamp
from cgx_ray.collectives.dense import Dense
from cgx_ray.collectives.exchange import Exchange
from cgx_ray.collectives.parcel import Step, copied_out
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike, send_and_receive
from cgx_ray.collectives.tree import Tree
from cgx_ray.plan import NONE

# Turns of the round-robin per trial. The first turn sends what the other choice left in the residuals; only the second
# one is measured.
_TRIAL_TURNS = 2
# Trials that one cycle is as long as. Two of them are trials, so the worse choice is in force in 1 step of 20.
_CYCLE_TRIALS = 20


class StarOrVar:
    """Chooses STAR or VAR for the next step, by which of them sends more of the gradient's energy.

    Each choice is tried for 2N steps. The one with the larger gain, summed over the second half of its trial, stays for
    the rest of 40N steps; then the trials start again. If the gains are equal it is STAR, which takes a latency less.

    Departure from the paper (Flexible Communication), which leaves it to future work to switch by test performance:
    that needs a test set and cannot tell the choices apart within an epoch. The compression gain |g_c|^2 / |g_e|^2 of
    the average is known at every step: the share of the error-fed gradient's energy that crosses the network now and
    not later. All ranks see the same sums, so they agree without a message.

    Checkpoints do not contain it: every new plan, every resumed run and every new density of dgc's warm-up begins with
    the trials.
    """

    def __init__(self, world_size: int) -> None:
        self._trial_steps = _TRIAL_TURNS * world_size
        self._step = 0
        self._gains = {False: 0.0, True: 0.0}

    @property
    def by_norm(self) -> bool:
        """True for VAR in the next step."""
        trial = self._step // self._trial_steps
        return self._gains[True] > self._gains[False] if trial > 1 else trial == 1

    def note(self, gain: float) -> None:
        """Record the gain of a step. Call it once per step."""
        if self._step == 0:
            self._gains = {False: 0.0, True: 0.0}
        trial, place = divmod(self._step, self._trial_steps)
        if trial <= 1 and place * _TRIAL_TURNS >= self._trial_steps:
            self._gains[self.by_norm] += gain
        self._step = (self._step + 1) % (_CYCLE_TRIALS * self._trial_steps)


def compression_gain(average_K: Tensor, fed_energy: float) -> float:
    """Return |g_c|^2 / |g_e|^2, or 0 where it has no meaning, as in steps that are not finite.

    The float is the same on all ranks: it is computed from a sum of integers, which does not depend on processor and
    number of threads as a sum of floats does.
    """
    largest = float(average_K.abs().max()) if average_K.numel() else 0.0
    if not (0 < fed_energy < math.inf and 0 < largest < math.inf):
        return 0.0
    _, exponent = math.frexp(largest)
    quantized_K = (average_K.double() * math.ldexp(1.0, 15 - exponent)).round().long()
    return math.ldexp(int(quantized_K.square().sum()), 2 * exponent - 30) / fed_energy


class ArTopk(Exchange):
    """Cost of the sum, 2(N-1) a + 2(N-1)/N m_v b by the vendor's ring or that of `Tree`, and a log N + b log N m_i for
    the broadcast; m_v: bytes of the values, m_i: bytes of the packed indices.

    1. All ranks agree on the rank that broadcasts. "star": ranks take turns by step. "var": the rank whose top-k
       elements have the largest norm, for which all select and send each other these norms, in one more latency.
       "auto": one of the two, see `StarOrVar`; it sums one float more.
    2. This rank broadcasts the indices of its top-k elements.
    3. All ranks sum their values at these indices. The other values stay in their residuals.

    Departure from Algorithm 1: with "star" only the broadcasting rank selects, since no rank uses the others' indices.
    """

    def __init__(self, codec: Codec, numel: int, transport: TransportLike, choice: str, *, by_tree: bool) -> None:
        assert isinstance(codec, Sparse)
        assert choice in ("star", "var", "auto")
        super().__init__(transport)
        self._codec = codec
        num_kept = codec.num_kept(numel)
        index_bytes = codec.index_bytes(numel)
        self._message = Message(index_bytes, Room(HEADER_BYTES + index_bytes, codec.device))
        self._selection = Selection(num_kept, codec.device)
        self._choice = choice
        self.star_or_var = StarOrVar(transport.world_size) if choice == "auto" else None
        # The values, a number that is NaN if any rank's gradient is not finite, and for `StarOrVar` |g_e|^2.
        num_sums = num_kept + 1 + (self.star_or_var is not None)
        self._sums = torch.empty(num_sums, dtype=torch.float32, device=codec.device)
        raw = make_codec(NONE, device=codec.device)
        self._average = Tree(raw, num_sums, transport) if by_tree else Dense(4 * num_sums, transport)
        self._norms = [Message(4) for _ in range(transport.world_size)]
        self.sent_bytes = self._sent_bytes(by_norm=choice == "var")

    def _sent_bytes(self, *, by_norm: bool) -> int:
        indices = math.log2(self._transport.world_size) * self._message.wire.numel()
        norms = (HEADER_BYTES + 4) * len(self._transport.peers) if by_norm else 0
        return round(self._average.sent_bytes + indices + norms)

    def turns(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> Iterator[Handle]:
        """See `Exchange.turns`."""
        assert memory is not None
        self.keeps_order = True
        step = Step(grad_N=grad_N, memory=memory, stamp=stamp, seed=seed, phases=phases)
        fed_N = self._codec.feed(grad_N, memory)
        by_norm = self.star_or_var.by_norm if self.star_or_var is not None else self._choice == "var"
        self.sent_bytes = self._sent_bytes(by_norm=by_norm)
        rank, root = self._transport.rank, stamp.step % self._transport.world_size
        if by_norm or root == rank:
            self._codec.select(fed_N, self._selection, step.key(rank, 0))
        if by_norm:
            yield from self._exchange_norms(fed_N.numel(), step)
            root = self._largest()
        yield from self._broadcast_indices(fed_N.numel(), root, step)

        index_K, values_K = self._selection.index_K.long(), self._sums[: self._selection.num_kept]
        # With indices of another rank a GPU must not be led out of its memory before the host has heard of it, below.
        is_broken = self._selection.is_broken(grad_N.numel()) if self._codec.device != HOST else None
        if is_broken is not None:
            index_K.clamp_(0, grad_N.numel() - 1)
        # Behind the last index there are zeros; the sums for these are not used.
        torch.index_select(fed_N, 0, index_K, out=values_K)
        # An Inf of this rank may lie at an index that the broadcasting rank did not choose.
        self._sums[self._selection.num_kept] = nan_if_not_finite(fed_N)
        if self.star_or_var is not None:
            self._sums[-1] = fed_N.norm().square()
        averaging = self._average.turns(self._sums, None, replace(stamp, codec="none"), seed, phases)
        handle = next(averaging, None)
        self.keeps_order = False
        if handle is not None:
            yield handle
            phases.resume()
            yield from averaging

        count = self._count(grad_N.numel(), is_broken)
        if self.star_or_var is not None:
            self.star_or_var.note(compression_gain(values_K[:count], float(self._sums[-1])))
        if is_finite(self._sums[: self._selection.num_kept + 1]):
            self._codec.forget(self._selection, memory)
            grad_N.zero_()
            grad_N.index_copy_(0, index_K[:count], values_K[:count])
        else:
            grad_N.fill_(math.nan)
        phases.lap("decode")

    def _count(self, numel: int, is_broken: Tensor | None) -> int:
        """Return the number of indices, when the device has found them. Raises WireError if the message was broken."""
        selection = self._selection
        if is_broken is None:
            return int(selection.count_1)
        count, fault = torch.cat([selection.count_1, is_broken.view(1)]).tolist()
        if fault:
            raise selection.broken(numel, ValueError(f"it does not hold {count} indices that ascend below {numel}"))
        return int(count)

    def _exchange_norms(self, numel: int, step: Step) -> Iterator[Handle]:
        """Tell all ranks the norm of what this rank has selected."""
        rank, first = self._transport.rank, replace(step.stamp, phase=1)
        self._norms[rank].payload.view(torch.float32).copy_(self._selection.value_K.norm())
        self._norms[rank].seal(first, numel)
        step.phases.lap("encode")
        received = {peer: norm for peer, norm in enumerate(self._norms) if peer != rank}
        sends = dict.fromkeys(received, self._norms[rank].wire)
        with step.phases.round():
            yield from send_and_receive(self._transport, sends, {peer: norm.wire for peer, norm in received.items()})
        for sender, norm in received.items():
            norm.check(first, numel, self._transport.ranks[sender])

    def _largest(self) -> int:
        """Return the rank with the largest norm, the first one if several are equal. NaN counts as the largest."""
        norms = torch.cat([norm.payload.view(torch.float32) for norm in self._norms])
        return int(torch.where(norms.isnan(), math.inf, norms).argmax())

    def _broadcast_indices(self, numel: int, root: int, step: Step) -> Iterator[Handle]:
        """Fill the selection's indices with those that `root` has selected."""
        selection = self._selection
        if root == self._transport.rank:
            selection.pack(numel, self._message.payload)
            yield from copied_out(self._message.room, step.phases)
            self._message.seal(step.stamp, numel)
        step.phases.lap("encode")
        with step.phases.round():
            yield from self._transport.broadcast(self._message.wire, root)
        self._message.check(step.stamp, numel, self._transport.ranks[root])
        selection.unpack(numel, self._message.payload)

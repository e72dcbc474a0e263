"""AR-Topk: one worker's top-k indices, everyone's values at them, summed (Flexible Communication, Alg. 1)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import Codec, Memory, is_finite, poison
from cgx_ray.codecs.sparse import Selection, Sparse
from cgx_ray.codecs.wire import HEADER_BYTES, Message, Stamp
from cgx_ray.collectives.dense import Dense
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Transport
from cgx_ray.collectives.tree import Tree
from cgx_ray.plan import NONE
from cgx_ray.runtime_ext import ops

# A trial is two turns of the round-robin, the first one to work off what the other choice left behind, and a cycle
# has 20 trials: the worse choice is in force in one step of 20.
_TRIAL_TURNS = 2
_CYCLE_TRIALS = 20


class Trials:
    """Whether STAR or VAR chooses the broadcasting worker, by which of them sends more of the gradient.

    The paper leaves it to future work to switch by test performance. That needs a test set and does not tell one
    choice from the other within an epoch; what can be measured at every step is the compression gain |g_c|^2 / |g_e|^2
    of the average: the share of the error-fed gradient's energy that crosses the network now and not later. Each choice
    is tried in turn, then the one with the larger gain stays for the rest of a cycle; of equals STAR, which takes a
    latency less. All ranks see the same sums, so they agree without a message of their own. Nothing of it is in a
    checkpoint: every new plan, every resumed run and every new density of dgc's warm-up begin with the trials.
    """

    def __init__(self, world_size: int) -> None:
        self._trial_steps = _TRIAL_TURNS * world_size
        self._step = 0
        self._gains = {False: 0.0, True: 0.0}

    @property
    def by_norm(self) -> bool:
        """True for VAR in the step to come."""
        trial = self._step // self._trial_steps
        return self._gains[True] > self._gains[False] if trial > 1 else trial == 1

    def note(self, gain: float) -> None:
        """Take note of a step's gain; call it once a step."""
        if self._step == 0:
            self._gains = {False: 0.0, True: 0.0}
        trial, place = divmod(self._step, self._trial_steps)
        if trial <= 1 and place * _TRIAL_TURNS >= self._trial_steps:
            self._gains[self.by_norm] += gain
        self._step = (self._step + 1) % (_CYCLE_TRIALS * self._trial_steps)


class ArTopk:
    """Cost a log N + b log N m_i for the indices, and of `Tree` or the vendor's ring for m_v, the bytes of the values.

    The broadcasting worker goes round-robin by step ("star") or is the one with the largest error-fed gradient
    ("var"), for which all send each other their norms: one latency more; "auto" is one or the other, see `Trials`, for
    which a float more is summed. Departure from Algorithm 1: only the broadcasting worker selects, as nobody uses the
    others' indices.
    """

    def __init__(self, codec: Codec, numel: int, transport: Transport, choice: str, *, by_tree: bool) -> None:
        assert isinstance(codec, Sparse)
        assert choice in ("star", "var", "auto")
        self._codec = codec
        self._transport = transport
        num_kept = codec.spec.num_kept(numel)
        self._message = Message(codec.spec.index_bytes(numel), codec.device)
        self._selection = Selection(num_kept, codec.device)
        self._choice = choice
        self.trials = Trials(transport.world_size) if choice == "auto" else None
        # Values, poison, and for the trials |g_e|^2: what all ranks must see the same sum of.
        num_sums = num_kept + 1 + (self.trials is not None)
        self._sums = torch.empty(num_sums, device=codec.device)
        raw = make_codec(NONE, device=codec.device)
        self._average = Tree(raw, num_sums, transport) if by_tree else Dense(4 * num_sums, transport)
        self._norms = [Message(4) for _ in range(transport.world_size)]
        self.sent_bytes = self._sent_bytes(by_norm=choice == "var")

    def _sent_bytes(self, *, by_norm: bool) -> int:
        indices = math.log2(self._transport.world_size) * self._message.wire.numel()
        norms = (HEADER_BYTES + 4) * len(self._transport.peers) if by_norm else 0
        return round(self._average.sent_bytes + indices + norms)

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        assert memory is not None
        numel, selection = grad_N.numel(), self._selection
        values_K = self._sums[: selection.num_kept]
        fed_N = self._codec.feed(grad_N, memory)
        by_norm = self.trials.by_norm if self.trials is not None else self._choice == "var"
        self.sent_bytes = self._sent_bytes(by_norm=by_norm)
        root = self._largest(fed_N, stamp, phases) if by_norm else stamp.step % self._transport.world_size
        if root == self._transport.rank:
            self._codec.select(fed_N, selection, ops.message_key(seed, stamp.step, stamp.group, root, 0))
            selection.pack(numel, self._message.payload)
            self._message.seal(stamp, numel)
        phases.lap("encode")
        self._transport.broadcast(self._message.wire, root)
        phases.lap("exchange")

        self._message.check(stamp, numel, self._transport.ranks[root])
        selection.unpack(numel, self._message.payload)
        # Behind the last index there are zeros: what is summed for these is not used.
        index_K = selection.index_K.long()
        torch.index_select(fed_N, 0, index_K, out=values_K)
        # A worker's Inf may lie at an index that the broadcaster did not choose.
        self._sums[selection.num_kept] = poison(fed_N)
        if self.trials is not None:
            self._sums[-1] = fed_N.norm().square()
        self._average.run(self._sums, None, replace(stamp, codec="none"), seed, phases)

        count = int(selection.count_1)
        if self.trials is not None:
            self.trials.note(compression_gain(values_K[:count], float(self._sums[-1])))
        if is_finite(self._sums[: selection.num_kept + 1]):
            self._codec.forget(selection, memory)
            grad_N.zero_()
            grad_N.index_copy_(0, index_K[:count], values_K[:count])
        else:
            grad_N.fill_(math.nan)
        phases.lap("decode")

    def _largest(self, fed_N: Tensor, stamp: Stamp, phases: Phases) -> int:
        """The rank with the largest gradient, the first one of equals. One that is not finite counts as larger."""
        rank, first = self._transport.rank, replace(stamp, phase=1)
        self._norms[rank].payload.view(torch.float32).copy_(fed_N.norm())
        self._norms[rank].seal(first, fed_N.numel())
        phases.lap("encode")
        received = {peer: norm for peer, norm in enumerate(self._norms) if peer != rank}
        self._transport.exchange(
            dict.fromkeys(received, self._norms[rank].wire), {peer: norm.wire for peer, norm in received.items()}
        )
        phases.lap("exchange")
        for sender, norm in received.items():
            norm.check(first, fed_N.numel(), self._transport.ranks[sender])
        norms = torch.cat([norm.payload.view(torch.float32) for norm in self._norms])
        return int(torch.where(norms.isnan(), math.inf, norms).argmax())


def compression_gain(average_K: Tensor, fed_energy: float) -> float:
    """|g_c|^2 / |g_e|^2; 0 where it says nothing, as in steps that are not finite.

    The same float on all ranks: a sum of whole numbers does not depend on processors and threads, one of floats does.
    """
    largest = float(average_K.abs().max()) if average_K.numel() else 0.0
    if not (0 < fed_energy < math.inf and 0 < largest < math.inf):
        return 0.0
    _, exponent = math.frexp(largest)
    quantized_K = torch.ldexp(average_K.double(), torch.tensor(15 - exponent)).round().long()
    return math.ldexp(int(quantized_K.square().sum()), 2 * exponent - 30) / fed_energy

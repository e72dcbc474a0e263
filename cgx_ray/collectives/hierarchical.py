"""Hierarchical: sum inside the node, average between nodes by any scheme, every local rank its share, gather inside.

N ranks on n nodes, L of them on this one, C on the smallest
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import POWERSGD_Q, RESIDUALS, Codec, Memory
from cgx_ray.codecs.powersgd import PowerSgd
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.exchange import Exchange
from cgx_ray.collectives.parcel import Step, chunk_bounds
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.sra import Sra
from cgx_ray.collectives.subset import Direct, Subset
from cgx_ray.collectives.transport import Transport
from cgx_ray.plan import Intra, Layer, Scheme
from cgx_ray.runtime_ext import ops
from cgx_ray.runtime_ext.shm import LocalGroup

# Which of a step's random numbers: those of the C exchanges between nodes, of each node, and of what all nodes encode.
_BETWEEN, _INSIDE, _SHARED = range(3)


def has_inside(nodes: Sequence[int], scheme: Scheme) -> bool:
    """False where a hierarchical exchange is a flat one: one rank a node, or `dense` on a single node."""
    num_nodes = len(set(nodes))
    return num_nodes < len(nodes) and not (num_nodes == 1 and scheme is Scheme.DENSE)


class Hierarchical:
    """Cost that inside, 2 a' + 2(L-1)/L M b' dense or, compressed, m in place of M, and that of the scheme for n ranks
    and the whole group, b being that of a node's network card, which C ranks share.

    A group is cut into C chunks. Of each node, rank i of the first C carries chunk i: it gets the sum over the node,
    averages it with the ranks i of the other nodes, and gives the result to its node. Other ranks only hand in and get
    back. On a single node nothing is left between nodes: what is owed is paid, and with `dense` nothing is dropped.

    Memory keeps the unit of the flat schemes: the mean over all N ranks is what the averages still lack, so that plans
    may change either way. Sums over a node, not means, are exchanged where codecs remember, and the result is
    multiplied by n/N: what a carrier's encoding drops of a sum is then what it owes of N gradients.
    - `dense` inside: only carriers owe, each in its chunk. What others of the node owe, or their momentum, is handed
      over before the first step.
    - `compressed` inside: a rank also owes what its messages inside drop, as in `Sra`. What encoding the average drops
      is the same on all nodes, and each of the n carriers of a chunk owes it N/n times.

    Codecs that remember nothing get means: what fp16 can hold does not overflow. For the others a sum may, if values
    travel in fp16 (`value_bits=16`): from 65520 on, L times sooner than flat. Gradients that travel as they are, in 16
    bits, are divided before they are summed.

    A codec sees a chunk as its group: topk keeps a share of each, dgc clips each by clip / sqrt(N), as sums of L
    gradients over a C-th of the elements are about as long as one gradient. powersgd's chunks end where layers do.
    """

    def __init__(
        self,
        codec: Codec,
        intra: Intra,
        numel: int,
        transport: Transport,
        make_inner: Callable[[Codec, int, Transport], Exchange],
    ) -> None:
        """`make_inner`: the scheme between nodes, for a codec, a number of elements, and some ranks of `transport`."""
        members = _members(transport.nodes)
        here = next(ranks for ranks in members if transport.rank in ranks)
        num_chunks = min(map(len, members))
        self._place, self._node = here.index(transport.rank), members.index(here)
        chunks = _chunks(codec, numel, num_chunks)
        bounds = chunks + [(numel, numel)] * (len(here) - num_chunks)
        self._own = start, stop = bounds[self._place]
        self._scale = Fraction(len(members), transport.world_size)

        self._codec = make_codec(codec.spec, _cut(codec.layers, start, stop), codec.world_size)
        self._inner: Exchange | None = None
        if len(members) > 1 and stop > start:
            carriers = Subset(transport, [others[self._place] for others in members])
            self._inner = make_inner(self._codec, stop - start, carriers)
        self.sent_bytes = self._inner.sent_bytes if self._inner is not None else 0
        self._q_bounds = _q_bounds(codec, numel, self._own)

        inside = Subset(transport, here)
        self._inside: _Dense | _Compressed
        if intra is Intra.DENSE:
            self._inside = _Dense(transport, transport.local or Direct(inside), bounds)
        else:
            self._inside = _Compressed(Sra(codec, numel, inside, bounds), numel, float(1 / self._scale), self._own)

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`. Without a codec `grad_N` may be of any dtype."""
        step = Step(grad_N=grad_N, memory=memory, stamp=stamp, seed=self._seed(seed, stamp, _INSIDE), phases=phases)
        own_N = grad_N[slice(*self._own)]
        if grad_N.element_size() == 2:
            self._rescale(grad_N)
        self._inside.reduce(step)
        if memory is None and grad_N.element_size() > 2:
            self._rescale(own_N)
        part = self._part(memory) if memory is not None else None
        if self._inner is not None:
            self._inner.run(own_N, part, stamp, self._seed(seed, stamp, _BETWEEN), phases)
            self.sent_bytes = self._inner.sent_bytes
        elif part is not None:
            self._pay(own_N, part)
        if memory is not None:
            self._rescale(own_N)
        phases.lap("decode")
        self._inside.share(replace(step, seed=self._seed(seed, stamp, _SHARED)))

    def _rescale(self, values_N: Tensor) -> None:
        """Multiply by n/N; exactly, where the result is a number of that type."""
        values_N.div_(self._scale.denominator)
        if self._scale.numerator > 1:
            values_N.mul_(self._scale.numerator)

    def _pay(self, own_N: Tensor, memory: Memory) -> None:
        """Nothing is encoded between nodes: send all that there is, as a codec does that drops nothing."""
        own_N.copy_(self._codec.feed(own_N, memory))
        for kind, value in memory.next.items():
            if kind != POWERSGD_Q:
                value.zero_()

    def _part(self, memory: Memory) -> Memory:
        """Views of the own chunk's memory."""
        part = memory.part(*self._own)
        if POWERSGD_Q not in memory.now:
            return part
        now, next_ = (kinds[POWERSGD_Q][slice(*self._q_bounds)] for kinds in (memory.now, memory.next))
        return Memory({**part.now, POWERSGD_Q: now}, {**part.next, POWERSGD_Q: next_}, memory.scale)

    def _seed(self, seed: int, stamp: Stamp, use: int) -> int:
        """Ranks that exchange with each other have the same, and no others but for what all nodes must encode alike."""
        who = {_BETWEEN: self._place, _INSIDE: self._node, _SHARED: 0}[use]
        return ops.message_key(seed, stamp.step, stamp.group, who, use)


class _Dense:
    """Inside a node: sums as they are, in shared memory or by messages."""

    def __init__(self, transport: Transport, local: LocalGroup | Direct, bounds: Sequence[tuple[int, int]]) -> None:
        self._transport = transport
        self._local = local
        self._bounds = bounds
        self._has_taken_over = False

    def reduce(self, step: Step) -> None:
        """Replace the own chunk by its sum over the node."""
        if step.memory is not None:
            if not self._has_taken_over:
                self._take_over(step.memory)
            # Others' chunks are never encoded here.
            for kind, value in step.memory.next.items():
                value.copy_(step.memory.now[kind]) if kind == POWERSGD_Q else value.zero_()
        step.phases.lap("encode")
        self._reduce_scatter(step.grad_N)
        step.phases.lap("exchange")

    def share(self, step: Step) -> None:
        """Give the own chunk to the node."""
        with self._transport.reporting("a gathering inside the node"):
            self._local.all_gather(step.grad_N, self._bounds)
        step.phases.lap("exchange")

    def _take_over(self, memory: Memory) -> None:
        """Once: give what is remembered to who carries it. No sum changes, so the step need not succeed."""
        start, stop = self._bounds[self._local.rank]
        for kind, value in memory.now.items():
            if kind != POWERSGD_Q:
                self._reduce_scatter(value)
                value[:start].zero_()
                value[stop:].zero_()
        self._has_taken_over = True

    def _reduce_scatter(self, values_N: Tensor) -> None:
        with self._transport.reporting("a sum inside the node"):
            self._local.reduce_scatter(values_N, self._bounds)


class _Compressed:
    """Inside a node: the two halves of `Sra`."""

    def __init__(self, sra: Sra, numel: int, num_debtors: float, own: tuple[int, int]) -> None:
        """`num_debtors`: how many times this rank owes what encoding the average of its chunk drops."""
        self._sra = sra
        self._num_debtors = num_debtors
        self._own = slice(*own)
        self._dropped_N = torch.zeros(numel)

    def reduce(self, step: Step) -> None:
        """Replace the own chunk by its sum over the node."""
        self._sra.scatter(step)
        self._sra.reduce(step)

    def share(self, step: Step) -> None:
        """Give the own chunk to the node, and use what it gets."""
        if step.memory is None:
            self._sra.share(step, self._num_debtors)
            return
        # No residual is added: it is another one on each node, which would then get another average.
        self._sra.share(replace(step, memory=Memory({}, {RESIDUALS: self._dropped_N})), self._num_debtors)
        step.memory.next_N[self._own].add_(self._dropped_N[self._own])


def _members(nodes: Sequence[int]) -> list[list[int]]:
    """The ranks of each node, ascending."""
    return [[rank for rank, node in enumerate(nodes) if node == wanted] for wanted in sorted(set(nodes))]


def _chunks(codec: Codec, numel: int, num_chunks: int) -> list[tuple[int, int]]:
    """Near-equal runs of what `codec` may encode by itself."""
    if not isinstance(codec, PowerSgd):
        return chunk_bounds(numel, num_chunks, codec.granule)
    borders = [shape.start for shape in codec.shapes(numel)] + [numel]
    cuts = [min(borders, key=lambda border: abs(border - numel * i / num_chunks)) for i in range(num_chunks + 1)]
    return list(itertools.pairwise(cuts))


def _cut(layers: Sequence[Layer], start: int, stop: int) -> list[Layer]:
    """What of `layers` lies in [start, stop); a part of a layer counts as one without rows."""
    parts, first = [], 0
    for layer in layers:
        numel = min(first + layer.numel, stop) - max(first, start)
        if numel == layer.numel:
            parts.append(layer)
        elif numel > 0:
            parts.append(replace(layer, numel=numel, ndim=1, num_rows=None))
        first += layer.numel
    return parts


def _q_bounds(codec: Codec, numel: int, own: tuple[int, int]) -> tuple[int, int]:
    """Where PowerSGD's Q of the layers in `own` lies in that of the group."""
    if not isinstance(codec, PowerSgd):
        return 0, 0
    shapes = codec.shapes(numel)
    first, last = (sum(s.num_columns * s.rank for s in shapes if s.start < border) for border in own)
    return first, last

"""Hierarchical: sum inside each node, average between nodes by any scheme, then give the result out inside.

N ranks on n nodes, L of them on this one, C on the smallest
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import HOST, POWERSGD_Q, Codec, Memory
from cgx_ray.codecs.powersgd import PowerSgd
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.exchange import Exchange
from cgx_ray.collectives.inside_node import CompressedInside, DenseInside
from cgx_ray.collectives.parcel import Step
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.pieces import chunk_bounds
from cgx_ray.collectives.sra import Sra
from cgx_ray.collectives.subset import MessageGroup, Subset
from cgx_ray.collectives.transport.transport import Transport
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike, ranks_of_nodes
from cgx_ray.plan import Intra, Layer, Scheme
from cgx_ray.runtime_ext import ops

# Uses of random numbers in a step: each of the C exchanges between nodes, the inside of each node, and encodings that
# must be the same on all nodes.
_BETWEEN, _INSIDE, _SHARED = range(3)


def has_inside(nodes: Sequence[int], scheme: Scheme) -> bool:
    """Return False if a hierarchical exchange is a flat one: one rank per node, or `dense` on a single node."""
    num_nodes = len(set(nodes))
    return num_nodes < len(nodes) and not (num_nodes == 1 and scheme is Scheme.DENSE)


class Hierarchical(Exchange):
    """Cost 2a' + 2(L-1)/L M b' inside a node, with m for M if compressed, and between nodes that of the scheme for n
    ranks and the whole group. a', b': the link inside; b: that of a node's network card, which C ranks share.

    1. Cut the group into C chunks. Rank i of each node, for i < C, carries chunk i: it gets the sum over its node.
    2. The ranks i of all nodes average chunk i by the scheme. Sums between nodes (dense, allreduce, artopk_ring) go
       direct, in 2 latencies instead of a ring's 2(n-1).
    3. Rank i gives the result to its node. Ranks from C on only take part in steps 1 and 3.

    Nodes may have different numbers of ranks, and ranks may be in any order. On a single node step 2 is left out: the
    residuals are sent in full, and with `dense` nothing is dropped.

    Inside a node, `dense` sums go through shared memory, or by messages if there is none. With a codec of a device they
    are the vendor's, `Transport.inside`, and all of the exchange stays in its memory. `compressed` sums, on the host,
    are the two halves of `Sra`, for codecs whose sums can be encoded again (not `none`, not `prefix`).

    Memory has the same unit as in flat schemes, so that plans may change either way: the mean over all N ranks is what
    the averages still lack. With codecs that remember, ranks exchange sums over a node, not means, and the result is
    multiplied by n/N. Then the part of a sum that a carrier's encoding drops is its residual, in units of N gradients.

    - `dense` inside: only carriers have residuals, each in its chunk. The residuals and momentum of the node's other
      ranks are handed to them before the first step.
    - `compressed` inside: a rank also keeps what its messages inside drop, as in `Sra`. Encoding the average drops the
      same on all nodes, and each of the n carriers of a chunk keeps that N/n times.

    With codecs that remember nothing, ranks exchange means, so fp16 does not overflow. With the others a sum may, if
    its values travel in fp16 (`value_bits=16`): from 65520 on, L times sooner than in flat schemes. Uncompressed 16-bit
    gradients are divided before they are summed.

    A codec sees a chunk as its group: topk keeps its share of each chunk. dgc clips each chunk by clip / sqrt(N), since
    a sum of L gradients over 1/C of the elements is about as long as one gradient. powersgd's chunks end where layers
    do.

    Bytes inside a node are neither card bytes nor in `sent_bytes`, but the exchange time contains the inside.
    """

    def __init__(
        self,
        codec: Codec,
        intra: Intra,
        numel: int,
        transport: Transport,
        make_inner: Callable[[Codec, int, TransportLike], Exchange],
    ) -> None:
        """`make_inner` makes the exchange between nodes, for a codec, a number of elements, and the ranks in it."""
        super().__init__(transport)
        members = ranks_of_nodes(transport.nodes)
        here = next(ranks for ranks in members if transport.rank in ranks)
        num_chunks = min(map(len, members))
        self._place, self._node = here.index(transport.rank), members.index(here)
        chunks = _chunks(codec, numel, num_chunks)
        bounds = chunks + [(numel, numel)] * (len(here) - num_chunks)
        self._own = start, stop = bounds[self._place]
        self._scale = Fraction(len(members), transport.world_size)

        self._codec = make_codec(codec.spec, _layers_within(codec.layers, start, stop), codec.world_size, codec.device)
        self._inner: Exchange | None = None
        if len(members) > 1 and stop > start:
            carriers = Subset(transport, [others[self._place] for others in members])
            self._inner = make_inner(self._codec, stop - start, carriers)
        self.sent_bytes = self._inner.sent_bytes if self._inner is not None else 0
        self._q_bounds = _q_bounds(codec, numel, self._own)

        inside = Subset(transport, here)
        self._inside: DenseInside | CompressedInside
        if intra is Intra.DENSE:
            on_device = transport.inside if codec.device != HOST else None
            self._inside = DenseInside(transport, on_device or transport.local or MessageGroup(inside), bounds)
        else:
            sra = Sra(codec, numel, inside, bounds)
            self._inside = CompressedInside(sra, numel, float(1 / self._scale), self._own)

    def turns(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> Iterator[Handle]:
        """See `Exchange.turns`. With codec none `grad_N` may be of any dtype."""
        step = Step(grad_N=grad_N, memory=memory, stamp=stamp, seed=self._seed(seed, stamp, _INSIDE), phases=phases)
        # Sums in shared memory are collectives too, and so are those of the vendor inside a node.
        self.keeps_order = True
        own_N = grad_N[slice(*self._own)]
        if grad_N.element_size() == 2:
            self._rescale(grad_N)
        yield from self._inside.reduce(step)
        if memory is None and grad_N.element_size() > 2:
            self._rescale(own_N)
        part = self._part(memory) if memory is not None else None
        if self._inner is not None:
            yield from self._inner.turns(own_N, part, stamp, self._seed(seed, stamp, _BETWEEN), phases)
            self.sent_bytes = self._inner.sent_bytes
        elif part is not None:
            self._add_residual(own_N, part)
        if memory is not None:
            self._rescale(own_N)
        phases.lap("decode")
        self.keeps_order = False
        yield from self._inside.share(replace(step, seed=self._seed(seed, stamp, _SHARED)))

    def _rescale(self, values_N: Tensor) -> None:
        """Multiply by n/N, exactly if the dtype can represent the result."""
        values_N.div_(self._scale.denominator)
        if self._scale.numerator > 1:
            values_N.mul_(self._scale.numerator)

    def _add_residual(self, own_N: Tensor, memory: Memory) -> None:
        """On a single node: add the residual and keep none, as a codec that drops nothing."""
        own_N.copy_(self._codec.feed(own_N, memory))
        for kind, value in memory.next.items():
            if kind != POWERSGD_Q:
                value.zero_()

    def _part(self, memory: Memory) -> Memory:
        """Return views of the own chunk's memory."""
        part = memory.part(*self._own)
        if POWERSGD_Q not in memory.now:
            return part
        now, next_ = (kinds[POWERSGD_Q][slice(*self._q_bounds)] for kinds in (memory.now, memory.next))
        return Memory({**part.now, POWERSGD_Q: now}, {**part.next, POWERSGD_Q: next_}, memory.scale)

    def _seed(self, seed: int, stamp: Stamp, use: int) -> int:
        """Return the seed for one of the uses: equal on ranks that exchange with each other, different elsewhere."""
        who = {_BETWEEN: self._place, _INSIDE: self._node, _SHARED: 0}[use]
        return ops.message_key(seed, stamp.step, stamp.group, who, use)


def _chunks(codec: Codec, numel: int, num_chunks: int) -> list[tuple[int, int]]:
    """Cut the group into near-equal chunks that `codec` may encode by themselves."""
    if not isinstance(codec, PowerSgd):
        return chunk_bounds(numel, num_chunks, codec.granule)
    borders = [shape.start for shape in codec.shapes(numel)] + [numel]
    cuts = [min(borders, key=lambda border: abs(border - numel * i / num_chunks)) for i in range(num_chunks + 1)]
    return list(itertools.pairwise(cuts))


def _layers_within(layers: Sequence[Layer], start: int, stop: int) -> list[Layer]:
    """Return the layers, or parts of layers, in the elements [start, stop). A part counts as a layer without rows."""
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
    """Return where in the group's PowerSGD Q, as [start, stop), the Q of the layers in `own` lies."""
    if not isinstance(codec, PowerSgd):
        return 0, 0
    shapes = codec.shapes(numel)
    first, last = (sum(s.num_columns * s.rank for s in shapes if s.start < border) for border in own)
    return first, last

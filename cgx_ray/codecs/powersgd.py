"""PowerSGD: one low-rank matrix per layer (Vogels et al. 2019).

M is a layer's gradient as a matrix of n rows and m columns; P (n, r) and Q (m, r) are its factors
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cgx_ray.codec_spec import near_square
from cgx_ray.codecs.codec import POWERSGD_Q, Codec, Memory
from cgx_ray.plan import CodecSpec, Layer


class Shape(NamedTuple):
    """A layer's place in its group, the shape of its matrix, and the rank of the approximation."""

    start: int
    numel: int
    num_rows: int
    num_columns: int
    rank: int


class PowerSgd(Codec):
    """One step of power iteration from the Q of the step before: P = M Q, orthogonalised, Q = M^T P, M ~ P Q^T.

    Payload: P of all layers, then Q of all layers, float32, column by column. Layers that are not matrices are reshaped
    to nearly square ones, padded with zeros. The products come from torch.mm, so ranks get the same bits from the same
    factors only if they have the same CPU, torch and number of threads.
    """

    needs_feedback = True

    def __init__(self, spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1) -> None:
        super().__init__(spec, layers, world_size)
        assert spec.rank is not None
        self._rank = spec.rank

    def payload_bytes(self, numel: int) -> int:
        return 4 * sum(shape.rank * (shape.num_rows + shape.num_columns) for shape in self.shapes(numel))

    def shapes(self, numel: int) -> list[Shape]:
        """Return one shape per layer. A group of unknown layers counts as one layer."""
        sizes = [(layer.numel, layer.num_rows) for layer in self.layers] or [(numel, None)]
        starts = itertools.accumulate((size for size, _ in sizes), initial=0)
        return [self._shape(start, *size) for start, size in zip(starts, sizes, strict=False)]

    def memory_of(self, numel: int, layer: Layer | None = None) -> dict[str, Tensor]:
        """Return residuals and Q. Q starts alike on all ranks, so the mean of all P is the P of the mean gradient."""
        shape = self._shape(0, numel, layer.num_rows if layer is not None else None)
        return {**super().memory_of(numel, layer), POWERSGD_Q: _first_q(shape)}

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        p_M, q_M = self.split(payload, grad_N.numel())
        fed_N, start_M = self.begin(grad_N, memory)
        self.project(fed_N, start_M, p_M)
        self.orthogonalize(fed_N.numel(), p_M)
        self.project_back(fed_N, p_M, q_M)
        if memory is not None:
            memory.next[POWERSGD_Q].copy_(q_M)
            self.expand(p_M, q_M, memory.next_N, sign=-1)

    def begin(self, grad_N: Tensor, memory: Memory | None) -> tuple[Tensor, Tensor]:
        """Return the gradient plus the residual, in `memory.next_N`, and the Q to start from."""
        if memory is not None:
            return self.feed(grad_N, memory), memory.now[POWERSGD_Q]
        first_M = torch.cat([_first_q(shape) for shape in self.shapes(grad_N.numel())])
        return grad_N.float(), first_M.to(grad_N.device)

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        if not add:
            out_N.zero_()
        self.expand(*self.split(payload, out_N.numel()), out_N, sign=1)

    def split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return P and Q of all layers, as views."""
        factors = payload.view(torch.float32)
        p_numel = sum(shape.rank * shape.num_rows for shape in self.shapes(numel))
        return factors[:p_numel], factors[p_numel:]

    def project(self, fed_N: Tensor, q_M: Tensor, p_M: Tensor) -> None:
        """Write P = M Q of every layer to `p_M`."""
        for shape, p, q in self._factors(fed_N.numel(), p_M, q_M):
            torch.mm(_matrix(fed_N, shape), q, out=p)

    def orthogonalize(self, numel: int, p_M: Tensor) -> None:
        """Replace the columns of every P by an orthonormal basis of their span, in place.

        Departure: the paper uses Gram-Schmidt. Householder's QR also finds a basis where columns are zero; otherwise
        a gradient of zeros would keep Q at zero in all later steps. The signs are those for which R has no negative
        diagonal element.
        """
        for p in _columns(p_M, [(shape.num_rows, shape.rank) for shape in self.shapes(numel)]):
            if p.numel():
                basis, r = torch.linalg.qr(p)
                torch.mul(basis, torch.where(r.diagonal() < 0, -1.0, 1.0), out=p)

    def project_back(self, fed_N: Tensor, p_M: Tensor, q_M: Tensor) -> None:
        """Write Q = M^T P of every layer to `q_M`."""
        for shape, p, q in self._factors(fed_N.numel(), p_M, q_M):
            torch.mm(_matrix(fed_N, shape).t(), p, out=q)

    def expand(self, p_M: Tensor, q_M: Tensor, out_N: Tensor, *, sign: int) -> None:
        """Add `sign` P Q^T of every layer to `out_N`."""
        for shape, p, q in self._factors(out_N.numel(), p_M, q_M):
            part = out_N[shape.start : shape.start + shape.numel]
            if shape.num_rows * shape.num_columns == shape.numel:
                part.view(shape.num_rows, shape.num_columns).addmm_(p, q.t(), alpha=sign)
            else:
                part.add_(torch.mm(p, q.t()).view(-1)[: shape.numel], alpha=sign)

    def _factors(self, numel: int, p_M: Tensor, q_M: Tensor) -> Iterator[tuple[Shape, Tensor, Tensor]]:
        """Return every layer's shape with its P and Q."""
        shapes = self.shapes(numel)
        ps = _columns(p_M, [(shape.num_rows, shape.rank) for shape in shapes])
        qs = _columns(q_M, [(shape.num_columns, shape.rank) for shape in shapes])
        return zip(shapes, ps, qs, strict=True)

    def _shape(self, start: int, numel: int, num_rows: int | None) -> Shape:
        rows, columns = (num_rows, numel // num_rows) if num_rows else near_square(numel)
        return Shape(start, numel, rows, columns, min(self._rank, rows, columns))


def _matrix(fed_N: Tensor, shape: Shape) -> Tensor:
    part = fed_N[shape.start : shape.start + shape.numel]
    padding = shape.num_rows * shape.num_columns - shape.numel
    if padding:
        part = torch.nn.functional.pad(part, (0, padding))
    return part.view(shape.num_rows, shape.num_columns)


def _columns(flat_M: Tensor, sizes: list[tuple[int, int]]) -> list[Tensor]:
    """Return factors of (rows, rank) each, as views."""
    # Stored column by column, since MKL multiplies such narrow matrices 4 to 15 times as slowly row by row.
    parts = flat_M.split([rows * rank for rows, rank in sizes])
    return [part.view(rank, rows).t() for part, (rows, rank) in zip(parts, sizes, strict=True)]


def _first_q(shape: Shape) -> Tensor:
    return torch.randn(shape.num_columns * shape.rank, generator=torch.Generator().manual_seed(0))

"""PowerSGD: one low-rank matrix per layer (Vogels et al. 2019).

M is a layer's gradient as a matrix of n rows and m columns; P (n, r) and Q (m, r) are its factors
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cgx_ray.codecs.codec import HOST, POWERSGD_Q, Codec, Memory
from cgx_ray.plan import CodecSpec, Layer, near_square
from cgx_ray.runtime_ext.checks import check_sized


class Shape(NamedTuple):
    """A layer's place in its group, the shape of its matrix, the rank of the approximation.

    p_start, q_start  its places in the P and in the Q of all layers
    """

    start: int
    numel: int
    num_rows: int
    num_columns: int
    rank: int
    p_start: int
    q_start: int

    @property
    def end(self) -> int:
        return self.start + self.numel

    @property
    def p_end(self) -> int:
        return self.p_start + self.num_rows * self.rank

    @property
    def q_end(self) -> int:
        return self.q_start + self.num_columns * self.rank


# Operands of one element on the host, which torch takes on every device. From plain numbers it would make such tensors
# again in every call.
_ZERO, _ONE, _MINUS_TWO = (torch.tensor(value, dtype=torch.float32, device=HOST) for value in (0.0, 1.0, -2.0))


class PowerSgd(Codec):
    """One step of power iteration from the Q of the step before: P = M Q, orthogonalised, Q = M^T P, M ~ P Q^T.

    Payload: P of all layers, then Q of all layers, float32, column by column. Layers that are not matrices are reshaped
    to nearly square ones, padded with zeros. The products come from torch.mm, so ranks get the same bits from the same
    factors only if they have the same CPU, torch and number of threads.
    """

    def __init__(self, spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1) -> None:
        super().__init__(spec, layers, world_size)
        assert spec.rank is not None
        self._rank = spec.rank
        self._known: tuple[int, list[Shape]] = (-1, [])

    def payload_bytes(self, numel: int) -> int:
        shapes = self.shapes(numel)
        return 4 * (shapes[-1].p_end + shapes[-1].q_end)

    def shapes(self, numel: int) -> list[Shape]:
        """Return one shape per layer. A group of unknown layers counts as one layer."""
        if self._known[0] != numel:
            shapes: list[Shape] = []
            for size in [(layer.numel, layer.num_rows) for layer in self.layers] or [(numel, None)]:
                shapes.append(self._shape(*size, shapes[-1] if shapes else None))
            self._known = numel, shapes
        return self._known[1]

    def memory_of(self, numel: int, layer: Layer | None = None) -> dict[str, Tensor]:
        """Return residuals and Q. Q starts alike on all ranks, so the mean of all P is the P of the mean gradient."""
        shape = self._shape(numel, layer.num_rows if layer is not None else None)
        return {**super().memory_of(numel, layer), POWERSGD_Q: _first_q(shape)}

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        p_M, q_M = self.split(payload, grad_N.numel())
        fed_N, start_M = self.begin(grad_N, memory)
        for shape, p, q in self._factors(fed_N.numel(), p_M, q_M):
            matrix = _matrix(fed_N, shape)
            _multiply(matrix, _q(start_M, shape), p)
            _orthogonalize(p)
            _multiply(matrix.t(), p, q)
            if memory is not None:
                _expand(p, q, memory.next_N, shape, sign=-1)
        if memory is not None:
            memory.next[POWERSGD_Q].copy_(q_M)

    def begin(self, grad_N: Tensor, memory: Memory | None) -> tuple[Tensor, Tensor]:
        """Return the gradient plus the residual, in `memory.next_N`, and the Q to start from."""
        if memory is not None:
            return self.feed(grad_N, memory), memory.now[POWERSGD_Q]
        first_M = torch.cat([_first_q(shape) for shape in self.shapes(grad_N.numel())])
        return grad_N.float(), first_M.to(grad_N.device)

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        check_sized("payload", payload, torch.uint8, self.payload_bytes(out_N.numel()), out_N.device)
        if not add:
            out_N.zero_()
        self.expand(*self.split(payload, out_N.numel()), out_N, sign=1)

    def split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return P and Q of all layers, as views."""
        factors = payload.view(torch.float32)
        p_numel = self.shapes(numel)[-1].p_end
        return factors[:p_numel], factors[p_numel:]

    def project(self, fed_N: Tensor, q_M: Tensor, p_M: Tensor) -> None:
        """Write P = M Q of every layer to `p_M`."""
        for shape, p, q in self._factors(fed_N.numel(), p_M, q_M):
            _multiply(_matrix(fed_N, shape), q, p)

    def orthogonalize(self, numel: int, p_M: Tensor) -> None:
        """Replace the columns of every P by an orthonormal basis of their span, in place.

        Departure: the paper uses Gram-Schmidt. Householder's QR also finds a basis where columns are zero; otherwise
        a gradient of zeros would keep Q at zero in all later steps. The signs are those for which R has no negative
        diagonal element.
        """
        for shape in self.shapes(numel):
            _orthogonalize(_p(p_M, shape))

    def project_back(self, fed_N: Tensor, p_M: Tensor, q_M: Tensor) -> None:
        """Write Q = M^T P of every layer to `q_M`."""
        for shape, p, q in self._factors(fed_N.numel(), p_M, q_M):
            _multiply(_matrix(fed_N, shape).t(), p, q)

    def expand(self, p_M: Tensor, q_M: Tensor, out_N: Tensor, *, sign: int) -> None:
        """Add `sign` P Q^T of every layer to `out_N`."""
        for shape, p, q in self._factors(out_N.numel(), p_M, q_M):
            _expand(p, q, out_N, shape, sign)

    def _factors(self, numel: int, p_M: Tensor, q_M: Tensor) -> Iterator[tuple[Shape, Tensor, Tensor]]:
        """Return every layer's shape with its P and Q, as views."""
        return ((shape, _p(p_M, shape), _q(q_M, shape)) for shape in self.shapes(numel))

    def _shape(self, numel: int, num_rows: int | None, before: Shape | None = None) -> Shape:
        """Return the shape of a layer that comes after the layer `before`."""
        rows, columns = (num_rows, numel // num_rows) if num_rows else near_square(numel)
        starts = (before.end, before.p_end, before.q_end) if before is not None else (0, 0, 0)
        return Shape(starts[0], numel, rows, columns, min(self._rank, rows, columns), *starts[1:])


# The views below are made by one call of torch each, since tiny layers cost little but such calls.


def _matrix(fed_N: Tensor, shape: Shape) -> Tensor:
    size = shape.num_rows, shape.num_columns
    padding = shape.num_rows * shape.num_columns - shape.numel
    if padding:
        return torch.constant_pad_nd(fed_N[shape.start : shape.end], (0, padding)).view(size)
    step = fed_N.stride(0)
    return fed_N.as_strided(size, (step * shape.num_columns, step), fed_N.storage_offset() + step * shape.start)


def _p(p_M: Tensor, shape: Shape) -> Tensor:
    return _columns(p_M, shape.p_start, shape.num_rows, shape.rank)


def _q(q_M: Tensor, shape: Shape) -> Tensor:
    return _columns(q_M, shape.q_start, shape.num_columns, shape.rank)


def _columns(factors_M: Tensor, start: int, num_rows: int, rank: int) -> Tensor:
    # Stored column by column, since MKL multiplies such narrow matrices 4 to 15 times as slowly row by row.
    return factors_M.as_strided((num_rows, rank), (1, num_rows), factors_M.storage_offset() + start)


def _orthogonalize(p: Tensor) -> None:
    if p.numel():
        basis, r = torch.linalg.qr(p)
        # `torch.where` would copy its operands to the device.
        sign = (r.diagonal() < _ZERO).to(p.dtype).mul_(_MINUS_TWO).add_(_ONE)
        torch.mul(basis, sign, out=p)


def _rounds_products(factor: Tensor) -> bool:
    """Return True if torch may round the operands of matrix products to the 11 bits of TF32 where `factor` lies.

    The user's settings say so for all threads, so they cannot be changed for the products here alone.
    """
    return factor.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _multiply(matrix: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write `matrix` times `factor`, of few columns, to `out`."""
    if not _rounds_products(factor):
        torch.mm(matrix, factor, out=out)
        return
    # Products with vectors are made without TF32.
    for column, out_column in zip(factor.unbind(1), out.unbind(1), strict=True):
        torch.mv(matrix, column, out=out_column)


def _expand(p: Tensor, q: Tensor, out_N: Tensor, shape: Shape, sign: int) -> None:
    if shape.num_rows * shape.num_columns == shape.numel:
        _add_product(_matrix(out_N, shape), p, q, sign)
        return
    if _rounds_products(p):
        product = torch.zeros(shape.num_rows, shape.num_columns, dtype=p.dtype, device=p.device)
        _add_product(product, p, q, 1)
    else:
        product = torch.mm(p, q.t())
    out_N[shape.start : shape.end].add_(product.view(-1)[: shape.numel], alpha=sign)


def _add_product(matrix: Tensor, p: Tensor, q: Tensor, sign: int) -> None:
    if not _rounds_products(p):
        matrix.addmm_(p, q.t(), alpha=sign)
        return
    for p_column, q_column in zip(p.unbind(1), q.unbind(1), strict=True):
        matrix.addr_(p_column, q_column, alpha=sign)


def _first_q(shape: Shape) -> Tensor:
    numel, generator = shape.num_columns * shape.rank, torch.Generator().manual_seed(0)
    return torch.randn(numel, generator=generator, dtype=torch.float32, device=HOST)

"""Public kernels of the codecs that send some elements: selection, and the packing of indices.

N elements of a gradient, K kept elements. Tensors, devices and errors are as in `ops`. A magnitude is the bits of a
float32 without its sign.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import cuda_sparse, reference
from .checks import (
    FLOATS,
    address,
    as_float32,
    check_gradient,
    check_integer,
    check_key,
    check_sized,
    check_tensor,
    is_contiguous,
    native,
    runs_on_cuda,
)
from .layer_ends import LayerEnds

# A threshold that no magnitude reaches.
NEVER = 1 << 31
_COUNT_BYTES = 4  # a message begins with its number of elements, int32


def build(device: torch.device) -> None:
    """Compile and load the kernels for a CUDA `device`, as `ops.build_qsgd` does."""
    if device.type == "cuda":
        cuda_sparse.build(device)


def topk_select(
    grad_N: Tensor,
    index_K: Tensor,
    value_K: Tensor,
    *,
    ends: LayerEnds | None = None,
    residual_N: Tensor | None = None,
    next_N: Tensor | None = None,
) -> None:
    """Select the K elements of `grad_N`, plus `residual_N` if given, that are largest in magnitude, exactly.

    ends        with it, the largest of each layer are selected, as many as it says
    index_K     (K,) int32; overwritten with ascending indices
    value_K     (K,) float32; overwritten with the elements there
    residual_N  (N,) float32, the error that earlier steps left; read only
    next_N      (N,) float32, overwritten with the elements that were not selected, and zeros in place of the others;
                may be `residual_N`; other overlaps are not allowed

    NaN is the largest, then Inf. Among equal magnitudes the lowest indices win.
    """
    check_gradient(grad_N, residual_N, next_N)
    _check_kept(grad_N, index_K, value_K)
    layers = _layers(ends, grad_N, index_K)
    if not runs_on_cuda(grad_N) and is_contiguous(index_K, value_K, residual_N, next_N):
        grad_N = as_float32(grad_N)
        args = (address(grad_N), address(residual_N), address(next_N), grad_N.numel(), *layers)
        native.topk_select(*args, address(index_K), address(value_K), index_K.numel(), torch.get_num_threads())
    elif ends is not None:
        for part, kept in ends.parts:
            residual, next_ = (None if x is None else x[part] for x in (residual_N, next_N))
            topk_select(grad_N[part], index_K[kept], value_K[kept], residual_N=residual, next_N=next_)
            index_K[kept] += part.start
    elif runs_on_cuda(grad_N):
        cuda_sparse.topk_select(grad_N, residual_N, next_N, index_K, value_K)
    else:
        fed_N = reference.add_feedback(grad_N, residual_N).contiguous()
        reference.topk_select(fed_N, index_K, value_K)
        if next_N is not None:
            next_N.copy_(fed_N)
            next_N[index_K.long()] = 0.0


def topk_encode(
    grad_N: Tensor,
    payload: Tensor,
    index_K: Tensor,
    value_K: Tensor,
    *,
    ends: LayerEnds | None = None,
    residual_N: Tensor | None = None,
    next_N: Tensor | None = None,
) -> None:
    """Select as `topk_select` does and write the message as `pack_message` does.

    One call, because for short messages the overhead of two calls exceeds their work.
    """
    numel, num_kept = grad_N.numel(), index_K.numel()
    check_gradient(grad_N, residual_N, next_N)
    _check_kept(grad_N, index_K, value_K)
    layers = _layers(ends, grad_N, index_K)
    _check_message(payload, index_K, numel)
    if not runs_on_cuda(grad_N) and is_contiguous(payload, index_K, value_K, residual_N, next_N):
        grad_N = as_float32(grad_N)
        args = (address(grad_N), address(residual_N), address(next_N), numel, *layers)
        room = (address(index_K), address(value_K), num_kept)
        native.topk_encode(*args, address(payload), *room, torch.get_num_threads())
        return
    topk_select(grad_N, index_K, value_K, ends=ends, residual_N=residual_N, next_N=next_N)
    count_1 = torch.full((1,), num_kept, dtype=torch.int32, device=grad_N.device)
    pack_message(index_K, value_K, count_1, numel, payload)


def magnitude_histogram(grad_N: Tensor) -> Tensor:
    """Return (4096,) int64: how many magnitudes have these 12 high bits, the exponent and four more."""
    check_tensor("grad_N", grad_N, *FLOATS)
    counts = torch.empty(reference.NUM_BINS, dtype=torch.int64, device=grad_N.device)
    if runs_on_cuda(grad_N):
        cuda_sparse.magnitude_histogram(grad_N, counts)
    else:
        grad_N = as_float32(grad_N)
        native.magnitude_histogram(address(grad_N), grad_N.numel(), address(counts), torch.get_num_threads())
    return counts


def bisect_thresholds(grad_N: Tensor, num_kept: int, num_rounds: int) -> Tensor:
    """Return (sure, maybe) for `collect`, (2,) int64: the magnitudes between which the `num_kept`-th largest lies.

    MSTopk (Shi et al. 2021): halve the range of the magnitudes `num_rounds` times, 1 to 31.
    """
    check_tensor("grad_N", grad_N, *FLOATS)
    check_integer("num_kept", num_kept)
    check_integer("num_rounds", num_rounds)
    _check_num_kept(grad_N.numel(), num_kept)
    if not 1 <= num_rounds <= 31:
        raise ValueError(f"num_rounds {num_rounds} is not allowed; give 1 to 31")
    thresholds_2 = torch.empty(2, dtype=torch.int64, device=grad_N.device)
    if runs_on_cuda(grad_N):
        cuda_sparse.bisect_thresholds(grad_N, num_kept, num_rounds, thresholds_2)
    else:
        grad_N = as_float32(grad_N)
        native.bisect_thresholds(
            address(grad_N), grad_N.numel(), num_kept, num_rounds, address(thresholds_2), torch.get_num_threads()
        )
    return thresholds_2


def sample_thresholds(grad_N: Tensor, num_kept: int, stride: int, key: int) -> Tensor:
    """Return (sure, maybe) for `collect`, (2,) int64: sure is NEVER, maybe is the threshold within a sample.

    DGC (Lin et al. 2018, section 3.1): select exactly among every `stride`-th element. `key` gives the element at which
    the sample starts. Zeros never reach `maybe`.
    """
    check_tensor("grad_N", grad_N, *FLOATS)
    check_key("key", key)
    check_integer("num_kept", num_kept)
    check_integer("stride", stride)
    _check_num_kept(grad_N.numel(), num_kept)
    if stride < 1:
        raise ValueError(f"stride {stride} is not allowed; give 1 or more")
    numel = grad_N.numel()
    if numel == 0:
        return torch.full((2,), NEVER, dtype=torch.int64, device=grad_N.device)
    first = min(reference.random_below(key, stride), numel - 1)
    sample = as_float32(grad_N[first::stride] if stride > 1 else grad_N)
    num_sampled = max(1, num_kept * sample.numel() // numel)
    if runs_on_cuda(grad_N):
        index = torch.empty(num_sampled, dtype=torch.int32, device=grad_N.device)
        value = torch.empty(num_sampled, dtype=torch.float32, device=grad_N.device)
        cuda_sparse.topk_select(sample, None, None, index, value)
        thresholds_2 = torch.full((2,), NEVER, dtype=torch.int64, device=grad_N.device)
        thresholds_2[1] = reference.magnitudes(value).amin().clamp(min=1)
    else:
        thresholds_2 = torch.empty(2, dtype=torch.int64, device="cpu")
        args = (address(sample), sample.numel(), num_sampled, address(thresholds_2))
        native.rank_thresholds(*args, torch.get_num_threads())
    return thresholds_2


def sidco_thresholds(grad_N: Tensor, ratios: Sequence[float], num_kept: int) -> Tensor:
    """Return (sure, maybe) for `collect`, (2,) int64: sure is NEVER, maybe comes from an exponential fit.

    SIDCo (Abdelmoniem et al. 2021): `ratios` holds ln(1 / share) of each stage; the product of the shares is the
    density. If the fit is off from `num_kept` by more than a factor of two, maybe comes from the histogram, see
    `reference.sidco_threshold`. Zeros never reach `maybe`.
    """
    check_tensor("grad_N", grad_N, *FLOATS)
    check_integer("num_kept", num_kept)
    _check_num_kept(grad_N.numel(), num_kept)
    if runs_on_cuda(grad_N):
        counts = magnitude_histogram(grad_N)
        thresholds_2 = torch.full((2,), NEVER, dtype=torch.int64, device=grad_N.device)
        cuda_sparse.sidco_threshold(counts, tuple(ratios), num_kept, thresholds_2)
    else:
        thresholds_2 = torch.empty(2, dtype=torch.int64, device="cpu")
        grad_N = as_float32(grad_N)
        args = (address(grad_N), grad_N.numel(), list(ratios), num_kept, address(thresholds_2))
        native.sidco_thresholds(*args, torch.get_num_threads())
    return thresholds_2


def collect(
    grad_N: Tensor, thresholds_2: Tensor, index_K: Tensor, value_K: Tensor, count_1: Tensor, *, key: int
) -> None:
    """Write the elements of `grad_N` that pass `thresholds_2`, at most K of them.

    thresholds_2  (2,) int64 (sure, maybe), magnitudes; at most K elements reach `sure`
    index_K       (K,) int32; overwritten with ascending indices, then zeros
    value_K       (K,) float32; overwritten with the elements there, then zeros
    count_1       (1,) int32; overwritten with the number of elements written

    All elements that reach `sure` are written. Those that only reach `maybe` fill the remaining places: a run of them
    in index order, which starts at a random one, given by `key`, and wraps around at the end. So all have the same
    chance.
    """
    check_gradient(grad_N, None, None)
    _check_kept(grad_N, index_K, value_K)
    check_sized("thresholds_2", thresholds_2, torch.int64, 2, grad_N.device)
    check_sized("count_1", count_1, torch.int32, 1, grad_N.device)
    check_key("key", key)
    if runs_on_cuda(grad_N):
        cuda_sparse.collect(grad_N, thresholds_2, index_K, value_K, count_1, key=key)
    elif is_contiguous(index_K, value_K):
        grad_N = as_float32(grad_N)
        args = (address(grad_N), grad_N.numel(), address(thresholds_2), key)
        kept = (address(index_K), address(value_K), index_K.numel(), address(count_1))
        native.collect(*args, *kept, torch.get_num_threads())
    else:
        sure, maybe = thresholds_2.tolist()
        count_1.fill_(reference.collect(as_float32(grad_N), (sure, maybe), key, index_K, value_K))


def random_indices(numel: int, index_K: Tensor, *, key: int) -> None:
    """Overwrite `index_K`, (K,) int32, with one random index from each of K near-equal runs of [0, numel)."""
    check_tensor("index_K", index_K, torch.int32)
    check_integer("numel", numel)
    check_key("key", key)
    _check_num_kept(numel, index_K.numel())
    if runs_on_cuda(index_K):
        cuda_sparse.random_indices(numel, index_K, key=key)
    elif is_contiguous(index_K):
        native.random_indices(numel, key, address(index_K), index_K.numel())
    else:
        reference.random_indices(numel, key, index_K)


def index_bytes(numel: int, num_kept: int) -> int:
    """Return the number of bytes that `pack_indices` fills, a multiple of 4; see `reference.index_layout`."""
    return reference.index_layout(numel, num_kept)[2]


def pack_indices(index_K: Tensor, count_1: Tensor, numel: int, out: Tensor) -> None:
    """Write the first `count_1` of `index_K`, ascending below `numel`, into the smallest of three layouts.

    index_K  (K,) int32; read only
    count_1  (1,) int32, clamped to [0, K]; read only
    out      uint8, `index_bytes(numel, K)` long; overwritten

    If an index is outside of [0, `numel`), `unpack_indices` refuses the message.
    """
    _check_indices(index_K, count_1, numel, "out", out)
    if runs_on_cuda(index_K):
        cuda_sparse.pack_indices(index_K, count_1, numel, out)
    elif is_contiguous(index_K, out):
        native.pack_indices(address(index_K), address(count_1), index_K.numel(), numel, address(out))
    else:
        reference.pack_indices(index_K, int(count_1), numel, out)


def unpack_indices(packed: Tensor, count_1: Tensor, numel: int, index_K: Tensor) -> None:
    """Undo `pack_indices` and write zeros after the first `count_1` of `index_K`.

    On the CPU, raises ValueError unless `packed` holds `count_1` indices that ascend below `numel`. On a GPU this check
    would synchronize: there a broken message gives wrong indices, and `scatter_add` skips those outside of [0, N).
    """
    _check_indices(index_K, count_1, numel, "packed", packed)
    if runs_on_cuda(index_K):
        cuda_sparse.unpack_indices(packed, count_1, numel, index_K)
    elif is_contiguous(index_K, packed):
        args = (address(packed), address(count_1), index_K.numel(), numel, address(index_K))
        if not native.unpack_indices(*args):
            raise ValueError(f"the message does not hold {int(count_1)} indices that ascend below {numel}")
    else:
        reference.unpack_indices(packed, int(count_1), numel, index_K)


def scatter_add(index_K: Tensor, value_K: Tensor, count_1: Tensor, out_N: Tensor) -> None:
    """Add the first `count_1` of `value_K` to `out_N`, float32, at their indices, which are distinct.

    The count is clamped to [0, K]. Indices outside of [0, N) are skipped.
    """
    check_tensor("out_N", out_N, torch.float32)
    _check_kept(out_N, index_K, value_K)
    check_sized("count_1", count_1, torch.int32, 1, out_N.device)
    if runs_on_cuda(out_N):
        cuda_sparse.scatter_add(index_K, value_K, count_1, out_N)
    elif is_contiguous(index_K, value_K, out_N):
        kept = (address(index_K), address(value_K), address(count_1), index_K.numel())
        native.scatter_add(*kept, address(out_N), out_N.numel())
    else:
        reference.scatter_add(index_K, value_K, int(count_1), out_N)


def scatter_zero(index_K: Tensor, count_1: Tensor, out_N: Tensor) -> None:
    """Set `out_N` to zero at the first `count_1` indices. Count and indices as in `scatter_add`."""
    check_tensor("out_N", out_N, torch.float32)
    check_tensor("index_K", index_K, torch.int32, device=out_N.device)
    _check_num_kept(out_N.numel(), index_K.numel())
    check_sized("count_1", count_1, torch.int32, 1, out_N.device)
    if not runs_on_cuda(out_N) and is_contiguous(index_K, out_N):
        kept = (address(index_K), address(count_1), index_K.numel())
        native.scatter_zero(*kept, address(out_N), out_N.numel())
    else:
        reference.scatter_zero(index_K, int(count_1), out_N)


def pack_message(index_K: Tensor, value_K: Tensor, count_1: Tensor, numel: int, payload: Tensor) -> None:
    """Write `count_1`, the packed indices and all values, float32, to `payload`.

    payload  uint8, 4 + `index_bytes(numel, K)` + 4 K long, on a 4-byte boundary; overwritten

    Indices as in `pack_indices`.
    """
    check_tensor("index_K", index_K, torch.int32)
    check_integer("numel", numel)
    check_sized("value_K", value_K, torch.float32, index_K.numel(), index_K.device)
    check_sized("count_1", count_1, torch.int32, 1, index_K.device)
    _check_message(payload, index_K, numel)
    if not runs_on_cuda(index_K) and is_contiguous(index_K, value_K, payload):
        kept = (address(index_K), address(value_K), address(count_1), index_K.numel())
        native.pack_message(*kept, numel, address(payload))
        return
    head, packed, values = _fields(payload, index_K, numel)
    head.view(torch.int32).copy_(count_1)
    pack_indices(index_K, count_1, numel, packed)
    values.view(torch.float32).copy_(value_K)


def unpack_message(payload: Tensor, index_K: Tensor, out_N: Tensor, *, add: bool) -> None:
    """Write the elements that `pack_message` packed to `out_N`, float32, and zeros elsewhere; with `add`, add them.

    index_K  (K,) int32; overwritten with the indices

    On the CPU, raises ValueError and leaves `out_N` unchanged if `payload` is broken. On a GPU see `unpack_indices`.
    """
    check_tensor("out_N", out_N, torch.float32)
    check_tensor("index_K", index_K, torch.int32, device=out_N.device)
    numel = out_N.numel()
    _check_message(payload, index_K, numel)
    if not runs_on_cuda(out_N) and is_contiguous(payload, index_K, out_N):
        args = (address(payload), address(index_K), index_K.numel(), address(out_N), numel, add)
        if not native.unpack_message(*args, torch.get_num_threads()):
            count = int(payload[:_COUNT_BYTES].clone().view(torch.int32))
            raise ValueError(f"the message does not hold {count} indices that ascend below {numel}")
        return
    head, packed, values = (part.contiguous() for part in _fields(payload, index_K, numel))
    count_1, value_K = head.view(torch.int32), values.view(torch.float32)
    unpack_indices(packed, count_1, numel, index_K)
    if not add:
        out_N.zero_()
    scatter_add(index_K, value_K, count_1, out_N)


def _fields(payload: Tensor, index_K: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bytes of count, indices and values of a message."""
    value_start = _COUNT_BYTES + index_bytes(numel, index_K.numel())
    return payload[:_COUNT_BYTES], payload[_COUNT_BYTES:value_start], payload[value_start:]


def _layers(ends: LayerEnds | None, grad_N: Tensor, index_K: Tensor) -> tuple[int, int, int]:
    """Return the native kernels' arguments for `ends`: two addresses and the number of layers, 0 for none."""
    if ends is None:
        return 0, 0, 0
    if (ends.numel, ends.num_kept) != (grad_N.numel(), index_K.numel()):
        raise ValueError(
            f"the layers keep {ends.num_kept} of {ends.numel} elements, the call {index_K.numel()} of "
            f"{grad_N.numel()}; both must be the same"
        )
    return address(ends.ends_L), address(ends.kept_ends_L), len(ends.parts)


def _check_message(payload: Tensor, index_K: Tensor, numel: int) -> None:
    num_kept = index_K.numel()
    _check_num_kept(numel, num_kept)
    num_bytes = _COUNT_BYTES + index_bytes(numel, num_kept) + 4 * num_kept
    check_sized("payload", payload, torch.uint8, num_bytes, index_K.device)


def _check_kept(grad_N: Tensor, index_K: Tensor, value_K: Tensor) -> None:
    check_tensor("index_K", index_K, torch.int32, device=grad_N.device)
    check_tensor("value_K", value_K, torch.float32, device=grad_N.device)
    if value_K.numel() != index_K.numel():
        raise ValueError(f"index_K has {index_K.numel()} elements, value_K {value_K.numel()}; both need K elements")
    _check_num_kept(grad_N.numel(), index_K.numel())


def _check_num_kept(numel: int, num_kept: int) -> None:
    if not 0 <= num_kept <= numel < 1 << 31:
        raise ValueError(f"cannot keep {num_kept} of {numel} elements; need K <= N < 2**31")


def _check_indices(index_K: Tensor, count_1: Tensor, numel: int, name: str, packed: Tensor) -> None:
    check_tensor("index_K", index_K, torch.int32)
    check_integer("numel", numel)
    _check_num_kept(numel, index_K.numel())
    check_sized("count_1", count_1, torch.int32, 1, index_K.device)
    check_sized(name, packed, torch.uint8, index_bytes(numel, index_K.numel()), index_K.device)

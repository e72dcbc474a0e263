"""Workspaces and launches of the CUDA kernels that `sparse` calls.

N elements of a gradient, W words of 32 bits, K kept elements, S stages of a fit. Nothing here waits for the device or
reads from it: counts and thresholds stay in its memory. Tensors that are not contiguous are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import cuda_launch, reference

_BLOCK_SIZE = 256  # as in csrc/cuda/block.h
_WORD_BITS = 32
_SEARCH_WORDS = 6
_LEVEL_BITS = (12, 23, 31)  # bits of a magnitude that are known after each level
# Elements from which a threshold is guessed from a sample. A guess saves counting most elements but costs two more
# launches, and with fewer elements that costs more than it saves.
_MIN_SAMPLED = 1 << 22
# Elements per kept element above which a guess pays. With more kept, the guess leaves few elements out.
_MIN_RATIO = 8


@dataclass(frozen=True, slots=True)
class _Words:
    """One bit per element in 32-bit words, and the launch grid over them: a block owns `words_per_block`."""

    num_words: int
    words_per_block: int
    num_blocks: int

    @classmethod
    def of_bits(cls, num_bits: int, kernel: str, device: torch.device) -> _Words:
        """Return the grid of `kernel`, which one round of blocks fills, and of those that share its words."""
        num_words = -(-num_bits // _WORD_BITS)
        rounds = max(-(-num_words // (_BLOCK_SIZE * cuda_launch.max_blocks(kernel, _BLOCK_SIZE, device))), 1)
        words_per_block = rounds * _BLOCK_SIZE
        return cls(num_words, words_per_block, max(-(-num_words // words_per_block), 1))

    def sizes(self) -> tuple[np.uint32, np.uint32]:
        return np.uint32(self.num_words), np.uint32(self.words_per_block)


class _SelectionPasses:
    """Workspace of one selection among `numel` elements, and the source that its next pass reads."""

    def __init__(self, grad_N: Tensor, residual_N: Tensor | None) -> None:
        device = grad_N.device
        self.source: tuple[Tensor, Tensor | None] = (grad_N, residual_N)
        self.numel = grad_N.numel()
        self.words = _Words.of_bits(self.numel, f"select_split_{cuda_launch.dtype_name(grad_N)}", device)
        zeros = torch.zeros(2 * _SEARCH_WORDS + 4 * reference.NUM_BINS, dtype=torch.int32, device=device)
        self.search = zeros[: 2 * _SEARCH_WORDS].view(torch.int64)
        self.bins = zeros[2 * _SEARCH_WORDS :].view(4, reference.NUM_BINS)  # 3 levels, then the sample
        self.sure_W, self.maybe_W = torch.empty((2, self.words.num_words), dtype=torch.int32, device=device)
        self.tallies = torch.empty(self.words.num_blocks, dtype=torch.int64, device=device)

    def find(self, next_N: Tensor | None, rank: int, num_levels: int) -> None:
        """Find the leading bits of the `rank`-th largest magnitude; _LEVEL_BITS says how many per level."""
        is_sampled = self.numel >= _MIN_SAMPLED and rank * _MIN_RATIO < self.numel
        if is_sampled:
            self._launch("threshold_sample", np.uint32(self.numel), np.int64(rank), self.search, self.bins[3])
        self.split(next_N, rank=rank)
        if is_sampled:
            self.split(None, rank=rank, is_retry=True)
        for level in range(1, num_levels):
            self.split(None, rank=rank, level=level)

    def split(
        self,
        next_N: Tensor | None,
        *,
        thresholds_2: Tensor | None = None,
        rank: int = 0,
        level: int = 0,
        is_retry: bool = False,
    ) -> None:
        """Make one pass over the elements that may still be selected; later passes read `next_N` if it is written."""
        bins = self.bins[min(level, 2)]
        self._launch(
            "select_split",
            *(next_N, np.uint32(self.numel), thresholds_2),
            *(np.int64(rank), np.int32(level), np.int32(is_retry), self.search, bins),
            *(self.sure_W, self.maybe_W, self.tallies, *self.words.sizes()),
        )
        if next_N is not None:
            self.source = (next_N, None)

    def write(self, next_N: Tensor | None, index_K: Tensor, value_K: Tensor, count_1: Tensor | None, key: int) -> None:
        """Write the selected elements, after the last pass."""
        self._launch(
            "select_write",
            *(next_N, np.uint32(self.numel), np.uint32(key), self.search),
            *(self.sure_W, self.maybe_W, self.tallies, *self.words.sizes()),
            *(index_K, value_K, np.uint32(index_K.numel()), count_1),
        )

    def _launch(self, name: str, *args: Tensor | np.generic | None) -> None:
        kernel = f"{name}_{cuda_launch.dtype_name(self.source[0])}"
        cuda_launch.launch(kernel, self.words.num_blocks, _BLOCK_SIZE, *self.source, *args)


def build(device: torch.device) -> None:
    """Build what the functions here launch."""
    for source in ("select", "threshold", "indices"):
        cuda_launch.build(source, device)


def topk_select(
    grad_N: Tensor, residual_N: Tensor | None, next_N: Tensor | None, index_K: Tensor, value_K: Tensor
) -> None:
    with cuda_launch.written(next_N, index_K, value_K) as (next_copy_N, index_copy_K, value_copy_K):
        selection = _SelectionPasses(grad_N.contiguous(), cuda_launch.read(residual_N))
        selection.find(next_copy_N, index_K.numel(), len(_LEVEL_BITS))
        selection.split(None, level=len(_LEVEL_BITS))
        # With key 0 the run starts at the first of equal elements, so the lowest indices win.
        selection.write(next_copy_N, index_copy_K, value_copy_K, None, key=0)


def magnitude_histogram(grad_N: Tensor, counts: Tensor) -> None:
    grad_N, counts = grad_N.contiguous(), counts.zero_()
    kernel = f"threshold_histogram_{cuda_launch.dtype_name(grad_N)}"
    num_blocks = _Words.of_bits(grad_N.numel(), kernel, grad_N.device).num_blocks
    cuda_launch.launch(kernel, num_blocks, _BLOCK_SIZE, grad_N, np.uint32(grad_N.numel()), counts)


def bisect_thresholds(grad_N: Tensor, num_kept: int, num_rounds: int, thresholds_2: Tensor) -> None:
    # `maybe` has the leading bits of the (num_kept + 1)-th largest magnitude, so more than num_kept reach it.
    selection = _SelectionPasses(grad_N.contiguous(), None)
    num_levels = 1 + sum(bits < num_rounds for bits in _LEVEL_BITS)
    selection.find(None, num_kept + 1, num_levels)
    args = (selection.search, np.int32(num_levels), np.int32(num_rounds), thresholds_2)
    cuda_launch.launch("threshold_bracket", 1, _BLOCK_SIZE, *args)


def sidco_threshold(counts: Tensor, ratios: Sequence[float], num_kept: int, thresholds_2: Tensor) -> None:
    ratio_S = torch.empty(len(ratios), dtype=torch.float64, device=counts.device)
    for stage, ratio in enumerate(ratios):
        # `fill_` passes the number with the launch; copying a tensor from host memory would wait for the device.
        ratio_S[stage].fill_(ratio)
    args = (counts, ratio_S, np.int32(len(ratios)), np.int64(num_kept), thresholds_2)
    cuda_launch.launch("threshold_fit", 1, _BLOCK_SIZE, *args)


def collect(
    grad_N: Tensor, thresholds_2: Tensor, index_K: Tensor, value_K: Tensor, count_1: Tensor, *, key: int
) -> None:
    with cuda_launch.written(index_K, value_K) as (index_copy_K, value_copy_K):
        selection = _SelectionPasses(grad_N.contiguous(), None)
        selection.split(None, thresholds_2=thresholds_2.contiguous())
        selection.write(None, index_copy_K, value_copy_K, count_1, key)


def random_indices(numel: int, index_K: Tensor, *, key: int) -> None:
    with cuda_launch.written(index_K) as (copy_K,):
        args = (np.int64(numel), np.uint32(key), copy_K, np.uint32(index_K.numel()))
        num_blocks = _num_blocks(index_K.numel(), "indices_random", index_K.device)
        cuda_launch.launch("indices_random", num_blocks, _BLOCK_SIZE, *args)


def pack_indices(index_K: Tensor, count_1: Tensor, numel: int, out: Tensor) -> None:
    index_K, num_kept = index_K.contiguous(), index_K.numel()
    kind, low_bits, low_words = _layout(numel, num_kept)
    kernel = "indices_copy" if kind == "raw" else "indices_pack"
    num_blocks = _num_blocks(num_kept, kernel, index_K.device)
    with _written_words(out) as word_W:
        if kind == "raw":
            cuda_launch.launch(kernel, num_blocks, _BLOCK_SIZE, index_K, count_1, np.uint32(num_kept), word_W)
            return
        low_W, ones_W = word_W[:low_words], word_W[low_words:].zero_()
        shape = (np.uint32(num_kept), np.uint32(numel), np.int32(low_bits), np.int32(kind == "offsets"))
        args = (index_K, count_1, *shape, low_W, np.uint32(low_words), ones_W)
        cuda_launch.launch(kernel, num_blocks, _BLOCK_SIZE, *args)


def unpack_indices(packed: Tensor, count_1: Tensor, numel: int, index_K: Tensor) -> None:
    num_kept, device = index_K.numel(), index_K.device
    kind, low_bits, low_words = _layout(numel, num_kept)
    if not _is_aligned(packed):
        packed = packed.clone(memory_format=torch.contiguous_format)
    word_W = packed.view(torch.int32)
    with cuda_launch.written(index_K) as (copy_K,):
        if kind == "raw":
            args = (word_W, count_1, np.uint32(num_kept), copy_K)
            num_blocks = _num_blocks(num_kept, "indices_copy", device)
            cuda_launch.launch("indices_copy", num_blocks, _BLOCK_SIZE, *args)
            return
        low_W, ones_W = word_W[:low_words], word_W[low_words:]
        words = _Words.of_bits(_WORD_BITS * ones_W.numel(), "indices_unpack", device)
        tallies = torch.empty(words.num_blocks, dtype=torch.int64, device=device)
        total = torch.zeros(2, dtype=torch.int64, device=device)
        ticket = total[1:].view(torch.int32)
        grid = (words.num_blocks, _BLOCK_SIZE, ones_W, *words.sizes(), tallies, total[:1])
        cuda_launch.launch("indices_count", *grid, ticket)
        layout = (low_W, np.int32(low_bits), np.int32(kind == "offsets"))
        cuda_launch.launch("indices_unpack", *grid, *layout, count_1, copy_K, np.uint32(num_kept))


def scatter_add(index_K: Tensor, value_K: Tensor, count_1: Tensor, out_N: Tensor) -> None:
    num_kept = index_K.numel()
    with cuda_launch.written(out_N) as (copy_N,):
        args = (index_K.contiguous(), value_K.contiguous(), count_1, np.uint32(num_kept))
        num_blocks = _num_blocks(num_kept, "indices_scatter_add", out_N.device)
        cuda_launch.launch("indices_scatter_add", num_blocks, _BLOCK_SIZE, *args, copy_N, np.uint32(copy_N.numel()))


def _num_blocks(num_threads: int, kernel: str, device: torch.device) -> int:
    """Return the number of blocks for `num_threads` items; with many items a thread takes more than one."""
    return min(max(-(-num_threads // _BLOCK_SIZE), 1), cuda_launch.max_blocks(kernel, _BLOCK_SIZE, device))


def _layout(numel: int, num_kept: int) -> tuple[str, int, int]:
    """Return (kind, low_bits, low_words); only "offsets" has low bits, in the words before the blocks."""
    kind, low_bits, _ = reference.index_layout(numel, num_kept)
    return (kind, low_bits, -(-num_kept * low_bits // _WORD_BITS)) if kind == "offsets" else (kind, 0, 0)


def _is_aligned(packed: Tensor) -> bool:
    """Return True if the bytes can be viewed as 32-bit words."""
    return packed.is_contiguous() and packed.storage_offset() % 4 == 0 and packed.data_ptr() % 4 == 0


@contextmanager
def _written_words(out: Tensor) -> Iterator[Tensor]:
    """Yield `out`, bytes, as 32-bit words; if it is not aligned, yield new words and copy them to `out` at the end."""
    if _is_aligned(out):
        yield out.view(torch.int32)
        return
    word_W = torch.empty(out.numel() // 4, dtype=torch.int32, device=out.device)
    yield word_W
    out.copy_(word_W.view(torch.uint8))

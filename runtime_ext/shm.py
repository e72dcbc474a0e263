"""Shared memory between the ranks of one host: which ranks can share it, and their collectives, in C++."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .checks import native

Segment = native.Segment
# In the order of LocalGroup::Type.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_FOLDER = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_key() -> str | None:
    """Return a key that is equal on ranks that see the same /dev/shm as the same user.

    It differs between hosts, containers and namespaces. None if there is no such folder.
    """
    try:
        status = _FOLDER.stat()
        return f"{_BOOT_ID.read_text().strip()} {status.st_dev} {status.st_ino} {os.geteuid()}"
    except OSError:
        return None


class LocalGroup:
    """Sums and gathers of contiguous CPU tensors of `DTYPES`, among the ranks that have mapped one segment.

    rank, size  index of this rank among them, in ascending order of ranks of the run, and their number

    All ranks call the same operations in the same order, one at a time. Sums are made in rank order, and
    16-bit elements are summed in float32 and rounded once, so all ranks and all runs get the same bits.

    Each operation raises RuntimeError that names the ranks that did not come within the time-out, hung up, or called
    another operation; then everything is closed. It raises ValueError or TypeError for a tensor or bounds that are not
    allowed.
    """

    def __init__(
        self, segment: Segment, rank: int, ranks: Sequence[int], timeout_s: float, hang_up: Callable[[], None]
    ) -> None:
        """Join as number `rank` of `ranks`, which are ranks of the run, ascending.

        `hang_up` is called when an operation fails.
        """
        self.rank = rank
        self.size = len(ranks)
        self._hang_up = hang_up
        self._native = native.LocalGroup(segment, rank, list(ranks), timeout_s)

    def reduce_scatter(self, values_N: Tensor, bounds: Sequence[tuple[int, int]]) -> None:
        """Replace the part of `values_N` within this rank's bounds by its sum over ranks; the rest stays as it is.

        bounds  (start, stop) by rank, the same on all ranks, disjoint; may be empty or leave gaps
        """
        self._run(self._native.reduce_scatter, values_N, _type_of(values_N), self._checked(bounds, values_N))

    def all_gather(self, values_N: Tensor, bounds: Sequence[tuple[int, int]]) -> None:
        """Copy each rank's part of `values_N` to all ranks, bit for bit; `bounds` as in `reduce_scatter`."""
        self._run(self._native.all_gather, values_N, _type_of(values_N), self._checked(bounds, values_N))

    def all_reduce(self, values_N: Tensor) -> None:
        """Replace `values_N` by its sum over ranks."""
        self._run(self._native.all_reduce, values_N, values_N.numel(), _type_of(values_N))

    def _run(self, operation: Callable[..., None], values_N: Tensor, *arguments: object) -> None:
        try:
            operation(values_N.data_ptr(), *arguments)
        except RuntimeError:
            self._hang_up()
            raise

    def _checked(self, bounds: Sequence[tuple[int, int]], values_N: Tensor) -> list[tuple[int, int]]:
        cuts = [cut for start_stop in sorted(bounds) for cut in start_stop]
        if len(bounds) != self.size or cuts != sorted(cuts) or not all(0 <= cut <= values_N.numel() for cut in cuts):
            raise ValueError(
                f"bounds {list(bounds)} do not fit {values_N.numel()} elements and {self.size} ranks; give one "
                "(start, stop) per rank, without overlaps"
            )
        return list(bounds)


def _type_of(values_N: Tensor) -> int:
    if not values_N.is_cpu or not values_N.is_contiguous():
        raise ValueError(f"values_N is on {values_N.device} or strided; give a contiguous CPU tensor")
    if values_N.dtype not in DTYPES:
        raise TypeError(f"values_N is {values_N.dtype}; give {', '.join(map(str, DTYPES))}")
    return DTYPES.index(values_N.dtype)

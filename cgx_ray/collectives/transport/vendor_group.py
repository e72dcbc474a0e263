"""Sums and gathers among the ranks of a node by torch.distributed, in the memory of a device: NCCL on GPUs.

L ranks of the node, C elements of the longest part
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cgx_ray.runtime_ext.streams import Mark, Streams
from cgx_ray.torch_compat import collective

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def gpu_address(device: torch.device | int) -> str:
    """Return the machine and the PCI bus of a GPU, the same in every container, also for all slices of one (MIG)."""
    # Torch's stub lacks the addresses.
    properties: Any = torch.cuda.get_device_properties(device)
    address = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return f"{_BOOT_ID.read_text().strip()} {':'.join(map(str, address))}"


class VendorGroup:
    """The operations of `runtime_ext.shm.LocalGroup` for memory of a device, which does them by itself.

    They are iterators that enqueue all there is to do, on the stream of the vendor's sums, and yield the mark of its
    end. All ranks must start them in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, streams: Streams) -> None:
        """
        group    the ranks of this node, ascending
        streams  those of the device
        """
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._streams = streams

    def reduce_scatter(self, values_N: Tensor, bounds: Sequence[tuple[int, int]]) -> Iterator[Mark]:
        """Replace this rank's part of `values_N` by its sum over ranks. Cost a + (L-1)/L M b.

        values_N  flat and contiguous; what the other parts hold afterwards is undefined
        bounds    by rank, elements [start, stop), the same on all ranks, side by side; may be empty

        The order of the sum is the vendor's, so its bits are those of no other kind of group.
        """
        with self._streams.apart():
            rows_LC, parts, rows = self._rows(values_N, bounds)
            if rows:
                self._streams.copy_each(list(zip(parts, rows, strict=True)))
            self._sum_rows(rows_LC)
            if rows:
                self._streams.copy_each([(rows[self.rank], parts[self.rank])])
            mark = self._streams.mark()
        yield mark

    def all_gather(self, values_N: Tensor, bounds: Sequence[tuple[int, int]]) -> Iterator[Mark]:
        """Replace the others' parts of `values_N` by theirs, bit for bit. Cost and arguments of `reduce_scatter`."""
        with self._streams.apart():
            rows_LC, parts, rows = self._rows(values_N, bounds)
            if rows:
                self._streams.copy_each([(parts[self.rank], rows[self.rank])])
            self._gather_rows(rows_LC)
            if rows:
                others = [pair for rank, pair in enumerate(zip(rows, parts, strict=True)) if rank != self.rank]
                self._streams.copy_each(others)
            mark = self._streams.mark()
        yield mark

    def mark(self) -> Mark:
        """Return the point to which the device has come with the vendor's sums, once all calls so far are done."""
        with self._streams.apart():
            return self._streams.mark()

    def abort(self) -> None:
        """Let what is under way end without a result. For any thread."""
        self._group.abort()

    def _rows(
        self, values_N: Tensor, bounds: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """Return (L, C) memory with a row for each rank, the parts of `values_N`, and by rank where in a row its is.

        The vendor takes equal rows only. Parts that are equally long are rows already: then the last list is empty.
        """
        numels = [stop - start for start, stop in bounds]
        parts = values_N.split(numels)
        longest = max(numels)
        if min(numels) == longest:
            return values_N.view(self.size, longest), parts, []
        rows_LC = self._room(values_N, longest)
        return rows_LC, parts, [row_C[:numel] for row_C, numel in zip(rows_LC, numels, strict=True)]

    def _room(self, values_N: Tensor, longest: int) -> Tensor:
        # Of the stream on which alone it is used: torch may give it to that stream's next call at once.
        return torch.empty(self.size, longest, dtype=values_N.dtype, device=values_N.device)

    def _sum_rows(self, rows_LC: Tensor) -> None:
        """Replace this rank's row by its sum over ranks."""
        collective(dist, "reduce_scatter_single")(rows_LC[self.rank], rows_LC.view(-1), group=self._group)

    def _gather_rows(self, rows_LC: Tensor) -> None:
        """Replace the others' rows by theirs."""
        collective(dist, "all_gather_single")(rows_LC.view(-1), rows_LC[self.rank], group=self._group)

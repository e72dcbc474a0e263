"""Sums inside nodes by the group of a traced device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cgx_ray.collectives.transport.vendor_group import VendorGroup

if TYPE_CHECKING:
    from support.device.traced_device import TracedDevice


def trace_nodes(device: TracedDevice) -> None:
    """Make what `VendorGroup` does to memory calls of `device`."""
    room, sum_rows, gather_rows = VendorGroup._room, VendorGroup._sum_rows, VendorGroup._gather_rows

    def traced_room(inside: VendorGroup, values_N: Tensor, longest: int) -> Tensor:
        rows_LC = room(inside, values_N, longest)
        device.own(rows_LC)
        return rows_LC

    def traced_sum_rows(inside: VendorGroup, rows_LC: Tensor) -> None:
        device.launch(lambda: sum_rows(inside, rows_LC), [rows_LC], [rows_LC], "sums")

    def traced_gather_rows(inside: VendorGroup, rows_LC: Tensor) -> None:
        device.launch(lambda: gather_rows(inside, rows_LC), [rows_LC], [rows_LC], "gathers")

    VendorGroup._room = traced_room  # type: ignore[method-assign]
    VendorGroup._sum_rows = traced_sum_rows  # type: ignore[method-assign]
    VendorGroup._gather_rows = traced_gather_rows  # type: ignore[method-assign]

"""Protocol of whoever decides for an attachment: Ray Train's side, or the control loop of a run without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from cgx_ray.plan import Layer, Plan
from cgx_ray.planner.candidates import CodecCosts
from cgx_ray.session.settings import Settings

if TYPE_CHECKING:
    from cgx_ray.session.attachment import Attachment

# See `Session.first_plan`.
FirstPlan = Callable[[Sequence[Layer], int, int, CodecCosts | None], Plan]


class Session(Protocol):
    """Ray Train's side of an attachment: settings, first plan, and a thread that carries plans and samples."""

    settings: Settings

    def first_plan(self, layers: Sequence[Layer], world_size: int, bucket_bytes: int, costs: CodecCosts | None) -> Plan:
        """Return the plan to start with, on rank 0.

        bucket_bytes  of DDP's buckets
        costs         see `slowest`; None for a sharded model, whose plans are chosen by trial
        """

    def start(self, attachment: Attachment) -> None:
        """Restore the state in a checkpoint, then carry plans in and samples out until `attachment` is closed.

        At world size 1 only the state counts.
        """

"""The controller's knowledge of the moment, as it is published as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cgx_ray.control.estimate import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFacts:
    """Network and step times as the controller knows them now; None if unknown.

    bandwidth         payload bytes per second of a worker's link, from the training's own messages or from probes
    slow_link_bits_per_s
                      by rank, for ranks whose link is much slower than the others'
    slow_ranks        ranks whose compute takes much longer than the others'
    silent_nodes      ids of nodes that no longer answer the others
    silent_ranks      ranks whose samples have not come for seconds; steps count without them
    """

    bandwidth: Estimate | None
    latency_s: float | None
    num_link_changes: int
    slow_link_bits_per_s: Mapping[int, float]
    slow_ranks: frozenset[int]
    silent_nodes: frozenset[str]
    silent_ranks: frozenset[int]
    predicted_step_s: float | None
    measured_step_s: float | None

    @property
    def bandwidth_bits_per_s(self) -> float | None:
        return 8 * self.bandwidth.value if self.bandwidth is not None else None

    @property
    def bandwidth_error(self) -> float | None:
        """Half the width of the bandwidth's interval, as a fraction of the bandwidth."""
        rate = self.bandwidth
        return (rate.high - rate.low) / (2 * rate.value) if rate is not None else None

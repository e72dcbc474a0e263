"""Facts as a controller publishes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KnownFacts:
    """Facts of a controller that knows everything: a slow link, a slow rank, a silent node."""

    slow_link_bits_per_s: Mapping[int, float] = field(default_factory=lambda: {1: 1e8})
    slow_ranks: frozenset[int] = frozenset({1})
    silent_nodes: frozenset[str] = frozenset({"c"})
    bandwidth_bits_per_s: float = 1e9
    bandwidth_spread_bits_per_s: Mapping[str, float] = field(default_factory=lambda: {"low": 9e8, "high": 1.2e9})
    latency_s: float = 1e-3
    num_link_changes: int = 1
    num_impossible: int = 1
    predicted_step_s: float = 0.2
    measured_step_s: float = 0.25
    predicted_dense_step_s: float = 0.5
    dense_step_s: float = 0.6
    speed_up: float = 2.4
    prediction_error: float = 0.25
    plan_version: int = 3
    num_banned: int = 2
    num_decisions: Mapping[tuple[str, str], int] = field(default_factory=lambda: {("replace", "network"): 1})
    newest_decision_s: Mapping[tuple[str, str], float] = field(default_factory=lambda: {("replace", "network"): 1e9})
    num_reverts: Mapping[str, int] = field(default_factory=lambda: {"trial_expired": 1})
    num_faults: Mapping[tuple[int, str], int] = field(default_factory=lambda: {(1, "time_out"): 1})
    report_age_s: Mapping[str, float] = field(default_factory=lambda: {"c": 2.0})
    num_incomplete_steps: int = 1

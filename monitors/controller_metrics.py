"""Metrics of a run as its controller knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from cgx_ray.monitors.export import RANK, RUN, RUN_ID, Sink


class ControllerFacts(Protocol):
    """Values that the controller publishes once per second while nodes report. None means unknown."""

    @property
    def bandwidth_bits_per_s(self) -> float | None: ...
    @property
    def bandwidth_spread_bits_per_s(self) -> Mapping[str, float]: ...
    @property
    def latency_s(self) -> float | None: ...
    @property
    def num_link_changes(self) -> int: ...
    @property
    def num_impossible(self) -> int: ...
    @property
    def slow_link_bits_per_s(self) -> Mapping[int, float]: ...
    @property
    def slow_ranks(self) -> frozenset[int]: ...
    @property
    def silent_nodes(self) -> frozenset[str]: ...
    @property
    def predicted_step_s(self) -> float | None: ...
    @property
    def measured_step_s(self) -> float | None: ...
    @property
    def predicted_dense_step_s(self) -> float | None: ...
    @property
    def dense_step_s(self) -> float | None: ...
    @property
    def speed_up(self) -> float | None: ...
    @property
    def prediction_error(self) -> float | None: ...
    @property
    def plan_version(self) -> int: ...
    @property
    def num_banned(self) -> int: ...
    @property
    def num_decisions(self) -> Mapping[tuple[str, str], int]: ...
    @property
    def newest_decision_s(self) -> Mapping[tuple[str, str], float]: ...
    @property
    def num_reverts(self) -> Mapping[str, int]: ...
    @property
    def num_faults(self) -> Mapping[tuple[int, str], int]: ...
    @property
    def report_age_s(self) -> Mapping[str, float]: ...
    @property
    def num_incomplete_steps(self) -> int: ...


class ControllerMetrics:
    """Publishes estimates and decisions of the controller. `journal`: path of the run's journal."""

    def __init__(self, sink: Sink, run_name: str, run_id: str = "", *, journal: str) -> None:
        self._sink, self._journal = sink, journal
        self._run = {RUN: run_name, RUN_ID: run_id}
        self._named: dict[str, set[int | str]] = {}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}

    def export(self, facts: ControllerFacts, num_journal_errors: int) -> None:
        """Set the gauges and counters; `num_journal_errors` is the total so far."""
        values = {
            "cgx_ray_link_bandwidth_bits_per_second": facts.bandwidth_bits_per_s,
            "cgx_ray_worker_latency_seconds": facts.latency_s,
            "cgx_ray_predicted_step_seconds": facts.predicted_step_s,
            "cgx_ray_measured_step_seconds": facts.measured_step_s,
            "cgx_ray_predicted_dense_step_seconds": facts.predicted_dense_step_s,
            "cgx_ray_dense_step_seconds": facts.dense_step_s,
            "cgx_ray_speed_up": facts.speed_up,
            "cgx_ray_prediction_error": facts.prediction_error,
            "cgx_ray_newest_plan_version": facts.plan_version,
            "cgx_ray_banned_options": facts.num_banned,
        }
        for name, value in values.items():
            if value is not None:
                self._sink.set(name, value, self._run)
        self._sink.set("cgx_ray_journal_info", 1, {**self._run, "journal": self._journal})
        for side, rate in facts.bandwidth_spread_bits_per_s.items():
            self._sink.set("cgx_ray_link_bandwidth_spread_bits_per_second", rate, {**self._run, "side": side})
        self._set_of("cgx_ray_slow_link_bits_per_second", RANK, facts.slow_link_bits_per_s)
        self._set_of("cgx_ray_slow_rank", RANK, dict.fromkeys(facts.slow_ranks, 1))
        self._set_of("cgx_ray_silent_node", "peer", dict.fromkeys(facts.silent_nodes, 1))
        self._set_of("cgx_ray_report_age_seconds", "peer", facts.report_age_s)
        for (kind, cause), num_decisions in facts.num_decisions.items():
            self._count("cgx_ray_decisions", num_decisions, kind=kind, cause=cause)
        for (kind, cause), time_s in facts.newest_decision_s.items():
            self._sink.set("cgx_ray_decision_timestamp_seconds", time_s, {**self._run, "kind": kind, "cause": cause})
        for cause, num_reverts in facts.num_reverts.items():
            self._count("cgx_ray_reverts", num_reverts, cause=cause)
        for (rank, fault), num_faults in facts.num_faults.items():
            self._count("cgx_ray_faults", num_faults, **{RANK: str(rank), "fault": fault})
        self._count("cgx_ray_link_changes", facts.num_link_changes)
        self._count("cgx_ray_impossible_rates", facts.num_impossible)
        self._count("cgx_ray_incomplete_steps", facts.num_incomplete_steps)
        self._count("cgx_ray_journal_errors", num_journal_errors)

    def _count(self, name: str, total: float, **labels: str) -> None:
        """Bring the counter to `total`."""
        key = name, tuple(labels.values())
        self._sink.increase(name, total - self._totals.get(key, 0.0), {**self._run, **labels})
        self._totals[key] = total

    def _set_of(self, name: str, tag: str, values: Mapping[Any, float]) -> None:
        """Set one gauge per key of `values`, and to 0 the gauges of keys that are no longer in `values`."""
        known = self._named.setdefault(name, set())
        known.update(values)
        for one in known:
            self._sink.set(name, values.get(one, 0), {**self._run, tag: str(one)})

"""All metrics of the project with name, meaning and unit, published through `ray.util.metrics`.

Ray serves them on each node's metrics port, with the prefix `ray_` and, for counters, the suffix `_total`. A metric is
created by the process that first sets it, so importing this module registers nothing. Ray drops a gauge that is not set
for about 30 s: call `export` about every second, even if nothing has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any, Protocol

from ray.util import metrics

from cgx_ray.monitors.sample import CURVE_DENSITIES, HostLoad, NodeSample, StepSample

# Labels of Ray Train's own metrics, so that panels can join both.
RUN = "ray_train_run_name"
RANK = "ray_train_worker_world_rank"

PHASES = ("compute", "encode", "exchange", "decode")
STEP_SECONDS_BOUNDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0]


@dataclass(frozen=True, slots=True)
class Metric:
    """Arguments of the metric's class in `ray.util.metrics`."""

    kind: type[metrics.Metric]
    meaning: str
    tags: tuple[str, ...]


METRICS: dict[str, Metric] = {
    # Set by the agent of each node.
    "cgx_ray_step_seconds": Metric(metrics.Histogram, "Seconds per training step of a rank.", (RUN, RANK)),
    "cgx_ray_phase_seconds": Metric(
        metrics.Gauge,
        "Seconds per step in a phase: compute (the step without the communication that compute does not hide), encode, "
        "exchange or decode; mean over the last interval with steps. The last three may overlap with compute.",
        (RUN, RANK, "phase"),
    ),
    "cgx_ray_wire_bytes": Metric(metrics.Counter, "Bytes of gradients sent by a rank.", (RUN, RANK)),
    "cgx_ray_dense_bytes": Metric(
        metrics.Counter, "Bytes of a rank's gradients before compression, counted once per step.", (RUN, RANK)
    ),
    "cgx_ray_compression_ratio": Metric(
        metrics.Gauge,
        "Bytes of the gradient divided by bytes of its encoding, in the last step; 1 if dense. No unit.",
        (RUN, RANK),
    ),
    "cgx_ray_plan_version": Metric(metrics.Gauge, "Version of the plan used in a rank's last step.", (RUN, RANK)),
    "cgx_ray_gain": Metric(
        metrics.Gauge,
        "Compression gain when last measured: energy of the compressed gradient divided by energy of the error-fed "
        "gradient. By codec as predicted, by option in use as it was kept. No unit.",
        (RUN, RANK, "codec"),
    ),
    "cgx_ray_gradient_norm": Metric(
        metrics.Gauge, "Norm of a rank's gradient when last measured, without residuals and small layers.", (RUN, RANK)
    ),
    "cgx_ray_gain_at_density": Metric(
        metrics.Gauge,
        "Compression gain of top-k at a density when last measured; mean over the node's ranks. No unit.",
        (RUN, "density"),
    ),
    "cgx_ray_link_latency_seconds": Metric(
        metrics.Gauge, "One-way latency in seconds from this node to the node `peer`.", (RUN, "peer")
    ),
    "cgx_ray_nic_bytes_per_second": Metric(
        metrics.Gauge,
        "Bytes per second through the node's network cards, without loopback; direction is sent or received.",
        (RUN, "direction"),
    ),
    "cgx_ray_nic_speed_bits_per_second": Metric(
        metrics.Gauge,
        "Speed in bits per second of the node's fastest network card; 0 if its driver does not report it.",
        (RUN,),
    ),
    "cgx_ray_nic_errors": Metric(
        metrics.Counter, "Packets that the node's network cards dropped or received broken.", (RUN,)
    ),
    "cgx_ray_neighbour_bytes_per_second": Metric(
        metrics.Gauge,
        "Bytes per second on the node's link that are not from this training; mean over half a minute. Missing if "
        "ranks of the node share no memory, since they also count what they send to each other.",
        (RUN,),
    ),
    "cgx_ray_cpu_share": Metric(metrics.Gauge, "Fraction of the node's processors in use, 0 to 1. No unit.", (RUN,)),
    "cgx_ray_memory_share": Metric(metrics.Gauge, "Fraction of the node's memory in use, 0 to 1. No unit.", (RUN,)),
    "cgx_ray_pressure": Metric(
        metrics.Gauge,
        "Fraction of the last 10 s in which a process on the node waited for a resource (cpu or memory). No unit.",
        (RUN, "resource"),
    ),
    # Set by the controller.
    "cgx_ray_decisions": Metric(metrics.Counter, "Decisions so far; kind is keep, replace or disable.", (RUN, "kind")),
    "cgx_ray_link_bandwidth_bits_per_second": Metric(
        metrics.Gauge,
        "Bandwidth of a worker's link in bits per second, estimated from the training's messages or from probes. If "
        "some links are slow, that of the slowest.",
        (RUN,),
    ),
    "cgx_ray_link_bandwidth_error": Metric(
        metrics.Gauge,
        "Half the width of the bandwidth's 95 % interval, as a fraction of the bandwidth. No unit.",
        (RUN,),
    ),
    "cgx_ray_worker_latency_seconds": Metric(
        metrics.Gauge, "One-way latency in seconds between workers that are not near each other.", (RUN,)
    ),
    "cgx_ray_link_changes": Metric(metrics.Counter, "Number of changes of latency or bandwidth.", (RUN,)),
    "cgx_ray_impossible_rates": Metric(
        metrics.Counter, "Measured rates that were dropped, as a card or the probes show that no link had them.", (RUN,)
    ),
    "cgx_ray_slow_link_bits_per_second": Metric(
        metrics.Gauge,
        "Bandwidth in bits per second of a rank whose link is much slower than the others'; 0 when it no longer is.",
        (RUN, RANK),
    ),
    "cgx_ray_slow_rank": Metric(
        metrics.Gauge,
        "1 while a rank's compute takes much longer than the others', 0 afterwards. No unit.",
        (RUN, RANK),
    ),
    "cgx_ray_silent_node": Metric(
        metrics.Gauge, "1 while the node `peer` answers no other node's probes, 0 afterwards. No unit.", (RUN, "peer")
    ),
    "cgx_ray_predicted_step_seconds": Metric(
        metrics.Gauge, "Seconds per step that the planner predicts for the plan in force.", (RUN,)
    ),
    "cgx_ray_measured_step_seconds": Metric(
        metrics.Gauge, "Seconds per step that the ranks measure under the plan in force.", (RUN,)
    ),
    "cgx_ray_journal_errors": Metric(metrics.Counter, "Lines of the journal that could not be written.", (RUN,)),
}


class NodeMetrics:
    """Publishes the samples of one node.

    Keeps the last values of each rank and sets them again if the rank had no new step.
    """

    def __init__(self, run_name: str) -> None:
        self._run = {RUN: run_name}
        self._gauges_of_rank: dict[int, dict[tuple[str, str, str], float]] = {}
        self._curve_of_rank: dict[int, tuple[float, ...]] = {}
        self._num_nic_errors = 0

    def export(self, sample: NodeSample) -> None:
        """Add the new steps to the counters, then set every gauge of the node."""
        steps_of_rank: dict[int, list[StepSample]] = {}
        for step in sample.steps:
            steps_of_rank.setdefault(step.rank, []).append(step)
        for rank, steps in steps_of_rank.items():
            self._count(steps, {**self._run, RANK: str(rank)})
            self._gauges_of_rank.setdefault(rank, {}).update(_gauges(steps))
            for step in steps:
                if step.gain_curve:
                    self._curve_of_rank[rank] = step.gain_curve
        for rank, gauges in self._gauges_of_rank.items():
            for (name, tag, value_of_tag), value in gauges.items():
                extra = {tag: value_of_tag} if tag else {}
                _get(name).set(value, {**self._run, RANK: str(rank), **extra})
        columns = zip(*self._curve_of_rank.values(), strict=True)
        for density, gains in zip(CURVE_DENSITIES, columns, strict=False):
            _get("cgx_ray_gain_at_density").set(fmean(gains), {**self._run, "density": f"{density:.2g}"})
        for peer, latency_s in sample.latency_s.items():
            _get("cgx_ray_link_latency_seconds").set(latency_s, {**self._run, "peer": peer})
        self._export_host(sample.host)

    def _export_host(self, host: HostLoad) -> None:
        for direction, rate in (("sent", host.sent_bytes_per_s), ("received", host.received_bytes_per_s)):
            _get("cgx_ray_nic_bytes_per_second").set(rate, {**self._run, "direction": direction})
        for resource, share in host.pressure.items():
            _get("cgx_ray_pressure").set(share, {**self._run, "resource": resource})
        if host.neighbour_bytes_per_s is not None:
            _get("cgx_ray_neighbour_bytes_per_second").set(host.neighbour_bytes_per_s, self._run)
        _get("cgx_ray_nic_speed_bits_per_second").set(host.nic_speed_bits_per_s, self._run)
        _get("cgx_ray_cpu_share").set(host.cpu_share, self._run)
        _get("cgx_ray_memory_share").set(host.memory_share, self._run)
        _increase("cgx_ray_nic_errors", host.num_nic_errors - self._num_nic_errors, self._run)
        self._num_nic_errors = host.num_nic_errors

    def _count(self, steps: list[StepSample], tags: Mapping[str, str]) -> None:
        for step in steps:
            _get("cgx_ray_step_seconds").observe(step.step_s, tags)
        _increase("cgx_ray_wire_bytes", sum(step.wire_bytes for step in steps), tags)
        _increase("cgx_ray_dense_bytes", sum(step.dense_bytes for step in steps), tags)


def _gauges(steps: list[StepSample]) -> dict[tuple[str, str, str], float]:
    """Return values of one rank's gauges by (metric, extra tag, value of that tag)."""
    last = steps[-1]
    gauges: dict[tuple[str, str, str], float] = {
        ("cgx_ray_phase_seconds", "phase", phase): fmean(getattr(step, f"{phase}_s") for step in steps)
        for phase in PHASES
    }
    gauges["cgx_ray_plan_version", "", ""] = last.plan_version
    encoded_bytes = sum(transfer.wire_bytes for transfer in last.transfers)
    if encoded_bytes:
        gauges["cgx_ray_compression_ratio", "", ""] = last.dense_bytes / encoded_bytes
    for step in steps:
        if step.norm is not None:
            gauges["cgx_ray_gradient_norm", "", ""] = step.norm
        # Options that are not in use are left out: they would be a dozen time series per codec and rank.
        codecs = {name: gain for name, gain in step.gain.items() if " over " not in name}
        gauges.update({("cgx_ray_gain", "codec", name): gain for name, gain in {**codecs, **step.kept}.items()})
    return gauges


class ControllerFacts(Protocol):
    """Values that the controller publishes with each report of a node. None means unknown."""

    @property
    def bandwidth_bits_per_s(self) -> float | None: ...
    @property
    def bandwidth_error(self) -> float | None: ...
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


class ControllerMetrics:
    """Publishes estimates and decisions of the controller."""

    def __init__(self, run_name: str) -> None:
        self._run = {RUN: run_name}
        self._num_journal_errors = 0
        self._num_link_changes = 0
        self._num_impossible = 0
        self._named: dict[str, set[int | str]] = {}

    def count_decision(self, kind: str) -> None:
        _increase("cgx_ray_decisions", 1, {**self._run, "kind": kind})

    def export(self, facts: ControllerFacts, num_journal_errors: int) -> None:
        """Set the gauges and counters; `num_journal_errors` is the total so far."""
        values = {
            "cgx_ray_link_bandwidth_bits_per_second": facts.bandwidth_bits_per_s,
            "cgx_ray_link_bandwidth_error": facts.bandwidth_error,
            "cgx_ray_worker_latency_seconds": facts.latency_s,
            "cgx_ray_predicted_step_seconds": facts.predicted_step_s,
            "cgx_ray_measured_step_seconds": facts.measured_step_s,
        }
        for name, value in values.items():
            if value is not None:
                _get(name).set(value, self._run)
        self._set_of("cgx_ray_slow_link_bits_per_second", RANK, facts.slow_link_bits_per_s)
        self._set_of("cgx_ray_slow_rank", RANK, dict.fromkeys(facts.slow_ranks, 1))
        self._set_of("cgx_ray_silent_node", "peer", dict.fromkeys(facts.silent_nodes, 1))
        _increase("cgx_ray_link_changes", facts.num_link_changes - self._num_link_changes, self._run)
        self._num_link_changes = facts.num_link_changes
        _increase("cgx_ray_impossible_rates", facts.num_impossible - self._num_impossible, self._run)
        self._num_impossible = facts.num_impossible
        _increase("cgx_ray_journal_errors", num_journal_errors - self._num_journal_errors, self._run)
        self._num_journal_errors = num_journal_errors

    def _set_of(self, name: str, tag: str, values: Mapping[Any, float]) -> None:
        """Set one gauge per key of `values`, and to 0 the gauges of keys that are no longer in `values`."""
        known = self._named.setdefault(name, set())
        known.update(values)
        for one in known:
            _get(name).set(values.get(one, 0), {**self._run, tag: str(one)})


def _increase(name: str, by: float, tags: Mapping[str, str]) -> None:
    # Ray refuses an increase by 0.
    if by > 0:
        _get(name).inc(by, tags)


@cache
def _get(name: str) -> Any:
    metric = METRICS[name]
    if metric.kind is metrics.Histogram:
        return metrics.Histogram(name, metric.meaning, boundaries=STEP_SECONDS_BOUNDS, tag_keys=metric.tags)
    return metric.kind(name, metric.meaning, tag_keys=metric.tags)

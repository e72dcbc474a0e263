"""Metrics of one node, or of one rank without Ray: from samples to values of `export.METRICS`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from cgx_ray.monitors.export import PHASES, RANK, RUN, RUN_ID, Sink
from cgx_ray.monitors.sample import CURVE_DENSITIES, HostLoad, StepSample, Transfer
from cgx_ray.plan import CodecSpec, spoken


class OptionNames(NamedTuple):
    """Names of a codec and a scheme, as values of labels."""

    codec: str
    scheme: str


# The samples of an FSDP2 model have no transfers.
_SHARDED = OptionNames("sharded", "sharded")

# A gauge of one rank: its metric, and its labels beside run and rank.
_Gauge = tuple[str, tuple[tuple[str, str], ...]]


class NodeMetrics:
    """Publishes the samples of one node.

    Keeps the last values of each rank and sets them again if the rank had no new step, because Ray drops a gauge that
    is not set for about 30 s. So call `export` about every second, even if nothing has changed.
    """

    def __init__(self, sink: Sink, run_name: str, run_id: str = "") -> None:
        self._sink = sink
        self._run = {RUN: run_name, RUN_ID: run_id}
        self._gauges_of_rank: dict[int, dict[_Gauge, float]] = {}
        self._curve_of_rank: dict[int, tuple[float, ...]] = {}
        self._num_nic_errors = 0

    def export(self, samples: Sequence[StepSample], latency_s: Mapping[str, float], host: HostLoad) -> None:
        """Add new steps to the counters, then set every gauge of the node. See `NodeSample` for the other arguments."""
        self.export_steps(samples)
        for peer, one_way_s in latency_s.items():
            self._sink.set("cgx_ray_link_latency_seconds", one_way_s, {**self._run, "peer": peer})
        self._export_host(host)

    def export_steps(self, samples: Sequence[StepSample]) -> None:
        """Add new steps to the counters, then set every gauge of the ranks so far."""
        steps_of_rank: dict[int, list[StepSample]] = {}
        for step in samples:
            steps_of_rank.setdefault(step.rank, []).append(step)
        for rank, steps in steps_of_rank.items():
            self._count(steps, {**self._run, RANK: str(rank)})
            known = self._gauges_of_rank.setdefault(rank, {})
            # Options of an earlier plan have no groups any more.
            known.update({gauge: 0.0 for gauge in known if gauge[0] == "cgx_ray_groups"})
            known.update(_gauges(steps))
            for step in steps:
                if step.gain_curve:
                    self._curve_of_rank[rank] = step.gain_curve
        for rank, gauges in self._gauges_of_rank.items():
            labels = {**self._run, RANK: str(rank)}
            for (name, extra), value in gauges.items():
                self._sink.set(name, value, {**labels, **dict(extra)} if extra else labels)
        columns = zip(*self._curve_of_rank.values(), strict=True)
        for density, gains in zip(CURVE_DENSITIES, columns, strict=False):
            self._sink.set("cgx_ray_gain_at_density", fmean(gains), {**self._run, "density": f"{density:.2g}"})

    def _export_host(self, host: HostLoad) -> None:
        for direction, rate in (("sent", host.sent_bytes_per_s), ("received", host.received_bytes_per_s)):
            self._sink.set("cgx_ray_nic_bytes_per_second", rate, {**self._run, "direction": direction})
        for resource, share in host.pressure.items():
            self._sink.set("cgx_ray_pressure", share, {**self._run, "resource": resource})
        if host.neighbour_bytes_per_s is not None:
            self._sink.set("cgx_ray_neighbour_bytes_per_second", host.neighbour_bytes_per_s, self._run)
        self._sink.set("cgx_ray_nic_speed_bits_per_second", host.nic_speed_bits_per_s, self._run)
        self._sink.set("cgx_ray_cpu_share", host.cpu_share, self._run)
        self._sink.set("cgx_ray_memory_share", host.memory_share, self._run)
        self._sink.increase("cgx_ray_nic_errors", host.num_nic_errors - self._num_nic_errors, self._run)
        self._num_nic_errors = host.num_nic_errors

    def _count(self, steps: list[StepSample], labels: Mapping[str, str]) -> None:
        num_steps: Counter[OptionNames] = Counter()
        wire_bytes: Counter[OptionNames] = Counter()
        dense_bytes: Counter[OptionNames] = Counter()
        # Gathered first: names are looked up once per codec and scheme, not once per group and step.
        transfers: defaultdict[tuple[str, str, int], list[Transfer]] = defaultdict(list)
        main_of_plan: dict[int, OptionNames] = {}
        for step in steps:
            self._sink.observe("cgx_ray_step_seconds", step.step_s, labels)
            if step.plan_version not in main_of_plan:
                main_of_plan[step.plan_version] = _main_option(step)
            num_steps[main_of_plan[step.plan_version]] += step.num_steps
            if not step.transfers:
                wire_bytes[_SHARDED] += step.wire_bytes
                dense_bytes[_SHARDED] += step.dense_bytes
            for one in step.transfers:
                transfers[one.codec, one.scheme, step.num_steps].append(one)
        for (codec, scheme, in_round), sent in transfers.items():
            names = OptionNames(_name(codec), scheme)
            wire_bytes[names] += sum([one.sent_bytes for one in sent])
            dense_bytes[names] += in_round * sum([one.dense_bytes for one in sent])
        for name, counts in (("steps", num_steps), ("wire_bytes", wire_bytes), ("dense_bytes", dense_bytes)):
            for names, count in counts.items():
                self._sink.increase(f"cgx_ray_{name}", count, {**labels, **names._asdict()})
        self._sink.increase("cgx_ray_non_finite_steps", sum(not step.is_finite for step in steps), labels)
        self._sink.increase("cgx_ray_weight_checks", sum(step.weight_drift == 0 for step in steps), labels)


# Looked up for each sample.
_spoken = lru_cache(maxsize=1024)(spoken)


def _name(codec: str) -> str:
    """Return the codec's name, without parameters; "dense" without one, as everywhere that people read."""
    name = _spec(codec).name
    return "dense" if name == "none" else name


@lru_cache(maxsize=1024)
def _spec(text: str) -> CodecSpec:
    return CodecSpec.parse(text)


def _main_option(step: StepSample) -> OptionNames:
    """Return the names of codec and scheme of the largest part of the gradient."""
    if not step.transfers:
        return _SHARDED
    numels: Counter[tuple[str, str]] = Counter()
    for one in step.transfers:
        numels[one.codec, one.scheme] += one.numel
    codec, scheme = max(numels, key=lambda option: numels[option])
    return OptionNames(_name(codec), scheme)


def _gauges(steps: list[StepSample]) -> dict[_Gauge, float]:
    """Return values of one rank's gauges."""
    last = steps[-1]
    gauges: dict[_Gauge, float] = {
        ("cgx_ray_phase_seconds", (("phase", phase),)): fmean(getattr(step, f"{phase}_s") for step in steps)
        for phase in PHASES
    }
    gauges["cgx_ray_exposed_seconds", ()] = fmean(step.step_s - step.compute_s for step in steps)
    gauges["cgx_ray_plan_version", ()] = last.plan_version
    gauges |= _plan_gauges(last)
    lags_s = [max(step.lag_s.values()) for step in steps if step.lag_s]
    if lags_s:
        gauges["cgx_ray_agreement_lag_seconds", ()] = fmean(lags_s)
    for step in steps:
        if step.norm is not None:
            gauges["cgx_ray_gradient_norm", ()] = step.norm
        if step.loss is not None:
            gauges["cgx_ray_loss", ()] = step.loss
        if step.lr is not None:
            gauges["cgx_ray_learning_rate", ()] = step.lr
        if step.weight_drift is not None:
            gauges["cgx_ray_weight_drift", ()] = step.weight_drift
        if step.norm and step.residual_norm is not None:
            gauges["cgx_ray_residual_ratio", ()] = step.residual_norm / step.norm
        # Options that are not in use are left out: they would be a dozen time series per codec and rank.
        codecs = {name: gain for name, gain in step.gain.items() if " over " not in name}
        found = {**codecs, **step.kept}
        gauges.update({("cgx_ray_gain", (("codec", _spoken(name)),)): gain for name, gain in found.items()})
    return gauges


def _plan_gauges(step: StepSample) -> dict[_Gauge, float]:
    """Return what the plan in force does to the gradient. Empty for an FSDP2 model."""
    numel = sum(one.numel for one in step.transfers)
    encoded_bytes = sum(one.wire_bytes for one in step.transfers)
    if not numel or not encoded_bytes:
        return {}
    groups = Counter(OptionNames(_name(one.codec), one.scheme) for one in step.transfers)
    kept = sum(one.numel * (_spec(one.codec).density or 1.0) for one in step.transfers)
    return {
        ("cgx_ray_compression_ratio", ()): step.num_steps * step.dense_bytes / encoded_bytes,
        ("cgx_ray_density", ()): kept / numel,
        ("cgx_ray_period", ()): float(step.num_steps),
        ("cgx_ray_bits_per_element", ()): 8 * encoded_bytes / numel / step.num_steps,
        **{("cgx_ray_groups", tuple(names._asdict().items())): float(n) for names, n in groups.items()},
    }

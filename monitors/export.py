"""All metrics of the project: name, kind, unit, labels and meaning. The only home of their names.

`node_metrics` and `controller_metrics` set them through a `Sink`: `ray_sink` inside Ray, `endpoint` without it. Both
serve the same names: with the prefix `ray_` and, for counters, the suffix `_total`, as Ray does. So one set of boards
shows both. Labels have few values: none is a step, a layer, a group or free text. A path is
one value per run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

# Labels of Ray Train's own metrics, so that panels can join both. Every metric has the first two.
RUN = "ray_train_run_name"
RUN_ID = "ray_train_run_id"
RANK = "ray_train_worker_world_rank"

PHASES = ("compute", "encode", "exchange", "decode", "between")
STEP_SECONDS_BOUNDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0]

LABELS = {
    RUN: "name of the run",
    RUN_ID: "Ray Train's id of the run; empty without Ray",
    RANK: "rank in the run",
    "phase": "compute, encode, exchange, decode or between (steps)",
    "codec": "name of the codec, without parameters; `dense` without one, `sharded` for FSDP2 models. For "
    "`cgx_ray_gain`, codec or option",
    "scheme": "name of the scheme; `sharded` for FSDP2 models",
    "density": "density of top-k",
    "peer": "id of a node",
    "direction": "sent or received",
    "resource": "cpu or memory",
    "side": "low or high",
    "kind": "keep, replace or disable",
    "fault": "time_out (a rank did not answer in time), damaged (CRC-32C of a message), weights_differ, connection (a "
    "rank is gone or hung up) or other",
    "cause": "kind of the cause: first_measurements, network, compute, prediction (steps took longer or shorter than "
    "predicted), gain, loss, review, ban (what to do after a plan was taken back), slower_than_dense, "
    "compare_with_dense, trial_ended, trial_expired (no outcome in time) or restart",
    "journal": "path of the run's decisions.jsonl on the node of its controller",
}

Kind = Literal["gauge", "counter", "histogram"]
Source = Literal["node", "controller"]


@dataclass(frozen=True, slots=True)
class Metric:
    """Kind, unit and meaning of a metric. `extra`: its labels beside run name and run id. `source`: who sets it."""

    kind: Kind
    unit: str
    source: Source
    extra: tuple[str, ...]
    meaning: str

    @property
    def labels(self) -> tuple[str, ...]:
        return (RUN, RUN_ID, *self.extra)

    @property
    def help(self) -> str:
        return f"{self.meaning} Unit: {self.unit}."


class Sink(Protocol):
    """Where values go. `labels` holds every label of the metric."""

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None: ...
    def increase(self, name: str, by: float, labels: Mapping[str, str]) -> None: ...
    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None: ...


_OPTION = (RANK, "codec", "scheme")

METRICS: dict[str, Metric] = {
    # Set by the agent of each node, or by each rank without Ray.
    "cgx_ray_step_seconds": Metric(
        "histogram",
        "seconds",
        "node",
        (RANK,),
        "Time of a training step of a rank, without what the rank does between two steps.",
    ),
    "cgx_ray_steps": Metric(
        "counter",
        "steps",
        "node",
        _OPTION,
        "Steps of a rank, by the codec and scheme of the largest part of its gradients.",
    ),
    "cgx_ray_phase_seconds": Metric(
        "gauge",
        "seconds",
        "node",
        (RANK, "phase"),
        "Time per step in a phase: compute (the step without the communication that compute does not hide), encode, "
        "exchange, decode or between (what the rank does between two steps, such as an evaluation, a checkpoint or a "
        "report; it is no part of the step); mean over the last interval with steps. Encode, exchange and decode may "
        "overlap with compute.",
    ),
    "cgx_ray_exposed_seconds": Metric(
        "gauge",
        "seconds",
        "node",
        (RANK,),
        "Communication per step that compute does not hide, with the time for which this rank waits for others; mean "
        "over the last interval with steps.",
    ),
    "cgx_ray_wire_bytes": Metric(
        "counter", "bytes", "node", _OPTION, "Gradients, or changes of parameters, sent by a rank, encoded."
    ),
    "cgx_ray_dense_bytes": Metric(
        "counter", "bytes", "node", _OPTION, "A rank's gradients before compression, counted once per step."
    ),
    "cgx_ray_compression_ratio": Metric(
        "gauge",
        "ratio",
        "node",
        (RANK,),
        "Bytes of the gradient divided by bytes of its encoding, in the last step; 1 if dense.",
    ),
    "cgx_ray_density": Metric(
        "gauge",
        "ratio",
        "node",
        (RANK,),
        "Share of elements that the codecs in force send, mean over elements; 1 if all, at any number of bits.",
    ),
    "cgx_ray_bits_per_element": Metric(
        "gauge",
        "bits",
        "node",
        (RANK,),
        "Encoded size per element of the gradient, mean over elements, with indices and scales; 32 if dense float32.",
    ),
    "cgx_ray_period": Metric("gauge", "steps", "node", (RANK,), "Steps between two exchanges of the last one."),
    "cgx_ray_groups": Metric("gauge", "groups", "node", _OPTION, "Groups of the plan in force, by codec and scheme."),
    "cgx_ray_plan_version": Metric("gauge", "version", "node", (RANK,), "Plan used in a rank's last step."),
    "cgx_ray_gain": Metric(
        "gauge",
        "ratio",
        "node",
        (RANK, "codec"),
        "Compression gain when last measured: energy of the compressed gradient divided by energy of the error-fed "
        "gradient. By codec as predicted, by option in use as it was kept.",
    ),
    "cgx_ray_gradient_norm": Metric(
        "gauge",
        "norm",
        "node",
        (RANK,),
        "Norm of a rank's gradient when last measured, without residuals and small layers.",
    ),
    "cgx_ray_loss": Metric(
        "gauge", "loss", "node", (RANK,), "Newest loss that the training has reported; missing if it reports none."
    ),
    "cgx_ray_learning_rate": Metric(
        "gauge", "learning rate", "node", (RANK,), "Newest learning rate that the training has reported."
    ),
    "cgx_ray_residual_ratio": Metric(
        "gauge",
        "ratio",
        "node",
        (RANK,),
        "Norm of the error-feedback residual divided by the norm of the gradient, when last measured. Missing if no "
        "codec in use has a residual.",
    ),
    "cgx_ray_gain_at_density": Metric(
        "gauge",
        "ratio",
        "node",
        ("density",),
        "Compression gain of top-k at a density when last measured; mean over the node's ranks.",
    ),
    "cgx_ray_agreement_lag_seconds": Metric(
        "gauge",
        "seconds",
        "node",
        (RANK,),
        "Time from the end of a rank's step until it knows that the last other rank has ended it: how late that is.",
    ),
    "cgx_ray_non_finite_steps": Metric(
        "counter",
        "steps",
        "node",
        (RANK,),
        "Steps in which an average was NaN or Inf. Looked at only while a codec in use has memory.",
    ),
    "cgx_ray_weight_checks": Metric(
        "counter",
        "checks",
        "node",
        (RANK,),
        "Comparisons of all ranks' weights that found no difference. A difference beyond rounding ends the training, "
        "see `cgx_ray_faults`.",
    ),
    "cgx_ray_weight_drift": Metric(
        "gauge",
        "ratio",
        "node",
        (RANK,),
        "Largest difference of a layer's weights between ranks, divided by the norm of the layer, when last compared; "
        "0 if all bits were the same.",
    ),
    "cgx_ray_link_latency_seconds": Metric(
        "gauge", "seconds", "node", ("peer",), "One-way latency from this node to the node `peer`."
    ),
    "cgx_ray_nic_bytes_per_second": Metric(
        "gauge",
        "bytes per second",
        "node",
        ("direction",),
        "Traffic of the node's network cards, without loopback.",
    ),
    "cgx_ray_nic_speed_bits_per_second": Metric(
        "gauge",
        "bits per second",
        "node",
        (),
        "Speed of the node's fastest network card; 0 if its driver does not report it.",
    ),
    "cgx_ray_nic_errors": Metric(
        "counter", "packets", "node", (), "Packets that the node's network cards dropped or received broken."
    ),
    "cgx_ray_neighbour_bytes_per_second": Metric(
        "gauge",
        "bytes per second",
        "node",
        (),
        "Traffic on the node's link that is not from this training; mean over half a minute. Missing if ranks of the "
        "node share no memory, since they also count what they send to each other.",
    ),
    "cgx_ray_cpu_share": Metric("gauge", "ratio", "node", (), "Fraction of the node's processors in use, 0 to 1."),
    "cgx_ray_memory_share": Metric("gauge", "ratio", "node", (), "Fraction of the node's memory in use, 0 to 1."),
    "cgx_ray_pressure": Metric(
        "gauge",
        "ratio",
        "node",
        ("resource",),
        "Fraction of the last 10 s in which a process on the node waited for a resource.",
    ),
    # Set by the controller.
    "cgx_ray_newest_plan_version": Metric(
        "gauge", "version", "controller", (), "Newest plan that the controller hands out."
    ),
    "cgx_ray_decisions": Metric("counter", "decisions", "controller", ("kind", "cause"), "Decisions so far."),
    "cgx_ray_decision_timestamp_seconds": Metric(
        "gauge",
        "seconds since 1970",
        "controller",
        ("kind", "cause"),
        "Time of the newest decision of this kind and cause.",
    ),
    "cgx_ray_reverts": Metric(
        "counter",
        "reverts",
        "controller",
        ("cause",),
        "Returns to an earlier plan: slower_than_dense, or trial_expired (no outcome was known in time).",
    ),
    "cgx_ray_banned_options": Metric("gauge", "options", "controller", (), "Options that are banned for a time."),
    "cgx_ray_link_bandwidth_bits_per_second": Metric(
        "gauge",
        "bits per second",
        "controller",
        (),
        "Bandwidth of a worker's link, estimated from the training's messages or from probes. If some links are slow, "
        "that of the slowest.",
    ),
    "cgx_ray_link_bandwidth_spread_bits_per_second": Metric(
        "gauge",
        "bits per second",
        "controller",
        ("side",),
        "Spread of the measurements behind the bandwidth. No confidence interval: the link may be faster or slower.",
    ),
    "cgx_ray_worker_latency_seconds": Metric(
        "gauge", "seconds", "controller", (), "One-way latency between workers that are not near each other."
    ),
    "cgx_ray_link_changes": Metric("counter", "changes", "controller", (), "Changes of latency or bandwidth."),
    "cgx_ray_impossible_rates": Metric(
        "counter",
        "rates",
        "controller",
        (),
        "Measured rates that were dropped, as a card or the probes show that no link had them.",
    ),
    "cgx_ray_slow_link_bits_per_second": Metric(
        "gauge",
        "bits per second",
        "controller",
        (RANK,),
        "Bandwidth of a rank whose link is much slower than the others'; 0 when it no longer is.",
    ),
    "cgx_ray_slow_rank": Metric(
        "gauge",
        "0 or 1",
        "controller",
        (RANK,),
        "1 while a rank's compute takes much longer than the others', 0 afterwards.",
    ),
    "cgx_ray_silent_node": Metric(
        "gauge",
        "0 or 1",
        "controller",
        ("peer",),
        "1 while the node `peer` answers no other node's probes, 0 afterwards.",
    ),
    "cgx_ray_report_age_seconds": Metric(
        "gauge",
        "seconds",
        "controller",
        ("peer",),
        "Time from the last report of the node `peer` to the last report of any node.",
    ),
    "cgx_ray_incomplete_steps": Metric(
        "counter", "steps", "controller", (), "Steps that were judged without a rank, as its report has not come."
    ),
    "cgx_ray_predicted_step_seconds": Metric(
        "gauge", "seconds", "controller", (), "Time per step that the planner predicts for the plan in force."
    ),
    "cgx_ray_measured_step_seconds": Metric(
        "gauge", "seconds", "controller", (), "Time per step that the ranks measure under the plan in force."
    ),
    "cgx_ray_predicted_dense_step_seconds": Metric(
        "gauge", "seconds", "controller", (), "Time per dense step that was predicted with the last decision."
    ),
    "cgx_ray_dense_step_seconds": Metric(
        "gauge",
        "seconds",
        "controller",
        (),
        "Time per dense step as it is known now: the model's, times the error that this run's dense steps have shown.",
    ),
    "cgx_ray_speed_up": Metric(
        "gauge",
        "ratio",
        "controller",
        (),
        "Time of a dense step divided by that of a step under the plan in force; 1 if that is dense. Median over the "
        "newest steps, each beside a dense step with the same compute, as predicted and corrected by measured dense "
        "steps. The number of cgx-ray top and of the report.",
    ),
    "cgx_ray_prediction_error": Metric(
        "gauge",
        "ratio",
        "controller",
        (),
        "Measured over predicted time per step of the last outcome, less 1; 0.1 is 10 % slower than predicted.",
    ),
    "cgx_ray_faults": Metric(
        "counter",
        "faults",
        "controller",
        (RANK, "fault"),
        "Errors that ended the training on a rank, over all restarts of the workers. Ray publishes a counter every 10 "
        "s unless set otherwise, so those of the last worker group may be in decisions.jsonl alone.",
    ),
    "cgx_ray_journal_info": Metric("gauge", "1", "controller", ("journal",), "Always 1; its label has the path."),
    "cgx_ray_journal_errors": Metric(
        "counter", "lines", "controller", (), "Lines of the journal that could not be written."
    ),
}


def served_name(name: str) -> str:
    """Return the name that Prometheus reads. A histogram has it with _bucket, _sum and _count."""
    return f"ray_{name}_total" if METRICS[name].kind == "counter" else f"ray_{name}"

"""Measurements as values that cross process boundaries."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Literal, NamedTuple

from cgx_ray.monitors import reductions
from cgx_ray.monitors.reductions import Reduction, Sum, by_name, by_place, reducer

# Distances between ranks whose rates count in a step, so that a rank is in 16 pairs: the work of a step must not grow
# with the square of the ranks. Other distances count after ROTATION_STEPS, as estimates need several steps of a pair.
COUNTED_OFFSETS = 8
ROTATION_STEPS = 64


def counted_offsets(step: int, world_size: int) -> Sequence[int]:
    """Return the distances between the ranks whose pairs count in `step`: all in small groups, else a few far apart."""
    farthest = world_size // 2
    if farthest <= COUNTED_OFFSETS:
        return range(1, farthest + 1)
    turn = step // ROTATION_STEPS
    return [1 + (turn + index * farthest // COUNTED_OFFSETS) % farthest for index in range(COUNTED_OFFSETS)]


class Transfer(NamedTuple):
    """One exchange of one group, observed by one rank.

    codec        as in `CodecSpec.parse`
    intra        "flat", or how nodes summed first: then `seconds` contains two kinds of links
    wire_bytes   encoded size of the group
    index_bytes  part of wire_bytes that tells which elements are sent
    sent_bytes   bytes that this rank has sent for the group
    seconds      from the time at which this rank had its first message ready until it had the messages of all others.
                 It contains the wait for late peers, and encoding and decoding in between. The smallest value over all
                 ranks is closest to the time of the network
    """

    group: int
    scheme: str
    numel: int
    wire_bytes: int
    seconds: float
    index_bytes: int = 0
    intra: str = "flat"
    codec: str = "none"
    sent_bytes: int = 0
    dense_bytes: int = 0


def shortest(transfers: Sequence[Transfer]) -> Transfer:
    """Return the exchange of the rank that has waited least for the others."""
    return min(transfers, key=attrgetter("seconds"))


# Densities at which gain curves are measured: four per decade.
CURVE_DENSITIES = tuple(10 ** (-quarter / 4) for quarter in range(16, -1, -1))


class LayerError(NamedTuple):
    """|g|^2 of a layer, the share of it that a codec loses, and the norm of the largest elements of its gradients' sum.

    top  as `LayerErrors.top_norm` in the planner; 0 where nobody needs it
    """

    energy: float
    lost: float
    top: float = 0.0


class LayerSum(NamedTuple):
    """Sums over `num` ranks of a layer's |g|^2, of the part of it that a codec loses, and of `LayerError.top`."""

    energy: float
    lost_energy: float
    top: float
    num: int


def _layer_sum(errors: Sequence[LayerError]) -> LayerSum:
    lost_energy = math.fsum(one.energy * one.lost for one in errors)
    energy, top = (math.fsum(values) for values in zip(*((one.energy, one.top) for one in errors), strict=True))
    return LayerSum(energy, lost_energy, top, len(errors))


def _mean_error(sums: Sequence[LayerSum]) -> LayerError:
    """Return the mean over the ranks; lost shares are weighted by energy."""
    energy, lost_energy, top, num = (math.fsum(values) for values in zip(*sums, strict=True))
    return LayerError(energy / num, lost_energy / energy, top / num)


class InsideLink(NamedTuple):
    """Latency, and seconds per byte, of sums between the ranks of a node. `is_of_device`: in the memory of GPUs."""

    alpha_s: float
    beta_s_per_byte: float
    is_of_device: bool = False


def _slowest(links: Sequence[InsideLink | None]) -> InsideLink | None:
    """Return the link of the lowest rate, as all wait for it; None without any."""
    return max(filter(None, links), key=attrgetter("beta_s_per_byte"), default=None)


class Burst(NamedTuple):
    """Bytes of long messages from all ranks together, and the seconds in which the kernel received them."""

    num_bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.num_bytes / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """One step of a rank, or of all ranks. A field's type names how values of ranks become one. All times in seconds.

    num_steps  steps of a round in which ranks have trained alone; else 1. Times and bytes are those of its mean step;
               transfers, bursts and card bytes are of all its steps
    step_s     from the end of the previous exchange to the end of this one, without `between_s`
    between_s  what happened between the two steps: evaluations, checkpoints, reports, sleeps (`engine.step`)
    compute_s  step_s less the communication that compute did not hide
    ready_s    for each group, time from the start of the step, after `between_s`, until backward had finished its last
               layer
    gain       compression gain by codec (`str(CodecSpec)`), on steps that measured it; also by option (`str(Option)`)
               where schemes differ. With error feedback it is predicted for the time when the residual has settled
    kept       gain that options in use really had, by `str(Option)`, on the same steps; only those with a residual
    gain_curve gain of top-k at CURVE_DENSITIES on the error-fed gradient, on the same steps
    norm       |g| of the groups worth compressing, without residuals, on the same steps
    layer_errors
               by layer worth compressing, |g|^2 and the share of it that qsgd with `error_bits` bits loses, on the same
               steps; empty if no plan needs them, and on all but the first ranks
    loss, lr   newest loss and learning rate that the training has reported since the sample before; None if it has not,
               or if they are not finite
    may_train_alone
               see `Engine.may_train_alone`
    num_local  number of ranks that share memory, including this one
    inside     link between these ranks; None if it was not measured
    """

    step: Annotated[int, reductions.SAME]
    plan_version: Annotated[int, reductions.SAME]
    step_s: Annotated[float, reductions.PER_RANK]
    between_s: Annotated[float, reductions.LARGEST] = 0.0
    compute_s: Annotated[float, reductions.LARGEST]
    ready_s: Annotated[tuple[float, ...], reductions.LARGEST_BY_PLACE]
    gain: Annotated[Mapping[str, float], reductions.MEAN_BY_NAME] = field(default_factory=dict)
    kept: Annotated[Mapping[str, float], reductions.MEAN_BY_NAME] = field(default_factory=dict)
    gain_curve: Annotated[tuple[float, ...], reductions.MEAN_BY_PLACE] = ()
    norm: Annotated[float | None, reductions.ROOT_MEAN_SQUARE] = None
    layer_errors: Annotated[Mapping[str, LayerError], Reduction(by_name(_layer_sum), by_name(_mean_error))] = field(
        default_factory=dict
    )
    error_bits: Annotated[int | None, reductions.BY_HAND] = None
    loss: Annotated[float | None, reductions.MEAN_OF_FINITE] = None
    lr: Annotated[float | None, reductions.MEDIAN] = None
    num_steps: Annotated[int, reductions.SAME] = 1
    may_train_alone: Annotated[bool, reductions.SAME] = True
    num_local: Annotated[int, reductions.SAME_OR_ONE] = 1
    inside: Annotated[InsideLink | None, Reduction(_slowest, _slowest)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample(StepValues):
    """One step of one rank.

    encode_s, exchange_s, decode_s
               sums over groups; groups overlap, so the sums may exceed the time that passed
    card_bytes bytes that this rank sent to ranks that share no memory with it
    residual_norm
               |residual| that the step leaves in the groups of `norm`, on the same steps; None if no codec in use has
               one
    is_finite  False if an average was NaN or Inf, so that the codecs' memory was not changed. Only looked at if a codec
               has memory
    bursts     receptions on this rank's link while long messages were arriving, some 50 ms each;
               over a simulated link, what was sent
    rate_from  by sending rank, bytes per second at which its long messages arrived; of the ranks that count in the step
    lag_s      by rank that this one greets at the end of a step, time from that until the other's greeting came,
               by this rank's clock. The lags of two ranks to each other add up to one round trip, whichever
               rank was late and whatever their clocks say. Empty without a mesh
    weight_drift
               if the weights that ranks held when the step before began were compared: 0 if they were the same, else
               the difference where it is largest, relative to the norm of the layer
    """

    rank: Annotated[int, reductions.BY_HAND]
    encode_s: Annotated[float, reductions.PER_RANK]
    exchange_s: Annotated[float, reductions.PER_RANK]
    decode_s: Annotated[float, reductions.PER_RANK]
    wire_bytes: Annotated[int, reductions.PER_RANK]
    dense_bytes: Annotated[int, reductions.PER_RANK]
    card_bytes: Annotated[int, reductions.RANK_ONLY] = 0
    transfers: Annotated[tuple[Transfer, ...], Reduction(by_place(shortest))]
    residual_norm: Annotated[float | None, reductions.RANK_ONLY] = None
    is_finite: Annotated[bool, reductions.RANK_ONLY] = True
    bursts: Annotated[tuple[Burst, ...], reductions.PER_RANK] = ()
    rate_from: Annotated[Mapping[int, float], reductions.PER_RANK] = field(default_factory=dict)
    lag_s: Annotated[Mapping[int, float], reductions.PER_RANK] = field(default_factory=dict)
    weight_drift: Annotated[float | None, reductions.SAME_IN_NODE] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStep:
    """One step of those ranks of a node that have reported it. Fields are those of `StepSample`, reduced.

    ranks      ascending; values by rank are in this order
    norm, loss, lr
               of the ranks that have them; finite losses only
    """

    ranks: tuple[int, ...]
    step: int
    plan_version: int
    step_s: tuple[float, ...]
    between_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    encode_s: tuple[float, ...]
    exchange_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    wire_bytes: tuple[int, ...]
    dense_bytes: tuple[int, ...]
    ready_s: tuple[float, ...]
    transfers: tuple[Transfer, ...]
    bursts: tuple[tuple[Burst, ...], ...]
    rate_from: tuple[Mapping[int, float], ...]
    lag_s: tuple[Mapping[int, float], ...]
    norm: tuple[float, ...]
    loss: tuple[float, ...]
    lr: tuple[float, ...]
    gain: Mapping[str, Sum]
    kept: Mapping[str, Sum]
    gain_curve: tuple[Sum, ...]
    layer_errors: Mapping[str, LayerSum]
    error_bits: int | None
    num_steps: int
    may_train_alone: bool
    num_local: int
    weight_drift: float | None
    inside: InsideLink | None


# They make the fields of a `NodeStep` from samples of its ranks, and those of `StepValues` from records of all nodes.
reduce_ranks, reduce_nodes = reducer(StepSample, "of_ranks"), reducer(StepSample, "of_nodes")


def node_steps(samples: Iterable[StepSample]) -> tuple[NodeStep, ...]:
    """Return the records of the steps in `samples`, oldest first. The samples of each rank must be in order.

    Steps that ranks train again, from a checkpoint, are in records of their own, after those of the first pass.
    """
    newest: dict[int, int] = {}
    num_passes: Counter[int] = Counter()
    found: dict[tuple[int, int, int], list[StepSample]] = {}
    for sample in samples:
        num_passes[sample.rank] += sample.step <= newest.get(sample.rank, -1)
        newest[sample.rank] = sample.step
        found.setdefault((num_passes[sample.rank], sample.step, sample.plan_version), []).append(sample)
    return tuple(_gather(sorted(found[key], key=lambda sample: sample.rank)) for key in sorted(found))


def _gather(samples: Sequence[StepSample]) -> NodeStep:
    """Return the record of one step of several ranks under one plan."""
    return NodeStep(
        ranks=tuple(one.rank for one in samples),
        error_bits=next((one.error_bits for one in samples if one.layer_errors), None),
        **reduce_ranks(samples),
    )


# An error that ends the training on a rank: a peer did not answer in time, a message was damaged (CRC-32C), ranks hold
# different weights, a connection broke, or any other.
FaultKind = Literal["time_out", "damaged", "weights_differ", "connection", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The error that stopped the exchange of gradients on a rank, and the training with it."""

    rank: int
    step: int
    kind: FaultKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """Load of a node. Rates are those of all network cards together, without loopback.

    neighbour_bytes_per_s  traffic on the node's link that is not from this training, mean over half a minute. None if
                           ranks of the node share no memory: then they also count what they send to each other
    nic_speed_bits_per_s   of the fastest card, as reported by its driver; 0 if it is unknown
    num_nic_errors         packets dropped or broken so far
    cpu_share, memory_share
                           fraction in use, 0 to 1
    pressure               by resource (cpu, memory), fraction of the last 10 s in which a process waited for it
    """

    sent_bytes_per_s: float
    received_bytes_per_s: float
    neighbour_bytes_per_s: float | None = None
    nic_speed_bits_per_s: float = 0.0
    num_nic_errors: int = 0
    cpu_share: float = 0.0
    memory_share: float = 0.0
    pressure: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Payload bytes per second from one node to another, by a probe.

    tool            iperf3 or tcp
    sent, received  payload bytes per second through the sender's and the receiver's card meanwhile, 0 if unknown: a
                    probe gets only its share of a link that others use
    """

    bytes_per_s: float
    tool: str = "tcp"
    sent: float = 0.0
    received: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """One node's measurements since its last report.

    steps      oldest first, one record per step. Ranks that report a step later are in another record of it
    latency_s  one-way latency to the other nodes that this one measures, by node id: half the smallest TCP round trip
    bandwidth  to other nodes by node id, from active probes since the last report
    """

    node_id: str
    time_s: float
    steps: tuple[NodeStep, ...]
    latency_s: Mapping[str, float]
    host: HostLoad
    bandwidth: Mapping[str, Bandwidth] = field(default_factory=dict)

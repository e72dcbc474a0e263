"""What monitors measure, as values that cross process boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One exchange of one group as one rank saw it.

    intra        "flat", or what was summed inside nodes first: then seconds are those of two kinds of links
    index_bytes  of wire_bytes, those that say which elements are sent
    seconds      from the moment this rank had its first message ready to the moment it held everyone's. It contains the
                 wait for late peers, and what was encoded and decoded meanwhile; the smallest value over all ranks is
                 the network's share.
    """

    group: int
    scheme: str
    numel: int
    wire_bytes: int
    seconds: float
    index_bytes: int = 0
    intra: str = "flat"


# Where gain curves are sampled: four a decade.
CURVE_DENSITIES = tuple(10 ** (-quarter / 4) for quarter in range(16, -1, -1))


class Burst(NamedTuple):
    """Bytes of long messages, from all ranks together, and how long the kernel took to get them."""

    num_bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.num_bytes / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One step of one rank. All times in seconds.

    step_s     from the end of the previous exchange to the end of this one
    compute_s  step_s less the communication that compute did not hide
    encode_s, exchange_s, decode_s
               sums over groups; they overlap, so together they may be more than the time that passed
    card_bytes what this rank sent to ranks that share no memory with it
    ready_s    for each group, when backward had finished its last layer, from the start of the step
    gain       compression gain by codec (`str(CodecSpec)`), on the steps that measured it
    gain_curve gain of top-k at CURVE_DENSITIES, and `norm`, |g| of the groups worth compressing, on the same steps
    bursts     what this rank's link brought while long messages were under way, some 50 ms each
    rate_from  by rank, bytes a second at which its long messages came; 0 where none did
    lag_s      by rank, from when this rank sent its agreement to when the other's came, by this rank's clock; so what
               two ranks have of each other adds up to a round trip, whichever of them was late and whatever their
               clocks say. Empty without a mesh.
    num_local  ranks that share memory, this one among them
    """

    rank: int
    step: int
    plan_version: int
    step_s: float
    compute_s: float
    encode_s: float
    exchange_s: float
    decode_s: float
    wire_bytes: int
    dense_bytes: int
    ready_s: tuple[float, ...]
    transfers: tuple[Transfer, ...]
    gain: Mapping[str, float] = field(default_factory=dict)
    gain_curve: tuple[float, ...] = ()
    norm: float | None = None
    card_bytes: int = 0
    bursts: tuple[Burst, ...] = ()
    rate_from: tuple[float, ...] = ()
    lag_s: tuple[float, ...] = ()
    num_local: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """What a node is busy with. Rates are of its network cards together, loopback left out.

    neighbour_bytes_per_s  what others than this run put on its link, mean over half a minute; None where this run's
                           part is not known: ranks of the node share no memory, so they cannot tell it from others
    nic_speed_bits_per_s   of its fastest card, as the driver has it; 0 if it does not say
    num_nic_errors         packets dropped or broken so far
    cpu_share, memory_share
                           in use, 0 to 1
    pressure               by resource (cpu, memory) the share of the last 10 s in which something waited for it
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
class NodeSample:
    """What one node saw since its last report.

    steps      of all ranks on the node, oldest first
    latency_s  one-way latency to other nodes by node id: half the smallest TCP round trip
    bandwidth  payload bytes a second to other nodes by node id, of active probes since the last report
    """

    node_id: str
    time_s: float
    steps: tuple[StepSample, ...]
    latency_s: Mapping[str, float]
    host: HostLoad
    bandwidth: Mapping[str, float] = field(default_factory=dict)

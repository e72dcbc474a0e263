"""Records of what the observer of `cgx-ray why` saw on one rank: values that go to JSON and back.

Times are seconds of one step. Clocks of ranks need not agree: no value is a time of day.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from cgx_ray.errors import ConfigError

FORMAT_VERSION = 1
# Files of the folder that CGX_WHY names.
OPTIONS_FILE, GATHERED_FILE = "options.json", "gathered.json"

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverOptions:
    """Options of `cgx-ray why`: steps to measure after the warm ones, and whether ranks probe each other."""

    num_steps: int = 50
    probes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step of one rank, from the end of an optimizer's step to the next. Its parts are all but `hidden_s`.

    input_s      until the forward pass begins: what waits for data, and whatever the script does between steps
    forward_s, backward_s
                 backward includes the loss, and ends with the last gradient
    exposed_s    from then on until gradients are averaged: what the exchange takes after backward
    hidden_s     from the first full bucket to the end of backward: what the exchange could hide behind it
    rest_s       until the optimizer has stepped: clipping, logging, the optimizer
    processor_s  processor time of the process, all threads, at the end of the step on the host
    """

    input_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    rest_s: float = 0.0
    processor_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.input_s + self.forward_s + self.backward_s + self.exposed_s + self.rest_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLayer:
    """A parameter that DDP averages. `ready_s`: from the start of forward until its gradient; 0 where not measured."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    ready_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A TCP connection of the rank's process while steps were measured.

    own, other       addresses of both ends, as "10.0.0.1:5000"
    bytes_per_s      median of the rates at which the kernel saw data arrive, 0 if unknown
    busy_s, receiver_limited_s, num_timeouts
                     as in `TcpInfo`; num_timeouts is the largest that was seen
    """

    own: str
    other: str
    sent_bytes: int
    received_bytes: int
    resent_bytes: int
    bytes_per_s: float
    busy_s: float
    receiver_limited_s: float
    round_trip_s: float
    least_round_trip_s: float | None
    path_mtu: int
    segment_bytes: int
    num_timeouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCard:
    """An interface of the node that is up.

    bit_per_s     0 if the driver does not say; of others than physical cards a number that was made up
    duplex        "full", "half", or "" if unknown
    kind          "physical", "virtual" (a container's or a machine's), "bridge", "tunnel" or "loopback"
    sent_bytes, received_bytes, num_errors
                  while steps were measured, of all programs; errors are packets that were broken or dropped
    quiet_bytes_per_s
                  both ways, in moments without a byte of the rank's process under way; None if none was seen
    """

    name: str
    addresses: tuple[str, ...]
    bit_per_s: float
    duplex: str
    mtu: int
    kind: str
    sent_bytes: int
    received_bytes: int
    num_errors: int
    quiet_bytes_per_s: float | None = None


def is_card(card: NetworkCard) -> bool:
    """Return True if other nodes may be reached by it: a bridge ends on this node, as loopback does."""
    return card.kind not in ("loopback", "bridge")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The rank's node, as its process sees it, while steps were measured.

    num_processors  that this process may use
    busy_share      share of all processors' time in use, by all programs
    stolen_share    share that the hypervisor gave to others
    throttled_s     seconds for which the container's limit stopped its processes
    shared_bytes    size of /dev/shm, 0 if there is none
    open_files, max_open_files
                    of this process
    fabrics         RDMA devices with an active port
    gpus            one line per GPU of nvidia-smi: UUID, name, width of its bus now and at most, reasons that slow its
                    clock
    """

    name: str
    num_processors: int
    busy_share: float
    stolen_share: float
    throttled_s: float
    shared_bytes: int
    open_files: int
    max_open_files: int
    cards: tuple[NetworkCard, ...]
    fabrics: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()

    def card_at(self, address: str) -> NetworkCard | None:
        """Return the card with this address; None if none has it."""
        return next((card for card in self.cards if address in card.addresses), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedPath:
    """A path that this rank probed before the first step, between addresses; as in `NodePath`. 0: nothing answers."""

    own: str
    other: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """All that was seen on one rank.

    is_whole       True once all steps were measured, or the process ended
    backend        of the process group, as "gloo"
    device         type of the model's device; "" without a model
    gpu            UUID of that device, as nvidia-smi has it; "" if it is no GPU
    num_models     DDP models that were built; 0: steps are unknown
    has_loader     the process has a DataLoader when steps begin to count
    num_warm       steps before those in `steps`
    steps          in order, the same ones on all ranks
    seen_s         seconds over which connections, cards and processors were measured
    num_threads    that torch computes with
    waited_s       seconds of these in which a thread of the process was ready to run and had no processor
    bucket_bytes   DDP's buckets, in the order in which they are averaged; empty if unknown
    layers         of the first model; of rank 0 only
    num_exchanges  per step: more than 1 if a step exchanges gradients several times
    versions       of Python, torch, ... by name
    """

    format_version: int = FORMAT_VERSION
    is_whole: bool = False
    rank: int
    world_size: int
    backend: str
    device: str = ""
    gpu: str = ""
    num_models: int = 0
    has_loader: bool = False
    num_warm: int = 0
    steps: tuple[StepTimes, ...] = ()
    num_exchanges: float = 1.0
    seen_s: float = 0.0
    num_threads: int = 1
    waited_s: float = 0.0
    bucket_bytes: tuple[int, ...] = ()
    layers: tuple[ObservedLayer, ...] = ()
    connections: tuple[Connection, ...] = ()
    probes: tuple[ProbedPath, ...] = ()
    node: NodeFacts
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def waited_share(self) -> float:
        """Share of the time in which a thread was ready and had no processor; above 1 if several threads waited."""
        return self.waited_s / self.seen_s if self.seen_s > 0 else 0.0


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's record."""
    return f"rank-{rank:05}.json"


def to_json(value: Any) -> dict[str, Any]:
    """Return a value of this module for JSON."""
    found: dict[str, Any] = dataclasses.asdict(value)
    return found


def from_json(kind: type[_Value], data: Any) -> _Value:
    """Return the value of which `to_json` returned `data`. Raises ConfigError if it is none of that kind."""
    try:
        return _built(kind, data)  # type: ignore[no-any-return]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"this is no {kind.__name__} of cgx-ray why ({error}); use the same version of cgx_ray on all nodes"
        ) from error


def _built(kind: Any, data: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)  # type: ignore[arg-type]
        return kind(**{name: _built(hints[name], value) for name, value in data.items()})  # type: ignore[operator]
    if origin is tuple:
        return tuple(_built(inner[0], value) for value in data)
    if origin in (dict, Mapping):
        return {str(name): _built(inner[1], value) for name, value in data.items()}
    if origin in (types.UnionType, Union):
        return None if data is None else _built(inner[0], data)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if type(data) is not kind:
        raise TypeError(f"{data!r:.80} is no {kind.__name__}")
    return data


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)

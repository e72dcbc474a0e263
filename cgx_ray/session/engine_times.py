"""Times what a group costs the engine's thread besides its codec, where a device encodes.

Two and four ranks, all in this thread, average groups over sra by connections to themselves, with a codec that does
nothing. Only the turns of the exchanges are timed, no waits: the thread goes on with other groups meanwhile.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory, PayloadRow
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Handle, Phases
from cgx_ray.collectives.sra import Sra
from cgx_ray.plan import DEVICE_PIECE_BYTES, NONE
from cgx_ray.planner.engine_cost import HOST_ENGINE, EngineCost
from cgx_ray.runtime_ext.mesh import TOKEN_BYTES, Mesh, Parts
from cgx_ray.runtime_ext.streams import Mark

logger = logging.getLogger(__name__)

NUM_GROUPS = 16
# Numbers of ranks: a rank takes in three messages of a group, and seven.
FEW_RANKS, MANY_RANKS = 2, 4
# The shortest counts. In the first one memory is taken.
NUM_ROUNDS = 4
EMPTY_BYTES = 64
# Messages that show the seconds per byte, and groups of them: together they take 10 MiB of pinned memory.
LONG_BYTES, NUM_LONG_GROUPS = 1 << 19, 4
LOCALHOST = "127.0.0.1"
TIMEOUT_S = 10.0


def measure_engine(device: torch.device) -> EngineCost:
    """Return what groups cost the engine whose gradients lie on `device`, no host.

    If the connections fail, the thread's times are those of hosts.
    """
    times = HOST_ENGINE.thread_s, HOST_ENGINE.message_s, HOST_ENGINE.byte_s
    try:
        times = _thread_times(device)
    except RuntimeError as error:
        logger.warning(
            "the engine's thread cannot be timed (%s); plans are made with the times of other machines", error
        )
    thread_s, message_s, byte_s = times
    return EngineCost(
        thread_s=thread_s,
        message_s=message_s,
        byte_s=byte_s,
        piece_bytes=DEVICE_PIECE_BYTES,
        codes_rows=True,
        # NCCL sums there, over as many connections as it takes to fill the link.
        vendor_window_bytes=None,
    )


def _thread_times(device: torch.device) -> tuple[float, float, float]:
    """Return the seconds of the thread per group, message and byte."""
    with _connected(FEW_RANKS) as few, _connected(MANY_RANKS) as many:
        few_s = _seconds_of_group(few, device, EMPTY_BYTES, NUM_GROUPS)
        many_s = _seconds_of_group(many, device, EMPTY_BYTES, NUM_GROUPS)
        long_s = _seconds_of_group(few, device, LONG_BYTES, NUM_LONG_GROUPS)
    return fit_times(few_s, many_s, long_s)


def fit_times(few_s: float, many_s: float, long_s: float) -> tuple[float, float, float]:
    """Return the seconds per group, message and byte, from those of a group.

    few_s, many_s  among FEW_RANKS and MANY_RANKS, with messages of no length
    long_s         among FEW_RANKS, with messages of LONG_BYTES
    """
    few, many = (2 * num_ranks - 1 for num_ranks in (FEW_RANKS, MANY_RANKS))
    message_s = min(max(many_s - few_s, 0.0) / (many - few), few_s / few)
    # A rank encodes the chunk of the other and its own sum, and decodes these and the other's part.
    num_coded = FEW_RANKS + few
    return few_s - few * message_s, message_s, max(long_s - few_s, 0.0) / (num_coded * (LONG_BYTES - EMPTY_BYTES))


class _NoCodec(Codec):
    """Messages of a given length, in which nothing is written."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        super().__init__(NONE)
        self.device, self._num_bytes = device, num_bytes

    def payload_bytes(self, numel: int) -> int:
        return self._num_bytes

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        pass

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        pass

    def sum_rows(self, own: PayloadRow, payloads: Sequence[Tensor], num_ranks: int) -> None:
        pass


class _Ends:
    """A `TransportLike`: the end of one rank of the connections. `channel`: that of the group at work."""

    takes_many = seals = True

    def __init__(self, mesh: Mesh, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.peers = [(rank + distance) % world_size for distance in range(1, world_size)]
        self.ranks: Sequence[int] = range(world_size)
        self.channel = 0
        self._mesh = mesh

    def start(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        return self._mesh.post(sends, receives, self.channel)

    def start_sealed(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        return self._mesh.post(sends, receives, self.channel, is_sealed=True)

    def is_over(self, handle: Handle) -> bool:
        return handle.is_done if isinstance(handle, Mark) else self._mesh.is_over(_ticket(handle))

    def finish(self, handle: Handle, waited_s: float = 0.0) -> None:
        if not isinstance(handle, Mark):
            self._mesh.wait(_ticket(handle), TIMEOUT_S, waited_s)

    def all_reduce(self, values_N: Tensor) -> Iterator[Handle]:
        raise NotImplementedError

    def broadcast(self, message: Tensor, root: int) -> Iterator[Handle]:
        raise NotImplementedError


def _ticket(handle: Handle) -> int:
    assert isinstance(handle, int)
    return handle


@contextmanager
def _connected(num_ranks: int) -> Iterator[list[_Ends]]:
    """Connect ranks of this process with each other."""
    token = secrets.token_bytes(TOKEN_BYTES)
    with ExitStack() as opened:
        meshes = []
        for rank in range(num_ranks):
            meshes.append(Mesh(rank, num_ranks, 1, LOCALHOST, token))
            opened.callback(meshes[-1].close)
        addresses = [(LOCALHOST, mesh.port) for mesh in meshes]
        with ThreadPoolExecutor(num_ranks) as threads:
            list(threads.map(lambda mesh: mesh.connect(addresses, TIMEOUT_S), meshes))
        yield [_Ends(mesh, rank, num_ranks) for rank, mesh in enumerate(meshes)]


@dataclass(slots=True)
class _RankTurns:
    ends: _Ends
    group: int
    turns: Iterator[Handle]
    handle: Handle | None = None


def _seconds_of_group(ends: Sequence[_Ends], device: torch.device, num_bytes: int, num_groups: int) -> float:
    """Return the seconds of a rank's thread for a group with messages of `num_bytes`."""
    codec = _NoCodec(device, num_bytes)
    grad_N = torch.zeros(len(ends), dtype=torch.float32, device=device)
    exchanges = [[Sra(codec, len(ends), own) for own in ends] for _ in range(num_groups)]
    rounds = []
    for step in range(NUM_ROUNDS):
        under_way = deque(
            _RankTurns(own, group, exchange.turns(grad_N, None, _stamp(step, group), 0, Phases()))
            for group, of_ranks in enumerate(exchanges)
            for own, exchange in zip(ends, of_ranks, strict=True)
        )
        rounds.append(_seconds_of_turns(under_way) / (num_groups * len(ends)))
    return min(rounds)


def _stamp(step: int, group: int) -> Stamp:
    return Stamp(plan_version=0, step=step, group=group, codec=NONE.name)


def _seconds_of_turns(under_way: deque[_RankTurns]) -> float:
    """Take all turns of all groups and ranks; return the seconds in them."""
    spent_s, late_s = 0.0, time.perf_counter() + TIMEOUT_S
    while under_way:
        one = under_way.popleft()
        if one.handle is not None and not one.ends.is_over(one.handle):
            if time.perf_counter() > late_s:
                raise RuntimeError(f"no message within {TIMEOUT_S:g} s")
            under_way.append(one)
            continue
        one.ends.channel = one.group
        start_s = time.perf_counter()
        if one.handle is not None:
            one.ends.finish(one.handle)
        one.handle = next(one.turns, None)
        spent_s += time.perf_counter() - start_s
        if one.handle is not None:
            under_way.append(one)
    return spent_s

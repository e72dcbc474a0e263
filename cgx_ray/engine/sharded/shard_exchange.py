"""Moves the shards of a module between ranks: reduce-scatter, all-reduce over replicas, all-gather.

R ranks that share the parameters, T elements of a module's shard, S of them in one part
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import RESIDUALS, Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Phases, Transport
from cgx_ray.collectives.sharded import Rows, all_gather, reduce_scatter
from cgx_ray.collectives.sra import Sra
from cgx_ray.collectives.transport.transport_like import wait_for
from cgx_ray.engine.sharded.shards import Part, Unit
from cgx_ray.errors import CGXError
from cgx_ray.plan import NONE, CodecSpec
from cgx_ray.runtime_ext.streams import Mark


class ShardExchange:
    """The transports of a sharded model and the work that it does on them, step by step.

    sums_inside as in `ShardedEngine`
    step        number of the step under way
    phases      times of the exchanges of this step. Each method returns the Phases of its exchange. Call
                `lap("decode")` on them when you have used the result
    sent_bytes  bytes that this rank has sent in this step
    """

    def __init__(
        self, shards: Transport, replicas: Transport | None, plan_version: int, seed: int, *, sums_inside: bool = False
    ) -> None:
        """
        shards    connects the ranks that share the parameters
        replicas  connects the ranks that hold the same shard; None if this rank alone holds it
        """
        self.sums_inside = sums_inside
        self.step = 0
        self.phases: list[Phases] = []
        self.sent_bytes = 0
        self._shards = shards
        self._replicas = replicas
        self.plan_version = plan_version
        self._seed = seed
        # Per part that replicas average: the exchange, and a buffer for what it drops. The buffer is never added to a
        # later exchange: the residuals of the part are.
        self._averaging: WeakKeyDictionary[Part, tuple[Sra, Memory | None]] = WeakKeyDictionary()
        # Whether the reduce-scatter of a unit averages; where FSDP2 makes it, as the all-reduce does.
        self._averages: dict[str, bool] = {}

    @property
    def transports(self) -> list[Transport]:
        """The transports over shards and, if there are replicas, over replicas."""
        return [self._shards] if self._replicas is None else [self._shards, self._replicas]

    def wait_for(self, mark: Mark) -> None:
        """Wait until the device has come to `mark`. Raises TransportError as `Transport.finish` does."""
        wait_for(mark, self._shards)

    def summed_row(self, part: Part, rows_RS: Tensor) -> Tensor:
        """Return the sum over the ranks that share the parameters of this rank's row, (S,) on the host."""
        rows = Rows(codec=make_codec(NONE), rows_RS=rows_RS, stamp=self._stamp(part, 2, NONE))
        reduce_scatter([rows], self._shards, self._seed, self._start(self._shards))
        return rows_RS[self._shards.rank]

    def next_step(self) -> None:
        """Begin the next step with no times and no bytes."""
        self.step += 1
        self.phases, self.sent_bytes = [], 0

    def close(self) -> None:
        """Close the transports, which also ends a wait for other ranks."""
        for transport in self.transports:
            transport.close()

    def give_up(self, why: str) -> None:
        """Send the reason to all ranks, then disconnect from them."""
        for transport in self.transports:
            transport.give_up(why)

    def reduce_scatter(self, unit: Unit, rows_RT: Tensor, out_T: Tensor, *, is_average: bool) -> Phases:
        """Fill `out_T` with the sum or average of this rank's row over ranks; see `ShardedEngine.reduce_scatter`."""
        rank, num_ranks = self._shards.rank, self._shards.world_size
        self._averages[unit.name] = is_average
        _check_width(rows_RT, unit.gradient_width)
        phases = self._start(self._shards)
        moved = []
        for part in unit.gradients:
            rows_RS = part.room(rows_RT)
            part.gather(rows_RT, rows_RS)
            if part.memory is not None:
                self._add_residual(part, rows_RS[rank])
            moved.append(Rows(codec=part.codec, rows_RS=rows_RS, stamp=self._stamp(part, 0), memory=part.memory))
        # Replicas must round differently, so that their errors average out.
        seed = self._seed + (self._replicas.rank if self._replicas is not None else 0)
        self.sent_bytes += reduce_scatter(moved, self._shards, seed, phases)
        for part, rows in zip(unit.gradients, moved, strict=True):
            own_1S = rows.rows_RS[rank : rank + 1]
            if is_average:
                own_1S.div_(num_ranks)
            part.scatter(own_1S, out_T.view(1, -1))
            part.zero_padding_residual()
        return phases

    def all_reduce(self, unit: Unit, shard_T: Tensor, *, is_average: bool) -> Phases:
        """Replace `shard_T`, a result of the reduce-scatter, by its sum or average over replicas."""
        assert self._replicas is not None
        phases = self._start(self._replicas)
        shard_1T = shard_T.view(1, -1)
        _check_width(shard_1T, unit.gradient_width)
        for part in unit.gradients:
            # Averaging divides by R, so an error e in the average is an error R * e in this rank's gradient.
            owed = part.num_ranks if self._averages.get(unit.name, is_average) else 1
            sra, memory = self._averaging_of(part)
            values_1S = part.room(shard_1T)
            part.gather(shard_1T, values_1S)
            if self.sums_inside and part.memory is not None:
                self._add_residual(part, values_1S[0], 1 / owed)
            self._replicas.group_index = part.index
            phases.lap("encode")
            sra.run(values_1S.view(-1), memory, self._stamp(part, 0), self._seed, phases)
            self.sent_bytes += sra.sent_bytes
            if memory is not None:
                assert part.memory is not None
                torch.mul(memory.next_N, owed, out=part.row(part.memory.next_N, self._shards.rank))
                part.zero_padding_residual()
            if not is_average:
                values_1S.mul_(self._replicas.world_size)
            part.scatter(values_1S, shard_1T)
        return phases

    def all_gather(self, unit: Unit, rows_RT: Tensor) -> Phases:
        """Fill `rows_RT` with the decoded parameters of all ranks, including this rank's own."""
        own = slice(self._shards.rank, self._shards.rank + 1)
        _check_width(rows_RT, unit.parameter_width)
        phases = self._start(self._shards)
        moved = []
        for part in unit.parameters:
            rows_RS = part.room(rows_RT)
            part.gather(rows_RT[own], rows_RS[own])
            moved.append(Rows(codec=part.codec, rows_RS=rows_RS, stamp=self._stamp(part, 1)))
        self.sent_bytes += all_gather(moved, self._shards, self._seed, phases)
        for part, rows in zip(unit.parameters, moved, strict=True):
            part.scatter(rows.rows_RS, rows_RT)
        return phases

    def _add_residual(self, part: Part, own_S: Tensor, share: float = 1.0) -> None:
        """Add a share of what this rank owes of its own shard to it, and owe nothing of it in the next step so far."""
        assert part.memory is not None
        own_S.add_(part.row(part.memory.now[RESIDUALS], self._shards.rank), alpha=share)
        part.row(part.memory.next_N, self._shards.rank).zero_()

    def _start(self, transport: Transport) -> Phases:
        transport.step = self.step
        self.phases.append(Phases())
        return self.phases[-1]

    def _stamp(self, part: Part, phase: int, codec: CodecSpec | None = None) -> Stamp:
        name = (codec or part.codec.spec).name
        return Stamp(plan_version=self.plan_version, step=self.step, group=part.index, codec=name, phase=phase)

    def _averaging_of(self, part: Part) -> tuple[Sra, Memory | None]:
        if part not in self._averaging:
            assert self._replicas is not None
            memory = part.codec.new_memory(part.width, part.codec.device) if part.memory is not None else None
            self._averaging[part] = Sra(part.codec, part.width, self._replicas), memory
        return self._averaging[part]


def _check_width(rows_RT: Tensor, width: int) -> None:
    if rows_RT.shape[1] != width or not rows_RT.is_floating_point():
        raise CGXError(
            f"FSDP2 passes shards of {rows_RT.shape[1]} elements of {rows_RT.dtype}, but all layers of the module "
            f"together have {width}; if some layers get no gradient, let the loss use them, or call "
            "set_reduce_scatter_unused_params(True), from torch 2.13 on; freeze layers before attach, and use one "
            "dtype per module"
        )

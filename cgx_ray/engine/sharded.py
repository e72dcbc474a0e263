"""The engine of sharded models: one communication thread a rank that reduces and gathers shards in call order."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cgx_ray.codecs.codec import KINDS, RESIDUALS, Memory, is_finite
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Phases, Transport
from cgx_ray.collectives.sharded import Rows, all_gather, reduce_scatter
from cgx_ray.collectives.sra import Sra
from cgx_ray.engine.loss_scale import Scales, one_scale
from cgx_ray.engine.shards import Part, Unit
from cgx_ray.engine.telemetry import Telemetry
from cgx_ray.engine.thread import WorkThread, follow_num_threads
from cgx_ray.errors import CGXError, PlanError, StateError
from cgx_ray.monitors.sample import StepSample
from cgx_ray.plan import Plan

logger = logging.getLogger(__name__)


class ShardedEngine:
    """Averages shards of gradients, and gathers parameters, on its own thread.

    Every rank must make the same calls in the same order. A step lasts until `end_step`, or until a unit comes again.
    What codecs remember of it takes effect when all ranks have found its averages finite, which is known, at the
    latest, when the next step begins.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        plan: Plan,
        rank: int,
        shards: Transport,
        replicas: Transport | None,
        *,
        seed: int = 0,
    ) -> None:
        """Start the thread.

        rank      of the whole run, for messages and samples
        shards    connects the ranks that share the parameters
        replicas  connects the ranks that hold the same shard; None if this rank alone holds it
        """
        self.plan = plan
        self.step = 0
        self._units = units
        self._rank = rank
        self._shards = shards
        self._replicas = replicas
        self._transports = [shards] if replicas is None else [shards, replicas]
        self._seed = seed
        # The unit of what is remembered.
        self._loss_scale = 1.0
        self._has_memory = any(part.memory is not None for unit in units for part in unit.gradients)
        # Of each part whose average the replicas exchange. Only what it drops is used: what is owed went in before.
        self._averaging: dict[int, tuple[Sra, Memory | None]] = {}
        self.telemetry = Telemetry(rank)
        self._failure: CGXError | None = None
        # Of the step in the making.
        self._ran: list[Unit] = []
        self._is_finite = True
        self._phases: list[Phases] = []
        self._sent_bytes = 0
        self._last_end_s = time.perf_counter()
        # The training thread's own.
        self._waited_s = 0.0
        # Of the step before: its units, and the answer to whether all ranks found it finite.
        self._unsettled: tuple[list[Unit], Callable[[], Tensor]] | None = None
        self._num_threads = torch.get_num_threads()
        self._hang_up = partial(_close, self._transports)
        self._thread = WorkThread("cgx-ray-engine", self._run, self._hang_up)

    # Called by the training thread.

    def reduce_scatter(
        self,
        unit: Unit,
        rows_RT: Tensor,
        out_T: Tensor,
        *,
        is_average: bool,
        scales: Scales = (),
        delivered: Callable[[Tensor], Tensor] | None = None,
    ) -> Future[None]:
        """Begin to fill `out_T` with the sum or average of this rank's row over the ranks that share the parameters.

        rows_RT, out_T  float32, of the unit's gradients; the rows are changed
        scales          of the losses that they come from, see `LossScale.now`
        delivered       makes of `out_T` the gradient that the model gets, to judge whether the step is finite
        """
        return self._submit(
            unit.name, lambda: self._reduce_scatter(unit, rows_RT, out_T, is_average, scales, delivered or _as_it_is)
        )

    def all_reduce(
        self, unit: Unit, shard_T: Tensor, *, is_average: bool, delivered: Callable[[Tensor], Tensor] | None = None
    ) -> Future[None]:
        """Begin to replace what `reduce_scatter` has made by its sum or average over replicas; `delivered` as there."""
        return self._submit(unit.name, lambda: self._all_reduce(unit, shard_T, is_average, delivered or _as_it_is))

    def all_gather(self, unit: Unit, rows_RT: Tensor) -> Future[None]:
        """Begin to fill `rows_RT` with everyone's parameters, this rank's own row as its peers will see it."""
        return self._submit(unit.name, lambda: self._all_gather(unit, rows_RT))

    def end_step(self) -> Future[None]:
        """End the step, if anything was reduced in it."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return self._submit("", lambda: self._end_step(waited_s))

    def wait(self, future: Future[None]) -> None:
        """Wait for what was begun. Raises what stopped the engine, if something did."""
        start = time.perf_counter()
        future.result()
        self._waited_s += time.perf_counter() - start

    def hold(self, plan: Plan) -> None:
        """Raise PlanError: a sharded model keeps its first plan."""
        raise PlanError("the plan of an FSDP2 model cannot change; attach with another codec in the next run")

    @property
    def last_step(self) -> StepSample | None:
        """Sample of the last finished step; None before the first."""
        return self.telemetry.last_step

    def take_samples(self) -> list[StepSample]:
        """See `Engine.take_samples`. Transfers are left out: the planner's schemes are those of whole gradients."""
        return self.telemetry.take_samples()

    def state(self) -> dict[str, Any]:
        """See `Engine.state`. Residuals lie as the whole gradients do, so they fit any number of ranks."""
        state: dict[str, Any] = self._submit("", self._state).result()
        return state

    def load_state(self, step: int, memories: Mapping[str, Mapping[str, Tensor]], *, loss_scale: float = 1.0) -> None:
        """See `Engine.load_state`. Raises StateError as well if the codec does not remember what is given."""
        remembering = {
            layer.layer.name: layer.layer.numel
            for part in self._parts()
            if part.memory is not None
            for layer in part.layers
        }
        for kind in KINDS:
            for name, value in memories[kind].items():
                if kind != RESIDUALS or remembering.get(name) != value.numel():
                    raise StateError(
                        f"the state has {kind} of {value.numel()} elements for layer {name!r}, of which "
                        f"{self.plan.describe()} remembers {remembering.get(name, 'nothing')}; attach with the codec "
                        "and the model that it is of"
                    )
        self._submit("", lambda: self._load(step, memories[RESIDUALS], loss_scale)).result()

    def close(self) -> None:
        """Stop the thread once it has finished what was submitted."""
        self._thread.end()
        self._hang_up()
        self._failure = self._failure or CGXError("the engine is closed; attach again to compress")

    def _submit(self, what: str, call: Callable[[], Any]) -> Future[Any]:
        if self._failure is not None:
            raise self._failure
        self._thread.check(f"rank {self._rank}, step {self.step}")
        self._num_threads = torch.get_num_threads()
        future: Future[Any] = Future()
        self._thread.put((what, call, future))
        return future

    # Called by the engine's own thread.

    def _run(self, jobs: Iterator[tuple[str, Callable[[], Any], Future[Any]]]) -> None:
        for what, call, future in jobs:
            if self._failure is not None:
                future.set_exception(self._failure)
                continue
            follow_num_threads(self._num_threads)
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised again in the training thread, through the future
                future.set_exception(self._fail(what, error))

    def _reduce_scatter(
        self,
        unit: Unit,
        rows_RT: Tensor,
        out_T: Tensor,
        is_average: bool,
        scales: Scales,
        delivered: Callable[[Tensor], Tensor],
    ) -> None:
        if unit in self._ran:
            self._end_step(0.0)
        if not self._ran:
            self._settle()
        self._follow_scale(scales)
        self._ran.append(unit)
        rank, num_ranks = self._shards.rank, self._shards.world_size
        _check_width(rows_RT, unit.gradient_width)
        phases = self._start(self._shards, unit.gradients)
        moved = []
        for part in unit.gradients:
            rows_RS = part.room(rows_RT)
            part.gather(rows_RT, rows_RS)
            if part.memory is not None:
                now_RS, next_RS = (kinds[RESIDUALS].view_as(rows_RS) for kinds in (part.memory.now, part.memory.next))
                rows_RS[rank] += now_RS[rank]
                next_RS[rank] = 0
            moved.append(Rows(codec=part.codec, rows_RS=rows_RS, stamp=self._stamp(part, 0), memory=part.memory))
        # Replicas round differently, else their errors would not average out.
        seed = self._seed + (self._replicas.rank if self._replicas is not None else 0)
        self._sent_bytes += reduce_scatter(moved, self._shards, seed, phases)
        for part, rows in zip(unit.gradients, moved, strict=True):
            own_1S = rows.rows_RS[rank : rank + 1]
            if is_average:
                own_1S.div_(num_ranks)
            part.scatter(own_1S, out_T.view(1, -1))
            part.forgive_padding()
        self._note(out_T, delivered)
        phases.lap("decode")

    def _all_reduce(self, unit: Unit, shard_T: Tensor, is_average: bool, delivered: Callable[[Tensor], Tensor]) -> None:
        assert self._replicas is not None
        phases = self._start(self._replicas, unit.gradients)
        shard_1T = shard_T.view(1, -1)
        for part in unit.gradients:
            sra, memory = self._averaging_of(part)
            values_1S = part.room(shard_1T)
            part.gather(shard_1T, values_1S)
            self._replicas.group_index = part.index
            phases.lap("encode")
            sra.run(values_1S.view(-1), memory, self._stamp(part, 0), self._seed, phases)
            self._sent_bytes += sra.sent_bytes
            if memory is not None:
                # A share of an average of R gradients: this rank owes R times as much of its own.
                assert part.memory is not None
                own_S = part.memory.next_N.view(part.num_ranks, -1)[self._shards.rank]
                torch.mul(memory.next_N, part.num_ranks if is_average else 1, out=own_S)
                part.forgive_padding()
            if not is_average:
                values_1S.mul_(self._replicas.world_size)
            part.scatter(values_1S, shard_1T)
        self._note(shard_T, delivered)
        phases.lap("decode")

    def _all_gather(self, unit: Unit, rows_RT: Tensor) -> None:
        own = slice(self._shards.rank, self._shards.rank + 1)
        _check_width(rows_RT, unit.parameter_width)
        phases = self._start(self._shards, unit.parameters)
        moved = []
        for part in unit.parameters:
            rows_RS = part.room(rows_RT)
            part.gather(rows_RT[own], rows_RS[own])
            moved.append(Rows(codec=part.codec, rows_RS=rows_RS, stamp=self._stamp(part, 1)))
        self._sent_bytes += all_gather(moved, self._shards, self._seed, phases)
        for part, rows in zip(unit.parameters, moved, strict=True):
            part.scatter(rows.rows_RS, rows_RT)
        phases.lap("decode")

    def _start(self, transport: Transport, parts: Sequence[Part]) -> Phases:
        transport.step = self.step
        transport.group_index = parts[0].index
        self._phases.append(Phases())
        return self._phases[-1]

    def _stamp(self, part: Part, phase: int) -> Stamp:
        return Stamp(
            plan_version=self.plan.version, step=self.step, group=part.index, codec=part.codec.spec.name, phase=phase
        )

    def _averaging_of(self, part: Part) -> tuple[Sra, Memory | None]:
        if part.index not in self._averaging:
            assert self._replicas is not None
            kinds = [{RESIDUALS: torch.zeros(part.width)}] if part.memory is not None else []
            self._averaging[part.index] = Sra(part.codec, part.width, self._replicas), Memory.joined(kinds)
        return self._averaging[part.index]

    def _note(self, average_T: Tensor, delivered: Callable[[Tensor], Tensor]) -> None:
        if self._has_memory and not is_finite(delivered(average_T)):
            self._is_finite = False

    def _end_step(self, waited_s: float) -> None:
        if not self._ran:
            return
        if self._has_memory:
            self._unsettled = self._ran, self._shards.start_minimum(torch.tensor([self._is_finite], dtype=torch.int64))
        now = time.perf_counter()
        with self.telemetry.optional("times and bytes", self.step):
            self._sample(now - self._last_end_s, waited_s)
        self.step += 1
        self._last_end_s = now
        self._ran, self._is_finite, self._phases, self._sent_bytes = [], True, [], 0

    def _sample(self, step_s: float, waited_s: float) -> None:
        sample = StepSample(
            rank=self._rank,
            step=self.step,
            plan_version=self.plan.version,
            step_s=step_s,
            compute_s=step_s - waited_s,
            encode_s=sum(phases.encode for phases in self._phases),
            exchange_s=sum(phases.exchange for phases in self._phases),
            decode_s=sum(phases.decode for phases in self._phases),
            wire_bytes=self._sent_bytes,
            card_bytes=sum(transport.take_card_bytes() for transport in self._transports),
            dense_bytes=sum(unit.dense_bytes for unit in self._ran),
            ready_s=(),
            transfers=(),
            # Ranks lie in a grid, shards by replicas, and so do those of a node.
            num_local=math.prod(transport.num_local for transport in self._transports),
        )
        self.telemetry.add(sample)

    def _settle(self) -> None:
        """Let codecs remember the last step, on all ranks or on none: GradScaler skips one that is not finite."""
        if self._unsettled is None:
            return
        units, minimum = self._unsettled
        self._unsettled = None
        if int(minimum()):
            for part in (part for unit in units for part in unit.gradients):
                if part.memory is not None:
                    part.memory.commit()

    def _follow_scale(self, scales: Scales) -> None:
        """See `Engine`. The first unit of a step tells the scale."""
        if self._has_memory:
            self._rescale(one_scale(scales, self._loss_scale if self._ran else None))

    def _rescale(self, scale: float) -> None:
        self._loss_scale = scale
        for part in self._parts():
            if part.memory is not None:
                part.memory.rescale(scale)

    def _state(self) -> dict[str, Any]:
        self._settle()
        owed = {name: value for part in self._parts() for name, value in part.owed().items()}
        kinds = {kind: owed if kind == RESIDUALS else {} for kind in KINDS}
        return {"step": self.step, "loss_scale": self._loss_scale, **kinds}

    def _load(self, step: int, owed: Mapping[str, Tensor], loss_scale: float) -> None:
        self._settle()
        self.step = step
        self._rescale(loss_scale)
        for part in self._parts():
            part.owe(owed)

    def _parts(self) -> list[Part]:
        return [part for unit in self._units for part in unit.gradients]

    def _fail(self, what: str, error: BaseException) -> CGXError:
        where = f"rank {self._rank}, step {self.step}" + (f", module {what!r}" if what else "")
        if self._replicas is not None:
            where += ", in which ranks count from 0 along each dimension of the mesh"
        kind = type(error) if isinstance(error, CGXError) else CGXError
        self._failure = kind(f"{where}: {error if isinstance(error, CGXError) else repr(error)}")
        self._failure.__cause__ = error
        logger.error("%s", self._failure, exc_info=error)
        self._hang_up()
        return self._failure


def _close(transports: Sequence[Transport]) -> None:
    for transport in transports:
        transport.close()


def _as_it_is(average_T: Tensor) -> Tensor:
    return average_T


def _check_width(rows_RT: Tensor, width: int) -> None:
    if rows_RT.shape[1] != width or not rows_RT.is_floating_point():
        raise CGXError(
            f"FSDP2 brings shards of {rows_RT.shape[1]} elements, {rows_RT.dtype}; all layers together have {width}; "
            "call set_reduce_scatter_unused_params(True) if some layers get no gradient, freeze layers before attach, "
            "and keep one dtype a module"
        )

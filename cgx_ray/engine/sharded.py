"""The engine of FSDP2 models: one communication thread per rank, which reduces and gathers shards in call order.

R ranks that share the parameters, T elements of a module's shard
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from cgx_ray.codecs.codec import KINDS, RESIDUALS, is_finite
from cgx_ray.collectives import Transport
from cgx_ray.engine.loss_scale import Scales, one_scale
from cgx_ray.engine.shard_exchange import ShardExchange
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
    The codecs' new memory becomes valid when all ranks have found the averages of the step finite. That is known when
    the next step begins, at the latest.
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

        rank      in the whole run, for messages and samples
        shards    connects the ranks that share the parameters
        replicas  connects the ranks that hold the same shard; None if this rank alone holds it
        """
        self.plan = plan
        self.telemetry = Telemetry(rank)
        self._units = units
        self._rank = rank
        self._shards = shards
        self._has_replicas = replicas is not None
        self._exchange = ShardExchange(shards, replicas, plan.version, seed)
        # The loss scale of the gradients that the memory was made from.
        self._loss_scale = 1.0
        self._has_memory = any(part.memory is not None for part in self._parts())
        self._failure: CGXError | None = None
        # Of the step under way.
        self._ran: list[Unit] = []
        self._is_finite = True
        self._last_end_s = time.perf_counter()
        # Seconds that the training thread has waited in this step. Only that thread uses it.
        self._waited_s = 0.0
        # Of the step before: its units, and a call that returns 1 if all ranks found it finite.
        self._unsettled: tuple[list[Unit], Callable[[], Tensor]] | None = None
        self._num_threads = torch.get_num_threads()
        self._thread = WorkThread("cgx-ray-engine", self._run, self._exchange.close)

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

        rows_RT, out_T  float32, the gradients of the unit; the rows are changed
        scales          loss scales of the gradients, see `LossScale.now`
        delivered       turns `out_T` into the gradient that the model gets, which is then checked for NaN and Inf
        """
        return self._submit(
            unit.name, lambda: self._reduce_scatter(unit, rows_RT, out_T, is_average, scales, delivered or _as_it_is)
        )

    def all_reduce(
        self, unit: Unit, shard_T: Tensor, *, is_average: bool, delivered: Callable[[Tensor], Tensor] | None = None
    ) -> Future[None]:
        """Begin to replace `shard_T`, filled by `reduce_scatter`, by its sum or average over replicas.

        `delivered` as in `reduce_scatter`.
        """
        return self._submit(unit.name, lambda: self._all_reduce(unit, shard_T, is_average, delivered or _as_it_is))

    def all_gather(self, unit: Unit, rows_RT: Tensor) -> Future[None]:
        """Begin to fill `rows_RT` with the parameters of all ranks. This rank's own row becomes what its peers see."""
        return self._submit(unit.name, lambda: self._all_gather(unit, rows_RT))

    def end_step(self) -> Future[None]:
        """End the step. Does nothing if the step has reduced no gradient."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return self._submit("", lambda: self._end_step(waited_s))

    def wait(self, future: Future[None]) -> None:
        """Wait for a call. Raises the error that stopped the engine, if there was one."""
        start = time.perf_counter()
        future.result()
        self._waited_s += time.perf_counter() - start

    def hold(self, plan: Plan) -> None:
        """Raise PlanError: a sharded model keeps its first plan."""
        raise PlanError("the plan of an FSDP2 model cannot change; attach with another codec in the next run")

    @property
    def step(self) -> int:
        """Number of the step under way."""
        return self._exchange.step

    @property
    def last_step(self) -> StepSample | None:
        """Sample of the last finished step; None before the first."""
        return self.telemetry.last_step

    def take_samples(self) -> list[StepSample]:
        """See `Engine.take_samples`. Samples have no transfers: the planner knows schemes of whole gradients only."""
        return self.telemetry.take_samples()

    def state(self) -> dict[str, Any]:
        """See `Engine.state`. Residuals are laid out like whole gradients, so they fit any number of ranks."""
        state: dict[str, Any] = self._submit("", self._state).result()
        return state

    def load_state(self, step: int, memories: Mapping[str, Mapping[str, Tensor]], *, loss_scale: float = 1.0) -> None:
        """See `Engine.load_state`. Also raises StateError for memory that the codec does not use."""
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
                        "and the model that saved the state"
                    )
        self._submit("", lambda: self._load(step, memories[RESIDUALS], loss_scale)).result()

    def close(self) -> None:
        """Stop the thread after it has finished all submitted calls."""
        self._thread.end()
        self._exchange.close()
        self._failure = self._failure or CGXError("the engine is closed; attach again to compress")

    def _submit(self, module: str, call: Callable[[], Any]) -> Future[Any]:
        if self._failure is not None:
            raise self._failure
        self._thread.check(f"rank {self._rank}, step {self.step}")
        self._num_threads = torch.get_num_threads()
        future: Future[Any] = Future()
        self._thread.put((module, call, future))
        return future

    # Called by the engine's own thread.

    def _run(self, jobs: Iterator[tuple[str, Callable[[], Any], Future[Any]]]) -> None:
        for module, call, future in jobs:
            if self._failure is not None:
                future.set_exception(self._failure)
                continue
            follow_num_threads(self._num_threads)
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised again in the training thread, through the future
                future.set_exception(self._fail(module, error))

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
        phases = self._exchange.reduce_scatter(unit, rows_RT, out_T, is_average=is_average)
        self._note(out_T, delivered)
        phases.lap("decode")

    def _all_reduce(self, unit: Unit, shard_T: Tensor, is_average: bool, delivered: Callable[[Tensor], Tensor]) -> None:
        phases = self._exchange.all_reduce(unit, shard_T, is_average=is_average)
        self._note(shard_T, delivered)
        phases.lap("decode")

    def _all_gather(self, unit: Unit, rows_RT: Tensor) -> None:
        self._exchange.all_gather(unit, rows_RT).lap("decode")

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
            self.telemetry.add(self._sample(now - self._last_end_s, waited_s))
        self._last_end_s = now
        self._ran, self._is_finite = [], True
        self._exchange.next_step()

    def _sample(self, step_s: float, waited_s: float) -> StepSample:
        done, transports = self._exchange, self._exchange.transports
        return StepSample(
            rank=self._rank,
            step=self.step,
            plan_version=self.plan.version,
            step_s=step_s,
            compute_s=step_s - waited_s,
            encode_s=sum(phases.encode for phases in done.phases),
            exchange_s=sum(phases.exchange for phases in done.phases),
            decode_s=sum(phases.decode for phases in done.phases),
            wire_bytes=done.sent_bytes,
            card_bytes=sum(transport.take_card_bytes() for transport in transports),
            dense_bytes=sum(unit.dense_bytes for unit in self._ran),
            ready_s=(),
            transfers=(),
            # Ranks form a grid of shards by replicas, and so do the ranks of one node.
            num_local=math.prod(transport.num_local for transport in transports),
        )

    def _settle(self) -> None:
        """Make the memory of the last step valid, on all ranks or on none. GradScaler skips a step with NaN or Inf."""
        if self._unsettled is None:
            return
        units, minimum = self._unsettled
        self._unsettled = None
        if int(minimum()):
            for part in (part for unit in units for part in unit.gradients):
                if part.memory is not None:
                    part.memory.commit()

    def _follow_scale(self, scales: Scales) -> None:
        """Convert the memory to the loss scale of the step, which its first unit brings; see `Engine`."""
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
        self._exchange.step = step
        self._rescale(loss_scale)
        for part in self._parts():
            part.owe(owed)

    def _parts(self) -> list[Part]:
        return [part for unit in self._units for part in unit.gradients]

    def _fail(self, module: str, error: BaseException) -> CGXError:
        where = f"rank {self._rank}, step {self.step}" + (f", module {module!r}" if module else "")
        if self._has_replicas:
            where += " (below, ranks count from 0 along each dimension of the mesh)"
        kind = type(error) if isinstance(error, CGXError) else CGXError
        self._failure = kind(f"{where}: {error if isinstance(error, CGXError) else repr(error)}")
        self._failure.__cause__ = error
        logger.error("%s", self._failure, exc_info=error)
        self._exchange.close()
        return self._failure


def _as_it_is(average_T: Tensor) -> Tensor:
    return average_T

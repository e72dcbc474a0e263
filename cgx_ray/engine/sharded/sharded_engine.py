"""The engine of FSDP2 models: one communication thread per rank, which reduces and gathers shards in call order.

R ranks that share the parameters, T elements of a module's shard
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cgx_ray.codecs import build_kernels
from cgx_ray.codecs.codec import RESIDUALS
from cgx_ray.collectives import Transport
from cgx_ray.engine.agreement import Agreement, HeldPlans, build_for
from cgx_ray.engine.group import codecs_on_device
from cgx_ray.engine.loss_scale import Scales
from cgx_ray.engine.sharded.shard_exchange import ShardExchange
from cgx_ray.engine.sharded.shard_memory import ShardMemory
from cgx_ray.engine.sharded.shards import Unit, check_plan, codecs_of
from cgx_ray.engine.step import PauseWatch
from cgx_ray.engine.step_sample import sample_of_shards
from cgx_ray.engine.telemetry import ObservedTraining, Telemetry
from cgx_ray.engine.thread import CLOSE_S, WorkThread, follow_num_threads, noting_more, overdue_at_close
from cgx_ray.errors import CGXError, ConfigError
from cgx_ray.monitors.sample import StepSample
from cgx_ray.plan import NONE, Layer, Plan
from cgx_ray.runtime_ext.streams import DONE, Mark, streams_of

logger = logging.getLogger(__name__)


class ShardedEngine:
    """Averages shards of gradients, and gathers parameters, on its own thread.

    Every rank must make the same calls in the same order. A step lasts until `end_step`, or until a unit comes again.
    The codecs' new memory becomes valid when the next step begins, except of layers whose averages were not applied.
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
        judged_together: Callable[[], Iterable[frozenset[str]]] = tuple,
        sums_inside: bool = False,
    ) -> None:
        """Start the thread.

        plan      of whose groups only the codecs count: layers of a unit travel together
        rank      in the whole run, for messages and samples
        shards    connects the ranks that share the parameters
        replicas  connects the ranks that hold the same shard; None if this rank alone holds it
        judged_together  as `LossScale.judged_together`
        sums_inside      True if FSDP2 itself reduce-scatters gradients, and only those between replicas are compressed

        Raises PlanError if a sharded model cannot have `plan`.
        """
        check_plan(plan, units)
        self.plan, self._units = plan, units
        # Whether no layer has a codec.
        self._is_dense = False
        self._choose(plan)
        self.streams = streams_of(units[0].device)
        self._is_on_device = self.streams.current() is not None
        self.telemetry, self.observed = Telemetry(rank), ObservedTraining()
        self._rank = rank
        self._has_replicas, self._num_shards = replicas is not None, shards.world_size
        self._num_replicas = replicas.world_size if replicas is not None else 1
        # Small layers go as they are.
        codecs = [part.codec.spec for unit in units for part in unit.parameters]
        self.parameter_codec = next((codec for codec in codecs if codec != NONE), NONE if codecs else None)
        build_kernels([*codecs_on_device(plan, shards), *codecs], units[0].device)
        self._exchange = ShardExchange(shards, replicas, plan.version, seed, sums_inside=sums_inside)
        self._memory = ShardMemory(units, shards, judged_together)
        self._minima = _GridMinima(rank, shards, replicas)
        self._agreement, self._held = Agreement(self._minima), HeldPlans()
        self._failure: CGXError | None = None
        # Units reduced in the step under way, if one has begun.
        self._ran: list[Unit] = []
        self._has_begun = False
        # The marks of the arguments of the call under way, and of the last gradients.
        self._computed = self._ready = DONE
        self._last_end_s = self._first_s = time.perf_counter()
        self._pauses = PauseWatch()
        # The thread uses the residuals on a stream of its own.
        self.streams.mark().wait()
        # Seconds that the training thread has waited in this step. Only that thread uses it.
        self._waited_s = 0.0
        self._num_threads = torch.get_num_threads()
        closed = "the engine is closed; attach again to compress"
        self._thread = WorkThread("cgx-ray-engine", self._run, self._exchange.close, closed=closed)

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
        self,
        unit: Unit,
        shard_T: Tensor,
        *,
        is_average: bool,
        scales: Scales = (),
        delivered: Callable[[Tensor], Tensor] | None = None,
    ) -> Future[None]:
        """Begin to replace `shard_T`, the result of a reduce-scatter, by its sum or average over replicas.

        `scales`, if that was FSDP2's, and `delivered` as in `reduce_scatter`.
        """
        return self._submit(
            unit.name, lambda: self._all_reduce(unit, shard_T, is_average, scales, delivered or _as_it_is)
        )

    def all_gather(self, unit: Unit, rows_RT: Tensor) -> Future[None]:
        """Begin to fill `rows_RT` with the parameters of all ranks. This rank's own row becomes what its peers see."""
        return self._submit(unit.name, lambda: self._all_gather(unit, rows_RT))

    def begin_step(self, unit: Unit) -> bool:
        """Begin with the gradients of a unit, and so perhaps a step; return True if no layer has a codec in it.

        All ranks get the same answer. Waits for the thread.
        """
        is_dense: bool = self._submit("", lambda: self._open(unit), DONE).result()
        return is_dense

    def hand_over(self, unit: Unit, ready: Mark) -> None:
        """Take down that FSDP2 itself reduces the gradients of a unit, in a step without codecs. `ready`: theirs."""
        self._submit(unit.name, lambda: self._hand_over(unit), ready)

    def end_step(self) -> Future[None]:
        """End the step, after all that this thread has called. Does nothing if the step has reduced no gradient."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return self._submit("", lambda: self._end_step(waited_s))

    def wait(self, future: Future[None], *, at_end: bool = False) -> None:
        """Wait for a call. Raises the error that stopped the engine, if there was one.

        at_end  backward has queued all gradients. From the last one on a device's clock tells the time (`_end_step`)
        """
        start = time.perf_counter()
        future.result()
        if not self._is_on_device:
            self._waited_s += time.perf_counter() - start
        elif not at_end:
            # Until the call begins, the device computes what it was given.
            began_s = future.began_s if isinstance(future, Call) else start
            self._waited_s += time.perf_counter() - max(start, began_s)

    def hold(self, plan: Plan) -> None:
        """Offer a plan. It takes effect at the same step on all ranks, once all of them hold it, see `Engine.hold`.

        Also raises PlanError for what `check_plan` refuses.
        """
        plan.check(self.layers, self._minima.world_size)
        check_plan(plan, self._units)
        build_for(plan, codecs_on_device(plan, self._exchange.transports[0]), self._units[0].device)
        self._held.add(plan, self.plan)

    @property
    def layers(self) -> list[Layer]:
        """Whole layers, in the order of their modules."""
        return [layer for unit in self._units for layer in unit.layers]

    @property
    def dense_share(self) -> float:
        """Bytes that a rank would send of a step's gradients, uncompressed, over the samples' `dense_bytes`."""
        of_shard = 2 * (self._num_replicas - 1) / self._num_replicas
        if self.sums_inside:
            return of_shard
        return (self._num_shards - 1) / self._num_shards + of_shard / self._num_shards

    @property
    def sums_inside(self) -> bool:
        """True if FSDP2 itself reduce-scatters gradients."""
        return self._exchange.sums_inside

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
        self._memory.check(memories, self.plan.describe())
        self._submit("", lambda: self._load(step, memories[RESIDUALS], loss_scale)).result()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Stop the thread once all submitted calls are finished; after `timeout_s` disconnect instead."""
        if not self._thread.end(timeout_s):
            self._exchange.give_up(overdue_at_close(self._rank, self.step, timeout_s))
            self._thread.end(timeout_s)
        self._exchange.close()

    def _submit(self, module: str, call: Callable[[], Any], computed: Mark | None = None) -> Future[Any]:
        """Have the thread make a call, after `computed`; default: after all that this thread has called so far."""
        if self._failure is not None:
            raise self._failure
        if self.streams.is_capturing():
            raise ConfigError(
                "a CUDA graph cannot contain the exchange of an FSDP2 model, in which the host takes part; capture "
                "parts of its modules by torch.cuda.make_graphed_callables"
            )
        self._num_threads = torch.get_num_threads()
        future = Call()
        job = module, call, computed or self.streams.mark(), future
        self._thread.put(job, f"rank {self._rank}, step {self.step}")
        return future

    # Called by the engine's own thread.

    def _run(self, jobs: Iterator[tuple[str, Callable[[], Any], Mark, Call]]) -> None:
        """Do the calls in order, each after the mark of its arguments. A future is set when the device is done too."""
        self.streams.enter()
        for module, call, computed, future in jobs:
            follow_num_threads(self._num_threads)
            try:
                if self._failure is not None:
                    future.set_exception(self._failure)
                else:
                    self._exchange.wait_for(computed)
                    self._computed = computed
                    future.began_s = time.perf_counter()
                    result = call()
                    self._exchange.wait_for(self.streams.mark())
                    future.set_result(result)
                    del result
            except BaseException as error:  # noqa: BLE001 - raised again in the training thread, through the future
                future.set_exception(self._fail(module, error))
            # It leads to the model, which must not stay while the thread waits for the next call.
            del call, computed, future

    def _reduce_scatter(
        self,
        unit: Unit,
        rows_RT: Tensor,
        out_T: Tensor,
        is_average: bool,
        scales: Scales,
        delivered: Callable[[Tensor], Tensor],
    ) -> None:
        self._begin(unit, scales)
        phases = self._exchange.reduce_scatter(unit, rows_RT, out_T, is_average=is_average)
        self._memory.note(unit, out_T, delivered)
        phases.lap("decode")

    def _begin(self, unit: Unit, scales: Scales) -> None:
        """Begin with the gradients of a unit, and so perhaps a step."""
        self._open(unit)
        self._memory.follow_scale(scales, is_first=not self._ran)
        self._ran.append(unit)
        self._ready = self._computed

    def _open(self, unit: Unit) -> bool:
        if unit in self._ran:
            self._end_step(0.0)
        if not self._has_begun:
            self._has_begun = True
            self._first_s = time.perf_counter()
            self._memory.settle()
            self._follow_plan()
        return self._is_dense

    def _hand_over(self, unit: Unit) -> None:
        self._begin(unit, ())
        self._exchange.sent_bytes += round(self.dense_share * self._dense_bytes([unit]))

    def _dense_bytes(self, units: Sequence[Unit]) -> int:
        # Replicas send their own shards only.
        return sum(unit.dense_bytes for unit in units) // (self._num_shards if self.sums_inside else 1)

    def _follow_plan(self) -> None:
        """Enter a plan if all ranks hold it, and tell them which ones this rank holds."""
        version, _ = self._agreement.settle() or (self.plan.version, 0)
        if version > self.plan.version:
            self.plan = self._held.take(version)
            self._exchange.plan_version = version
            self._choose(self.plan)
        # Scales of gradients are compared where they are used.
        self._agreement.post(step=self.step, in_force=self.plan, held=self._held)

    def _choose(self, plan: Plan) -> None:
        codecs = codecs_of(plan)
        self._is_dense = all(codec == NONE for codec in codecs.values())
        for unit in self._units:
            unit.choose(codecs)

    def _all_reduce(
        self, unit: Unit, shard_T: Tensor, is_average: bool, scales: Scales, delivered: Callable[[Tensor], Tensor]
    ) -> None:
        if self.sums_inside:
            self._begin(unit, scales)
        phases = self._exchange.all_reduce(unit, shard_T, is_average=is_average)
        self._memory.note(unit, shard_T, delivered)
        phases.lap("decode")

    def _all_gather(self, unit: Unit, rows_RT: Tensor) -> None:
        self._exchange.all_gather(unit, rows_RT).lap("decode")

    def _end_step(self, waited_s: float) -> None:
        if not self._ran:
            return
        self._memory.end_step(self._ran)
        self._minima.relay()
        if self._is_on_device:
            # The training's stream, which has waited for all gradients.
            waited_s += self._computed.seconds_since(self._ready)
        now = time.perf_counter()
        with self.telemetry.optional("times and bytes", self.step):
            loss, lr, pause_s = self.observed.take()
            between_s = self._pauses.add_step(self._first_s - self._last_end_s, now - self._first_s, pause_s)
            step_s = now - self._last_end_s - between_s
            sample = sample_of_shards(self._exchange, self._rank, self._dense_bytes(self._ran), step_s, waited_s)
            self.telemetry.add_sample(replace(sample, between_s=between_s, loss=loss, lr=lr))
        self._last_end_s = now
        self._ran, self._has_begun = [], False
        self._exchange.next_step()

    def _state(self) -> dict[str, Any]:
        return {"step": self.step, **self._memory.state()}

    def _load(self, step: int, residuals: Mapping[str, Tensor], loss_scale: float) -> None:
        self._memory.load(residuals, loss_scale, self._exchange.summed_row)
        self._exchange.step = step

    def _fail(self, module: str, error: BaseException) -> CGXError:
        where = f"rank {self._rank}, step {self.step}" + (f", module {module!r}" if module else "")
        if self._has_replicas:
            where += " (below, ranks count from 0 along each dimension of the mesh)"
        kind = type(error) if isinstance(error, CGXError) else CGXError
        failure = kind(f"{where}: {error if isinstance(error, CGXError) else repr(error)}")
        failure.__cause__ = error
        with noting_more(failure):
            logger.error("%s", failure, exc_info=error)
            self._exchange.give_up(str(failure))
            self.telemetry.note_fault(failure, self.step)
        self._failure = failure
        return failure


class Call(Future[Any]):
    """A call to the thread. `began_s`: when its arguments were ready, and all calls before it were done."""

    began_s = math.inf


class _GridMinima:
    """Minima over all ranks: first over those that share the parameters, then over those that hold the same shard.

    The first one has a step to arrive, and the second one the time from there to the next step.
    """

    def __init__(self, rank: int, shards: Transport, replicas: Transport | None) -> None:
        self.rank = rank
        self.world_size = shards.world_size * (replicas.world_size if replicas is not None else 1)
        self._shards, self._replicas = shards, replicas
        self._first: Callable[[], Tensor] | None = None
        self._second: Callable[[], Tensor] | None = None

    def start_minimum(self, values_K: Tensor) -> Callable[[], Tensor]:
        """See `Transport.start_minimum`. One at a time."""
        self._first = self._shards.start_minimum(values_K)
        return self._finish

    def relay(self) -> None:
        """Begin with replicas, once the ranks that share the parameters are done. Otherwise `_finish` does."""
        if self._first is not None:
            found_K, self._first = self._first(), None
            self._second = self._replicas.start_minimum(found_K) if self._replicas is not None else lambda: found_K

    def _finish(self) -> Tensor:
        self.relay()
        assert self._second is not None
        return self._second()


def _as_it_is(average_T: Tensor) -> Tensor:
    return average_T

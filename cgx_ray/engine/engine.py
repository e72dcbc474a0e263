"""The engine of DDP models: one communication thread per rank, which averages groups of gradients in plan order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from cgx_ray.codecs import build_kernels
from cgx_ray.codecs.codec import HOST
from cgx_ray.collectives import Transport
from cgx_ray.collectives.transport.transport_like import VendorCall
from cgx_ray.engine.agreement import Agreement, HeldPlans, build_for
from cgx_ray.engine.bank import Banks
from cgx_ray.engine.gains.gain_meter import StepMeter
from cgx_ray.engine.gains.gain_schedule import GainSchedule
from cgx_ray.engine.group import codecs_on_device
from cgx_ray.engine.layers import check_memories
from cgx_ray.engine.loss_scale import one_scale
from cgx_ray.engine.step import Arrived, Content, EarlyGradient, PendingBucket, StepClock, StepRun, StepStart
from cgx_ray.engine.step_sample import Span, sample_of_step, spans_of_step
from cgx_ray.engine.step_trace import StepTrace
from cgx_ray.engine.telemetry import Observed, ObservedTraining, Telemetry
from cgx_ray.engine.thread import CLOSE_S, Inbox, WorkThread, follow_num_threads, noting_more, overdue_at_close
from cgx_ray.errors import CGXError, ReplicaError
from cgx_ray.monitors.sample import InsideLink, StepSample
from cgx_ray.plan import DENSE, CodecSpec, Layer, Plan
from cgx_ray.runtime_ext import ops
from cgx_ray.runtime_ext.streams import streams_of

if TYPE_CHECKING:
    from cgx_ray.engine.period.rounds import Rounds

CLOSED = "the engine is closed; to train on, build the DistributedDataParallel again and attach that"

logger = logging.getLogger(__name__)


class Engine:
    """Averages gradients over ranks by the plan in force.

    `submit` may be called from any thread and returns at once. A layer belongs to its group, no matter which bucket
    brings it. Groups begin in plan order, each when its layers have arrived, and are under way side by side. A step
    ends when all groups are averaged.

    step         number of the step under way, or of the next one: it goes up before the last bucket goes back
    held         plans that are not in force yet
    streams      those of the gradients' device
    trace        gets the spans of every step, if there is one
    observed     what the training reports: loss, learning rate, pauses
    agreement    its `weight_check`, which has made the hashes that `submit` gets, says how much the weights differ
    rounds       follows the period of the plan in force
    sums         for the training thread
    may_train_alone  False once a step was within join(): no plan may have a period then
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        plan: Plan,
        transport: Transport,
        *,
        seed: int = 0,
        candidates: Sequence[CodecSpec] = (),
        by_layer: Sequence[CodecSpec] = (),
        sums_layers: bool = False,
        device: torch.device = HOST,
        inside: InsideLink | None = None,
        judged_together: Callable[[], Iterable[frozenset[str]]] = tuple,
    ) -> None:
        """Start the thread.

        candidates  codecs whose gain is measured in some steps
        by_layer    codecs whose errors are measured by layer in these steps, one of them each time
        sums_layers  as in `GainSchedule`
        device      where the gradients are; on a CUDA device the engine works on a stream of its own
        inside      link between the ranks of this node, for the samples
        judged_together  as `LossScale.judged_together`

        Raises PlanError if `plan` is for other layers or another world size.
        """
        plan.check(layers, transport.world_size)
        self._layers = {layer.name: layer for layer in layers}
        self._transport = transport
        self._seed, self._inside = seed, inside
        self.device = device
        self.streams = streams_of(device)
        self._gains = GainSchedule(candidates, layers, by_layer, device, sums_layers=sums_layers)
        self.agreement = Agreement(transport)
        self._banks = Banks(self._layers, transport, device, judged_together)
        self.held = HeldPlans()
        self.telemetry = Telemetry(transport.rank)
        self.observed = ObservedTraining()
        self._failure: CGXError | None = None
        self.step = 0
        # Held by the thread from before the last bucket goes back until the step is measured.
        self._ending = threading.RLock()
        self._last_spans: list[Span] = []
        self.trace: StepTrace | None = None
        self.rounds: Rounds | None = None
        self.sums = transport.training_sums
        self.may_train_alone = True
        self._clock = StepClock(self.streams, transport.watch)
        self.plan = plan
        build_kernels([*codecs_on_device(plan, transport), *candidates, *by_layer], device)
        self._banks.gradients.enter(plan)
        # The thread uses the groups' memory on a stream of its own.
        self.streams.mark().wait()
        self._num_threads = torch.get_num_threads()
        self._thread = WorkThread("cgx-ray-engine", self._run, transport.close, transport.wake, closed=CLOSED)

    # Called by the training thread, and by the threads that bring plans and collect samples.

    def submit(self, arrived: PendingBucket | EarlyGradient) -> None:
        """Queue a bucket or a gradient. Raises the error that stopped the engine, if there was one.

        The bucket of an early gradient must follow. Until then the gradient must stay as it is.
        """
        if self._failure is not None:
            raise self._failure
        self._num_threads = torch.get_num_threads()
        self._thread.put(arrived, f"rank {self._transport.rank}, step {self.step}")

    def begin_step(self) -> bool:
        """Begin a step before its first gradient. Return True if DDP's own all-reduce may average it.

        So it is, on all ranks alike, if the plan in force is dense as a whole, no gains are measured in this step and
        no residual is left. Waits for the thread, which at most waits for the agreement of the step before.
        """
        if self._failure is not None:
            raise self._failure
        start = StepStart()
        self._thread.put(start, f"rank {self._transport.rank}, step {self.step}")
        return start.future.result()

    def count_step(self) -> None:
        """Count a step whose gradients are not exchanged. Call it at its last gradient.

        Raises the error that stopped the engine, or what has made another rank disconnect, on all ranks.
        """
        self._transport.step = self.step
        with self.failing_together():
            if self._failure is None and self._transport.has_lost_ranks:
                raise self._transport.explained(RuntimeError("ranks have disconnected"))
        if self._failure is not None:
            raise self._failure
        self.step += 1

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Let a CGXError of the block, in the training thread, stop the engines of all ranks."""
        try:
            yield
        except CGXError as error:
            self._fail(error, [])
            raise

    def watched(self, work: dist.Work) -> VendorCall:
        """Return what `PendingBucket.summed` is for `work`."""
        return self._transport.watched("DDP's all-reduce", work)

    def hold(self, plan: Plan) -> None:
        """Offer a plan. It takes effect at the same step on all ranks, once all of them hold it.

        It is held once its kernels are built, which takes seconds on a CUDA device that lacks them. Raises PlanError if
        it does not fit, or a kernel does not compile or computes wrong bits; the plan in force stays in force.
        """
        plan.check(self.layers, self._transport.world_size)
        build_for(plan, codecs_on_device(plan, self._transport), self.device)
        self.held.add(plan, self.plan)

    @property
    def layers(self) -> list[Layer]:
        """The model's layers in registration order."""
        return list(self._layers.values())

    @property
    def last_step(self) -> StepSample | None:
        """Sample of the last finished step; None before the first."""
        with self._ending:
            return self.telemetry.last_step

    @property
    def last_spans(self) -> list[Span]:
        """Times of each group of the last finished step."""
        with self._ending:
            return self._last_spans

    @contextmanager
    def metered(self, candidates: Sequence[CodecSpec], interval_steps: int) -> Iterator[None]:
        """Measure the gains of `candidates` every `interval_steps` instead, at any cost.

        Enter and leave between steps.
        """
        self._wait_for_measurements()
        with self._gains.replaced(candidates, interval_steps):
            yield
            self._wait_for_measurements()

    def take_samples(self) -> list[StepSample]:
        """Return the samples since the last call, oldest first, at most the newest 1,024."""
        with self._ending:
            return self.telemetry.take_samples()

    def state(self) -> dict[str, Any]:
        """Return step, loss scale and the codecs' memory of this rank, for a checkpoint. Call between steps.

        Memory is in tensors by kind and layer. It was made from gradients that are multiplied by the loss scale. Memory
        of parameters' changes is under "changes".

        Raises the error that stopped the engine, if there was one: its step is in no memory, or in a part of it.
        """
        with self._ending:
            if self._failure is not None:
                raise self._failure
            self._banks.settle()
            return {"step": self.step, **self._banks.state()}

    def load_state(
        self,
        step: int,
        memories: Mapping[str, Mapping[str, Tensor]],
        *,
        changes: Mapping[str, Mapping[str, Tensor]] | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        """Continue from a checkpoint. Call on all ranks, between steps. Layers that it lacks start without memory.

        memories    as in `state`, with every kind; of gradients
        changes     the same of parameters' changes; none by default
        loss_scale  scale of `memories`; the next steps may have another

        Raises StateError if `memories` are from another model. Nothing has changed then.
        """
        check_memories(memories, self._layers)
        check_memories(changes or {}, self._layers)
        self._wait_for_measurements()
        self.step = step
        self._gains.start(step)
        # The thread could not write to memory that is made in inference mode.
        with torch.inference_mode(mode=False):
            self._banks.load(memories, loss_scale, changes)
            self._banks.gradients.enter(self.plan)
        self.streams.mark().wait()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Stop the thread once all submitted buckets are finished; after `timeout_s` disconnect instead."""
        if not self._thread.end(timeout_s):
            self._transport.give_up(overdue_at_close(self._transport.rank, self.step, timeout_s))
            self._thread.end(timeout_s)
        self._transport.close()
        # They hold the weights, and the attachment, which may outlive the model, holds this engine.
        self.agreement.weight_check = self.rounds = None

    def take_residuals(self) -> dict[str, Tensor]:
        """Return what codecs have left of this rank's gradients, by layer, and forget it. Call between steps."""
        with self._ending:
            self._banks.settle()
            return self._banks.take_residuals()

    def _wait_for_measurements(self) -> None:
        """Wait until the thread has measured the last finished step. Call it between steps."""
        with self._ending:
            pass

    # Called by the engine's own thread.

    def _run(self, inbox: Inbox[Arrived]) -> None:
        self.streams.enter()
        step: StepRun | None = None
        is_ending = False
        while not is_ending or (step is not None and step.has_work):
            arrived: Arrived | None = None
            try:
                if step is not None and step.has_work:
                    # Without waiting, unless there is nothing else to do.
                    arrived = inbox.take_now() if not is_ending else None
                else:
                    arrived = self._next(inbox, step)
                    is_ending = arrived is None
                if arrived is not None:
                    step = self._take(arrived, step)
                elif step is not None and step.has_work:
                    step.work()
                    self._read_scales(step)
                if step is not None and step.is_done:
                    self._end(step)
                    step = None
                    self._transport.greet(lambda: not inbox.is_empty)
            except BaseException as error:  # noqa: BLE001 - raised again in the training thread, through the futures
                new = [arrived] if isinstance(arrived, PendingBucket | StepStart) else []
                self._fail(error, [*new, *(step.buckets if step is not None else [])])
                step = None
        if step is not None:
            self._fail(step.closed_within(), step.buckets)

    def _take(self, arrived: Arrived, step: StepRun | None) -> StepRun | None:
        """Add what has arrived to `step`, or begin one. Return the step under way."""
        if self._failure is not None:
            if not isinstance(arrived, EarlyGradient):
                arrived.future.set_exception(self._failure)  # type: ignore[arg-type]  # torch's stub says Tensor
            return None
        is_first, step = step is None, step or self._begin(arrived)
        if isinstance(arrived, StepStart):
            is_dense = all(group.option == DENSE for group in self.plan.groups)
            arrived.future.set_result(is_dense and step.meter is None and self._banks.gradients.memories.is_empty)
            return step
        if is_first or isinstance(arrived, PendingBucket):
            step.unread.append(arrived)
        self._read_scales(step)
        if isinstance(arrived, PendingBucket):
            step.take(arrived)
        else:
            step.take_early(arrived)
        return step

    def _next(self, inbox: Inbox[Arrived], step: StepRun | None) -> Arrived | None:
        """Return what arrives next; None at the end. Raise CGXError if gradients of `step` do not arrive in time."""
        if step is None or not step.buckets:
            # DDP itself finds layers without a gradient, at the next forward, if it waits for no bucket.
            return inbox.take()
        try:
            return inbox.take(self._transport.timeout_s)
        except TimeoutError:
            raise step.overdue() from None

    def _begin(self, first: Arrived) -> StepRun:
        """Start a step: enter a plan if all ranks hold it."""
        follow_num_threads(self._num_threads)
        self._banks.settle()
        version, affordable_from = self.agreement.settle() or (self.plan.version, 0)
        if version > self.plan.version:
            self.plan = self.held.take(version)
        bank, steps = self._banks.gradients, range(self.step, self.step + 1)
        if isinstance(first, PendingBucket) and first.content is Content.CHANGES:
            bank, steps = self._banks.changes, first.steps
        self._banks.last = bank
        self._transport.step = number = steps[-1]
        meter = None
        if bank is self._banks.gradients and self._gains.is_due(number, affordable_from):
            key = ops.message_key(self._seed, number, 0, self._transport.rank, 0)
            meter = StepMeter(self._gains.meter(key), self.telemetry, number)
        return StepRun(
            bank.enter(self.plan),
            self._transport,
            self._clock,
            plan_version=self.plan.version,
            steps=steps,
            seed=self._seed,
            meter=meter,
            has_memory=not bank.memories.is_empty,
        )

    def _read_scales(self, step: StepRun) -> None:
        """Follow the loss scales and hashes of weights that the device has written. The first of them open `step`.

        The codecs' memory is converted to the scale. Raises CGXError if the step has no single scale, so that no memory
        is ever added to gradients of another scale.
        """
        memories = self._banks.last.memories
        while step.unread:
            arrived, has_memory = step.unread[0], not memories.is_empty
            needs_scale = has_memory and bool(arrived.scales)
            if (needs_scale and not arrived.computed.is_done) or not arrived.weights.written.is_done:
                return
            if has_memory:
                known = memories.scale if step.is_open else None
                where = f"rank {self._transport.rank}, step {step.number}: "
                memories.rescale(one_scale(arrived.scales, known, where))
            step.unread.popleft()
            if not step.is_open:
                self._post_agreement(step.number, arrived.weights.read())
                step.is_open = True

    def _post_agreement(self, number: int, weights: int) -> None:
        """Tell the other ranks what this one has at the start of step `number`."""
        self.agreement.post(
            step=number,
            in_force=self.plan,
            held=self.held,
            affordable_from=self._gains.affordable_from,
            loss_scale=self._banks.gradients.memories.scale,
            weights=weights,
        )

    def _end(self, step: StepRun) -> None:
        """Give the last buckets back, then measure the step: training goes on meanwhile."""
        with self._ending:
            self._banks.result = step.conclude()
            with self.telemetry.optional("times of arrival", step.number):
                step.note_arrivals()
            began_s = self._clock.began_s
            self._clock.restart()
            # What is reported from now on belongs to the next step, and its hooks read its number.
            observed = self.observed.take()
            if self._banks.last is self._banks.gradients:
                # The steps that have made changes were counted when their gradients came.
                self.step += 1
            step.release()
            self._transport.receive_greetings()
            self._measure(step, began_s, self._clock.began_s, observed)

    def _measure(self, step: StepRun, began_s: float, ended_s: float, observed: Observed) -> None:
        before = self.telemetry.last_step
        if self._banks.last is self._banks.changes and before is not None and before.step == step.number:
            # An optimizer has stepped after the round's end, and nothing else was done.
            return
        finish_s = step.meter.finish() if step.meter is not None else 0.0
        with self.telemetry.optional("times, bytes and gains", step.number):
            before_s, backward_s = step.first_arrival - began_s, step.last_arrival - step.first_arrival
            seconds = (one / step.num_steps for one in (before_s, backward_s, observed.pause_s))
            between_s = self._banks.last.pauses.add_step(*seconds)
            began_s += step.num_steps * between_s
            if step.meter is not None:
                # As if the step had waited for `finish`.
                self._gains.charge(step.number, ended_s - began_s + finish_s, step.meter.seconds)
            self._last_spans = spans_of_step(step, began_s)
            if self.trace is not None:
                self.trace.add_step(step.number, self._last_spans, began_s, ended_s)
            sample = sample_of_step(step, self._transport, self.telemetry, began_s, ended_s)
            drift = self.agreement.drift_at(step.number - step.num_steps)
            sample = replace(sample, between_s=between_s, loss=observed.loss, lr=observed.lr, inside=self._inside)
            self.telemetry.add_sample(replace(sample, weight_drift=drift, may_train_alone=self.may_train_alone))

    def _fail(self, error: BaseException, buckets: Sequence[PendingBucket | StepStart]) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CGXError) and self._transport.has_given_up:
            error = self._transport.explained(error)
        if isinstance(error, CGXError):
            failure = error
        else:
            failure = CGXError(f"rank {self._transport.rank}, step {self.step}: the engine stopped: {error!r}")
            failure.__cause__ = error
        with noting_more(failure):
            # All ranks find for themselves that weights differ. To disconnect could forestall them.
            if not isinstance(failure, ReplicaError):
                self._transport.give_up(str(failure))
            logger.error("%s", failure, exc_info=error)
            # Before the training thread can raise it, and the process may end.
            self.telemetry.note_fault(failure, self.step)
        self._failure = failure
        for bucket in buckets:
            if not bucket.future.done():
                bucket.future.set_exception(failure)  # type: ignore[arg-type]  # torch's stub says Tensor

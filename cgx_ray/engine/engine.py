"""The engine: one communication thread a rank that averages groups of gradients in plan order."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import HOST, KINDS, POWERSGD_Q
from cgx_ray.codecs.feedback import Memories
from cgx_ray.collectives import Transport
from cgx_ray.engine.agreement import Agreement
from cgx_ray.engine.group import GainMeter, Group, StepMeter
from cgx_ray.engine.step import Bucket, StepRun
from cgx_ray.engine.telemetry import Telemetry
from cgx_ray.engine.thread import MAX_KEPT_SAMPLES, Inbox, WorkThread, follow_num_threads, take_all
from cgx_ray.errors import CGXError, PlanError, StateError, listed
from cgx_ray.monitors.sample import Burst, StepSample, Transfer
from cgx_ray.plan import CodecSpec, Layer, Plan
from cgx_ray.runtime_ext import ops

logger = logging.getLogger(__name__)

# Step 0 has DDP's first, unrebuilt buckets and everyone's cold caches; step 1 is the first worth measuring.
GAIN_FIRST_STEP = 1
GAIN_INTERVAL_STEPS = 20
# Of the time of all steps. Less often than that where it costs more: in steps of milliseconds, or with many groups.
GAIN_SHARE = 0.005


class Engine:
    """Averages gradients over ranks by the plan in force.

    `submit` may be called from any thread and returns at once. A layer goes into its group whatever bucket brings
    it; a group runs when all its layers are in and the groups before it are done, so every rank runs the same
    groups in the same order. A step ends when all groups have run.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        plan: Plan,
        transport: Transport,
        *,
        seed: int = 0,
        candidates: Sequence[CodecSpec] = (),
        device: torch.device = HOST,
    ) -> None:
        """Start the thread.

        candidates  codecs whose gain is measured now and then
        device      where the gradients are; work on a CUDA device goes to a stream of the engine's own

        Raises PlanError if `plan` is for other layers or another world size.
        """
        plan.check(layers, transport.world_size)
        self._layers = {layer.name: layer for layer in layers}
        self._transport = transport
        self._seed = seed
        self.device = device
        self._candidates = {str(spec): make_codec(spec) for spec in candidates}
        self._gain_interval_steps = GAIN_INTERVAL_STEPS
        self._gain_share: float | None = GAIN_SHARE
        self._meter_from = 0
        self._agreement = Agreement(transport)
        self._memories = Memories()
        self._lock = threading.Lock()
        self._held: dict[int, Plan] = {}
        self._samples: deque[StepSample] = deque(maxlen=MAX_KEPT_SAMPLES)
        self.telemetry = Telemetry(transport.rank)
        self._failure: CGXError | None = None
        self.last_step: StepSample | None = None
        self.step = 0
        self._last_end: torch.cuda.Event | None = None
        self._mark_end()
        self._enter(plan)
        self._num_threads = torch.get_num_threads()
        self._thread = WorkThread("cgx-ray-engine", self._run, transport.close)

    # Called by the training thread and by those that carry plans and samples.

    def submit(self, bucket: Bucket) -> None:
        """Queue a bucket. Raises what stopped the engine, if something did."""
        if self._failure is not None:
            raise self._failure
        self._thread.check(f"rank {self._transport.rank}, step {self.step}")
        self._num_threads = torch.get_num_threads()
        self._thread.put(bucket)

    def hold(self, plan: Plan) -> None:
        """Offer a plan. It takes effect at the same step on all ranks, once all of them hold it.

        Raises PlanError if it does not fit; the plan in force stays in force.
        """
        plan.check(self.layers, self._transport.world_size)
        with self._lock:
            newest = max(self._held, default=self.plan.version)
            if plan.version <= newest:
                raise PlanError(f"plan {plan.version} is not newer than plan {newest}; give it a higher version")
            self._held[plan.version] = plan

    @property
    def layers(self) -> list[Layer]:
        """In registration order."""
        return list(self._layers.values())

    @contextmanager
    def metered(self, candidates: Sequence[CodecSpec], interval_steps: int) -> Iterator[None]:
        """Measure the gains of these codecs, every `interval_steps`, instead, whatever it costs.

        Enter and leave between steps.
        """
        before = self._candidates, self._gain_interval_steps, self._gain_share
        self._candidates = {str(spec): make_codec(spec) for spec in candidates}
        self._gain_interval_steps, self._gain_share = interval_steps, None
        try:
            yield
        finally:
            self._candidates, self._gain_interval_steps, self._gain_share = before

    def take_samples(self) -> list[StepSample]:
        """Samples since the last call, oldest first; the newest 1,024 if nobody called for long."""
        return take_all(self._samples)

    def state(self) -> dict[str, Any]:
        """Step and codecs' memory of this rank, tensors by kind and layer, for a checkpoint. Call between steps."""
        return {"step": self.step, **self._memories.state()}

    def load_state(self, step: int, memories: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a checkpoint. Call on all ranks, between steps. Layers that are not in it start afresh.

        memories  as in `state`, every kind of it

        Raises StateError if they are of another model; nothing has changed then.
        """
        for kind in KINDS:
            for name, value in memories[kind].items():
                expected = self._layers[name].numel if name in self._layers else None
                if expected is None or (kind != POWERSGD_Q and value.numel() != expected):
                    raise StateError(
                        f"the state has {kind} of {value.numel()} elements for layer {name!r}, the model has "
                        f"{'no such layer' if expected is None else expected}; it is of another model"
                    )
        self.step, self._meter_from = step, 0
        self._memories.load(memories)
        self._enter(self.plan)

    def close(self) -> None:
        """Stop the thread once it has finished what was submitted."""
        self._thread.end()
        self._transport.close()
        self._failure = self._failure or CGXError("the engine is closed; attach again to train on")

    # Called by the engine's own thread.

    def _run(self, inbox: Inbox[Bucket]) -> None:
        if self.device.type == "cuda":
            # Both are this thread's own.
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))
        step: StepRun | None = None
        while (bucket := self._next(inbox, step)) is not None:
            if self._failure is not None:
                bucket.future.set_exception(self._failure)  # type: ignore[arg-type]  # torch's stub says Tensor
                continue
            try:
                step = step or self._begin()
                step.take(bucket)
                if step.is_done:
                    step.settle()
                    self._end(step)
                    step.release()
                    step = None
            except BaseException as error:  # noqa: BLE001 - raised again in the training thread, through the futures
                self._fail(error, [bucket, *(step.buckets if step is not None else [])])

    def _next(self, inbox: Inbox[Bucket], step: StepRun | None) -> Bucket | None:
        """The next bucket; None at the end. The engine stops if it belongs to `step` and does not come in time."""
        if step is None or self._failure is not None:
            return inbox.take()
        try:
            return inbox.take(self._transport.timeout_s)
        except TimeoutError:
            self._fail(self._overdue(step.missing), step.buckets)
        return inbox.take()

    def _overdue(self, missing: Sequence[str]) -> CGXError:
        return CGXError(
            f"rank {self._transport.rank}, step {self.step}: {len(missing)} of {len(self._layers)} layers have no "
            f"gradient {self._transport.timeout_s:g} s after the last one came: {listed(missing)}; the loss may not "
            "use them (give DistributedDataParallel find_unused_parameters=True), they may have been frozen or "
            "unfrozen after it was built (build it anew and attach again), backward may have raised an error, or it "
            "takes longer than that (give attach or CGXConfig a larger timeout_s)"
        )

    def _begin(self) -> StepRun:
        follow_num_threads(self._num_threads)
        version, meter_from = self._agreement.settle() or (self.plan.version, 0)
        if version > self.plan.version:
            with self._lock:
                plan = self._held[version]
                self._held = {newer: held for newer, held in self._held.items() if newer > version}
            self._enter(plan)
        with self._lock:
            held = max(self._held, default=self.plan.version)
        self._agreement.post(step=self.step, in_force=self.plan.version, held=held, meter_from=self._meter_from)
        self._transport.step = self.step
        meter = None
        is_affordable = self._gain_share is None or self.step >= meter_from
        if self._candidates and self.step % self._gain_interval_steps == GAIN_FIRST_STEP and is_affordable:
            key = ops.message_key(self._seed, self.step, 0, self._transport.rank, 0)
            meter = StepMeter(GainMeter(self._candidates, key), self.telemetry, self.step)
        return StepRun(
            self._groups,
            plan_version=self.plan.version,
            step=self.step,
            seed=self._seed,
            meter=meter,
            checks_finite=not self._memories.is_empty,
            began=(self._last_end_s, self._last_end),
        )

    def _enter(self, plan: Plan) -> None:
        self.plan = plan
        self._groups = [
            Group(index, group, self._layers, self._transport, self._memories, self.device)
            for index, group in enumerate(plan.groups)
        ]
        if self.device.type == "cuda":
            # Their memory is filled on this thread's stream, and used on the engine's.
            torch.cuda.current_stream(self.device).synchronize()

    def _end(self, step: StepRun) -> None:
        began_s = self._last_end_s
        self._mark_end()
        with self.telemetry.optional("times, bytes and gains", self.step):
            self._sample(step, began_s)
        self.step += 1

    def _sample(self, step: StepRun, began_s: float) -> None:
        now = self._last_end_s
        step_s = now - began_s
        if step.meter is not None and self._gain_share is not None:
            budget_s = self._gain_share * (step_s - step.meter.seconds)
            self._meter_from = self.step + math.ceil(step.meter.seconds / budget_s)
        bursts: tuple[Burst, ...] = ()
        rate_from: tuple[float, ...] = ()
        with self.telemetry.optional("rates of arrival", self.step):
            bursts, rate_from = _rates(self._transport.take_bursts(), self._transport.world_size)
        sample = StepSample(
            rank=self._transport.rank,
            step=self.step,
            plan_version=self.plan.version,
            step_s=step_s,
            compute_s=step_s - (now - step.last_arrival),
            encode_s=sum(phases.encode for phases in step.phases),
            exchange_s=sum(phases.exchange for phases in step.phases),
            decode_s=sum(phases.decode for phases in step.phases),
            wire_bytes=sum(group.exchange.sent_bytes for group in self._groups),
            card_bytes=self._transport.take_card_bytes(),
            dense_bytes=sum(group.dense_bytes for group in self._groups),
            ready_s=tuple(ready - began_s for ready in step.ready_at),
            transfers=tuple(
                Transfer(
                    group=group.index,
                    scheme=str(group.plan.option.scheme),
                    intra=str(group.plan.option.intra),
                    numel=group.numel,
                    wire_bytes=group.wire_bytes,
                    index_bytes=group.index_bytes,
                    seconds=phases.exchange,
                )
                for group, phases in zip(self._groups, step.phases, strict=True)
            ),
            gain=step.meter.gains() if step.meter is not None else {},
            gain_curve=step.meter.curve() if step.meter is not None else (),
            norm=step.meter.norm if step.meter is not None else None,
            bursts=bursts,
            rate_from=rate_from,
            # Of the step before, whose agreement this one has read; so it is on all ranks.
            lag_s=self._transport.lag_s,
            num_local=self._transport.num_local,
        )
        self.last_step = sample
        self._samples.append(sample)

    def _mark_end(self) -> None:
        """Take the time, once the device has done what it was given: what comes next counts from here."""
        if self.device.type == "cuda":
            self._last_end = torch.cuda.Event(enable_timing=True)
            self._last_end.record(torch.cuda.current_stream(self.device))
            self._last_end.synchronize()
        self._last_end_s = time.perf_counter()

    def _fail(self, error: BaseException, buckets: Sequence[Bucket]) -> None:
        if isinstance(error, CGXError):
            self._failure = error
        else:
            self._failure = CGXError(f"rank {self._transport.rank}, step {self.step}: the engine stopped: {error!r}")
            self._failure.__cause__ = error
        logger.error("%s", self._failure, exc_info=error)
        self._transport.close()
        for bucket in buckets:
            if not bucket.future.done():
                bucket.future.set_exception(self._failure)  # type: ignore[arg-type]  # torch's stub says Tensor


def _rates(arrived: Sequence[tuple[int, int, float]], world_size: int) -> tuple[tuple[Burst, ...], tuple[float, ...]]:
    """Of (rank, bytes, seconds): the bursts of all ranks together, and each rank's mean rate."""
    num_bytes, seconds = [0] * world_size, [0.0] * world_size
    for peer, count, took_s in arrived:
        if peer >= 0:
            num_bytes[peer] += count
            seconds[peer] += took_s
    bursts = tuple(Burst(count, took_s) for peer, count, took_s in arrived if peer < 0)
    return bursts, tuple(n / s if s > 0 else 0.0 for n, s in zip(num_bytes, seconds, strict=True))

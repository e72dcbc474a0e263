"""Samples of finished steps, and the error that stopped the engine. An error while measuring never stops training."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from numbers import Real
from typing import NamedTuple, SupportsFloat

import numpy as np
from torch import Tensor

from cgx_ray.errors import ConfigError, DamagedMessageError, PeerTimeoutError, ReplicaError, TransportError
from cgx_ray.monitors.sample import Fault, FaultKind, StepSample
from cgx_ray.runtime_ext.streams import DONE, Mark, streams_of

logger = logging.getLogger(__name__)
MAX_KEPT_SAMPLES = 1024
# The first type that fits counts.
_KINDS: tuple[tuple[type[Exception], FaultKind], ...] = (
    (PeerTimeoutError, "time_out"),
    (TransportError, "connection"),
    (DamagedMessageError, "damaged"),
    (ReplicaError, "weights_differ"),
)


class _Reported(NamedTuple):
    """A number, which is there after `copied`."""

    value_host: float | Tensor
    copied: Mark = DONE

    def read(self) -> float | None:
        """Return the number if it is finite and there."""
        if not self.copied.is_done:
            return None
        number = float(self.value_host)
        return number if math.isfinite(number) else None


class Observed(NamedTuple):
    """Loss and learning rate, None if unknown, and seconds of pauses, since those that were taken before."""

    loss: float | None
    lr: float | None
    pause_s: float


class ObservedTraining:
    """Values that the training tells of itself. The training thread adds them, the engine's thread takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[str, _Reported] = {}
        self._pause_s = 0.0

    def add_report(self, *, loss: SupportsFloat | None, lr: SupportsFloat | None) -> None:
        """Replace what was reported before; None reports nothing. Never waits for a device.

        Raises ConfigError for what is no single number.
        """
        given = {"loss": loss, "lr": lr}
        reported = {name: _reported(name, value) for name, value in given.items() if value is not None}
        with self._lock:
            self._newest |= reported

    def add_pause(self, seconds: float) -> None:
        """Add seconds in which the training waited for what is no part of a step."""
        with self._lock:
            self._pause_s += seconds

    def take(self) -> Observed:
        """Return what was added since the last call.

        None for what was not reported, is not finite, or is still on its way from a device; a learning rate that is not
        positive counts as not reported.
        """
        with self._lock:
            newest, self._newest = self._newest, {}
            pause_s, self._pause_s = self._pause_s, 0.0
        loss, lr = (newest[name].read() if name in newest else None for name in ("loss", "lr"))
        return Observed(loss, lr if lr is not None and lr > 0 else None, pause_s)


def _reported(name: str, value: SupportsFloat) -> _Reported:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value_1 = value.detach().reshape(1)
        if value_1.device.type != "cuda":
            return _Reported(float(value_1))
        # The engine's thread must not wait for the training's stream, so the copy begins here, behind the loss.
        streams = streams_of(value_1.device)
        host_1 = streams.host_memory(1, value_1.dtype)
        streams.copy_each([(value_1, host_1)])
        return _Reported(host_1, streams.mark())
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
        return _Reported(float(value.item()))
    if isinstance(value, Real):
        return _Reported(float(value))
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
    raise ConfigError(f"observe got {what} as {name}; give a real number, or a tensor or array with one")


@dataclass
class StepTotals:
    """Sums over the measured steps of this rank: their seconds and bytes, as in `StepSample`."""

    num_steps: int = 0
    all_s: float = 0.0
    compute_s: float = 0.0
    wire_bytes: int = 0
    dense_bytes: int = 0

    def since(self, before: StepTotals) -> StepTotals:
        """Return the sums over the steps after `before`."""
        return StepTotals(*(new - old for new, old in zip(astuple(self), astuple(before), strict=True)))

    def add_sample(self, sample: StepSample) -> None:
        self.num_steps += sample.num_steps
        self.all_s += sample.num_steps * sample.step_s
        self.compute_s += sample.num_steps * min(sample.compute_s, sample.step_s)
        self.wire_bytes += sample.num_steps * sample.wire_bytes
        self.dense_bytes += sample.num_steps * sample.dense_bytes


class Telemetry:
    """Samples of the steps of one engine, and the errors that prevented some.

    totals        of all samples
    num_failures  measurements that failed on this rank
    last_step     newest sample; None before the first one
    fault         the error that has stopped the engine; None while it works
    on_fault      is called with the fault before anyone can raise the error
    on_sample     is called when there is a new sample
    """

    def __init__(self, rank: int) -> None:
        self.totals = StepTotals()
        self.num_failures = 0
        self.last_step: StepSample | None = None
        self._rank = rank
        self.fault: Fault | None = None
        self.on_fault: Callable[[Fault], None] | None = None
        self.on_sample: Callable[[], None] | None = None
        self._taken, self._means = StepTotals(), dict[str, float]()
        self._samples: deque[StepSample] = deque(maxlen=MAX_KEPT_SAMPLES)
        self._logged: set[tuple[str, type[Exception]]] = set()

    def add_sample(self, sample: StepSample) -> None:
        """Keep `sample` as the newest. Beyond 1,024 samples the oldest is dropped."""
        self.last_step = sample
        self.totals.add_sample(sample)
        self._samples.append(sample)
        if self.on_sample is not None:
            self.on_sample()

    def take_samples(self) -> list[StepSample]:
        """Return the samples since the last call, oldest first. Another thread may add samples meanwhile."""
        taken = []
        while self._samples:
            taken.append(self._samples.popleft())
        return taken

    def take_means(self) -> dict[str, float]:
        """Return the numbers of `Attachment.metrics`: the means since the last call, or its own without a new step."""
        totals = replace(self.totals)
        new = totals.since(self._taken)
        if new.num_steps and self.last_step is not None:
            self._taken = totals
            sums = {
                "step_s": new.all_s,
                "compute_s": new.compute_s,
                "wire_mb": new.wire_bytes / 1e6,
                "dense_mb": new.dense_bytes / 1e6,
            }
            self._means = {f"cgx_ray/{name}": value / new.num_steps for name, value in sums.items()}
            self._means["cgx_ray/period"] = float(self.last_step.num_steps)
            self._means["cgx_ray/plan"] = float(self.last_step.plan_version)
        return dict(self._means)

    def note_fault(self, error: Exception, step: int) -> None:
        """Keep `error`, which has stopped the engine in `step`, and call `on_fault`, which may take seconds."""
        kind: FaultKind = next((kind for of_type, kind in _KINDS if isinstance(error, of_type)), "other")
        self.fault = Fault(rank=self._rank, step=step, kind=kind, text=str(error))
        if self.on_fault is not None:
            with self.optional("the report of an error", step):
                self.on_fault(self.fault)

    @contextmanager
    def optional(self, numbers: str, step: int) -> Iterator[None]:
        """Continue after the block if the block raises. Log the first error of each type with its traceback.

        numbers  what is measured, as the warning calls it

        For measurements only: no message between ranks may depend on a block that can fail on one rank alone.
        """
        try:
            yield
        except Exception as error:
            self.num_failures += 1
            cause = numbers, type(error)
            if cause in self._logged:
                return
            self._logged.add(cause)
            logger.warning(
                "rank %d, step %d: %s could not be measured (%r); training goes on without them; "
                "later errors of this type are counted but not logged",
                self._rank,
                step,
                numbers,
                error,
                exc_info=error,
            )

"""Samples of finished steps, and the error that stopped the engine. An error while measuring never stops training."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cgx_ray.errors import DamagedMessageError, PeerTimeoutError, ReplicaError, TransportError
from cgx_ray.monitors.sample import Fault, FaultKind, StepSample

logger = logging.getLogger(__name__)

MAX_KEPT_SAMPLES = 1024
# The first type that fits counts.
_KINDS: tuple[tuple[type[Exception], FaultKind], ...] = (
    (PeerTimeoutError, "time_out"),
    (TransportError, "connection"),
    (DamagedMessageError, "damaged"),
    (ReplicaError, "weights_differ"),
)


class Telemetry:
    """Samples of the steps of one engine, and the errors that prevented some.

    num_failures  measurements that failed on this rank
    last_step     newest sample; None before the first one
    fault         the error that has stopped the engine; None while it works
    tell_fault    is given the fault before anyone can raise the error
    """

    def __init__(self, rank: int) -> None:
        self.num_failures = 0
        self.last_step: StepSample | None = None
        self._rank = rank
        self.fault: Fault | None = None
        self.tell_fault: Callable[[Fault], None] | None = None
        self._samples: deque[StepSample] = deque(maxlen=MAX_KEPT_SAMPLES)
        self._logged: set[tuple[str, type[Exception]]] = set()

    def add(self, sample: StepSample) -> None:
        """Keep `sample` as the newest. Beyond 1,024 samples the oldest is dropped."""
        self.last_step = sample
        self._samples.append(sample)

    def take_samples(self) -> list[StepSample]:
        """Return the samples since the last call, oldest first. Another thread may add samples meanwhile."""
        taken = []
        while self._samples:
            taken.append(self._samples.popleft())
        return taken

    def note_fault(self, error: Exception, step: int) -> None:
        """Keep `error`, which has stopped the engine in `step`, and tell of it, which may take seconds."""
        kind: FaultKind = next((kind for of_type, kind in _KINDS if isinstance(error, of_type)), "other")
        self.fault = Fault(rank=self._rank, step=step, kind=kind, text=str(error))
        if self.tell_fault is not None:
            with self.optional("the report of an error", step):
                self.tell_fault(self.fault)

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

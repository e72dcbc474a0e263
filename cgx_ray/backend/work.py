"""`CompressedWork`: the handle of one compressed all-reduce, for its caller to wait on."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cgx_ray.backend.buckets import Run
from cgx_ray.errors import CGXError, TransportError
from cgx_ray.plan import Option
from cgx_ray.runtime_ext.streams import streams_of


class CompressedWork(dist.Work):
    """A Work that the group's thread finishes and any other thread waits for.

    tensor  is replaced by the result
    op      ReduceOp SUM or AVG
    parts   by codec and scheme, the runs of the tensor that are compressed together
    exact   the runs of the tensor that Gloo reduces; None if there are none
    """

    def __init__(self, tensor: Tensor, op: Any, parts: Mapping[Option, Sequence[Run]], exact: ExactPart | None) -> None:
        super().__init__()
        self.tensor = tensor
        self.op = op
        self.parts = parts
        self.exact = exact
        self._error: CGXError | None = None
        self._is_done = threading.Event()
        streams = streams_of(tensor.device)
        # After it the tensor can be read.
        self.computed = streams.mark()
        self._outcome: torch.futures.Future[Tensor] = streams.future()
        # DDP reads it in C++, which sees an error raised in `then` but not `set_exception` of a Python future.
        self._future = self._outcome.then(self._result)

    def finish(self, error: CGXError | None = None) -> None:
        """Wake the waiting threads; they raise `error` if there is one."""
        self._error = error
        self._is_done.set()
        self._outcome.set_result(self.tensor)

    def _result(self, _outcome: torch.futures.Future[Tensor]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return [self.tensor]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the result. Raises the all-reduce's error, or TransportError after `timeout` (0: no limit)."""
        seconds = timeout.total_seconds()
        if not self._is_done.wait(seconds if seconds > 0 else None):
            raise TransportError(f"an all-reduce of {self.tensor.numel()} elements was not done after {seconds} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of a list with the tensor, or of the all-reduce's error."""
        return self._future

    def result(self) -> list[Tensor]:
        self.wait()
        return [self.tensor]

    def is_completed(self) -> bool:
        return self._is_done.is_set()

    def is_success(self) -> bool:
        return self._is_done.is_set() and self._error is None

    def exception(self) -> CGXError | None:
        return self._error


class ExactPart:
    """Runs of a flat tensor that the vendor reduces, beside each other in one buffer."""

    def __init__(self, tensor_N: Tensor, runs: Sequence[Run], group: Any, options: Any) -> None:
        self.runs = runs
        self._sum_K = torch.cat([tensor_N[start:stop] for start, stop in runs])
        self._work = group.allreduce([self._sum_K], options)

    def finish(self, tensor_N: Tensor) -> None:
        """Wait for the vendor and copy the results into `tensor_N`."""
        self._work.wait()
        sums = self._sum_K.split([stop - start for start, stop in self.runs])
        for (start, stop), reduced in zip(self.runs, sums, strict=True):
            tensor_N[start:stop] = reduced

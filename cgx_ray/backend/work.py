"""One compressed all-reduce under way: what its caller waits for."""

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


class CompressedWork(dist.Work):
    """Finished by the group's thread, waited for by any other.

    tensor  is replaced by the result
    op      ReduceOp SUM or AVG
    parts   the runs of it that are compressed alike, beside each other
    exact   the runs of it that Gloo reduces, beside each other, with Gloo's work; None if there are none
    """

    def __init__(self, tensor: Tensor, op: Any, parts: Mapping[Option, Sequence[Run]], exact: ExactPart | None) -> None:
        super().__init__()
        self.tensor = tensor
        self.op = op
        self.parts = parts
        self.exact = exact
        self._error: CGXError | None = None
        self._is_done = threading.Event()
        self._outcome: torch.futures.Future[None] = torch.futures.Future()
        # DDP reads it in C++, where `set_exception` of a Python future is not seen but an error in `then` is.
        self._future = self._outcome.then(self._result)

    def finish(self, error: CGXError | None = None) -> None:
        """Let go of those who wait; they get `error` if there is one."""
        self._error = error
        self._is_done.set()
        self._outcome.set_result(None)

    def _result(self, _outcome: torch.futures.Future[None]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return [self.tensor]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the tensor holds the result. Raises what went wrong, TransportError after `timeout` (0: none)."""
        seconds = timeout.total_seconds()
        if not self._is_done.wait(seconds if seconds > 0 else None):
            raise TransportError(f"an all-reduce of {self.tensor.numel()} elements was not done after {seconds} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of a list with the tensor. It fails with what went wrong."""
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
    """Runs of a flat tensor that go through Gloo, beside each other in a buffer of their own."""

    def __init__(self, tensor_N: Tensor, runs: Sequence[Run], group: Any, options: Any) -> None:
        self.runs = runs
        self._sum_K = torch.cat([tensor_N[start:stop] for start, stop in runs])
        self._work = group.allreduce([self._sum_K], options)

    def finish(self, tensor_N: Tensor) -> None:
        """Wait for Gloo and put the results where they belong."""
        self._work.wait()
        sums = self._sum_K.split([stop - start for start, stop in self.runs])
        for (start, stop), reduced in zip(self.runs, sums, strict=True):
            tensor_N[start:stop] = reduced

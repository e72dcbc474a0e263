"""Lets `cgx-ray why` observe a training: its observer is called when a process group or a DDP model has been made.

Nothing of cgx_ray is imported before that, so helpers of a training that make neither do not notice.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any


class Guard:
    """Stands between the observer and the training: no error of the first may end the second.

    is_over  True after an error, or when all has been seen: whatever is left of the observer does nothing then
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_over = False

    def wrapped(
        self, act: Callable[..., object], when_over: Callable[[], object] = lambda: None
    ) -> Callable[..., None]:
        """Return `act` as a function that raises nothing. Once the observing is over it calls `when_over` instead."""

        def call(*given: Any, **named: Any) -> None:
            if self.is_over:
                when_over()
                return
            try:
                act(*given, **named)
            except Exception:  # noqa: BLE001 - a stranger's training must go on, whatever we did wrong
                self.is_over = True
                self._write_down(traceback.format_exc())

        return call

    def _write_down(self, text: str) -> None:
        """Keep the first error of each process for the report."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"error-{os.getpid()}.txt").write_text(text)
        except OSError:
            return  # the folder cannot be written, so there is no report either


def arm(folder: str) -> None:
    """Call the observer after `init_process_group` and after each DDP model that this process builds."""
    import torch.distributed as dist  # noqa: PLC0415 - torch is being imported
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    place = Path(folder)
    if place.exists() and place.stat().st_uid != os.geteuid():
        text = f"CGX_WHY={folder} belongs to another user, so nothing is observed; name a folder of your own"
        warnings.warn(text, stacklevel=2)
        return
    guard = Guard(place)

    def observe(*models: Any) -> None:
        from cgx_ray.why.observer import observe as observe_with  # noqa: PLC0415 - see above

        observe_with(guard, models)

    guarded = guard.wrapped(observe)
    sys.excepthook = _without_signals(sys.excepthook)
    dist.init_process_group = _followed(dist.init_process_group, lambda *_: guarded())
    DistributedDataParallel.__init__ = _followed(DistributedDataParallel.__init__, guarded)  # type: ignore[method-assign]


def _without_signals(show: Callable[..., object]) -> Callable[..., None]:
    """Return the excepthook `show` without what ends torchrun when `cgx-ray why`, or Ctrl-C, ends it.

    Its launcher imports torch too. It has logged the signal, and a traceback of its own code says nothing more.
    """

    def call(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if kind.__name__ != "SignalException" or not kind.__module__.startswith("torch.distributed.elastic."):
            show(kind, error, trace)

    return call


def _followed(function: Callable[..., Any], then: Callable[..., None]) -> Callable[..., Any]:
    """Return `function` with a call of `then` after it, which gets its first argument."""

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        then(*given[:1])
        return result

    return call

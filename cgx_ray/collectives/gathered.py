"""Values of all ranks. An error that one rank meets is raised on all of them, at the next value that they gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from cgx_ray.collectives.lifeline import WORDS_S, Lifeline
from cgx_ray.errors import CGXError, TransportError

# Returns the values that all ranks gave, in rank order.
Gather = Callable[[Any], list[Any]]


def as_own(error: Exception) -> CGXError:
    """Return `error`, or a CGXError caused by it, which can be sent to all ranks."""
    if isinstance(error, CGXError):
        return error
    own = CGXError(f"rank {dist.get_rank()} cannot attach: {error!r}")
    own.__cause__ = error
    return own


def unreachable(error: RuntimeError, why: str | None = None) -> TransportError:
    """Return what to raise for an error of torch.distributed while ranks attach. `why`: the cause, if it is known."""
    return TransportError(
        f"rank {dist.get_rank()} cannot attach: {why or 'another rank has ended or does not answer'} ({error}); look "
        "at the log of the other ranks for the first error"
    )


class Gatherer:
    """Gathers over a group that all its ranks use for nothing else meanwhile.

    A rank that fails between two values gathers its error instead of the next one, whatever that is, so nobody waits
    for it.

    lifeline  names the rank that has ended or is silent; None before all ranks are connected for that
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.lifeline: Lifeline | None = None
        self._group = group
        self._raised: CGXError | None = None

    def __call__(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Raises the first CGXError among them, on all ranks.

        Raises TransportError if a rank has ended, or does not come within the time-out of the group.
        """
        values: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            why = self.lifeline.wait(WORDS_S) if self.lifeline is not None else None
            self._raised = unreachable(error, why)
            raise self._raised from error
        # The cause of this rank's own error does not travel, so keep the original.
        values[dist.get_rank(self._group)] = value
        for other in values:
            if isinstance(other, CGXError):
                self._raised = other
                raise other
        return values

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Let an error of this rank within the block be raised on all ranks."""
        try:
            yield
        except Exception as error:
            if error is self._raised:
                raise
            try:
                self(as_own(error))
            except TransportError as broken:
                # An error of the others, or none can be told any more: then this rank still has its own.
                if broken is self._raised and isinstance(broken.__cause__, RuntimeError):
                    own = as_own(error)
                    raise own from own.__cause__
                raise

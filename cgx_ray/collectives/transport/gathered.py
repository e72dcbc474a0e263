"""Values of all ranks. An error that one rank meets is raised on all of them, at the next value that they gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from cgx_ray.collectives.transport.lifeline import WORDS_S, Lifeline
from cgx_ray.errors import CGXError, LimitError, TransportError, limit_met

# Returns the values that all ranks gave, in rank order.
Gather = Callable[[Any], list[Any]]


def as_own(error: Exception) -> CGXError:
    """Return `error`, or a CGXError caused by it, which can be sent to all ranks: a LimitError if a limit was met."""
    if isinstance(error, LimitError):
        return error
    own: CGXError | None = None
    # The cause first: `error` may take it for a trouble of the network.
    for one in (error.__cause__, error):
        if one is not None and (met := limit_met(one)) is not None:
            own = LimitError(f"rank {dist.get_rank()} cannot attach: {one}; {met}")
            break
    if own is None:
        if isinstance(error, CGXError):
            return error
        # That of a file names it only so.
        own = CGXError(f"rank {dist.get_rank()} cannot attach: {error if isinstance(error, OSError) else repr(error)}")
    own.__cause__ = error
    return own


def unreachable(error: RuntimeError, why: str | None = None) -> TransportError | LimitError:
    """Return what to raise for an error of torch.distributed while ranks attach. `why`: the cause, if it is known."""
    if (met := limit_met(error)) is not None:
        return LimitError(f"rank {dist.get_rank()} cannot attach: {error}; {met}")
    return TransportError(
        f"rank {dist.get_rank()} cannot attach: {why or 'another rank has ended or does not answer'} ({error}); look "
        "at the log of the other ranks for the first error"
    )


class Gatherer:
    """Gathers over a group that all its ranks use for nothing else meanwhile.

    A rank that fails between two values gathers its error instead of the next one, whatever that is, so no rank waits
    for it.

    lifeline  names the rank that has ended or is silent; None before all ranks are connected for that
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.lifeline: Lifeline | None = None
        self._group = group
        self._raised: CGXError | None = None

    def __call__(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Raises one CGXError among them, on all ranks: the first, or a LimitError.

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
        # A rank that met a limit is the reason why others cannot reach it.
        errors = [other for other in values if isinstance(other, CGXError)]
        if errors:
            self._raised = next((error for error in errors if isinstance(error, LimitError)), errors[0])
            raise self._raised
        return values

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Let an error of this rank within the block be raised on all ranks."""
        try:
            yield
        except Exception as error:
            if error is self._raised:
                raise
            try:
                self(as_own(error))
            except TransportError as broken:
                # The others' error, or none can be gathered any more: then this rank still has its own.
                if broken is self._raised and isinstance(broken.__cause__, RuntimeError):
                    own = as_own(error)
                    raise own from own.__cause__
                raise
            except CGXError as shared:
                if str(shared) == str(error):
                    # All ranks have met it: one traceback is enough.
                    raise shared from None
                raise

"""Runs what only measures, so that no error of it stops training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class Telemetry:
    """Says once, and counts in `num_failures`, what could not be measured on this rank."""

    def __init__(self, rank: int) -> None:
        self.num_failures = 0
        self._rank = rank
        self._said: set[tuple[str, type[Exception]]] = set()

    @contextmanager
    def optional(self, numbers: str, step: int) -> Iterator[None]:
        """Go on behind the block if it raises. Log the first error of each type with its traceback.

        numbers  which ones are missing then, as the warning names them

        For measurements only: what ranks exchange must depend on nothing that a failed block leaves undone.
        """
        try:
            yield
        except Exception as error:
            self.num_failures += 1
            cause = numbers, type(error)
            if cause in self._said:
                return
            self._said.add(cause)
            logger.warning(
                "rank %d, step %d: %s could not be measured (%r); training goes on without them, and says so once",
                self._rank,
                step,
                numbers,
                error,
                exc_info=error,
            )

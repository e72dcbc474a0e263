"""Lines of the logger `cgx_ray`: shown as Python's logging is set up, else on standard error.

A program that sets up logging decides alone: its handlers and levels hold for `cgx_ray` as for any other logger. In a
process that has none, such as an actor or a plain script, lines from INFO on go to standard error. CGX_LOG_LEVEL
changes that level, also for actors, which no script sets up.
"""

from __future__ import annotations

import logging
import os
from typing import TextIO

from cgx_ray.errors import ConfigError

VARIABLE = "CGX_LOG_LEVEL"
NAME = "cgx_ray"
# Shows INFO as that level does, and is told apart from an INFO that the program sets.
_UNTIL_SET_UP = logging.INFO - 1


class _Formatter(logging.Formatter):
    """Names the level from WARNING on."""

    def format(self, record: logging.LogRecord) -> str:
        level = f" {record.levelname.lower()}" if record.levelno >= logging.WARNING else ""
        return f"{NAME}{level}: {super().format(record)}"


class _LinesHandler(logging.StreamHandler[TextIO]):
    """Shows lines until the program sets up handlers; then hands them those that its level lets through."""

    def emit(self, record: logging.LogRecord) -> None:
        logger, root = logging.getLogger(NAME), logging.getLogger()
        if logger.handlers != [self]:
            return
        if root.handlers:
            # Python looks at it after the handlers, so for this record too.
            logger.propagate = logger.level != _UNTIL_SET_UP or record.levelno >= root.level
        else:
            super().emit(record)


def show_lines() -> None:
    """Have the lines of this process shown. A second call changes nothing. Raises ConfigError for an unknown level."""
    logger = logging.getLogger(NAME)
    given = os.environ.get(VARIABLE, "").strip()
    if level := given.upper():
        known = logging.getLevelNamesMapping()
        if level not in known:
            raise ConfigError(f"{VARIABLE} {given!r} is not allowed; give DEBUG, INFO, WARNING or ERROR")
        logger.setLevel(level)
    if logger.hasHandlers():
        return
    if logger.level == logging.NOTSET:
        logger.setLevel(_UNTIL_SET_UP)
    handler = _LinesHandler()
    handler.setFormatter(_Formatter())
    logger.addHandler(handler)


def name_lines() -> None:
    """Have lines begin with the logger's name in the formats of others too, such as Ray's, which lack it."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(_name)


def _name(record: logging.LogRecord) -> bool:
    # The record is the same for all handlers.
    if record.name.partition(".")[0] == NAME and not str(record.msg).startswith(f"{NAME}: "):
        record.msg = f"{NAME}: {record.msg}"
    return True

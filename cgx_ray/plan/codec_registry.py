"""Codecs by name: our own, those of `register_codec`, and those that installed packages bring by an entry point.

A package brings a codec by an entry point of the group `cgx_ray.codecs`, such as `int8 = "my_package:INT8"`. It is
imported when its codec is first named, once in each process, so nothing slows down who names none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint

from cgx_ray.errors import ConfigError, unknown
from cgx_ray.installed import load, offered, package_of
from cgx_ray.plan.built_in import BUILT_IN
from cgx_ray.plan.codec_record import CodecRecord

ENTRY_POINTS = "cgx_ray.codecs"

logger = logging.getLogger(__name__)

# From outside: registered, or loaded from an entry point.
_brought: dict[str, CodecRecord] = {}


def register_codec(record: CodecRecord) -> None:
    """Make a codec of your own known by its name, in this process.

    Call it on every rank before the name is used. A control loop, with Ray or without, is a process of its own: for it
    a package must bring the record by an entry point. The same record may be registered again.

    Raises ConfigError if another codec has the name.
    """
    if not isinstance(record, CodecRecord):
        raise ConfigError(f"codec record {record!r} is not allowed; give a cgx_ray.CodecRecord")
    entry = None if record.name in BUILT_IN else _offered().get(record.name)
    if _brought.get(record.name) is record or (entry is not None and record_of(record.name) is record):
        return
    if record.name in known_codecs():
        owner = "cgx_ray" if record.name in BUILT_IN else f"package {package_of(entry)}" if entry else "another record"
        raise ConfigError(f"codec name {record.name!r} is taken by {owner}; give another one")
    _brought[record.name] = record


def record_of(name: str) -> CodecRecord:
    """Return the record of codec `name`; import the package that brings it, if this was not done yet.

    Raises ConfigError if no package brings it, if its package cannot be imported, or brings something else.
    """
    record = BUILT_IN.get(name) or _brought.get(name)
    if record is None:
        record = _brought[name] = _load(name)
    return record


def is_known_everywhere(name: str) -> bool:
    """Return whether processes that have not called `register_codec` know codec `name` too."""
    return name in BUILT_IN or name in _offered()


def known_codecs() -> tuple[str, ...]:
    """Return the names of all codecs: our own, then those from outside, whether they can be imported or not."""
    return tuple(dict.fromkeys([*BUILT_IN, *_brought, *_offered()]))


def usable_records() -> Iterator[CodecRecord]:
    """Yield the records of all codecs; warn of those that cannot be imported."""
    for name in known_codecs():
        try:
            yield record_of(name)
        except ConfigError as error:
            logger.warning("%s", error)


@cache
def _offered() -> dict[str, EntryPoint]:
    return offered(ENTRY_POINTS, BUILT_IN)


def _with_colon(name: str, parameters: str) -> str:
    """Return how to write the parameters of codec `name`, which were given after a space."""
    if "=" in parameters:
        return f"did you mean '{name}:{','.join(parameters.replace(',', ' ').split())}'?"
    takes = [f"{key}={parameter.default}" for key, parameter in record_of(name).parameters.items()]
    return f"parameters come after a colon, such as '{name}:{takes[0]}'" if takes else f"codec {name} has no parameters"


def _load(name: str) -> CodecRecord:
    entry = _offered().get(name)
    if entry is None:
        if name == "dense":
            raise ConfigError("unknown codec 'dense'; give 'none', which sends gradients as they are")
        first, _, rest = name.partition(" ")
        if rest and first in known_codecs():
            raise ConfigError(f"unknown codec {name!r}; {_with_colon(first, rest)}")
        raise ConfigError(
            f"{unknown('codec', name, known_codecs())}; install the package that brings it on all nodes, or call "
            "cgx_ray.register_codec in this process"
        )
    record = load("codec", entry)
    if not isinstance(record, CodecRecord) or record.name != name:
        raise ConfigError(
            f"codec {name!r} of package {package_of(entry)!r} is {record!r}; its entry point must name a "
            f"cgx_ray.CodecRecord whose name is {name!r}"
        )
    return record

"""Joined steps of a run in files of bounded size, so that the control loop can go through them again.

Two files in the run's folder hold the newest steps, `steps.ring` and before it `steps.ring.old`, each up to half of the
bound. A file begins with the whole state of the loop; then come the reports of the nodes, with the steps that they
completed and the decisions that these caused. A file is a row of records: length, CRC-32 and a compressed pickle.

Pickles can name any code to run. `read_ring` admits only values of the loop, so a file of a stranger runs nothing.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from cgx_ray.control.joined_steps import JoinedStep
from cgx_ray.control.journal import Journal
from cgx_ray.control.policy import Decision
from cgx_ray.errors import ConfigError
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.plan import Plan

logger = logging.getLogger(__name__)

# Rises when a record or the loop's state changes.
FORMAT = 6
# Files in a run's folder, oldest first.
OLD_NAME, NAME = "steps.ring.old", "steps.ring"
# Fraction of its bound at which a file is full, so that hardly any record finds no room.
FULL = 0.95
# Seconds after an error until the next attempt: a full disk may be cleared.
RETRY_S = 60.0
# Largest record, so that a broken length reads no gigabytes. A state of 2,000 layers takes 1 MB.
MAX_RECORD_BYTES = 256 << 20
_HEAD = struct.Struct("<II")
# Largest record after it is decompressed.
MAX_VALUE_BYTES = 1 << 30
_OWN_MODULES = ("cgx_ray.control.", "cgx_ray.planner.", "cgx_ray.plan", "cgx_ray.option", "cgx_ray.codec_spec")
# Their classes start processes, or read the pickle of any file.
_NO_VALUES = {f"cgx_ray.control.{name}" for name in ("controller", "loop_process", "loop_work")}
_ADMITTED = {
    "builtins": {"dict", "float", "frozenset", "int", "list", "set"},
    "collections": {"Counter", "defaultdict", "deque", "OrderedDict"},
    "cgx_ray.monitors.probe_schedule": {"ProbeSchedule"},
    "cgx_ray.monitors.sample": {
        "Bandwidth",
        "Burst",
        "HostLoad",
        "InsideLink",
        "LayerError",
        "LayerSum",
        "NodeSample",
        "NodeStep",
        "Sum",
        "Transfer",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedReport:
    """A report of a node as the loop takes it: the steps of its ranks are replaced by those of all ranks.

    ranks  that have reported steps from this node
    steps  joined with this report, oldest first
    now_s  by the clock of the controller
    """

    sample: NodeSample
    ranks: frozenset[int]
    steps: tuple[JoinedStep, ...]
    now_s: float


class Decided(NamedTuple):
    """A decision, the step after which it was made, and the plan in force since."""

    step: int
    decision: Decision
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStart:
    """The first record of a file. `loop`: its state, as a pickle of its own."""

    format: int
    version: str
    loop: bytes


class StepRing:
    """Writes the two files. An error costs steps, never the run.

    num_errors  writes that failed
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`max_bytes`: of both files together."""
        self.num_errors = 0
        self._path, self._old = folder / NAME, folder / OLD_NAME
        self._half = max_bytes // 2
        # The file needs a start before anything else; after an error not before `_retry_s`.
        self._is_begun = False
        self._retry_s: float | None = None

    def restart(self) -> None:
        """Begin a file with the next report: the loop has changed by something else than a report."""
        self._is_begun = False

    def begin(self, loop: object, now_s: float) -> None:
        """Begin a file with the state of `loop` if that is due. Call it before the loop takes a report."""
        if self._is_begun or (self._retry_s is not None and now_s < self._retry_s):
            return
        start = RingStart(format=FORMAT, version=_own_version(), loop=_state_of(loop))
        record = _record(start)
        if len(record) > self._half:
            self._fail(f"the loop's state has {len(record)} bytes, more than half of replay_bytes", now_s)
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                os.replace(self._path, self._old)
            self._path.write_bytes(record)
        except OSError as error:
            self._fail(str(error), now_s)
            return
        self._is_begun, self._retry_s = True, None

    def add(self, report: JoinedReport, decided: Sequence[Decided]) -> None:
        """Append a report that the loop has taken, and what it has decided."""
        if not self._is_begun:
            return
        record = _record((report, tuple(decided)))
        try:
            with self._path.open("ab") as file:
                num_bytes = file.tell() + len(record)
                # A record that does not fit is left out: the next file begins with the state after it.
                if num_bytes <= self._half:
                    file.write(record)
                self._is_begun = num_bytes <= FULL * self._half
        except OSError as error:
            self._fail(str(error), report.now_s)

    def _fail(self, why: str, now_s: float) -> None:
        """Give the disk back what the newest file takes: it lacks a step, so it is of no use from here on."""
        if self.num_errors == 0:
            logger.warning("steps are not kept in %s for a replay: %s; training goes on", self._path, why)
        self.num_errors += 1
        self._is_begun, self._retry_s = False, now_s + RETRY_S
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            logger.debug("%s stays: %s", self._path, error)


def _own_version() -> str:
    try:
        return version("cgx-ray")
    except PackageNotFoundError:
        return "unknown"


def _record(value: object) -> bytes:
    body = zlib.compress(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), level=1)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


class _LoopPickler(pickle.Pickler):
    """Leaves out what writes files."""

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, Journal):
            return "journal"
        return "ring" if isinstance(value, StepRing) else None


def _state_of(loop: object) -> bytes:
    buffer = io.BytesIO()
    _LoopPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(loop)
    return buffer.getvalue()


class _Reader(pickle.Unpickler):
    """Admits values of the loop alone. Raises UnpicklingError for anything else."""

    def __init__(self, body: bytes, journal: Journal | None = None) -> None:
        super().__init__(io.BytesIO(body))
        self._journal = journal

    def find_class(self, module: str, name: str) -> Any:
        is_own = module.startswith(_OWN_MODULES) and module not in _NO_VALUES
        if is_own or name in _ADMITTED.get(module, ()):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no value of the control loop")

    def persistent_load(self, pid: Any) -> Any:
        if pid == "journal" and self._journal is not None:
            return self._journal
        if pid == "ring":
            return None
        raise pickle.UnpicklingError(f"unknown reference {pid!r}")


def read_loop(start: RingStart, journal: Journal) -> Any:
    """Return the loop whose state `start` holds. It writes to `journal`.

    Raises ConfigError if this version has no such state.
    """
    try:
        return _Reader(start.loop, journal).load()
    except Exception as error:
        raise ConfigError(
            f"the state of the loop in {NAME} was written by version {start.version} of cgx_ray and cannot be read by "
            f"this one, {_own_version()} ({error!r:.200}); replay the decisions alone, without --steps"
        ) from error


def read_ring(path: Path, on_byte: Callable[[int], None], on_broken: Callable[[str], None]) -> Iterator[Any]:
    """Yield the records of a file in order: a RingStart, then pairs of a JoinedReport and what was decided.

    on_byte    called with the place in the file after each record
    on_broken  called with the reason if the file ends in something else: a killed process leaves half a record

    Raises ConfigError for a file of another format.
    """
    with path.open("rb") as file:
        while head := file.read(_HEAD.size):
            try:
                length, checksum = _HEAD.unpack(head)
                if length > MAX_RECORD_BYTES:
                    raise ValueError(f"a record of {length} bytes")
                body = file.read(length)
                if len(body) != length or zlib.crc32(body) != checksum:
                    raise ValueError("a record is cut or damaged")
                unpacker = zlib.decompressobj()
                value = _Reader(unpacker.decompress(body, MAX_VALUE_BYTES)).load()
            except (ValueError, struct.error, zlib.error, pickle.UnpicklingError, *_READ_ERRORS) as error:
                on_broken(f"{path.name} ends at byte {file.tell()}: {error!s:.200}")
                return
            on_byte(file.tell())
            if isinstance(value, RingStart) and value.format != FORMAT:
                raise ConfigError(f"{path} has format {value.format}, this version of cgx_ray reads {FORMAT}")
            yield value


# Raised by pickles of classes that have changed.
_READ_ERRORS = (LookupError, TypeError, AttributeError, EOFError, ImportError, MemoryError)

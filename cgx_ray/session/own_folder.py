"""A temporary folder of this process. Where the process is killed, the next one that makes such a folder removes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

_PREFIX = "cgx_ray-own-"
_LOCK = "lock"
# Seconds after which a folder that no process has locked is abandoned. Another process may be about to lock a new one,
# and one may have been made again, without its lock, after something has emptied the temporary folder.
_ABANDONED_S = 3600.0


class OwnFolder:
    """A folder that is locked until `remove`, or until the process ends: the kernel unlocks it however that happens."""

    def __init__(self) -> None:
        """Make it in the temporary folder of this user, after the abandoned ones there are removed."""
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, mode=0o600)
        # Some file systems of a network have no locks. There no process can lock it, so none removes it.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Ray often ends its workers without an exit of the interpreter, so this alone would not do.
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def remove(self) -> None:
        """Remove the folder with all that is in it. A second call does nothing."""
        self._remove()


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        # Another process may be faster, and folders of other users cannot be opened.
        with contextlib.suppress(OSError):
            if path.stat().st_mtime > time.time() - _ABANDONED_S:
                continue
            lock = os.open(path / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)

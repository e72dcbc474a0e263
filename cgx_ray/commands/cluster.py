"""Connection to a running Ray cluster."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
import ray

from cgx_ray.errors import ConfigError

# Longest waits in seconds: for the port, and for Ray, which takes one or two unless the machine is overloaded.
PORT_TIMEOUT_S, RAY_TIMEOUT_S = 2.0, 60.0
# Seconds between two looks at what Ray says.
_LOOK_S = 0.1
# Words of Ray's log that say early what its error, 10 s later, does not.
_REFUSED, _NO_RAY = "InvalidAuthToken", "Failed to get cluster ID"


class NoClusterError(ConfigError):
    """Nothing answers at an address, or not yet."""


address_option = click.option("--address", default="auto", show_default=True, help="Address of a running Ray cluster.")


def connect(address: str) -> None:
    """Connect to the Ray cluster at `address`. Raises ConfigError that says why it cannot; Ray's own log is not shown.

    That is a NoClusterError if a cluster that starts may yet be there.

    Ray tries again for long and says the reason in its log only, so that is read meanwhile.
    """
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():
            # Ray itself would try for minutes.
            socket.create_connection((host, int(port)), timeout=PORT_TIMEOUT_S).close()
        handler = signal.getsignal(signal.SIGTERM)
        with _standard_error() as said:
            _wait(_Connecting(address), said, address)
        # Ray's own one ends the process inside its C++ code, which aborts.
        signal.signal(signal.SIGTERM, handler)
    except OSError as error:
        raise NoClusterError(f"no Ray cluster at {address!r} ({error}); start one, or give its --address") from error


def cluster_address() -> str | None:
    """Return host:port of the cluster of `connect`, which "auto" does not say; None without one."""
    return ray.get_runtime_context().gcs_address if ray.is_initialized() else None


def is_up() -> bool:
    """Return whether the cluster of `connect` can still be reached.

    Ask before each call of Ray: without its cluster Ray waits for a minute and then ends the process.
    """
    # Without a connection Ray would start a cluster to answer.
    address = cluster_address()
    if address is None:
        return False
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PORT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


class _Connecting:
    """A call of `ray.init` in a thread of its own, since nothing can end it."""

    def __init__(self, address: str) -> None:
        self.error: Exception | None = None
        self._address = address
        self.thread = threading.Thread(target=self._run, name="cgx-ray-connect", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            ray.init(address=self._address, log_to_driver=False)
        except Exception as error:  # noqa: BLE001 - raised again by `_wait`
            self.error = error


def _wait(attempt: _Connecting, said: Callable[[], str], address: str) -> None:
    """Wait for the connection. `said`: what Ray has logged so far."""
    end_s = time.monotonic() + RAY_TIMEOUT_S
    while attempt.thread.is_alive():
        attempt.thread.join(_LOOK_S)
        text = said()
        if _REFUSED in text:
            raise ConfigError(
                f"the Ray cluster at {address!r} refused: token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH to the token of that cluster"
            )
        if _NO_RAY in text:
            raise ConfigError(f"what answers at {address!r} is no Ray cluster; give the --address of one")
        if time.monotonic() > end_s:
            raise ConfigError(f"the Ray cluster at {address!r} does not answer for {RAY_TIMEOUT_S:g} s; is it up?")
    if attempt.error is not None:
        raise attempt.error


@contextmanager
def _standard_error() -> Iterator[Callable[[], str]]:
    """Keep what this process writes to standard error, also in C++; yield a function that returns it."""
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace")
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)

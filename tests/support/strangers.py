"""Clients that nobody has invited."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from cgx_ray.monitors.guarded_server import Address
from cgx_ray.monitors.probe import measure_tcp

HOST = "127.0.0.1"


@contextmanager
def strangers(port: int, count: int, says: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections to a port of this machine that say the same and then nothing."""
    with ExitStack() as stack, _descriptors(4 * count):
        found = [stack.enter_context(socket.create_connection((HOST, port), timeout=20)) for _ in range(count)]
        for one in found:
            one.sendall(says)
        yield found


@contextmanager
def _descriptors(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def honest_rate(bulk: Address, num_bytes: int = 5_000_000) -> float:
    """Return the rate that a probe with the token finds.

    A probe that gets through may find no rate: a busy machine hands bytes over in trains too short to measure. Then the
    next one counts. Any other error is raised.
    """
    for _ in range(20):
        try:
            return measure_tcp(*bulk, num_bytes).bytes_per_s
        except ConnectionError as error:
            if "too few bytes reached" not in str(error):
                raise
    raise AssertionError(f"20 probes of {num_bytes} bytes found no rate")


def is_hung_up(client: socket.socket, within_s: float = 20.0) -> bool:
    """Return whether the server hangs up without an answer, waiting for it."""
    client.settimeout(within_s)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False

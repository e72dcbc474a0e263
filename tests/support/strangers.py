"""Clients that nobody has invited."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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


def is_hung_up(client: socket.socket, within_s: float = 20.0) -> bool:
    """Return whether the server hangs up without an answer, waiting for it."""
    client.settimeout(within_s)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False

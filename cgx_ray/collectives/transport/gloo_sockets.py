"""The connections of a Gloo group, so that a rank can end collectives that are under way.

Torch has no such call for Gloo: a collective ends when a connection breaks or after the time-out, and a group is not
destroyed before its collectives have ended. A group listens at an address and port of its own, so its connections can
be distinguished from all others of the process: one end of each is there, on this rank or on another one.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cgx_ray.sockets import tcp_sockets

logger = logging.getLogger(__name__)


class GlooSockets:
    """The connections of one group."""

    def __init__(self, listeners: Sequence[Sequence[tuple[str, int]]], rank: int) -> None:
        """`listeners`: by rank, where the group may listen, see `noted_listeners`."""
        self._own = set(listeners[rank])
        self._others = {one for other, theirs in enumerate(listeners) if other != rank for one in theirs}

    def shut_down(self) -> int:
        """Hang up on all ranks, which ends the group's collectives here and there; return the number of connections."""
        count = 0
        for opened in _open_sockets():
            try:
                own, other = opened.getsockname()[:2], opened.getpeername()[:2]
                if own in self._own or other in self._others:
                    opened.shutdown(socket.SHUT_RDWR)
                    count += 1
            except OSError:
                # Not connected: it listens, or the other end has hung up.
                continue
        return count


@contextmanager
def noted_listeners() -> Iterator[list[tuple[str, int]]]:
    """Give a list that holds, after the block, the addresses and ports at which this process listens since it began."""
    before, new = _listeners(), list[tuple[str, int]]()
    yield new
    new += sorted(_listeners() - before)


def _listeners() -> set[tuple[str, int]]:
    return {
        opened.getsockname()[:2]
        for opened in _open_sockets()
        if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def _open_sockets() -> Iterator[socket.socket]:
    try:
        yield from tcp_sockets()
    except OSError as error:
        # Nothing can be opened any more.
        logger.warning("the connections of Gloo cannot be found (%s): its collectives end after their time-out", error)

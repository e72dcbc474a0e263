"""Server for the run's monitors: it disconnects clients that do not send its token."""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from cgx_ray.ports import listen

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 16
# Sent to a client whose turn it is.
WELCOME = b"\1"
# Seconds that a client has for its token. It sends it with its first packet, so this is the time of a lost packet.
HELLO_S = 2.0
# Connections at a time. Each of up to 16 other nodes measures round trips over one; ranks of a node share its address.
MAX_CONNECTIONS = 128
MAX_PER_PEER = 32
# Connections that wait to be accepted. While the queue is full, honest clients try again after a second.
_BACKLOG = 1024
# Seconds until the next try after a connection could not be accepted, for example for want of file descriptors.
_ACCEPT_PAUSE_S = 0.1
# Seconds between two looks for connections that are past their time.
_LOOK_S = 0.25


class Address(NamedTuple):
    """Where a server listens, and the token that its clients show first. It is printed without the token."""

    host: str
    port: int
    token: str

    def __repr__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(slots=True)
class _Guest:
    peer: str
    end_s: float
    hello: bytes = b""
    is_known: bool = False


def connect(host: str, port: int, token: str, timeout_s: float) -> socket.socket:
    """Return a connection to the server at an `Address`, once it is this client's turn.

    timeout_s  of connecting, of the wait for the turn, and of the socket's later operations

    Raises OSError if the server does not answer, ConnectionError if it hangs up.
    """
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        sock.sendall(token.encode())
        if sock.recv(len(WELCOME)) != WELCOME:
            raise ConnectionError(f"{host}:{port} hung up: it was given another token, or has too many clients")
    except BaseException:
        sock.close()
        raise
    return sock


class GuardedServer(ABC):
    """Listens, and serves in one thread, until it is closed.

    Silence, slowness and numbers of strangers are limited (constants above), so they cost little time and memory. At a
    limit the oldest connection without a token is closed, so that honest clients, who show theirs at once, get through.

    A subclass serves clients with `welcome`, `receive` and `forget`, all called in the thread.
    """

    def __init__(self, host: str, name: str) -> None:
        """Listen on `host`, at a port as `ports.listen` chooses it. Raises OSError if it is no address of this node.

        name  of the thread
        """
        self._listener = listen(host)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(_TOKEN_BYTES))
        self._clients: dict[socket.socket, _Guest] = {}  # in the order of their arrival
        self._resume_s: float | None = None  # when to accept again
        self._logged: set[str] = set()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and all connections. May be called again."""
        if self._thread.is_alive():
            self._wake_writer.send(b"x")
            self._thread.join()
        self._wake_writer.close()

    @abstractmethod
    def welcome(self, client: socket.socket) -> bool:
        """Begin to serve a client that has sent the token: send WELCOME now or later. Return False to disconnect it."""

    @abstractmethod
    def receive(self, client: socket.socket) -> bool:
        """Receive what the client has sent, which may be its end, without waiting. Return False to disconnect it."""

    @abstractmethod
    def forget(self, client: socket.socket) -> None:
        """Drop what is kept for a client with a token, which was disconnected."""

    def allow(self, client: socket.socket, seconds: float) -> None:
        """Disconnect `client` after `seconds` from now, instead of at the time that was set before."""
        self._clients[client].end_s = time.monotonic() + seconds

    def _serve(self) -> None:
        look_s = 0.0
        while True:
            ready = [key.fileobj for key, _ in self._selector.select(self._patience_s())]
            if self._wake_reader in ready:
                break
            for sock in ready:
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept()
                elif sock in self._clients and not self._is_served(sock, self._clients[sock]):
                    self._disconnect(sock)
            if (now_s := time.monotonic()) >= look_s:
                look_s = now_s + _LOOK_S
                self._look(now_s)
        for sock in (*self._clients, self._listener, self._wake_reader):
            sock.close()
        self._selector.close()

    def _patience_s(self) -> float | None:
        if self._resume_s is not None:
            return _ACCEPT_PAUSE_S
        return _LOOK_S if self._clients else None

    def _look(self, now_s: float) -> None:
        """Disconnect clients that are past their time, and end a pause in accepting."""
        for sock in [sock for sock, client in self._clients.items() if client.end_s <= now_s]:
            client = self._clients[sock]
            if not client.is_known:
                self._log_once("hello", f"{client.peer} did not show the token in {HELLO_S:g} s and was disconnected")
            self._disconnect(sock)
        if self._resume_s is not None and self._resume_s <= now_s:
            self._resume_s = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            sock, (peer, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client hung up between select and accept
        except OSError as error:
            # The listener stays ready, so the thread would try again without end.
            self._selector.unregister(self._listener)
            self._resume_s = time.monotonic() + _ACCEPT_PAUSE_S
            self._log_once("accept", f"a connection could not be accepted ({error}); it is tried again")
            return
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._has_room(peer):
                self._selector.register(sock, selectors.EVENT_READ)
                self._clients[sock] = _Guest(peer, time.monotonic() + HELLO_S)
        except OSError as error:
            self._log_once("watch", f"the connection of {peer} could not be watched ({error}) and was closed")
        if sock not in self._clients:
            sock.close()

    def _has_room(self, peer: str) -> bool:
        """Make room for a connection from `peer`. Return False if only clients with a token could make it."""
        num_of_peer = sum(client.peer == peer for client in self._clients.values())
        if num_of_peer < MAX_PER_PEER and len(self._clients) < MAX_CONNECTIONS:
            return True
        num_open = len(self._clients)
        self._log_once("room", f"{num_open} connections are open, {num_of_peer} from {peer}; old ones are closed")
        strangers = {sock: client.peer for sock, client in self._clients.items() if not client.is_known}
        if num_of_peer < MAX_PER_PEER and strangers:
            # Whoever crowds the server makes the room, so that others are not affected.
            peer = Counter(strangers.values()).most_common(1)[0][0]
        oldest = next((sock for sock, its_peer in strangers.items() if its_peer == peer), None)
        if oldest is None:
            return False
        self._disconnect(oldest)
        return True

    def _is_served(self, sock: socket.socket, client: _Guest) -> bool:
        try:
            if client.is_known:
                return self.receive(sock)
            token = self.address.token.encode()
            part = sock.recv(len(token) - len(client.hello))
            client.hello += part
            if not part or len(client.hello) < len(token):
                return bool(part)
            if not secrets.compare_digest(client.hello, token):
                self._log_once("hello", f"{client.peer} showed another token and was disconnected")
                return False
            client.is_known = True
            return self.welcome(sock)
        except OSError:
            return False  # the client is gone, or does not read what it is sent

    def _disconnect(self, sock: socket.socket) -> None:
        client = self._clients.pop(sock)
        self._selector.unregister(sock)
        sock.close()
        if client.is_known:
            self.forget(sock)

    def _log_once(self, event: str, message: str) -> None:
        """Log the first event of each kind: strangers must not fill the log."""
        if event not in self._logged:
            self._logged.add(event)
            logger.warning("%r: %s; later events of this kind are not logged", self.address, message)

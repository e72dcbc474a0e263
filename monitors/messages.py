"""Messages between ranks and monitors of a run without Ray: pickled objects over TCP, both ways, in order.

Only clients that have sent the server's token are read (`guarded_server`), since a pickle can run code.
"""

from __future__ import annotations

import logging
import math
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from cgx_ray.monitors.guarded_server import WELCOME, Address, GuardedServer, connect

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 20
# Seconds for which a receiver may stand still before it is disconnected: a plan of a large model is some 100 KB.
SEND_S = 10.0
# Longest wait for clients to disconnect at the end, in seconds. They do at once, unless their machine is busy.
LINGER_S = 2.0
# Seconds for the server to answer. It is listening, so this is a lost packet or a busy machine.
CONNECT_S = 30.0

# Sends a message to whoever has sent the last one.
Reply = Callable[[Any], None]


def _packed(message: Any) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class _Incoming:
    """Bytes of a connection, of which the last message may not be whole yet."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add_bytes(self, part: bytes) -> Iterator[Any]:
        """Yield the messages that `part` completes."""
        self._bytes += part
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            message = pickle.loads(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield message


class MessageServer(GuardedServer):
    """Takes the messages of its clients, in one thread, and sends to all of them or to one."""

    def __init__(self, host: str, take: Callable[[Any, Reply], None]) -> None:
        """Listen on `host`; `take` gets each message. Raises OSError if it is not an address of this node."""
        self._take = take
        self._incoming: dict[socket.socket, _Incoming] = {}
        # The same connections, with a time-out: the server's thread reads them without waiting.
        self._writers: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        super().__init__(host, "cgx-ray-messages")

    def send(self, message: Any) -> None:
        """Send to all clients. A client that does not read is disconnected."""
        data = _packed(message)
        for client in list(self._writers):
            self._send_to(client, data)

    def end(self, message: Any) -> None:
        """Send the last message to all clients, give them LINGER_S to disconnect, and close."""
        self.send(message)
        # To close a connection whose client still sends would drop what the client has not read.
        self.wait_for_clients_to_leave(LINGER_S)
        self.close()

    def wait_for_clients_to_leave(self, most_s: float) -> None:
        """Return once no client is connected, or after `most_s` seconds."""
        end_s = time.monotonic() + most_s
        while self._writers and time.monotonic() < end_s:
            time.sleep(0.01)

    def welcome(self, client: socket.socket) -> bool:
        self.allow(client, math.inf)
        writer = client.dup()
        writer.settimeout(SEND_S)
        with self._lock:
            self._incoming[client], self._writers[client] = _Incoming(), writer
        return client.send(WELCOME) == len(WELCOME)

    def receive(self, client: socket.socket) -> bool:
        part = client.recv(_READ_BYTES)
        for message in self._incoming[client].add_bytes(part):
            self._take(message, partial(self._reply, client))
        return bool(part)

    def forget(self, client: socket.socket) -> None:
        with self._lock:
            del self._incoming[client]
            self._writers.pop(client).close()

    def close(self) -> None:
        super().close()
        with self._lock:
            for writer in self._writers.values():
                writer.close()
            self._writers.clear()

    def _reply(self, client: socket.socket, message: Any) -> None:
        self._send_to(client, _packed(message))

    def _send_to(self, client: socket.socket, data: bytes) -> None:
        with self._lock:
            writer = self._writers.get(client)
            if writer is None:
                return
            try:
                writer.sendall(data)
            except OSError as error:
                # Half a message may be on its way. The server's thread finds the end of the connection.
                logger.warning("a message of %d bytes did not reach a rank, now disconnected: %s", len(data), error)
                _shut_down(writer)


class MessageClient:
    """A connection to a MessageServer."""

    def __init__(self, address: Address, take: Callable[[Any], None], on_loss: Callable[[], None]) -> None:
        """Connect. Raises OSError if the server does not answer.

        take     gets each message, in a thread
        on_loss  called in that thread, once, if the connection ends before `close`
        """
        self._sock = connect(*address, timeout_s=CONNECT_S)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.settimeout(SEND_S)
        self._take, self._on_loss = take, on_loss
        self._lock = threading.Lock()
        self._is_closing = False
        self._thread = threading.Thread(target=self._read, name="cgx-ray-messages", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """Send; nothing happens once the connection has ended."""
        data = _packed(message)
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError:
                # The thread finds the end of the connection.
                _shut_down(self._sock)

    def close(self) -> None:
        self._is_closing = True
        _shut_down(self._sock)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._sock.close()

    def _read(self) -> None:
        incoming = _Incoming()
        while part := self._received():
            for message in incoming.add_bytes(part):
                self._take(message)
        if not self._is_closing:
            self._on_loss()

    def _received(self) -> bytes:
        """Return bytes; none at the end of the connection."""
        while True:
            try:
                return self._sock.recv(_READ_BYTES)
            except TimeoutError:
                continue
            except OSError:
                return b""


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("a connection had already ended")

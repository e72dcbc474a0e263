"""Round trips between nodes over TCP, the protocol of the gradients."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Mapping

from cgx_ray.monitors.guarded_server import WELCOME, Address, GuardedServer, connect
from cgx_ray.sockets import tcp_info

logger = logging.getLogger(__name__)

_PROBE = struct.Struct("<Q")
_MAX_READ_BYTES = 4096
# Seconds between two messages of a client, which waits at most one for each answer.
MAX_SILENCE_S = 5.0


class EchoServer(GuardedServer):
    """Sends everything back that it receives from those who know its token."""

    def __init__(self, host: str) -> None:
        """Listen on `host`, at a port as `ports.listen` chooses it. Raises OSError if it is no address of this node."""
        super().__init__(host, "cgx-ray-echo")

    def welcome(self, client: socket.socket) -> bool:
        self.allow(client, MAX_SILENCE_S)
        return client.send(WELCOME) == len(WELCOME)

    def receive(self, client: socket.socket) -> bool:
        message = client.recv(_MAX_READ_BYTES)
        self.allow(client, MAX_SILENCE_S)
        return bool(message) and client.send(message) == len(message)

    def forget(self, client: socket.socket) -> None:
        """Nothing is kept."""


def round_trip_s(
    host: str, port: int, token: str, *, num_probes: int = 5, timeout_s: float = 1.0, gap_s: float = 0.02
) -> float:
    """Return the smallest of `num_probes` round trips to the `EchoServer` at an `Address`, in seconds.

    On Linux the round trips that the kernel measured on this connection count too, including the handshake. They do not
    contain the time that a process waits for a processor.

    gap_s  pause between probes. Without it all probes would wait in one queue behind the same gradients

    Raises OSError (TimeoutError, ConnectionError) if the peer gives no answer within `timeout_s`, or a wrong one.
    """
    best_s = float("inf")
    with connect(host, port, token, timeout_s) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for probe in range(num_probes):
            if probe:
                time.sleep(gap_s)
            message = _PROBE.pack(probe)
            start_s = time.perf_counter()
            sock.sendall(message)
            answer = _receive(sock, len(message), deadline_s=start_s + timeout_s)
            best_s = min(best_s, time.perf_counter() - start_s)
            if answer != message:
                raise ConnectionError(f"{host}:{port} answered {answer!r} to {message!r}: not an echo server")
        info = tcp_info(sock)
        return best_s if info is None or info.least_round_trip_s is None else min(best_s, info.least_round_trip_s)


def _receive(sock: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    received = b""
    while len(received) < num_bytes:
        sock.settimeout(max(1e-3, deadline_s - time.perf_counter()))
        part = sock.recv(num_bytes - len(received))
        if not part:
            raise ConnectionError(f"{sock.getpeername()} closed the connection")
        received += part
    return received


class Peers:
    """The other nodes, and the one-way latencies to those that answer."""

    def __init__(self, addresses: Mapping[str, Address]) -> None:
        self._addresses = addresses
        self._silent: set[str] = set()
        self.latency_s: Mapping[str, float] = {}

    def measure(self, stopping: threading.Event) -> None:
        for node_id, address in self._addresses.items():
            if stopping.is_set():
                return
            others = {other: known_s for other, known_s in self.latency_s.items() if other != node_id}
            try:
                # Make a new mapping each time, since samples hold the old one.
                self.latency_s = {**others, node_id: round_trip_s(*address) / 2}
                self._silent.discard(node_id)
            except OSError as error:
                self.latency_s = others
                if node_id not in self._silent:
                    self._silent.add(node_id)
                    logger.warning(
                        "node %s does not answer at %r (%s); its latency is left out", node_id, address, error
                    )

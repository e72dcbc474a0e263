"""Round trips between nodes over TCP, the protocol of the gradients."""

from __future__ import annotations

import logging
import math
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping

from cgx_ray.ports import listen

logger = logging.getLogger(__name__)

_PROBE = struct.Struct("<Q")
_MAX_READ_BYTES = 4096
_MIN_RTT_OFFSET = 148  # of tcpi_min_rtt in Linux's struct tcp_info


class EchoServer:
    """Sends everything back that it receives, in its own thread, until it is closed. Any number of clients."""

    def __init__(self, host: str) -> None:
        """Listen on `host`, at a port as `ports.listen` chooses it. Raises OSError if it is no address of this node."""
        self._listener = listen(host)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="cgx-ray-echo", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and all connections. May be called again."""
        if self._thread.is_alive():
            self._wake_writer.send(b"x")
            self._thread.join()
        self._wake_writer.close()

    def _serve(self) -> None:
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._wake_reader in ready:
                break
            for sock in ready:
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept()
                elif not _echo(sock):
                    self._selector.unregister(sock)
                    sock.close()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            # The client hung up between select and accept, or this process is out of file descriptors.
            return
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(client, selectors.EVENT_READ)


def _echo(client: socket.socket) -> bool:
    """Send the received bytes back. Return False if the client is gone or does not read its answers."""
    try:
        message = client.recv(_MAX_READ_BYTES)
        return bool(message) and client.send(message) == len(message)
    except OSError:
        return False


def round_trip_s(host: str, port: int, *, num_probes: int = 5, timeout_s: float = 1.0, gap_s: float = 0.02) -> float:
    """Return the smallest of `num_probes` round trips to an `EchoServer`, in seconds.

    On Linux the round trips that the kernel measured on this connection count too, including the handshake. They do not
    contain the time that a process waits for a processor.

    gap_s  pause between probes. Without it all probes would wait in one queue behind the same gradients

    Raises OSError (TimeoutError, ConnectionError) if the peer gives no answer within `timeout_s`, or a wrong one.
    """
    best_s = float("inf")
    with socket.create_connection((host, port), timeout=timeout_s) as sock:
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
        return min(best_s, _kernel_round_trip_s(sock))


def _kernel_round_trip_s(sock: socket.socket) -> float:
    """Return the smallest round trip that the kernel measured on this connection; infinite if it does not report it."""
    if sys.platform != "linux":
        return math.inf
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_OFFSET + 4)
    microseconds = int.from_bytes(info[_MIN_RTT_OFFSET:], sys.byteorder)
    # The kernel reports ~0 before the first measurement. Kernels before 4.6 have a shorter structure.
    return microseconds * 1e-6 if 0 < microseconds < 0xFFFFFFFF else math.inf


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

    def __init__(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        self._addresses = addresses
        self._silent: set[str] = set()
        self.latency_s: Mapping[str, float] = {}

    def measure(self, stopping: threading.Event) -> None:
        for node_id, (host, port) in self._addresses.items():
            if stopping.is_set():
                return
            others = {other: known_s for other, known_s in self.latency_s.items() if other != node_id}
            try:
                # Make a new mapping each time, since samples hold the old one.
                self.latency_s = {**others, node_id: round_trip_s(host, port) / 2}
                self._silent.discard(node_id)
            except OSError as error:
                self.latency_s = others
                if node_id not in self._silent:
                    self._silent.add(node_id)
                    logger.warning(
                        "node %s does not answer at %s:%d (%s); its latency is left out", node_id, host, port, error
                    )

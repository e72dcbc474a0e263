"""Active probes of bandwidth and distance, for links that nobody uses. Round trips are in `network`."""

from __future__ import annotations

import itertools
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass

from cgx_ray.monitors import iperf3_probe
from cgx_ray.monitors.iperf3_probe import Iperf3Server, measure_iperf3
from cgx_ray.monitors.probe_schedule import budget_bytes
from cgx_ray.monitors.round_trip import EchoServer, round_trip_s

MAX_PROBE_S = 5.0
MAX_HOPS = 30
_PIECE_BYTES = 1 << 18
_RESULT = struct.Struct("<d")
# Rates are taken over this long, and the faster ones count: at first TCP itself is slow, and processors may be busy.
# After a stall queues let some 80 KB through at once, which must not be much of a window.
_WINDOW_S = 0.05
# What is no longer the same train.
_MIN_PAUSE_S = 2e-3
_PAUSE_GAPS = 8
# A train may be read in two goes: then every other gap is a pause.
_USUAL_GAP = 0.25
_FAST = 0.75
# In queues and token buckets before the link: faster than it.
_SKIPPED_BYTES = 1 << 17
# The least that says a rate.
_FIRST_BYTES = 2 * _SKIPPED_BYTES
_SO_TIMESTAMPNS = 35  # Python has no name for it
_TIMESPEC = struct.Struct("@qq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Payload bytes a second into a node, and the tool that says so: iperf3 or tcp."""

    bytes_per_s: float
    tool: str


class BulkServer:
    """Takes in what `measure_tcp` sends and answers with the rate at which it came; one probe after the other."""

    def __init__(self, host: str) -> None:
        """Listen on `host`, on a port that the system chooses. Raises OSError if `host` is not of this node."""
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="cgx-ray-bulk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more probes; waits for one that is under way. May be called again."""
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            with client:
                client.settimeout(MAX_PROBE_S)
                try:
                    client.sendall(_RESULT.pack(_receive_bulk(client)))
                except OSError:
                    continue  # the client is gone or stuck; it finds out itself


def measure_tcp(host: str, port: int, num_bytes: int) -> Bandwidth:
    """Send `num_bytes` to a `BulkServer`, for at most MAX_PROBE_S.

    Raises OSError if it does not answer, or another probe is under way there for longer than MAX_PROBE_S.
    """
    bytes_per_s = _send_bulk(host, port, num_bytes)
    if bytes_per_s == 0:
        raise ConnectionError(
            f"too little got to {host}:{port} to say at which rate; send more than {_SKIPPED_BYTES} bytes"
        )
    return Bandwidth(bytes_per_s=bytes_per_s, tool="tcp")


def _send_bulk(host: str, port: int, num_bytes: int) -> float:
    """The rate that a `BulkServer` answers, 0 if it was too little to say."""
    piece = bytes(_PIECE_BYTES)
    with socket.create_connection((host, port), timeout=2 * MAX_PROBE_S) as sock:
        end_s = time.perf_counter() + MAX_PROBE_S
        while num_bytes > 0 and time.perf_counter() < end_s:
            num_bytes -= sock.send(memoryview(piece)[:num_bytes])
        sock.shutdown(socket.SHUT_WR)
        answer = sock.recv(_RESULT.size, socket.MSG_WAITALL)
    if len(answer) < _RESULT.size:
        raise ConnectionError(f"{host}:{port} hung up before it said how fast it was")
    return float(_RESULT.unpack(answer)[0])


def _receive_bulk(client: socket.socket) -> float:
    """Read until the client has no more; returns bytes a second, by the kernel's time stamps where it has them."""
    has_stamps = sys.platform == "linux"
    if has_stamps:
        client.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    arrivals: list[tuple[float, int]] = []
    while True:
        data, extra, _, _ = client.recvmsg(_PIECE_BYTES, socket.CMSG_SPACE(_TIMESPEC.size))
        if not data:
            return _fast_rate(arrivals)
        stamps = [_TIMESPEC.unpack(value) for _, kind, value in extra if kind == _SO_TIMESTAMPNS]
        arrivals.append((stamps[0][0] + stamps[0][1] * 1e-9 if stamps else time.time(), len(data)))


def _fast_rate(arrivals: list[tuple[float, int]]) -> float:
    """Of (time, bytes): the rate over windows, at their fast side. 0 if it is too little to say.

    While TCP's window is smaller than a long path, a train of packets comes at the rate of the link once a round trip,
    and nothing in between: pauses belong to no window.
    """
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(arrivals)]
    usual_s = sorted(gaps)[round(_USUAL_GAP * (len(gaps) - 1))] if gaps else 0.0
    pause_s = max(_MIN_PAUSE_S, _PAUSE_GAPS * usual_s)
    trains: list[list[tuple[float, int]]] = [arrivals[:1]]
    for gap_s, arrival in zip(gaps, arrivals[1:], strict=True):
        if gap_s > pause_s:
            trains.append([])
        trains[-1].append(arrival)
    windows = sorted((n / seconds, seconds) for train in trains for n, seconds in _windows(train))
    # Each counts by its length: a short one may be what a stall has held back.
    reach = list(itertools.accumulate(seconds for _, seconds in windows))
    return next((rate for (rate, _), at in zip(windows, reach, strict=True) if at >= _FAST * reach[-1]), 0.0)


def _windows(train: list[tuple[float, int]]) -> list[tuple[int, float]]:
    """(bytes, seconds) of what follows the first _SKIPPED_BYTES, _WINDOW_S each but the last."""
    windows, start_s, received, skipped = [], 0.0, 0, 0
    for at_s, num_bytes in train:
        if skipped < _SKIPPED_BYTES:
            skipped += num_bytes
            start_s = at_s
            continue
        received += num_bytes
        if at_s - start_s >= _WINDOW_S:
            windows.append((received, at_s - start_s))
            start_s, received = at_s, 0
    if received and train[-1][0] > start_s:
        windows.append((received, train[-1][0] - start_s))
    return windows


def count_hops(host: str, port: int, timeout_s: float = 1.0) -> int | None:
    """Network hops to a listening port: the smallest time-to-live that reaches it; None if MAX_HOPS do not.

    Needs neither traceroute nor root. Each router on the way costs `timeout_s`. Raises ConnectionRefusedError if nobody
    listens.
    """
    is_v6 = ":" in host
    limit = (socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS) if is_v6 else (socket.IPPROTO_IP, socket.IP_TTL)
    for hops in range(1, MAX_HOPS + 1):
        with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(*limit, hops)
            sock.settimeout(timeout_s)
            try:
                sock.connect((host, port))
            except ConnectionRefusedError:
                raise
            except OSError:
                continue  # a router on the way dropped it
            return hops
    return None


def measure_bulk(bulk: tuple[str, int]) -> tuple[int, list[Bandwidth]]:
    """Probe a `BulkServer`: with more and more to learn what may be sent, then twice with that.

    Returns three times the bytes of each of these two, and what they found. A third such probe is still within the
    budget of a minute. Where that has no room for them (links under some 14 Mbit/s) it is 0, and what the last one
    before found. _FIRST_BYTES are always sent, three times as many on a long path. Raises OSError as `measure_tcp`.
    """
    spent, num_bytes, bytes_per_s = 0, _FIRST_BYTES, 0.0
    # A fifth of the budget; that of a fast link is not needed to know it.
    while num_bytes <= min(budget_bytes(None), budget_bytes(bytes_per_s)) // 5:
        bytes_per_s = _send_bulk(*bulk, num_bytes) or bytes_per_s
        spent, num_bytes = spent + num_bytes, 2 * num_bytes
    if bytes_per_s == 0:
        raise ConnectionError(f"{spent} bytes were too little to say at which rate they get to {bulk[0]}:{bulk[1]}")
    left = budget_bytes(bytes_per_s) - spent
    if left // 3 < num_bytes // 2:
        return 0, [Bandwidth(bytes_per_s=bytes_per_s, tool="tcp")]
    return left, [measure_tcp(*bulk, left // 3) for _ in range(2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What probes found of the way from one node to another.

    error  half the spread of the bandwidth over the probes, as a share of it; 0 if there was room for one only
    hops   None if they were not counted
    """

    latency_s: float
    bytes_per_s: float
    error: float
    tool: str
    hops: int | None


class Prober:
    """Answers other nodes' probes from construction on, and probes them. A plain class, to be made an actor."""

    def __init__(self, host: str) -> None:
        """Listen on `host`, this node's address. Raises OSError if it is not of this node."""
        self._host = host
        self._echo = EchoServer(host)
        self._bulk = BulkServer(host)
        self._iperf3: Iperf3Server | None = None

    def addresses(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Where it echoes, and where it takes in bulk data."""
        return self._echo.address, self._bulk.address

    def start_iperf3(self) -> tuple[str, int] | None:
        """Serve one iperf3 test, until `stop_iperf3`; returns where. None if libiperf is not installed here."""
        if iperf3_probe.available():
            self._iperf3 = Iperf3Server(self._host)
        return self._iperf3.address if self._iperf3 is not None else None

    def stop_iperf3(self) -> None:
        if self._iperf3 is not None:
            self._iperf3.close()
            self._iperf3 = None

    def probe(
        self,
        echo: tuple[str, int],
        bulk: tuple[str, int],
        iperf3: tuple[str, int] | None = None,
        *,
        counts_hops: bool = False,
    ) -> Way:
        """Probe the way to another node. All probes together keep to the budget of a minute.

        iperf3  where the other serves it; used if libiperf is installed here as well

        Raises OSError if the other does not answer.
        """
        latency_s = round_trip_s(*echo) / 2
        left, found = measure_bulk(bulk)
        if iperf3 is not None and left > 0 and iperf3_probe.available():
            bytes_per_s = measure_iperf3(*iperf3, left // 3)
            if bytes_per_s > 0:
                found.append(Bandwidth(bytes_per_s=bytes_per_s, tool="iperf3"))
        rates = [one.bytes_per_s for one in found]
        return Way(
            latency_s=latency_s,
            bytes_per_s=rates[-1],
            error=(max(rates) - min(rates)) / (2 * rates[-1]),
            tool=found[-1].tool,
            hops=count_hops(*echo) if counts_hops else None,
        )

    def close(self) -> None:
        self.stop_iperf3()
        self._bulk.close()
        self._echo.close()

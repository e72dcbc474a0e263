"""Active probes of bandwidth and hops, for links that carry no traffic. Round trips are in `round_trip`."""

from __future__ import annotations

import itertools
import logging
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean

from cgx_ray.errors import ConfigError
from cgx_ray.monitors import iperf3_probe
from cgx_ray.monitors.guarded_server import WELCOME, Address, GuardedServer, connect
from cgx_ray.monitors.host import CardMeter
from cgx_ray.monitors.iperf3_probe import Iperf3Server, measure_iperf3
from cgx_ray.monitors.probe_schedule import budget_bytes
from cgx_ray.monitors.round_trip import EchoServer, round_trip_s
from cgx_ray.monitors.sample import Bandwidth

logger = logging.getLogger(__name__)

# Seconds that one probe may send.
MAX_PROBE_S = 5.0
MAX_HOPS = 30
_PIECE_BYTES = 1 << 18
# Most bytes that are read at once, each with one time stamp: less than what arrives between two pauses on a long path.
_READ_BYTES = 1 << 16
# Rate of a probe's bytes, and what the receiver's card carried meanwhile.
_RESULT = struct.Struct("<dd")
# Arrivals of a probe that are kept apart. A link of 10 Gbit/s has half as many, and a client that sends single bytes
# would fill the memory. An even number, as two that follow each other become one at the limit.
_MAX_ARRIVALS = 1 << 17
# Seconds and bytes of a window over which a rate is measured, whichever comes first. After a stall queues deliver some
# 80 KB at once, which must be a small part of a window. With few windows their quantile is an extreme one: so a fast
# link, whose probe takes 0.2 s, has short ones.
_WINDOW_S, _WINDOW_BYTES = 0.05, 1 << 19
# Fewest arrivals in a window, if they are further apart than _MIN_PAUSE_S. On a long path each of the first ones may be
# all that TCP's window allowed in a round trip, and the pauses between them look like a slow link.
_MIN_ARRIVALS = 4
# A gap ends a train of packets if it lasts this many seconds and this many usual gaps.
_MIN_PAUSE_S = 2e-3
_PAUSE_GAPS = 8
# Quantile of gaps that is usual. A train may be read in two parts: then every other gap is a pause.
_USUAL_GAP = 0.25
# Quantile of the windows' rates that stands for the link: TCP starts slowly, and processors may be busy.
_FAST = 0.7
# Ratio of two probes' rates up to which both count. Beside a training they differ by up to 20 %.
_AGREEMENT = 1.25
# First bytes of a train, which are not measured: they come from queues and token buckets in front of the link.
_SKIPPED_BYTES = 1 << 17
# Bytes of the first probe: fewer give no usable rate.
_FIRST_BYTES = 2 * _SKIPPED_BYTES
_SO_TIMESTAMPNS = 35  # Python has no name for it
_TIMESPEC = struct.Struct("@qq")


class BulkServer(GuardedServer):
    """Receives the bytes of `measure_tcp` and answers with their rate, one probe at a time.

    Clients take turns. One that sends before its turn, nothing for MAX_PROBE_S, or for too long is disconnected.
    """

    def __init__(self, host: str) -> None:
        """Listen on `host`, at a port as `ports.listen` chooses it. Raises OSError if it is no address of this node."""
        self._turns: deque[socket.socket] = deque()  # the first one sends
        self._arrivals: list[tuple[float, int]] = []
        self._card = CardMeter(host)
        self._end_s = 0.0  # of its turn, in the time of time.monotonic
        super().__init__(host, "cgx-ray-bulk")

    def welcome(self, client: socket.socket) -> bool:
        self._turns.append(client)
        # It waits that long for its turn.
        self.allow(client, 2 * MAX_PROBE_S)
        if len(self._turns) == 1:
            self._begin()
        return True

    def receive(self, client: socket.socket) -> bool:
        if client is not self._turns[0]:
            return False  # it has given up, or sends before its turn
        at_s, num_bytes = _receive(client)
        if num_bytes == 0:
            client.send(_RESULT.pack(_fast_rate(self._arrivals), self._card.read()[1]))
            return False
        if not self._arrivals:
            self._card.read()  # count from here on
        self.allow(client, min(MAX_PROBE_S, self._end_s - time.monotonic()))
        if len(self._arrivals) == _MAX_ARRIVALS:
            pairs = zip(self._arrivals[::2], self._arrivals[1::2], strict=True)
            self._arrivals = [(later_s, one + other) for (_, one), (later_s, other) in pairs]
        self._arrivals.append((at_s, num_bytes))
        return True

    def forget(self, client: socket.socket) -> None:
        is_turn = client is self._turns[0]
        self._turns.remove(client)
        if is_turn and self._turns:
            self._begin()

    def _begin(self) -> None:
        """Tell the first client that it may send."""
        client, self._arrivals = self._turns[0], []
        # A client sends for MAX_PROBE_S, and waits for the answer twice as long.
        self._end_s = time.monotonic() + 3 * MAX_PROBE_S
        self.allow(client, MAX_PROBE_S)
        with suppress(OSError):  # a client that is gone is ready to be read, and `receive` finds out
            if sys.platform == "linux":
                client.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            client.send(WELCOME)


def measure_tcp(host: str, port: int, token: str, num_bytes: int) -> Bandwidth:
    """Send `num_bytes` to the `BulkServer` at an `Address`, for at most MAX_PROBE_S.

    Raises OSError if it does not answer, or if other probes keep it busy for longer than 2 * MAX_PROBE_S.
    """
    found = _send_bulk(host, port, token, num_bytes)
    if found.bytes_per_s == 0:
        raise ConnectionError(
            f"too few bytes reached {host}:{port} to measure a rate; send more than {_SKIPPED_BYTES} bytes"
        )
    return found


def _send_bulk(host: str, port: int, token: str, num_bytes: int) -> Bandwidth:
    """Return what a `BulkServer` answers; its rate is 0 if there were too few bytes to measure it."""
    piece = bytes(_PIECE_BYTES)
    with connect(host, port, token, 2 * MAX_PROBE_S) as sock:
        card = CardMeter(sock.getsockname()[0])
        end_s = time.perf_counter() + MAX_PROBE_S
        while num_bytes > 0 and time.perf_counter() < end_s:
            num_bytes -= sock.send(memoryview(piece)[:num_bytes])
        sock.shutdown(socket.SHUT_WR)
        answer = sock.recv(_RESULT.size, socket.MSG_WAITALL)
        sent, _ = card.read()
    if len(answer) < _RESULT.size:
        raise ConnectionError(f"{host}:{port} hung up before it answered with a rate")
    bytes_per_s, received = _RESULT.unpack(answer)
    return Bandwidth(bytes_per_s=bytes_per_s, tool="tcp", sent=sent, received=received)


def _receive(client: socket.socket) -> tuple[float, int]:
    """Return when bytes arrived, by the kernel's time stamp where it has one, and how many; 0 at the client's end."""
    data, extra, _, _ = client.recvmsg(_READ_BYTES, socket.CMSG_SPACE(_TIMESPEC.size))
    stamps = [_TIMESPEC.unpack(value) for _, kind, value in extra if kind == _SO_TIMESTAMPNS]
    return stamps[0][0] + stamps[0][1] * 1e-9 if stamps else time.time(), len(data)


def _fast_rate(arrivals: list[tuple[float, int]]) -> float:
    """Return the rate of `arrivals`, (time, bytes) each: the _FAST quantile over windows; 0 if there are too few bytes.

    While TCP's window is smaller than a long path, one train of packets arrives per round trip at the rate of the link,
    and nothing in between. So pauses belong to no window.
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
    # Weight each window by its length, since a short one may hold packets that a stall delayed.
    reach = list(itertools.accumulate(seconds for _, seconds in windows))
    return next((rate for (rate, _), at in zip(windows, reach, strict=True) if at >= _FAST * reach[-1]), 0.0)


def _windows(train: list[tuple[float, int]]) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of windows after the first _SKIPPED_BYTES."""
    windows, start_s, received, num_arrivals, skipped = [], 0.0, 0, 0, 0

    def is_rate(seconds: float) -> bool:
        return seconds > 0 and (num_arrivals >= _MIN_ARRIVALS or seconds <= num_arrivals * _MIN_PAUSE_S)

    for at_s, num_bytes in train:
        if skipped < _SKIPPED_BYTES:
            skipped += num_bytes
            start_s = at_s
            continue
        received += num_bytes
        num_arrivals += 1
        is_full = received >= _WINDOW_BYTES or at_s - start_s >= _WINDOW_S
        if is_full and is_rate(at_s - start_s):
            windows.append((received, at_s - start_s))
            start_s, received, num_arrivals = at_s, 0, 0
    if received and is_rate(train[-1][0] - start_s):
        windows.append((received, train[-1][0] - start_s))
    return windows


def count_hops(host: str, port: int, timeout_s: float = 1.0) -> int | None:
    """Return the network hops to a listening port, which is the smallest time-to-live that reaches it.

    Returns None if MAX_HOPS do not reach it. Needs neither traceroute nor root. Each router on the path costs
    `timeout_s`. Raises ConnectionRefusedError if no server listens.
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
                continue  # a router on the path dropped the packet
            return hops
    return None


def measure_bulk(bulk: Address) -> tuple[int, list[Bandwidth]]:
    """Probe a `BulkServer` within the budget of one minute.

    1. Probes of growing size give a first rate, which sets the budget.
    2. Two probes measure with a third of the remaining budget each.

    Returns the remaining budget, which has room for a third such probe, and the results of step 2. On links under some
    14 Mbit/s nothing remains: then it returns 0 and the last result of step 1. At least _FIRST_BYTES are sent, three
    times as many on a long path. Raises OSError as `measure_tcp`.
    """
    spent, num_bytes, last = 0, _FIRST_BYTES, Bandwidth(bytes_per_s=0.0)
    # Spend at most a fifth of the budget, and no more than that of the assumed rate, which suffices on fast links.
    while num_bytes <= min(budget_bytes(None), budget_bytes(last.bytes_per_s)) // 5:
        found = _send_bulk(*bulk, num_bytes)
        last = found if found.bytes_per_s > 0 else last
        spent, num_bytes = spent + num_bytes, 2 * num_bytes
    if last.bytes_per_s == 0:
        raise ConnectionError(f"{spent} bytes to {bulk!r} were too few to measure a rate")
    left = budget_bytes(last.bytes_per_s) - spent
    if left // 3 < num_bytes // 2:
        return 0, [last]
    return left, [measure_tcp(*bulk, left // 3) for _ in range(2)]


def measure_beside_training(bulk: Address) -> Bandwidth:
    """Return what `measure_bulk` finds. Raises OSError as `measure_tcp`."""
    _, found = measure_bulk(bulk)
    return Bandwidth(
        bytes_per_s=_usual_rate(found),
        sent=fmean(one.sent for one in found),
        received=fmean(one.received for one in found),
    )


def _usual_rate(found: list[Bandwidth]) -> float:
    """Return the mean rate, or the least one if they differ by more than _AGREEMENT.

    Bytes that a stall delayed seem too fast.
    """
    rates = [one.bytes_per_s for one in found]
    return fmean(rates) if max(rates) <= _AGREEMENT * min(rates) else min(rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePath:
    """Result of probing one node from another.

    bytes_per_s  that of iperf3 if it ran, else of the TCP probes together
    error        half the spread of the probes' bandwidths as a fraction of the bandwidth; 0 if there was only one
    hops         None if they were not counted
    """

    latency_s: float
    bytes_per_s: float
    error: float
    tool: str
    hops: int | None


class Prober:
    """Probes other nodes, and answers their probes from construction on. A plain class, to be made an actor."""

    def __init__(self, host: str) -> None:
        """Listen on `host`. Raises OSError if it is not an address of this node."""
        self._host = host
        self._echo = EchoServer(host)
        self._bulk = BulkServer(host)
        self._iperf3: Iperf3Server | None = None

    def addresses(self) -> tuple[Address, Address]:
        """Return the addresses of its echo server and of its bulk server."""
        return self._echo.address, self._bulk.address

    def start_iperf3(self, peer: str) -> tuple[str, int] | None:
        """Serve one iperf3 test from the host `peer` until `stop_iperf3`; return its address.

        Returns None if no server can run here.
        """
        self.stop_iperf3()
        if not iperf3_probe.available():
            return None
        try:
            self._iperf3 = Iperf3Server(self._host, peer)
        except (OSError, ConfigError) as error:
            logger.warning("probes to %s go over TCP without iperf3: %s", self._host, error)
            return None
        return self._iperf3.address

    def stop_iperf3(self) -> None:
        if self._iperf3 is not None:
            self._iperf3.close()
            self._iperf3 = None

    def probe(
        self,
        echo: Address,
        bulk: Address,
        iperf3: tuple[str, int] | None = None,
        *,
        counts_hops: bool = False,
    ) -> NodePath:
        """Probe another node by the addresses of its servers. All probes together keep to the budget of one minute.

        iperf3  used if libiperf is installed here too. If its test fails, the rate is measured with TCP

        Raises OSError if the other node does not answer.
        """
        latency_s = round_trip_s(*echo) / 2
        left, found = measure_bulk(bulk)
        known = _usual_rate(found)
        if iperf3 is not None and left > 0 and iperf3_probe.available():
            try:
                bytes_per_s = measure_iperf3(*iperf3, left // 3, self._host)
            except OSError as error:
                logger.warning("this probe has measured with TCP, because iperf3 failed: %s", error)
                bytes_per_s = 0.0
            if bytes_per_s > 0:
                found.append(Bandwidth(bytes_per_s=bytes_per_s, tool="iperf3"))
                known = bytes_per_s
        rates = [one.bytes_per_s for one in found]
        return NodePath(
            latency_s=latency_s,
            bytes_per_s=known,
            error=(max(rates) - min(rates)) / (2 * known),
            tool=found[-1].tool,
            hops=count_hops(echo.host, echo.port) if counts_hops else None,
        )

    def close(self) -> None:
        self.stop_iperf3()
        self._bulk.close()
        self._echo.close()

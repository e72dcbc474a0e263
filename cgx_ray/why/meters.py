"""Meters of a rank's process and node: its TCP connections, network cards and processors, between `begin` and `read`.

What a kernel, a container or a driver refuses is left out: an observer does not write into the output of the training.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import psutil

from cgx_ray.sockets import TcpInfo, tcp_info, tcp_sockets
from cgx_ray.why.records import Connection, NetworkCard, NodeFacts

# Rates that are kept of a connection, and connections that are reported: those of 128 ranks, both ways. They bound the
# memory of the observer.
_MAX_RATES, MAX_CONNECTIONS = 512, 256
_SMI_FIELDS = "uuid,name,pcie.link.width.current,pcie.link.width.max,clocks_throttle_reasons.active"
_SMI_S = 5.0

_Value = TypeVar("_Value")


def _taken(read: Callable[[], _Value], otherwise: _Value) -> _Value:
    try:
        return read()
    except (OSError, psutil.Error, ValueError, LookupError, subprocess.SubprocessError):
        return otherwise


class ConnectionMeter:
    """TCP connections of this process. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[tuple[str, str], TcpInfo] = {}
        self._last: dict[tuple[str, str], TcpInfo] = {}
        self._rates: defaultdict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=_MAX_RATES))
        self._timeouts: dict[tuple[str, str], int] = {}

    def begin(self) -> None:
        """Count from now on."""
        with self._lock:
            self._first, self._last = dict(_open_connections()), {}
            self._rates.clear()
            self._timeouts.clear()

    def sample(self) -> tuple[int, float]:
        """Look at all connections. Call it often: rates are those of the last messages, and closed ones are gone.

        Return the bytes that they have received, and their seconds with data under way. Between two looks with the same
        numbers nothing was.
        """
        with self._lock:
            received_bytes, busy_s = 0, 0.0
            for ends, info in _open_connections():
                received_bytes, busy_s = received_bytes + info.received_bytes, busy_s + info.busy_s
                before = self._last.get(ends, self._first.get(ends))
                if before is None or info.sent_bytes > before.sent_bytes:
                    self._rates[ends].append(info.bytes_per_s)
                self._timeouts[ends] = max(info.num_timeouts, self._timeouts.get(ends, 0))
                self._last[ends] = info
            if len(self._last) > 2 * MAX_CONNECTIONS:
                self._forget()
        return received_bytes, busy_s

    def read(self) -> tuple[Connection, ...]:
        """Return the connections that moved bytes, or tried to, those with the most bytes first."""
        with self._lock:
            return self._largest()

    def _largest(self) -> tuple[Connection, ...]:
        found = [self._connection(ends, info) for ends, info in self._last.items()]
        moved = [one for one in found if one.sent_bytes or one.received_bytes or one.num_timeouts]
        return tuple(sorted(moved, key=lambda one: -one.sent_bytes - one.received_bytes)[:MAX_CONNECTIONS])

    def _forget(self) -> None:
        """Forget all but the largest: a script may open connections for each batch."""
        kept = {(one.own, one.other) for one in self._largest()}
        for ends in self._last.keys() - kept:
            for known in (self._last, self._rates, self._timeouts):
                known.pop(ends, None)

    def _connection(self, ends: tuple[str, str], info: TcpInfo) -> Connection:
        first = self._first.get(ends)
        rates = self._rates[ends]
        return Connection(
            own=ends[0],
            other=ends[1],
            sent_bytes=info.sent_bytes - (first.sent_bytes if first else 0),
            received_bytes=info.received_bytes - (first.received_bytes if first else 0),
            resent_bytes=info.resent_bytes - (first.resent_bytes if first else 0),
            bytes_per_s=median(rates) if rates else 0.0,
            busy_s=info.busy_s - (first.busy_s if first else 0.0),
            receiver_limited_s=info.receiver_limited_s - (first.receiver_limited_s if first else 0.0),
            round_trip_s=info.round_trip_s,
            least_round_trip_s=info.least_round_trip_s,
            path_mtu=info.path_mtu,
            segment_bytes=info.segment_bytes,
            num_timeouts=self._timeouts[ends],
        )


def _open_connections() -> Iterator[tuple[tuple[str, str], TcpInfo]]:
    for opened in tcp_sockets():
        try:
            ends = _end(opened.getsockname()), _end(opened.getpeername())
            info = tcp_info(opened)
        except OSError:
            continue  # it listens, or the other end has hung up
        if info is not None:
            yield ends, info


def _end(address: tuple[str, int]) -> str:
    # A socket for both families names IPv4 addresses so.
    return f"{address[0].removeprefix('::ffff:')}:{address[1]}"


class _Counters(NamedTuple):
    """Counts of a node since it was started, and of a process since it began."""

    at_s: float
    cards: dict[str, tuple[int, int, int]]
    processors: dict[str, float]
    throttled_s: float
    waited_s: float


class NodeMeter:
    """Cards and processors of this node, and what this process waited for a processor."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._first = _counters()
        self._quiet = 0.0, Counter[str]()

    def add_quiet(self, before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> None:
        """Count what cards carried, as of `card_bytes`, while nothing of this process was under way."""
        quiet_s, num_bytes = self._quiet
        total = Counter(num_bytes)
        # Unlike a sum of counters, `update` keeps 0: that card is known to be quiet.
        total.update({name: max(0, after[name] - before.get(name, after[name])) for name in after})
        self._quiet = quiet_s + seconds, total

    def read(self, *, asks_gpus: bool) -> tuple[NodeFacts, float, float]:
        """Return the node, the seconds that were measured, and those of them that threads waited for a processor.

        asks_gpus  of one process per node: nvidia-smi takes a second
        """
        first, last, (quiet_s, num_bytes) = self._first, _counters(), self._quiet
        spent = {name: seconds - first.processors.get(name, 0.0) for name, seconds in last.processors.items()}
        all_s = sum(spent.values()) or 1.0
        facts = NodeFacts(
            name=socket.gethostname(),
            num_processors=_taken(lambda: len(os.sched_getaffinity(0)), 1),
            busy_share=1 - (spent.get("idle", 0.0) + spent.get("iowait", 0.0)) / all_s,
            stolen_share=spent.get("steal", 0.0) / all_s,
            throttled_s=last.throttled_s - first.throttled_s,
            shared_bytes=_taken(lambda: shutil.disk_usage("/dev/shm").total, 0),
            open_files=_taken(lambda: len(os.listdir("/proc/self/fd")), 0),
            max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            cards=_cards(first, last, {name: count / quiet_s for name, count in num_bytes.items()}),
            fabrics=_taken(_fabrics, ()),
            gpus=_taken(_gpus, ()) if asks_gpus else (),
        )
        return facts, last.at_s - first.at_s, max(0.0, last.waited_s - first.waited_s)


def card_bytes() -> dict[str, int]:
    """Return the bytes that each card has sent and received since it was started."""
    return {name: sent + received for name, (sent, received, _) in _card_counts().items()}


def versions() -> dict[str, str]:
    """Return what may differ between nodes and should not."""
    return {"python": platform.python_version(), "kernel": platform.release()}


def _counters() -> _Counters:
    return _Counters(
        at_s=time.monotonic(),
        cards=_card_counts(),
        processors=_taken(lambda: psutil.cpu_times()._asdict(), {}),
        throttled_s=_throttled_s(),
        waited_s=_waited_s(),
    )


def _card_counts() -> dict[str, tuple[int, int, int]]:
    counts = _taken(lambda: psutil.net_io_counters(pernic=True, nowrap=False), dict[str, Any]())
    return {
        name: (one.bytes_sent, one.bytes_recv, one.errin + one.errout + one.dropin + one.dropout)
        for name, one in counts.items()
    }


def _throttled_s() -> float:
    """Return the seconds for which the limit of this container has stopped its processes; 0 without a limit."""
    for path, field, unit in (("cpu.stat", "throttled_usec", 1e-6), ("cpu/cpu.stat", "throttled_time", 1e-9)):
        for line in _taken(Path("/sys/fs/cgroup", path).read_text, "").splitlines():
            if line.startswith(f"{field} "):
                return unit * int(line.split()[1])
    return 0.0


def _waited_s() -> float:
    """Return the seconds that the threads of this process were ready to run and had no processor."""
    found = 0
    for task in _taken(lambda: os.listdir("/proc/self/task"), list[str]()):
        words = _taken(Path("/proc/self/task", task, "schedstat").read_text, "0 0").split()
        found += int(words[1])
    return 1e-9 * found


def _cards(first: _Counters, last: _Counters, quiet_bytes_per_s: Mapping[str, float]) -> tuple[NetworkCard, ...]:
    addresses = _taken(psutil.net_if_addrs, dict[str, Any]())
    cards = []
    for name, stats in _taken(psutil.net_if_stats, dict[str, Any]()).items():
        if not stats.isup:
            continue
        flags = stats.flags.split(",")
        before, now = first.cards.get(name, (0, 0, 0)), last.cards.get(name, (0, 0, 0))
        sent, received, errors = (max(0, new - old) for new, old in zip(now, before, strict=True))
        families = (socket.AF_INET, socket.AF_INET6)
        cards.append(
            NetworkCard(
                name=name,
                addresses=tuple(
                    one.address.partition("%")[0] for one in addresses.get(name, []) if one.family in families
                ),
                bit_per_s=stats.speed * 1e6,
                duplex={psutil.NIC_DUPLEX_FULL: "full", psutil.NIC_DUPLEX_HALF: "half"}.get(stats.duplex, ""),
                mtu=stats.mtu,
                kind="loopback" if "loopback" in flags else _kind(name, "pointopoint" in flags),
                sent_bytes=sent,
                received_bytes=received,
                num_errors=errors,
                quiet_bytes_per_s=quiet_bytes_per_s.get(name),
            )
        )
    return tuple(cards)


def _kind(name: str, is_point_to_point: bool) -> str:
    folder = Path("/sys/class/net", name)
    if (folder / "bridge").exists():
        return "bridge"
    about = _taken((folder / "uevent").read_text, "")
    if is_point_to_point or (folder / "tun_flags").exists() or "DEVTYPE=wireguard" in about or "DEVTYPE=vxlan" in about:
        return "tunnel"
    return "physical" if (folder / "device").exists() else "virtual"


def _fabrics() -> tuple[str, ...]:
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    return tuple(dict.fromkeys(port.parts[4] for port in ports if "ACTIVE" in port.read_text()))


def _gpus() -> tuple[str, ...]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    asked = [command, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader"]
    done = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=_SMI_S)
    return tuple(done.stdout.strip().splitlines())

"""Our own back end: `cgx-switch`, a program that moves packets between TUN devices, one per host."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgx_ray.errors import LabError
from cgx_ray.lab.link import DIRECTIONS, MTU_BYTES, Direction, LinkState
from cgx_ray.lab.system import ip_batch, tc_batch
from cgx_ray.lab.tc import qdisc_line, queue_line, rate_line

# Packets that wait between a host and the switch. The queue fills only if the switch gets no processor for long.
_TUN_PACKETS = 10_000
_UNPACED_BIT_PER_S = 1e11
# Longest time on the wire of one piece that a sender hands over: 64 KiB from 1 Gbit/s on.
_GSO_S = 0.0005
_ANSWER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCounters:
    """Counts of one direction of a host's link, since the start or `clear_counters`. Bytes include all headers."""

    packets: int
    bytes: int
    dropped_queue: int
    dropped_loss: int
    dropped_mtu: int
    dropped_cut: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counts of the switch, and its lateness, which shows whether a measurement in the lab can be trusted.

    late_p99_ms  99 % of the packets came at most this late; below 0.2 a measurement is sound
    """

    delivered: int
    late_p50_ms: float
    late_p99_ms: float
    late_max_ms: float
    hosts: tuple[dict[Direction, LinkCounters], ...]


def program() -> Path | None:
    """Return the path of the switch, beside the native module. None if it was not built: only Linux builds it."""
    native = importlib.util.find_spec("cgx_ray.runtime_ext._native")
    path = Path(native.origin).parent / "cgx-switch" if native and native.origin else None
    return path if path and path.exists() else None


class SwitchNetwork:
    """TUN devices in the hosts' `namespaces`, and a process in namespace `switch` that moves packets between them.

    The process listens at `socket_path` and ends with the process that called `make`.
    """

    def __init__(self, switch: str, namespaces: Sequence[str], socket_path: Path) -> None:
        self.switch = switch
        self.namespaces = namespaces
        self.socket_path = socket_path

    def make(self, seed: int) -> subprocess.Popen[str]:
        argv = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.switch]
        argv += [str(program()), str(len(self.namespaces)), str(self.socket_path), str(seed)]
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert process.stdout is not None
        with process.stdout:
            first = process.stdout.readline().strip()
        if first != "ready":
            process.kill()
            process.wait()
            raise LabError(f"the switch did not start: {first or 'no output'}")
        moves = [f"link set cgx{host} netns {name} name eth0" for host, name in enumerate(self.namespaces)]
        ip_batch(self.switch, moves)
        for namespace in self.namespaces:
            ip_batch(namespace, [f"link set eth0 mtu {MTU_BYTES} txqueuelen {_TUN_PACKETS}"])
            tc_batch(namespace, [qdisc_line("eth0")])
        return process

    def set(self, host: int, direction: Direction, state: LinkState) -> None:
        # The switch enforces the exact rate. The host is slowed down as well: else everything that TCP has in flight
        # would wait in one queue at the switch, and later messages behind it.
        if direction == "up":
            rate = state.rate_bit_per_s if state.queue_bytes is None else _UNPACED_BIT_PER_S
            tc_batch(self.namespaces[host], [rate_line("eth0", rate), queue_line("eth0")])
            # A packet of 64 KiB takes 5 ms at 100 Mbit/s, and blocks packets of other connections meanwhile.
            gso_bytes = min(65536, max(MTU_BYTES, int(state.rate_bit_per_s / 8 * _GSO_S)))
            ip_batch(self.namespaces[host], [f"link set eth0 gso_max_size {gso_bytes}"])
        words = [8e9 / state.rate_bit_per_s, round(state.latency_s / 2 * 1e9), round(state.jitter_s / 2 * 1e9)]
        words += [state.loss_of_link, state.queue_bytes or 0, state.mtu_bytes]
        self._command(f"set {host} {direction} {' '.join(map(repr, words))}")

    def connect(self, host: int, is_connected: bool) -> None:
        self._command(f"connect {host} {int(is_connected)}")

    def counters(self) -> Counters:
        answer: dict[str, Any] = json.loads(self._ask("counters"))
        late = answer["late_ms"]
        hosts = tuple(
            {direction: LinkCounters(**links[direction]) for direction in DIRECTIONS} for links in answer["hosts"]
        )
        return Counters(
            delivered=answer["delivered"],
            late_p50_ms=late["p50"],
            late_p99_ms=late["p99"],
            late_max_ms=late["max"],
            hosts=hosts,
        )

    def clear_counters(self) -> None:
        self._command("clear")

    def _command(self, text: str) -> None:
        answer = self._ask(text)
        if answer != "ok":
            raise LabError(f"the switch answered: {answer}")

    def _ask(self, text: str) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                connection.connect(str(self.socket_path))
                connection.send(text.encode())
                return connection.recv(_ANSWER_BYTES).decode()
            except OSError as error:
                raise LabError(f"the switch of the lab does not answer: {error}; take the lab down") from error

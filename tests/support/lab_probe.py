"""Numbered UDP packets between hosts of a lab: `send` and `receive` in the test, this file's main in the hosts.

All hosts have the same clock, so a packet's time under way is the difference of two readings.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass

PORT = 7000
_END = (1 << 64) - 1
_IDLE_S = 60.0
# Ahead of everything else on the machine, as the switch is: what is measured is the lab and not who else runs.
AHEAD = ("chrt", "--fifo", "1")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Numbers of the packets that came, in their order, and when they were sent and came, in seconds."""

    numbers: list[int]
    sent: list[float]
    came: list[float]

    @property
    def under_way_ms(self) -> list[float]:
        return [(came - sent) * 1e3 for sent, came in zip(self.sent, self.came, strict=True)]


class Receiver:
    def __init__(self, process):
        self.process = process

    def arrivals(self) -> Arrivals:
        """Waits for the end mark, or until nothing has come for a minute."""
        return Arrivals(*json.loads(self.process.stdout.readline()))


@contextmanager
def receiver(lab, host):
    process = lab.popen(host, [*AHEAD, sys.executable, __file__, "receive"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    try:
        yield Receiver(process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def send(lab, host, to, numbers: range, *, payload=100, gap_s=0.0, end=True):
    """Send packets with these numbers, and then the end mark, which is sent until it gets through."""
    words = [lab.hosts[to].address, numbers.start, numbers.stop, payload, gap_s, int(end)]
    argv = [*AHEAD, sys.executable, __file__, "send", *map(str, words)]
    assert lab.popen(host, argv).wait() == 0


def exchange(lab, host, to, count, **options) -> Arrivals:
    with receiver(lab, to) as got:
        send(lab, host, to, range(count), **options)
        return got.arrivals()


def _receive() -> None:
    rows: list[tuple[int, float, float]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.setsockopt(socket.SOL_SOCKET, 33, 1 << 28)  # SO_RCVBUFFORCE
        here.bind(("", PORT))
        print("ready", flush=True)
        while True:
            try:
                data = here.recv(1 << 16)
            except TimeoutError:
                break
            here.settimeout(_IDLE_S)
            came = time.monotonic_ns()
            number = int.from_bytes(data[:8], "little")
            if number == _END:
                break
            rows.append((number, int.from_bytes(data[8:16], "little") / 1e9, came / 1e9))
    print(json.dumps(list(zip(*rows, strict=True)) or [[], [], []]), flush=True)


def _send(address: str, first: int, stop: int, payload: int, gap_s: float, end: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.connect((address, PORT))
        for number in range(first, stop):
            now = time.monotonic_ns()
            here.send(number.to_bytes(8, "little") + now.to_bytes(8, "little") + bytes(payload - 16))
            if gap_s:
                time.sleep(gap_s)
        for _ in range(20 if end else 0):  # some may be lost
            time.sleep(0.01)
            try:
                here.send(_END.to_bytes(8, "little"))
            except ConnectionRefusedError:  # the receiver has ended: it got one
                break


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive()
    else:
        _send(sys.argv[2], *map(int, sys.argv[3:6]), float(sys.argv[6]), sys.argv[7] == "1")

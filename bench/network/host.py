"""Processes of `python -m bench network` in a host of the lab, besides the job: probes, and a neighbour.

`prober ADDRESS`          writes a line with host, port and token of its echo and of its bulk server; for each such line
                          of another prober it probes these and writes latency in seconds and bytes per second
`sink ADDRESS`            writes its port and receives everything that is sent there
`neighbour ADDRESS PORT`  sends to a sink for up to 2 s every 3 to 8 s, until it is killed
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from cgx_ray.lab.namespaces import Lab
from cgx_ray.monitors.guarded_server import Address
from cgx_ray.monitors.probe import Prober

_PIECE = bytes(1 << 16)


@contextmanager
def process_in_host(lab: Lab, host: int, role: str, *arguments: str) -> Iterator[tuple[IO[str], IO[str]]]:
    """Run this module in a host and yield the process's input and output; end it with the body.

    arguments  after the role; the host's own address if left out
    """
    argv = [sys.executable, "-m", "bench.network.host", role, *(arguments or (lab.hosts[host].address,))]
    process = lab.popen(host, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin, process.stdout:
            yield process.stdin, process.stdout
    finally:
        process.kill()
        process.wait()


def _prober(address: str) -> None:
    prober = Prober(address)
    echo, bulk = prober.addresses()
    print(*echo, *bulk, flush=True)
    for line in sys.stdin:
        echo_host, echo_port, echo_token, bulk_host, bulk_port, bulk_token = line.split()
        path = prober.probe(
            Address(echo_host, int(echo_port), echo_token), Address(bulk_host, int(bulk_port), bulk_token)
        )
        print(path.latency_s, path.bytes_per_s, flush=True)


def _sink(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        client, _ = server.accept()
        with client:
            while client.recv(1 << 20):
                pass


def _neighbour(address: str, port: int) -> None:
    chance = random.Random(0)
    with socket.create_connection((address, port)) as sock:
        while True:
            time.sleep(chance.uniform(3, 8))
            end_s = time.perf_counter() + chance.uniform(0.5, 2)
            while time.perf_counter() < end_s:
                sock.sendall(_PIECE)


def main() -> None:
    role, address, *rest = sys.argv[1:]
    if role == "neighbour":
        _neighbour(address, int(rest[0]))
    else:
        {"prober": _prober, "sink": _sink}[role](address)


if __name__ == "__main__":
    main()

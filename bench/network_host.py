"""What `cgx-ray bench network` runs in a host of the lab beside the job: probes, and a neighbour.

`prober ADDRESS` writes where it listens; for each line "ECHO_HOST ECHO_PORT BULK_HOST BULK_PORT" it probes that way
and writes latency in seconds and bytes a second. `sink ADDRESS` writes its port and takes in what comes. `neighbour
ADDRESS PORT` sends there for up to 2 s every 3 to 8 s, until killed.
"""

from __future__ import annotations

import random
import socket
import sys
import time

from cgx_ray.monitors.probe import Prober

_PIECE = bytes(1 << 16)


def _prober(address: str) -> None:
    prober = Prober(address)
    echo, bulk = prober.addresses()
    print(*echo, *bulk, flush=True)
    for line in sys.stdin:
        echo_host, echo_port, bulk_host, bulk_port = line.split()
        way = prober.probe((echo_host, int(echo_port)), (bulk_host, int(bulk_port)))
        print(way.latency_s, way.bytes_per_s, flush=True)


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

"""Strangers at an iperf3 server, which serves one test from one address and then ends."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest
from support.strangers import HOST, is_hung_up

from cgx_ray.monitors import iperf3_probe
from cgx_ray.monitors.iperf3_probe import Iperf3Server, measure_iperf3

MANY_BYTES = 200_000_000
# Loopback has many addresses, so one machine can stand for several.
OTHER = "127.0.0.3"


@pytest.mark.fault("connections to iperf3 from another address", "they find no server")
def test_another_address_than_the_one_that_was_announced_finds_nobody() -> None:
    with closing(Iperf3Server(HOST, HOST)) as server:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                socket.create_connection(server.address, timeout=0.2, source_address=(OTHER, 0))
        assert measure_iperf3(*server.address, MANY_BYTES, HOST) > 0


def test_the_announced_address_need_not_be_the_servers_own() -> None:
    with closing(Iperf3Server(HOST, OTHER)) as server:
        with pytest.raises(TimeoutError):
            socket.create_connection(server.address, timeout=0.2)
        assert measure_iperf3(*server.address, MANY_BYTES, OTHER) > 0


@pytest.mark.fault("a silent connection to iperf3", "the server ends after 2 minutes")
def test_a_server_that_nobody_tests_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iperf3_probe, "MAX_SERVE_S", 0.3)
    with closing(Iperf3Server(HOST, HOST)) as server, socket.create_connection(server.address, timeout=20) as silent:
        assert server._process.wait(timeout=20) == 0
        assert is_hung_up(silent)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(server.address, timeout=20)

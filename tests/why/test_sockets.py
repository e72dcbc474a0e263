"""Counters that the kernel has of connections, and which connections a process has."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from support.why.made_records import training

from cgx_ray.sockets import TcpInfo, tcp_info, tcp_sockets
from cgx_ray.why import meters
from cgx_ray.why.meters import MAX_CONNECTIONS, ConnectionMeter, NodeMeter
from cgx_ray.why.watch import _QUIET_S, Watch

NUM_BYTES = 3 << 20


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        yield client, accepted


def send(client: socket.socket, accepted: socket.socket, num_bytes: int = NUM_BYTES) -> None:
    left = num_bytes
    while left:
        client.sendall(bytes(min(left, 1 << 16)))
        got = 0
        while got < min(left, 1 << 16):
            got += len(accepted.recv(1 << 16))
        left -= got


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a connection carries")
def test_the_kernel_counts_what_a_connection_carries(pair: tuple[socket.socket, socket.socket]) -> None:
    send(*pair)
    out, back = (tcp_info(one) for one in pair)
    assert out is not None
    assert back is not None
    # A busy machine is late with an acknowledgement, and TCP then sends a packet again, on loopback too.
    assert (out.sent_bytes - out.resent_bytes, out.received_bytes) == (NUM_BYTES, 0)
    assert (back.sent_bytes, back.received_bytes) == (0, NUM_BYTES)
    assert 0 <= out.resent_bytes < NUM_BYTES
    assert out.resent_bytes or not out.num_timeouts
    assert 0 < out.segment_bytes <= out.path_mtu
    assert out.least_round_trip_s is not None
    assert 0 < out.least_round_trip_s <= out.round_trip_s < 1
    assert out.bytes_per_s > 0


def test_a_process_finds_its_own_connections(pair: tuple[socket.socket, socket.socket]) -> None:
    assert {one.getsockname() for one in pair} <= {one.getsockname() for one in tcp_sockets()}


def test_a_meter_counts_from_its_begin(pair: tuple[socket.socket, socket.socket]) -> None:
    meter = ConnectionMeter()
    send(*pair)
    meter.begin()
    send(*pair, num_bytes=1 << 20)
    meter.sample()
    ends = {f"{host}:{port}" for host, port in (one.getsockname() for one in pair)}
    found = [one for one in meter.read() if {one.own, one.other} == ends]
    moved = sorted((one.sent_bytes - one.resent_bytes, one.received_bytes) for one in found)
    assert moved == [(0, 1 << 20), (1 << 20, 0)]
    assert len(meter.read()) <= MAX_CONNECTIONS


def test_connections_that_are_closed_again_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = TcpInfo(*[0] * 11)
    meter, opened = ConnectionMeter(), [list[int]()]
    monkeypatch.setattr(
        meters,
        "_open_connections",
        lambda: [(("10.0.0.1:1", f"10.0.0.2:{port}"), usual._replace(sent_bytes=port)) for port in opened[0]],
    )
    for first in range(1, 20 * MAX_CONNECTIONS, 100):
        opened[0] = list(range(first, first + 100))
        meter.sample()
        assert max(len(meter._last), len(meter._rates), len(meter._timeouts)) <= 2 * MAX_CONNECTIONS
    # The largest ones are kept.
    assert [one.sent_bytes for one in meter.read()] == list(range(first + 99, first + 99 - MAX_CONNECTIONS, -1))


def test_what_cards_carry_counts_as_others_only_while_nothing_is_under_way(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(tmp_path, 0, 1, dist.HashStore(), lambda _: training(1)[0], lambda act: act)
    count, sends = itertools.count(step=1000), [False]

    def carried() -> dict[str, int]:
        if sends[0]:
            send(*pair, num_bytes=1 << 16)
        return {"lo": next(count)}

    monkeypatch.setattr("cgx_ray.why.watch.card_bytes", carried)
    rates = []
    for sends[0] in (True, False):
        watch._look()
        (loopback,) = (card for card in watch.node.read(asks_gpus=False)[0].cards if card.kind == "loopback")
        rates.append(loopback.quiet_bytes_per_s)
    assert rates[0] is None
    assert 0 < rates[1] <= 1000 / _QUIET_S


def test_a_card_that_carried_nothing_is_quiet_not_unknown() -> None:
    meter = NodeMeter()
    meter.add_quiet({"lo": 5}, {"lo": 5}, seconds=1.0)
    (loopback,) = (card for card in meter.read(asks_gpus=False)[0].cards if card.kind == "loopback")
    assert loopback.quiet_bytes_per_s == 0


def test_a_node_has_loopback_and_processors() -> None:
    meter = NodeMeter()
    meter.begin()
    facts, seen_s, waited_s = meter.read(asks_gpus=False)
    assert facts.num_processors >= 1
    assert facts.name == socket.gethostname()
    (loopback,) = (card for card in facts.cards if card.kind == "loopback")
    assert "127.0.0.1" in loopback.addresses
    assert seen_s > 0
    assert waited_s >= 0


def test_a_default_time_out_of_the_program_makes_no_connection_non_blocking() -> None:
    before_s = socket.getdefaulttimeout()
    with socket.socket() as own:
        assert own.getblocking()
        socket.setdefaulttimeout(30.0)
        try:
            assert any(True for _ in tcp_sockets())
        finally:
            socket.setdefaulttimeout(before_s)
        assert os.get_blocking(own.fileno())

"""Strangers at the servers of the monitors, over real sockets: they are disconnected, and honest probes get through."""

from __future__ import annotations

import errno
import itertools
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from support.strangers import HOST, honest_rate, is_hung_up, strangers

from cgx_ray.monitors import guarded_server, probe, round_trip
from cgx_ray.monitors.guarded_server import MAX_PER_PEER, GuardedServer, connect
from cgx_ray.monitors.probe import BulkServer
from cgx_ray.monitors.round_trip import EchoServer, round_trip_s

NUM_BYTES = 5_000_000
# What an honest client asks of each kind of server.
ASK = {
    EchoServer: lambda address: round_trip_s(*address, timeout_s=20),
    BulkServer: honest_rate,
}


@pytest.fixture(params=ASK, ids=["echo", "bulk"])
def server(request: pytest.FixtureRequest) -> Iterator[GuardedServer]:
    with closing(request.param(HOST)) as server:
        yield server


def honest(server: GuardedServer) -> float:
    return ASK[type(server)](server.address)


@pytest.mark.fault("1,000 silent connections to echo and bulk servers", "honest probes get through")
def test_a_thousand_silent_connections_do_not_stop_honest_probes_and_are_hung_up_on(
    server: GuardedServer, caplog: pytest.LogCaptureFixture
) -> None:
    with strangers(server.address.port, 1000) as silent:
        assert honest(server) > 0
        assert len(server._clients) <= MAX_PER_PEER
        assert all(is_hung_up(one) for one in silent)
    assert honest(server) > 0
    wait_until(lambda: not server._clients)
    logged = [message for message in caplog.messages if message.startswith(f"{HOST}:{server.address.port}: ")]
    assert len(logged) == 2, logged
    assert "connections are open" in logged[0]
    assert "did not show the token in 2 s" in logged[1]


def test_silent_connections_do_not_keep_the_thread_busy(server: GuardedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rounds = itertools.count()
    look = type(server)._patience_s

    def counted(server: GuardedServer) -> float | None:
        next(num_rounds)
        return look(server)

    monkeypatch.setattr(GuardedServer, "_patience_s", counted)
    with strangers(server.address.port, 150):
        time.sleep(1.0)
        # A round per connection, one per hang-up, and four per second.
        assert next(num_rounds) <= 150 + 150 + 20


@pytest.mark.parametrize("says", [b"GET / HTTP/1.1\r\nHost: " + b"x" * 32, bytes(32), b"0" * 32, b"x" * 31])
def test_who_does_not_show_the_token_gets_no_answer(server: GuardedServer, says: bytes) -> None:
    with strangers(server.address.port, 3, says) as others:
        assert all(is_hung_up(one) for one in others)
    assert honest(server) > 0


def test_a_token_that_comes_byte_by_byte_must_be_whole_within_its_time(
    server: GuardedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_server, "HELLO_S", 0.3)
    slow = socket.create_connection(server.address[:2], timeout=20)
    with closing(slow), pytest.raises(OSError, match=r"reset|pipe"):
        drip(slow, server.address.token[:-1].encode(), every_s=0.1)
    assert honest(server) > 0


def drip(client: socket.socket, text: bytes, every_s: float) -> None:
    for byte in text:
        client.sendall(bytes([byte]))
        time.sleep(every_s)


def test_another_servers_token_is_refused(server: GuardedServer) -> None:
    with closing(EchoServer(HOST)) as other:
        wrong = server.address._replace(token=other.address.token)
        with pytest.raises(ConnectionError, match=f"{HOST}:{server.address.port} hung up: it was given another token"):
            ASK[type(server)](wrong)


def test_an_address_is_printed_without_its_token_and_reaches_other_processes_with_it(server: GuardedServer) -> None:
    address = server.address
    assert str(address) == f"{address}" == repr(address) == f"{HOST}:{address.port}"
    assert pickle.loads(pickle.dumps(address)) == address
    assert len(address.token) == 32
    with closing(type(server)(HOST)) as other:
        assert other.address.token != address.token


def test_clients_with_the_token_have_a_limit_too(server: GuardedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_server, "MAX_PER_PEER", 2)
    first = connect(*server.address, timeout_s=20)
    second = socket.create_connection(server.address[:2], timeout=20)
    second.sendall(server.address.token.encode())
    wait_until(lambda: sum(client.is_known for client in list(server._clients.values())) == 2)
    with pytest.raises(OSError, match=r"hung up|reset|pipe"):
        connect(*server.address, timeout_s=20)
    first.close()
    second.close()
    wait_until(lambda: not server._clients)
    assert honest(server) > 0


def test_who_crowds_the_server_makes_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback has many addresses, so one machine can stand for two."""
    monkeypatch.setattr(guarded_server, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(guarded_server, "HELLO_S", 60.0)
    with closing(EchoServer(HOST)) as server:
        at = server.address[:2]
        crowd = [socket.create_connection(at, timeout=20, source_address=("127.0.0.3", 0)) for _ in range(3)]
        other = socket.create_connection(at, timeout=20, source_address=("127.0.0.4", 0))
        wait_until(lambda: len(server._clients) == 4)
        assert round_trip_s(*server.address, timeout_s=20) > 0
        assert is_hung_up(crowd[0])
        other.sendall(server.address.token.encode())
        assert other.recv(1) == guarded_server.WELCOME
        for one in (*crowd, other):
            one.close()


@pytest.mark.fault("a server may open no more files", "it pauses, logs that, and goes on")
def test_without_file_descriptors_the_server_pauses_and_then_goes_on(
    server: GuardedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried_s: list[float] = []
    accept = socket.socket.accept

    def fail_at_first(listener: socket.socket) -> tuple[socket.socket, object]:
        tried_s.append(time.monotonic())
        if len(tried_s) <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_at_first)
    assert honest(server) > 0
    pauses_s = [after - before for before, after in itertools.pairwise(tried_s[:4])]
    assert min(pauses_s) >= guarded_server._ACCEPT_PAUSE_S, "it does not pause between two tries"
    logged = [message for message in caplog.messages if "Too many open files" in message]
    assert len(logged) == 1, logged


def test_an_echo_client_that_falls_silent_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trip, "MAX_SILENCE_S", 0.3)
    with closing(EchoServer(HOST)) as server, connect(*server.address, timeout_s=20) as client:
        assert is_hung_up(client)


def test_an_echo_client_that_does_not_read_is_hung_up_on() -> None:
    with closing(EchoServer(HOST)) as server, connect(*server.address, timeout_s=20) as client:
        with pytest.raises(OSError, match=r"reset|pipe"):
            flood(client)
        assert round_trip_s(*server.address, timeout_s=20) > 0


def flood(client: socket.socket) -> None:
    for _ in range(10_000):
        client.sendall(bytes(1 << 16))


@pytest.mark.fault("a byte now and then into the bulk server", "disconnected; honest probes get through")
def test_a_byte_now_and_then_holds_the_bulk_server_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_PROBE_S", 0.5)
    with closing(BulkServer(HOST)) as bulk, connect(*bulk.address, timeout_s=20) as slow:
        with pytest.raises(OSError, match=r"reset|pipe"):
            drip(slow, bytes(1000), every_s=0.05)
        assert honest_rate(bulk.address) > 0


def test_a_silent_client_holds_the_bulk_server_for_as_long_as_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_PROBE_S", 2.0)
    with closing(BulkServer(HOST)) as bulk, connect(*bulk.address, timeout_s=20) as silent:
        assert honest_rate(bulk.address) > 0
        assert is_hung_up(silent)


def test_who_sends_before_its_turn_is_hung_up_on_and_not_read() -> None:
    with closing(BulkServer(HOST)) as bulk, connect(*bulk.address, timeout_s=20) as first:
        with socket.create_connection(bulk.address[:2], timeout=20) as early:
            early.sendall(bulk.address.token.encode() + bytes(100))
            assert is_hung_up(early)
        first.shutdown(socket.SHUT_WR)
        assert first.recv(8, socket.MSG_WAITALL) == bytes(8), "no bytes, no rate"
        assert honest_rate(bulk.address) > 0


@pytest.mark.fault("a flood into the bulk server", "not read, and disconnected")
def test_a_flood_of_strangers_is_not_read() -> None:
    with closing(BulkServer(HOST)) as bulk:
        stranger = socket.create_connection(bulk.address[:2], timeout=20)
        with closing(stranger), pytest.raises(OSError, match=r"reset|pipe"):
            flood(stranger)
        assert honest_rate(bulk.address) > 0


@pytest.mark.fault("a flood of small packets with the token", "memory stays bounded")
def test_a_flood_of_small_packets_takes_bounded_memory_and_still_gives_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_MAX_ARRIVALS", 500)
    with closing(BulkServer(HOST)) as bulk:
        monkeypatch.setattr(probe, "_READ_BYTES", 1 << 12)
        assert honest_rate(bulk.address, NUM_BYTES) > 0
        assert 250 <= len(bulk._arrivals) <= 500
        assert sum(num_bytes for _, num_bytes in bulk._arrivals) == NUM_BYTES


def wait_until(claim: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not claim():
        assert time.monotonic() < end_s, "not within 20 s"
        time.sleep(0.01)

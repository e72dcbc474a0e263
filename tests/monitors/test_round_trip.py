"""Round trips to an echo server, and their errors."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

import pytest

from cgx_ray.monitors.guarded_server import WELCOME
from cgx_ray.monitors.round_trip import EchoServer, round_trip_s

HOST = "127.0.0.1"
TOKEN = "0" * 32


def test_echo_server_answers_several_clients_and_then_closes() -> None:
    server = EchoServer(HOST)
    with socket.create_connection(server.address[:2], timeout=5) as idle:
        found: list[float] = []
        threads = [
            threading.Thread(target=lambda: found.append(round_trip_s(*server.address, timeout_s=30, gap_s=0)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert all(0 < seconds < 30 for seconds in found), found
        server.close()
        assert idle.recv(1) == b"", "the server left a connection open"
    with pytest.raises(OSError, match="refused"):
        round_trip_s(*server.address)
    server.close()


def test_a_busy_peer_does_not_make_a_round_trip_longer() -> None:
    delays_s = [0.6, 0.4, 0.3]

    def answer_late(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            client.recv(len(TOKEN), socket.MSG_WAITALL)
            client.sendall(WELCOME)
            for delay_s in delays_s:
                message = client.recv(64)
                time.sleep(delay_s)
                client.sendall(message)

    with closing(socket.create_server((HOST, 0))) as listener:
        thread = threading.Thread(target=answer_late, args=(listener,))
        thread.start()
        found_s = round_trip_s(HOST, listener.getsockname()[1], TOKEN, num_probes=3, timeout_s=10, gap_s=0)
        thread.join()
    # The kernel's handshake took no delay.
    assert 0 < found_s < 0.3, found_s


def test_a_peer_that_accepts_and_never_answers_times_out() -> None:
    with closing(socket.create_server((HOST, 0))) as listener, pytest.raises(TimeoutError):
        round_trip_s(HOST, listener.getsockname()[1], TOKEN, timeout_s=0.1)


def test_a_peer_that_hangs_up_or_answers_nonsense_is_a_connection_error() -> None:
    def misbehave(listener: socket.socket) -> None:
        for answer in (b"", WELCOME, WELCOME + b"HTTP/1.1"):
            client, _ = listener.accept()
            with client:
                client.recv(64)
                client.sendall(answer)
                if answer:
                    client.recv(64)

    with closing(socket.create_server((HOST, 0))) as listener:
        thread = threading.Thread(target=misbehave, args=(listener,))
        thread.start()
        with pytest.raises(ConnectionError, match="hung up: it was given another token"):
            round_trip_s(HOST, listener.getsockname()[1], TOKEN)
        with pytest.raises(ConnectionError, match="closed"):
            round_trip_s(HOST, listener.getsockname()[1], TOKEN)
        with pytest.raises(ConnectionError, match="not an echo server"):
            round_trip_s(HOST, listener.getsockname()[1], TOKEN)
        thread.join()


def test_an_address_of_another_node_is_refused() -> None:
    # 192.0.2.0/24 is reserved for documentation, so no node has it.
    with pytest.raises(OSError, match="assign"):
        EchoServer("192.0.2.1")

"""Strangers at the port where a rank without Ray serves its metrics: Prometheus still reads them."""

from __future__ import annotations

import errno
import itertools
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.strangers import HOST, is_hung_up, strangers

from cgx_ray.monitors import endpoint as endpoint_module
from cgx_ray.monitors.endpoint import MAX_READERS, Endpoint


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with closing(Endpoint(HOST, 0)) as endpoint:
        yield endpoint


def read(endpoint: Endpoint) -> int:
    with urllib.request.urlopen(f"http://{HOST}:{endpoint.address[1]}/metrics", timeout=20) as answer:
        status: int = answer.status
    return status


@pytest.mark.fault("1,000 silent connections to `serve_metrics`", "Prometheus still reads")
@pytest.mark.parametrize("says", [b"", b"GET /metrics HTTP/1.1\r\nHost: a"])
def test_a_thousand_silent_connections_take_few_threads_and_do_not_stop_prometheus(
    endpoint: Endpoint, says: bytes
) -> None:
    before = threading.active_count()
    with strangers(endpoint.address[1], 1000, says) as silent:
        assert read(endpoint) == 200
        assert len(endpoint._server._readers) <= MAX_READERS
        while threading.active_count() > before + MAX_READERS:
            time.sleep(0.01)  # those that were disconnected are ending
        assert all(is_hung_up(one) for one in silent)
    assert read(endpoint) == 200
    while endpoint._server._readers:
        time.sleep(0.01)


def test_a_slow_reader_makes_room(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "MAX_READERS", 2)
    with strangers(endpoint.address[1], 2, b"GET /") as slow:
        while len(endpoint._server._readers) < 2:
            time.sleep(0.01)
        assert read(endpoint) == 200
        assert is_hung_up(slow[0])


def test_without_file_descriptors_it_pauses_and_then_goes_on(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_failures = itertools.count()
    accept = socket.socket.accept
    end_s = time.monotonic() + 0.5

    def fail_at_first(listener: socket.socket) -> tuple[socket.socket, object]:
        if time.monotonic() < end_s:
            next(num_failures)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_at_first)
    assert read(endpoint) == 200
    assert next(num_failures) <= 6, "it does not pause between two tries"

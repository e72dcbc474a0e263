"""Metrics without Ray: an HTTP endpoint that Prometheus reads, with a registry of its own."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app

from cgx_ray.monitors.export import METRICS, STEP_SECONDS_BOUNDS

logger = logging.getLogger(__name__)

# Readers at a time, each in a thread. Prometheus is one; an answer takes milliseconds.
MAX_READERS = 16
# Seconds for which a reader may be silent.
SILENCE_S = 2.0
# Seconds until the next try after a connection could not be accepted, for example for want of file descriptors.
_ACCEPT_PAUSE_S = 0.1


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log no request: Prometheus makes one every few seconds."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves each reader in a thread. Beyond MAX_READERS the oldest is disconnected: it is silent or slow."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._readers: list[socket.socket] = []
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            # The base class would try again at once and without end.
            time.sleep(_ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._readers.append(request)
            if len(self._readers) > MAX_READERS:
                # Its thread finds the end of the connection, and closes it.
                _hang_up(self._readers.pop(0))
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            if request in self._readers:
                self._readers.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("%s did not read the metrics", client_address, exc_info=True)


def _hang_up(reader: socket.socket) -> None:
    try:
        reader.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("a reader of the metrics had already gone")


class Endpoint:
    """A `Sink` that serves what is set, under the names that Ray would give it, so that the same boards show it.

    address  (host, port)
    """

    def __init__(self, host: str, port: int) -> None:
        """Listen on `host`; on any free port if `port` is 0. Raises OSError if that is not possible."""
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._server = _MetricsServer(host, port)
        self._server.set_app(make_wsgi_app(self._registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="cgx-ray-metrics", daemon=True)
        self._thread.start()
        self.address: tuple[str, int] = (host, self._server.server_port)

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        gauge = self._metric(name)
        assert isinstance(gauge, Gauge)
        gauge.labels(**labels).set(value)

    def increase(self, name: str, by: float, labels: Mapping[str, str]) -> None:
        counter = self._metric(name)
        assert isinstance(counter, Counter)
        # As in Ray, a counter is served from its first event on.
        if by > 0:
            counter.labels(**labels).inc(by)

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        histogram = self._metric(name)
        assert isinstance(histogram, Histogram)
        histogram.labels(**labels).observe(value)

    def close(self) -> None:
        """Stop listening. The series end with it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _metric(self, name: str) -> Counter | Gauge | Histogram:
        if name not in self._metrics:
            metric = METRICS[name]
            served, labels = f"ray_{name}", metric.labels
            if metric.kind == "histogram":
                bounds = tuple(STEP_SECONDS_BOUNDS)
                self._metrics[name] = Histogram(served, metric.help, labels, registry=self._registry, buckets=bounds)
            else:
                kind = Counter if metric.kind == "counter" else Gauge
                self._metrics[name] = kind(served, metric.help, labels, registry=self._registry)
        return self._metrics[name]

"""Metrics without Ray: an HTTP endpoint that Prometheus reads, with a registry of its own."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from cgx_ray.monitors.export import METRICS, STEP_SECONDS_BOUNDS


class Endpoint:
    """A `Sink` that serves what is set, under the names that Ray would give it, so that the same boards show it.

    address  (host, port)
    """

    def __init__(self, host: str, port: int) -> None:
        """Listen on `host`; on any free port if `port` is 0. Raises OSError if that is not possible."""
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
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

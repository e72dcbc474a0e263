"""Metrics through Ray, which serves them on each node's metrics port until the process that has set them ends."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ray.util import metrics

from cgx_ray.monitors.export import METRICS, STEP_SECONDS_BOUNDS


class RaySink:
    """A `Sink` whose metrics are registered when they are first set, once per process."""

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        _metric(name).set(value, labels)

    def increase(self, name: str, by: float, labels: Mapping[str, str]) -> None:
        # Ray refuses an increase by 0. A counter that has never been increased is not served.
        if by > 0:
            _metric(name).inc(by, labels)

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        _metric(name).observe(value, labels)


@cache
def _metric(name: str) -> Any:
    metric = METRICS[name]
    if metric.kind == "histogram":
        return metrics.Histogram(name, metric.help, boundaries=STEP_SECONDS_BOUNDS, tag_keys=metric.labels)
    kind = metrics.Counter if metric.kind == "counter" else metrics.Gauge
    return kind(name, metric.help, tag_keys=metric.labels)

"""Metrics of one rank without Ray: a thread that carries the engine's samples to an endpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cgx_ray.monitors.endpoint import Endpoint
from cgx_ray.monitors.node_metrics import NodeMetrics
from cgx_ray.monitors.sample import StepSample

INTERVAL_S = 1.0


class ServedMetrics:
    """Serves the metrics of a rank until `close`. `address`: its (host, port)."""

    def __init__(self, take_samples: Callable[[], Sequence[StepSample]], run_name: str, host: str, port: int) -> None:
        """Start to listen on `host` and to take samples. Raises OSError if the port is in use."""
        self._take_samples = take_samples
        self._endpoint = Endpoint(host, port)
        self.address = self._endpoint.address
        self._metrics = NodeMetrics(self._endpoint, run_name)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="cgx-ray-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._endpoint.close()

    def _carry(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            self._metrics.export_steps(self._take_samples())

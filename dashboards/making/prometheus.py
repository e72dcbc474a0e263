"""Starts a private Prometheus on loopback and queries it over HTTP. It ends with this process."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgx_ray.errors import CGXError

# Seconds until it answers; it takes less than one unless the machine is busy.
_START_TIMEOUT_S = 60.0


class PrometheusError(CGXError):
    """Prometheus did not start, or refused a query. The message holds its own words."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer: its labels, and (seconds since 1970, value) pairs."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]


class PrometheusServer:
    """The HTTP interface of a running Prometheus."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def query(self, expression: str) -> list[Series]:
        """Return the series of `expression` now. Raises PrometheusError if Prometheus refuses it."""
        found = self._get("query", query=expression)["result"]
        return [Series(one["metric"], _points([one["value"]])) for one in found]

    def query_range(self, expression: str, start_s: float, end_s: float, step_s: float) -> list[Series]:
        """Return the series of `expression` between two times. Raises PrometheusError if Prometheus refuses it."""
        found = self._get("query_range", query=expression, start=start_s, end=end_s, step=step_s)["result"]
        return [Series(one["metric"], _points(one["values"])) for one in found]

    def rules(self) -> list[dict[str, Any]]:
        """Return the recording and alert rules with their health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, name: str, **arguments: object) -> dict[str, Any]:
        url = f"{self.url}/api/v1/{name}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                data: dict[str, Any] = json.load(answer)["data"]
                return data
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"Prometheus refused {arguments}: {error.read().decode()}") from error


def _points(found: Sequence[tuple[float, str]]) -> list[tuple[float, float]]:
    return [(time_s, float(value)) for time_s, value in found]


@contextmanager
def prometheus(discovery: Path, folder: Path, *, rules: Path, interval_s: int = 1) -> Iterator[PrometheusServer]:
    """Start Debian's Prometheus on a free port of loopback; end it with the body.

    discovery   Ray's file of the addresses to read, `prom_metrics_service_discovery.json` in the session's folder
    folder      for its data and log
    rules       file of recording and alert rules
    interval_s  seconds between two readings, and between two evaluations of the rules

    Raises PrometheusError if it is not installed or does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "prometheus.yml"
    # JSON is YAML too.
    interval = f"{interval_s}s"
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": interval, "evaluation_interval": interval},
                "rule_files": [str(rules.resolve())],
                "scrape_configs": [
                    {
                        "job_name": "ray",
                        "file_sd_configs": [{"files": [str(discovery)], "refresh_interval": "1s"}],
                    }
                ],
            }
        )
    )
    port = _free_port()
    server, log = PrometheusServer(port), folder / "prometheus.log"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"], stdout=output, stderr=output
            )
        except FileNotFoundError as error:
            raise PrometheusError("prometheus is not installed; run: apt-get install prometheus") from error
    try:
        end_s = time.monotonic() + _START_TIMEOUT_S
        while not server.is_ready():
            if process.poll() is not None or time.monotonic() > end_s:
                raise PrometheusError(f"prometheus did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port

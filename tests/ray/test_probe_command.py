"""`cgx-ray probe` on a real Ray cluster, and its output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from rich.console import Console

from cgx_ray.commands import probe as probe_command
from cgx_ray.commands.probe import describe_ways, plot_ways, probe_nodes, way_table
from cgx_ray.errors import ConfigError
from cgx_ray.monitors import iperf3_process
from cgx_ray.monitors.probe import NodePath, Prober

HOSTS = ["10.0.0.1", "10.0.0.2"]
WAYS = {
    ("10.0.0.1", "10.0.0.2"): NodePath(latency_s=1e-3, bytes_per_s=125e6, error=0.02, tool="iperf3", hops=2),
    ("10.0.0.2", "10.0.0.1"): NodePath(latency_s=1e-3, bytes_per_s=12.5e6, error=0.3, tool="tcp", hops=None),
}


def test_table_picture_and_json_have_every_way(tmp_path: Path) -> None:
    console = Console(width=100, record=True)
    console.print(way_table(HOSTS, WAYS))
    text = console.export_text()
    for part in ("1000 ±2%", "100 ±30%", "1.00, 2"):
        assert part in text, text
    plot_ways(HOSTS, WAYS, tmp_path / "network.png")
    assert (tmp_path / "network.png").read_bytes().startswith(b"\x89PNG")
    described = json.loads(json.dumps(describe_ways(HOSTS, WAYS)))
    assert described["hosts"] == HOSTS
    assert described["ways"][1] == {
        "from": "10.0.0.2",
        "to": "10.0.0.1",
        "latency_s": 1e-3,
        "bytes_per_s": 12.5e6,
        "error": 0.3,
        "tool": "tcp",
        "hops": None,
    }


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of a Ray cluster of one node."""
    context = ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


def test_probes_go_both_ways(address: str) -> None:
    (node,) = ray.nodes()
    # Loopback has more than one address, so one node can stand for two.
    hosts = {"127.0.0.1": node["NodeID"], "127.0.0.2": node["NodeID"]}
    done: list[tuple[str, str]] = []
    ways = probe_nodes(hosts, done.append, counts_hops=True)
    assert sorted(done) == sorted(ways) == [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")]
    assert all(way.bytes_per_s > 0 and way.latency_s > 0 and way.hops == 1 for way in ways.values()), ways
    assert {way.tool for way in ways.values()} == {"iperf3"}


def test_a_failed_probe_is_one_clear_error_with_the_pair(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(Prober):
        def probe(self, *args: object, **options: object) -> NodePath:
            raise ConnectionRefusedError("connection refused by 127.0.0.2")

    monkeypatch.setattr(probe_command, "Prober", Unreachable)
    (node,) = ray.nodes()
    hosts = {"127.0.0.1": node["NodeID"], "127.0.0.2": node["NodeID"]}
    with pytest.raises(
        ConfigError, match=r"^the probe from 127\.0\.0\.\d to 127\.0\.0\.\d failed: connection refused by 127"
    ):
        probe_nodes(hosts, lambda pair: None)


def test_a_prober_that_is_killed_takes_its_iperf3_along(address: str) -> None:
    host = "127.0.0.7"  # no other test uses it
    prober = ray.remote(Prober).options(num_cpus=0).remote(host)
    ray.get(prober.start_iperf3.remote(host))
    servers = [process for process in psutil.process_iter() if is_server(process, host)]
    assert len(servers) == 1, servers
    ray.kill(prober)
    _, left = psutil.wait_procs(servers, timeout=60)
    assert not left, left


def is_server(process: psutil.Process, host: str) -> bool:
    try:
        return process.cmdline()[-6:-2] == [iperf3_process.__file__, "server", host, "0"]
    except psutil.Error:
        return False


def test_one_node_is_nothing_to_probe_and_no_cluster_is_one_clear_error(address: str) -> None:
    one, none = (
        subprocess.run(
            [sys.executable, "-m", "cgx_ray.cli", "probe", "--address", where],
            capture_output=True,
            text=True,
            check=False,
        )
        for where in (address, "127.0.0.1:1")
    )
    assert one.returncode == none.returncode == 2
    assert "the cluster has one node" in one.stderr, one.stderr
    assert "no Ray cluster at '127.0.0.1:1'" in none.stderr, none.stderr

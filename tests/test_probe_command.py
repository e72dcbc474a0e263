"""`cgx-ray probe` on a real Ray cluster in the lab, and what it shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cgx_ray.lab.namespaces import Lab
from cgx_ray.lab.ray_nodes import RayNodes, ray_env
from cgx_ray.monitors.probe import Way
from cgx_ray.report.ways import describe_ways, plot_ways, way_table

HOSTS = ["10.0.0.1", "10.0.0.2"]
WAYS = {
    ("10.0.0.1", "10.0.0.2"): Way(latency_s=1e-3, bytes_per_s=125e6, error=0.02, tool="iperf3", hops=2),
    ("10.0.0.2", "10.0.0.1"): Way(latency_s=1e-3, bytes_per_s=12.5e6, error=0.3, tool="tcp", hops=None),
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


@pytest.mark.skipif(Lab.available() is not None, reason=Lab.available() or "")
def test_probe_finds_both_ways_between_two_nodes(tmp_path: Path) -> None:
    with Lab(2, rate_bit_per_s=1e8) as lab, RayNodes(lab, tmp_path / "logs") as nodes:
        nodes.wait()
        argv = [sys.executable, "-m", "cgx_ray.cli", "probe", "--address", nodes.address, "--json", "-"]
        argv += ["--plot", str(tmp_path / "network.png")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        output, errors = lab.popen(0, argv, ray_env(), **pipes).communicate()
        assert output, errors
        ways = json.loads(output)["ways"]
        addresses = [host.address for host in lab.hosts]
    assert sorted((way["from"], way["to"]) for way in ways) == [tuple(addresses), tuple(reversed(addresses))]
    # 1448 of 1514 bytes are payload; below that only a busy machine takes it.
    assert all(0.5 * 0.956e8 < 8 * way["bytes_per_s"] < 1.05 * 0.956e8 for way in ways), ways
    assert (tmp_path / "network.png").exists()


@pytest.mark.skipif(Lab.available() is not None, reason=Lab.available() or "")
def test_one_node_is_nothing_to_probe_and_no_cluster_is_one_clear_error(tmp_path: Path) -> None:
    with Lab(1, rate_bit_per_s=1e9) as lab:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        argv = [sys.executable, "-m", "cgx_ray.cli", "probe"]
        none, _ = lab.popen(0, argv, {**ray_env(), "RAY_ADDRESS": ""}, **pipes).communicate()
        with RayNodes(lab, tmp_path / "logs") as nodes:
            nodes.wait()
            one, _ = lab.popen(0, [*argv, "--address", nodes.address], ray_env(), **pipes).communicate()
    assert "no Ray cluster at 'auto'" in none, none
    assert "the cluster has one node" in one, one

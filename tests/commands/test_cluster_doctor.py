"""`cgx-ray doctor --cluster`: what it says of nodes, on constructed reports and on a real cluster of one node."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from click.testing import CliRunner
from support.why.made_records import card, training

from cgx_ray.cli import main
from cgx_ray.commands import cluster_doctor
from cgx_ray.commands.cluster_doctor import NodeReport, findings_of

VERSIONS = {"python": "3.11.9", "cgx-ray": "1", "torch": "2.13.0", "ray": "2.56.0"}


def report(rank: int, node: dict[str, Any] | None = None, **given: Any) -> NodeReport:
    facts = replace(training()[rank].node, **(node or {}))
    usual: dict[str, Any] = {"versions": VERSIONS, "ports": "any", "refusal": "", "offset_s": 0.01, "answer_s": 0.1}
    return NodeReport(address=f"10.0.0.{rank + 1}", facts=facts, **{**usual, **given})


def test_nodes_that_are_alike_have_no_problem() -> None:
    found = findings_of([report(0), report(1)])
    assert [one.problem for one in found if one.problem] == []
    assert found[0].found == "eth0 (physical), 1 Gbit/s, full duplex, MTU 1500; ports any; /dev/shm 8192 MiB"


@pytest.mark.parametrize(
    ("other", "name", "problem"),
    [
        (report(1, {"cards": (card(address="10.0.0.2", mtu=9000),)}), "MTU", "nodes differ"),
        (report(1, versions={**VERSIONS, "torch": "2.11.0"}), "torch", "nodes differ"),
        (report(1, {"cards": (card(address="10.0.0.2", duplex="half"),)}), "10.0.0.2 (node-1)", "at the same time"),
        (report(1, offset_s=-3.0), "10.0.0.2 (node-1)", "its clock is 3 s off"),
        (report(1, refusal="all ports are in use"), "10.0.0.2 (node-1)", "all ports are in use"),
        (
            report(1, {"cards": (card(address="10.0.0.2"), card("eth1", "10.1.0.2", bit_per_s=1e10))}),
            "10.0.0.2 (node-1)",
            "eth1 is faster (10 Gbit/s)",
        ),
    ],
)
def test_what_is_wrong_with_a_node_is_named_with_its_remedy(other: NodeReport, name: str, problem: str) -> None:
    (found,) = (one for one in findings_of([report(0), other]) if one.problem)
    assert found.name == name
    assert problem in found.problem
    assert found.remedy


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    context = ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


def test_a_real_cluster_is_looked_at(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_doctor, "connect", lambda address: None)  # this process is connected
    done = CliRunner().invoke(main, ["doctor", "--cluster", address])
    assert done.exit_code == 0, done.output
    assert "MTU" in done.output
    assert "/dev/shm" in done.output


def test_all_nodes_are_asked_at_once_and_ctrl_c_ends_the_wait(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hosts = {f"127.0.0.{last}" for last in range(1, 4)}

    def report_never(host: str) -> None:
        (tmp_path / host).touch()
        time.sleep(1000)

    def interrupt() -> None:
        while {path.name for path in tmp_path.iterdir()} != hosts:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(cluster_doctor, "_report", report_never)
    monkeypatch.setattr(cluster_doctor, "_WAIT_S", 600.0)  # three workers start, beside other tests
    # A shell's background jobs ignore it, and pytest is often one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster_doctor._ask(dict.fromkeys(hosts, ray.get_runtime_context().get_node_id()))
    finally:
        signal.signal(signal.SIGINT, before)

"""Monitors over real sockets and a real local Ray: what they measure, and that they outlive what they talk to."""

from __future__ import annotations

import pickle
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import ray
from support.controller_facts import KnownFacts
from support.samples import step_sample

from bench.network.monitor_cost import monitor_rows, publishing_row
from cgx_ray.monitors.agent import NodeAgent
from cgx_ray.monitors.controller_metrics import ControllerMetrics
from cgx_ray.monitors.export import LABELS, METRICS, RUN, served_name
from cgx_ray.monitors.probe import BulkServer
from cgx_ray.monitors.ray_sink import RaySink
from cgx_ray.monitors.round_trip import EchoServer, Peers, round_trip_s
from cgx_ray.monitors.sample import CURVE_DENSITIES, Bandwidth, NodeSample
from cgx_ray.plan import Plan

HOST = "127.0.0.1"


def wait_until(claim: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if result := claim():
            return result
        time.sleep(0.05)
    pytest.fail(f"{what}: not within {timeout_s} s")


# The agent in a real Ray.


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        # Publish metrics every second instead of every ten.
        _system_config={"metrics_report_interval_ms": 1000},
    )
    yield
    ray.shutdown()


# Ray pickles a class inside a function by value. Its workers cannot import test modules.
def fake_controller() -> Any:
    @ray.remote(num_cpus=0)
    class FakeController:
        def __init__(self) -> None:
            self.samples: list[NodeSample] = []
            self.rejects = False
            self.order: str | None = None

        def observe(self, node_id: str, report: bytes, newest: int) -> tuple[str | None, list[Plan]]:
            if self.rejects:
                raise ValueError("no use for this")
            sample = pickle.loads(report)
            assert sample.node_id == node_id
            self.samples.append(sample)
            order, self.order = self.order, None
            return order, []

        def probe(self, node_id: str) -> None:
            self.order = node_id

        def next_order(self) -> str | None:
            return self.order

        def reject(self, rejects: bool) -> None:
            self.rejects = rejects

        def taken(self) -> list[NodeSample]:
            return self.samples

    return FakeController.remote()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("cgx_ray")]


@pytest.fixture
def agent(local_ray: None) -> Iterator[NodeAgent]:
    """An agent in the test's own process, so that the test can read its log. Its controllers are real actors."""
    agent = NodeAgent("a", "run", HOST, interval_s=0.05, latency_interval_s=0.1)
    yield agent
    agent.stop()


def test_agent_actor_sends_every_step_once_and_publishes_every_metric(local_ray: None) -> None:
    actor = ray.remote(NodeAgent).options(num_cpus=0).remote("a", "run", HOST, interval_s=0.2)
    controller = fake_controller()
    with closing(EchoServer(HOST)) as peer:
        own = ray.get(actor.address.remote())
        assert round_trip_s(*own) > 0
        ray.get(actor.start.remote({"a": own, "b": peer.address}, controller))
        for step in range(20):
            drift = 0.0 if step == 0 else 2e-8
            samples = [replace(step_sample(rank, step), num_local=2, weight_drift=drift) for rank in (0, 1)]
            ray.get(actor.report.remote(samples))

        def taken() -> list[NodeSample]:
            return ray.get(controller.taken.remote())

        def reported() -> list[tuple[int, int]]:
            return [(step.step, rank) for sample in taken() for step in sample.steps for rank in step.ranks]

        wait_until(lambda: len(reported()) >= 40, "40 steps")
        latest = wait_until(lambda: [sample for sample in taken() if sample.latency_s], "a latency")[-1]
        assert reported() == [(step, rank) for step in range(20) for rank in (0, 1)]
        assert latest.latency_s.keys() == {"b"}
        assert 0 < latest.latency_s["b"] < 0.5

        # There may be no broken packets, and older kernels report no pressure. Each average was finite.
        optional = {"cgx_ray_nic_errors", "cgx_ray_pressure", "cgx_ray_non_finite_steps"}
        wait_until(lambda: set(missing(served_metrics())) <= optional, "every metric")
        # Each of the two ranks had 20 steps of 1,500 bytes.
        sent = "ray_cgx_ray_wire_bytes_total{"
        wait_until(lambda: values(served_metrics(), sent) == [30_000, 30_000], "all bytes")
        text = served_metrics()
    ratios = [line for line in text.splitlines() if line.startswith("ray_cgx_ray_compression_ratio{")]
    assert len(ratios) == 2
    assert all(f'{RUN}="run"' in line and line.endswith(" 4.0") for line in ratios), ratios
    # The gain of ranks 0 and 1 is 0.5 and 0.6 at every density.
    assert values(text, "ray_cgx_ray_gain_at_density{") == pytest.approx([0.55] * len(CURVE_DENSITIES))
    ray.get(actor.stop.remote())


def served_metrics() -> str:
    """Return the text that Prometheus would read. The test itself sets the controller's metrics."""
    controller_metrics = ControllerMetrics(RaySink(), "run", "id", journal="/runs/run/decisions.jsonl")
    controller_metrics.export(KnownFacts(), num_journal_errors=1)
    return scrape()


def test_a_rank_that_is_no_longer_slow_is_set_to_zero(local_ray: None) -> None:
    controller_metrics = ControllerMetrics(RaySink(), "other run", journal="/runs/other/decisions.jsonl")
    controller_metrics.export(KnownFacts({1: 1e8, 2: 2e8}, frozenset({3})), num_journal_errors=0)
    controller_metrics.export(KnownFacts({2: 3e8}, frozenset()), num_journal_errors=0)

    def found() -> dict[str, list[float]]:
        lines = [line for line in scrape().splitlines() if f'{RUN}="other run"' in line]
        return {name: sorted(values("\n".join(lines), f"ray_cgx_ray_slow_{name}{{")) for name in expected}

    expected = {"link_bits_per_second": [0, 3e8], "rank": [0]}
    wait_until(lambda: found() == expected, str(expected))


def scrape() -> str:
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def test_a_peer_that_is_gone_has_no_latency_and_is_logged_once(
    agent: NodeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    controller = fake_controller()

    def last_latency_s() -> dict[str, float] | None:
        taken = ray.get(controller.taken.remote())
        return dict(taken[-1].latency_s) if taken else None

    with closing(EchoServer(HOST)) as peer:
        agent.start({"b": peer.address}, controller)
        wait_until(last_latency_s, "a latency")
    wait_until(lambda: last_latency_s() == {}, "no latency")
    time.sleep(0.5)  # five more attempts
    heard = logged(caplog)
    assert len(heard) == 1, heard
    assert "node b does not answer" in heard[0]


def test_agent_outlives_its_controller_says_so_once_and_takes_another(
    agent: NodeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    first = fake_controller()
    agent.start({}, first)
    wait_until(lambda: ray.get(first.taken.remote()), "a first sample")
    ray.kill(first)
    wait_until(lambda: logged(caplog), "a line about the controller")
    agent.report([step_sample(0, 0)])
    time.sleep(0.5)  # ten more intervals
    heard = logged(caplog)
    assert len(heard) == 1, heard
    assert "the controller does not answer" in heard[0]

    second = fake_controller()
    agent.start({}, second)
    agent.report([step_sample(0, 1)])
    wait_until(lambda: any(sample.steps for sample in ray.get(second.taken.remote())), "steps")


def test_an_agent_probes_the_node_that_the_controller_names_and_no_other(agent: NodeAgent) -> None:
    controller = fake_controller()
    with closing(EchoServer(HOST)) as echo, closing(BulkServer(HOST)) as bulk:
        agent.start({"b": echo.address}, controller, {"b": bulk.address})
        ray.get(controller.probe.remote("gone"))
        wait_until(lambda: ray.get(controller.next_order.remote()) is None, "order gone")

        def rates() -> list[Mapping[str, Bandwidth]]:
            # Order again: a probe finds no rate if a busy machine hands its bytes over at once.
            ray.get(controller.probe.remote("b"))
            return [one.bandwidth for one in ray.get(controller.taken.remote()) if one.bandwidth]

        found = wait_until(rates, "a rate")
        agent.stop()
    assert {node_id for rates in found for node_id in rates} == {"b"}
    assert found[0]["b"].bytes_per_s > 1e6


def test_a_node_that_falls_silent_again_is_named_again(caplog: pytest.LogCaptureFixture) -> None:
    with closing(EchoServer(HOST)) as gone:
        pass
    with closing(EchoServer(HOST)) as there:
        addresses = {"b": gone.address}
        peers = Peers(addresses)
        for address, answers in ((gone, 0), (there, 1), (gone, 0), (gone, 0)):
            addresses["b"] = address.address
            peers.measure(threading.Event())
            assert len(peers.latency_s) == answers
    heard = logged(caplog)
    assert len(heard) == 2, heard


def test_a_controller_that_rejects_a_sample_still_gets_the_next(
    agent: NodeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    controller = fake_controller()
    ray.get(controller.reject.remote(True))
    agent.start({}, controller)
    wait_until(lambda: logged(caplog), "a line about the rejection")
    ray.get(controller.reject.remote(False))
    wait_until(lambda: len(ray.get(controller.taken.remote())) > 3, "samples")
    heard = logged(caplog)
    assert len(heard) == 1, heard
    assert "no use for this" in heard[0]


def test_an_agent_takes_little_more_memory_than_an_actor_that_does_nothing(local_ray: None) -> None:
    memory = next(row for row in monitor_rows(0.5, warm_up_s=0.5) if row.name == "agent_memory")
    assert memory.met, memory


def test_the_bench_publishes_and_writes_what_a_controller_does(local_ray: None) -> None:
    assert publishing_row(num_rounds=1).value > 0


def test_an_agent_that_never_started_stops(agent: NodeAgent) -> None:
    agent.report([step_sample(0, 0)])
    agent.stop()
    with pytest.raises(OSError, match="refused"):
        round_trip_s(*agent.address())


def values(text: str, start: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith(start)]


def missing(text: str) -> list[str]:
    return [name for name in METRICS if f"\n{served_name(name)}" not in text]


def test_every_metric_has_only_known_labels_and_says_what_it_means() -> None:
    assert {label for metric in METRICS.values() for label in metric.labels} == LABELS.keys()
    assert all(metric.meaning.endswith(".") and metric.unit for metric in METRICS.values())
    # Prometheus' convention: the unit is part of the name.
    odd = [name for name, metric in METRICS.items() if metric.unit == "seconds" and not name.endswith("_seconds")]
    assert odd == []

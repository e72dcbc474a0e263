"""The agent's threads without Ray: an error does not end them."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing

import pytest

from cgx_ray.monitors import agent, node_monitor
from cgx_ray.monitors.agent import NodeAgent
from cgx_ray.monitors.node_monitor import measured_nodes
from cgx_ray.monitors.round_trip import EchoServer

HOST = "127.0.0.1"


@pytest.mark.fault("an unexpected error in an agent's thread", "logged once; the thread goes on")
def test_an_unexpected_error_is_logged_once_and_both_threads_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing_twice(work: Callable[..., object], counts: list[int]) -> Callable[..., object]:
        num_calls = itertools.count()

        def run(*args: object) -> object:
            if next(num_calls) < 2:
                raise KeyError("unexpected")
            counts.append(1)
            return work(*args)

        return run

    measured: list[int] = []
    published: list[int] = []
    monkeypatch.setattr(node_monitor.Peers, "measure", failing_twice(node_monitor.Peers.measure, measured))
    monkeypatch.setattr(agent.NodeMetrics, "export", failing_twice(lambda *_: None, published))
    node = NodeAgent("a", "run", HOST, interval_s=0.01, latency_interval_s=0.01)
    with closing(EchoServer(HOST)) as peer:
        node.start({"b": peer.address})
        end_s = time.monotonic() + 60
        while not (measured and published) and time.monotonic() < end_s:
            time.sleep(0.01)
        node.stop()
    assert measured
    assert published
    messages = [message for message in caplog.messages if "KeyError('unexpected')" in message]
    assert sorted(message.split()[3] for message in messages) == ["cgx-ray-latency", "cgx-ray-publish"], messages


def test_of_many_nodes_each_measures_the_latency_to_16_and_each_is_measured_by_16() -> None:
    names = [f"node {number:04}" for number in range(100)]
    found = [measured_nodes(name, names) for name in names]
    assert {len(others) for others in found} == {16}
    assert set(Counter(itertools.chain(*found)).values()) == {16}
    assert sorted(measured_nodes("b", "abc")) == ["a", "c"]
    assert measured_nodes("a", "a") == []

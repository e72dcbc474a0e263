"""The network as messages and probes show it, stepped over made-up reports."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.control_runs import QUIET, start

from cgx_ray.control.network.estimate import FEW
from cgx_ray.control.network.known_network import PROBE_HOLDS_S, KnownNetwork
from cgx_ray.control.network.traffic import StepTraffic
from cgx_ray.monitors.sample import Bandwidth, Burst, HostLoad, NodeSample, node_steps

MIB = 1 << 20


def _probed(rates: Mapping[str, float]) -> dict[str, Bandwidth]:
    return {node: Bandwidth(bytes_per_s=rate) for node, rate in rates.items()}


def _report(
    network: KnownNetwork,
    nodes: str,
    node: str,
    found: Mapping[str, Bandwidth] | None = None,
    *,
    host: HostLoad = QUIET,
    now_s: float = 0.0,
) -> None:
    """Report that `node` has a latency of 1 ms to the other `nodes`, each with one rank, and what it has probed."""
    latency_s = {other: 1e-3 for other in nodes if other != node}
    sample = NodeSample(node_id=node, time_s=now_s, steps=(), latency_s=latency_s, host=host, bandwidth=found or {})
    network.add_report(sample, [nodes.index(node)], now_s)


def test_probes_count_while_messages_are_not_sure(tmp_path: Path) -> None:
    run = start(tmp_path)

    def report(node_id: str, time_s: float, bandwidth: dict[str, float]) -> None:
        others = {other: 1e-3 for other in "ab" if other != node_id}
        run.loop.observe(
            NodeSample(
                node_id=node_id, time_s=time_s, steps=(), latency_s=others, host=QUIET, bandwidth=_probed(bandwidth)
            ),
            time_s,
        )

    for node_id in "ab":
        report(node_id, 0.0, {})
    assert run.loop.next_probe("a", 0.0) is None, "the first minute belongs to messages"
    assert (run.loop.next_probe("b", 60.0), run.loop.next_probe("a", 60.0)) == (None, "b")
    report("a", 1.0, {"b": 25e6})
    assert run.loop.facts().bandwidth_bits_per_s == 200e6
    report("b", 2 + PROBE_HOLDS_S, {})
    assert run.loop.facts().bandwidth_bits_per_s is None, "too old, though a is silent"
    assert run.loop.next_probe("b", 120.0) == "a"
    report("b", 3 + PROBE_HOLDS_S, {"a": 25e6})
    run.run(FEW)
    messages = run.loop.facts().bandwidth_bits_per_s
    assert messages == pytest.approx(1e9, rel=0.1)
    report("a", 4 + PROBE_HOLDS_S, {"b": 1.1 * messages / 8})
    assert run.loop.facts().bandwidth_bits_per_s == messages, "sure messages stand"
    assert (run.loop.next_probe("a", 300.0), run.loop.next_probe("b", 300.0)) == (None, None)


@pytest.mark.parametrize("ways", [("ab", "cd", "ba", "da"), ("ba", "cd", "ab", "ad")], ids=["from b", "to b"])
@pytest.mark.parametrize(("received", "known"), [(None, 1e6), (1.2e6, 1e6), (80e6, 100e6)])
def test_a_probe_of_a_slow_link_counts_unless_messages_come_through_it_faster(
    received: float | None, known: float, ways: Sequence[str]
) -> None:
    network = KnownNetwork()
    for node in "abcd":
        _report(network, "abcd", node)
    # Few bursts, so the messages are not sure.
    bursts = {rank: [Burst(MIB, MIB / received)] for rank in range(4)} if received is not None else {}
    pairs = {(a, b): received / 3 for a, b in itertools.permutations(range(4), 2)} if received is not None else {}
    for _ in range(2):
        network.add_step(StepTraffic(seconds=0.25, bursts=bursts, pair_rate=pairs), 1.0)
    # The last way clears the other end of the slow one.
    for way, rate in zip(ways, (100e6, 100e6, 1e6, 100e6), strict=True):
        _report(network, "abcd", way[0], _probed({way[1]: rate}), now_s=2.0)
    assert network.bandwidth is not None
    assert (network.bandwidth.value, network.bandwidth.source) == (known, "probes")
    assert network.slow == ({1: 1e6} if known == 1e6 else {})


WAYS = tuple(map("".join, itertools.permutations("abcd", 2)))


TO_D = tuple(way for way in WAYS if way[1] == "d")


OF_D = tuple(way for way in WAYS if "d" in way)


@pytest.mark.parametrize(
    ("ways", "slow_ways", "named"),
    [
        (WAYS, TO_D, {3}),
        (WAYS, OF_D, {3}),
        (["ab", "cd"], ["cd"], set()),
        (["ab", "ad"], ["ad"], {3}),
        (["ab", "ba"], ["ba"], set()),
        (["ab", "bc", "cd", "da"], ["cd", "da"], set()),
        (["ab", "cd", "bc", "db"], ["cd", "db"], {3}),
    ],
    ids=["down", "both", "either end", "other end cleared", "two nodes", "nobody cleared", "as granted"],
)
def test_probes_count_with_a_slow_node_and_name_it_once_the_other_end_was_fast_elsewhere(
    ways: Sequence[str], slow_ways: Sequence[str], named: set[int]
) -> None:
    network = KnownNetwork()

    for node in "abcd":
        _report(network, "abcd", node)
    for way in ways:
        _report(network, "abcd", way[0], _probed({way[1]: 1.25e6 if way in slow_ways else 1.25e8}))
    assert network.bandwidth is not None
    assert (network.bandwidth.value, network.bandwidth.source) == (1.25e6, "probes")
    assert network.bandwidth.low <= network.bandwidth.value <= network.bandwidth.high
    assert network.slow == dict.fromkeys(named, 1.25e6)


@pytest.mark.parametrize(("neighbour", "expected"), [(0.0, 10e6), (2e6, 8e6), (9e6, 2.5e6), (None, 2.5e6)])
def test_a_probe_beside_messages_finds_what_the_cards_carried_without_the_neighbours(
    neighbour: float | None, expected: float
) -> None:
    network = KnownNetwork()
    host = replace(QUIET, neighbour_bytes_per_s=neighbour)
    found = {"b": Bandwidth(bytes_per_s=2.5e6, sent=10e6, received=10e6)}
    _report(network, "ab", "b", host=host)
    _report(network, "ab", "a", found, host=host)
    assert network.bandwidth is not None
    assert network.bandwidth.value == expected


def test_a_slow_uplink_is_not_hidden_by_what_others_send_to_the_probed_node() -> None:
    network = KnownNetwork()
    report = partial(_report, network, "abc", host=replace(QUIET, neighbour_bytes_per_s=0.0))
    for node in "abc":
        report(node)
    report("a", {"b": Bandwidth(bytes_per_s=1e6, sent=2e6, received=12e6)})
    report("b", {"c": Bandwidth(bytes_per_s=12e6, sent=12e6, received=12e6)})
    report("c", {"a": Bandwidth(bytes_per_s=5e6, sent=11e6, received=12e6)})
    assert network.slow == {0: 2e6}


@pytest.mark.parametrize("received", [90e6, 200e6])
def test_where_all_uplinks_are_slower_than_all_downlinks_probes_find_the_uplinks_and_name_nobody(
    received: float,
) -> None:
    network = KnownNetwork()
    report = partial(_report, network, "abcd", host=replace(QUIET, neighbour_bytes_per_s=0.0))
    for node in "abcd":
        report(node)
    for source, target in ("ab", "cd", "ba", "dc"):
        report(source, {target: Bandwidth(bytes_per_s=20e6, sent=50e6, received=received)})
    assert network.bandwidth is not None
    assert network.bandwidth.value == 50e6
    assert network.slow == {}


def test_of_three_nodes_with_slow_uplinks_probes_name_none() -> None:
    network = KnownNetwork()
    report = partial(_report, network, "abc", host=replace(QUIET, neighbour_bytes_per_s=0.0))
    for node in "abc":
        report(node)
    for source, target in ("cb", "ac", "ca", "ab"):
        report(source, {target: Bandwidth(bytes_per_s=20e6, sent=50e6, received=100e6)})
        assert network.bandwidth is not None
        assert network.bandwidth.value == 50e6
        assert network.slow == {}


@pytest.mark.parametrize(
    ("shares", "num_local", "is_known"),
    [((0.9,), 1, True), ((0.8,), 1, False), ((0.8, 1.0), 1, True), ((0.8,), 2, True)],
    ids=["about alike", "slower", "slower, then alike", "two ranks per node"],
)
def test_messages_above_what_all_ranks_send_are_not_sure(
    shares: Sequence[float], num_local: int, is_known: bool
) -> None:
    network, nodes = KnownNetwork(), "abcd"
    for index, node in enumerate(nodes):
        sample = NodeSample(node_id=node, time_s=0.0, steps=(), latency_s={}, host=QUIET)
        network.add_report(sample, range(index * num_local, (index + 1) * num_local), 0.0)
    ranks = range(4 * num_local)
    for step, share in enumerate(share for share in shares for _ in range(40)):
        bursts = {rank: [Burst(MIB, MIB / 12.5e6)] * 4 for rank in ranks}
        sent = share * 12.5e6 / (len(ranks) - 1)
        # Ranks seldom send messages that are long enough.
        pairs = dict.fromkeys(itertools.permutations(ranks, 2), sent) if step % 3 == 0 else {}
        network.add_step(StepTraffic(seconds=0.5, bursts=bursts, pair_rate=pairs), step / 2)
    assert network.is_known == is_known
    assert network.slow == {}
    assert network.num_changes == 0


def test_a_slow_link_by_messages_stands_until_probes_from_and_to_its_node_are_faster() -> None:
    network = KnownNetwork()
    for node in "abcd":
        _report(network, "abcd", node)
    for step in range(20):
        # The slow link's own bursts scatter too much to be sure.
        rates = [25e6, 25e6, 6e6 if step % 2 else 3e6, 25e6]
        bursts = {rank: [Burst(MIB, MIB / rate)] * 3 for rank, rate in enumerate(rates)}
        network.add_step(StepTraffic(seconds=0.5, bursts=bursts), step / 2)
    for source, target in ("ab", "bd", "ca"):
        _report(network, "abcd", source, _probed({target: 24e6}))
        assert network.bandwidth is not None
        assert not network.bandwidth.is_sure
        assert network.bandwidth.value == 6e6
        assert network.slow == {2: 6e6}
    _report(network, "abcd", "d", _probed({"c": 24e6}))
    assert network.slow == {}
    assert (network.bandwidth.value, network.bandwidth.source) == (24e6, "probes")


def test_what_a_node_probed_counts_no_longer_once_it_is_silent(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.latency_s = 1e-3
    run.run(1)
    far = NodeSample(
        node_id="far",
        time_s=0.0,
        steps=(),
        latency_s={"node": 0.101},
        host=QUIET,
        bandwidth=_probed({"node": 1e6}),
    )
    run.loop.observe(far, 1.0)
    assert run.loop.facts().latency_s == pytest.approx(0.051)
    run.step = 2 + int(PROBE_HOLDS_S)
    run.run(1)
    assert run.loop.facts().latency_s == pytest.approx(1e-3)


def test_the_number_of_link_changes_only_grows(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.run(20)
    assert run.loop.facts().num_link_changes == 0
    run.gbps = 0.1
    run.run(20)
    slower = run.loop.facts().num_link_changes
    assert slower > 0
    run.latency_s = 0.15
    run.run(1)
    assert run.loop.facts().num_link_changes > slower


def test_latencies_from_before_a_change_do_not_count_until_all_nodes_have_measured_again(tmp_path: Path) -> None:
    run, nodes = start(tmp_path), "abcd"
    said = {node: {peer: 1e-3 + 1e-6 * i for i, peer in enumerate(nodes) if peer != node} for node in nodes}

    def step(latency_s: float) -> float | None:
        lag_s = [{peer: latency_s for peer in range(4) if peer != rank} for rank in range(4)]
        samples = [replace(run.sample(rank), lag_s=lag_s[rank]) for rank in range(4)]
        run.step += 1
        for node, sample in zip(nodes, samples, strict=True):
            steps = node_steps([sample])
            report = NodeSample(node_id=node, time_s=run.step, steps=steps, latency_s=dict(said[node]), host=QUIET)
            run.loop.observe(report, float(run.step))
        return run.loop.facts().latency_s

    for _ in range(20):
        assert step(1e-3) == pytest.approx(1e-3, rel=0.01)
    changes = run.loop.facts().num_link_changes
    while run.loop.facts().num_link_changes == changes:
        step(20e-3)
    # Agents measure one peer after another, and one agent is late.
    for peer in nodes:
        for node in nodes[1:]:
            said[node] |= {peer: 30e-3} if peer != node else {}
            assert step(20e-3) == pytest.approx(20e-3, rel=0.01)
    said["a"] = dict.fromkeys("bcd", 15e-3)
    for node in nodes[1:]:
        said[node] = {peer: 15e-3 for peer in nodes if peer != node}
    assert step(20e-3) == pytest.approx(15e-3, rel=0.01), "the shorter of both, once all have measured"

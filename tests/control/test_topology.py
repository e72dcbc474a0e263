"""Near ranks, slow links and silent nodes."""

from __future__ import annotations

import itertools

from cgx_ray.control.network.topology import SilentNodes, clusters, slow_links

PAIRS = list(itertools.combinations(range(4), 2))


def test_clusters_are_hosts_whatever_the_order_of_pairs() -> None:
    trips = {(b, a): 3e-5 * (1 + 0.5 * (a == 0)) if a % 3 == b % 3 else 1e-3 for a, b in PAIRS}
    assert clusters(trips) == [[0, 3], [1], [2]]
    assert clusters({pair: 1e-3 * (1 + 0.1 * sum(pair)) for pair in PAIRS}) == [[0, 1, 2, 3]]
    assert clusters({}) == []


def test_two_links_do_not_say_which_of_them_is_slow() -> None:
    assert slow_links({0: 1.0, 1: 10.0}) == {}
    assert slow_links({0: 1.0, 1: 10.0, 2: 9.0}) == {0: 1.0}


def test_a_node_that_answers_nobody_any_more_is_silent_until_it_does() -> None:
    silent = SilentNodes()
    nodes = set("abcd")
    silent.add_answers("a", [])
    assert silent.node_ids == set(), "nobody has asked yet"
    for node in sorted(nodes):
        silent.add_answers(node, nodes - {node})
    assert silent.node_ids == set()
    for node in "abc":
        silent.add_answers(node, nodes - {node, "d"})
    assert silent.node_ids == {"d"}
    # The reports of the node that is cut off do not matter: they may arrive late or never.
    silent.add_answers("d", [])
    assert silent.node_ids == {"d"}
    silent.add_answers("b", nodes - {"b"})
    assert silent.node_ids == set()
    for node in nodes:
        silent.add_answers(node, [])
    assert silent.node_ids == set(), "all at once: nobody knows who is cut off"

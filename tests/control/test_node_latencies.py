"""The median of the nodes' latencies, beside a plain one."""

from __future__ import annotations

import random
from statistics import median

from cgx_ray.control.network.known_network import NodeLatencies


def test_the_median_is_that_of_the_newest_latency_of_each_node() -> None:
    draw, kept, found = random.Random(0), dict[str, tuple[float, float]](), NodeLatencies()
    for now in range(400):
        name = f"node {draw.randrange(9)}"
        if draw.random() < 0.2:
            found.remove(name)
            kept.pop(name, None)
        elif draw.random() < 0.1:
            found.forget_before(now - 5.0)
            kept = {node: one for node, one in kept.items() if one[0] >= now - 5}
        else:
            # Few values, so that several nodes have the same.
            latency_s = draw.choice([1e-4, 2e-4, 5e-4])
            found.add_latency(name, float(now), latency_s)
            kept[name] = float(now), latency_s
        assert bool(found) == bool(kept)
        if kept:
            assert found.median_s == median(latency_s for _, latency_s in kept.values()), now
    found.clear()
    assert not found

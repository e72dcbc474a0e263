"""The third board: how fast are the links, and who is slow?"""

from __future__ import annotations

from cgx_ray.monitors.export import RANK
from dashboards.making.board import (
    BITS_PER_S,
    COUNT,
    GREEN,
    RED,
    SECONDS,
    YELLOW,
    Board,
    Kind,
    Panel,
    Query,
    of,
    rate,
    total,
)

_LINKS = [
    Panel(
        title="How fast is a link?",
        meaning="Bandwidth of a worker's link; of the slowest, if some are slow. Plans are made for it. Low and high "
        "are the spread of the measurements, and no confidence interval.",
        unit=BITS_PER_S,
        is_log=True,
        queries=[
            Query(f"max({of('cgx_ray_link_bandwidth_bits_per_second')})", "bandwidth"),
            Query(f"max by (side) ({of('cgx_ray_link_bandwidth_spread_bits_per_second')})", "{{side}}"),
        ],
        empty="the bandwidth is not known yet",
    ),
    Panel(
        title="How long does a message take?",
        meaning="One-way latency between workers that are not near each other.",
        unit=SECONDS,
        queries=[Query(f"max({of('cgx_ray_worker_latency_seconds')})", "latency")],
        empty="the latency is not known yet",
    ),
    Panel(
        title="Which pairs of nodes are far apart?",
        meaning="One-way latency: half the smallest round trip. Rows measure, columns answer.",
        unit=SECONDS,
        kind=Kind.MATRIX,
        colours=((None, GREEN), (0.005, YELLOW), (0.05, RED)),
        queries=[Query(f"min by (instance, peer) ({of('cgx_ray_link_latency_seconds')})", "{{instance}} to {{peer}}")],
        empty="the run has one node",
    ),
    Panel(
        title="How often did the network change?",
        meaning="Changes of bandwidth or latency so far.",
        unit=COUNT,
        kind=Kind.NUMBER,
        queries=[total("cgx_ray_link_changes")],
    ),
    Panel(
        title="How many measured rates were impossible?",
        meaning="Rates that were dropped, as a card or the probes show that no link had them. Many: something between "
        "the ranks, such as a proxy, takes bytes faster than the link carries them.",
        unit=COUNT,
        kind=Kind.NUMBER,
        queries=[total("cgx_ray_impossible_rates")],
    ),
]

_SLOW = [
    Panel(
        title="How many links are slow?",
        meaning="Ranks whose link is much slower than the others' now.",
        unit=COUNT,
        kind=Kind.NUMBER,
        colours=((None, GREEN), (1, RED)),
        queries=[
            Query(f"count(max by ({RANK}) ({of('cgx_ray_slow_link_bits_per_second')}) > 0) or vector(0)", "slow links")
        ],
    ),
    Panel(
        title="Which link is slow, and how slow?",
        meaning="Bandwidth of a rank whose link is much slower than the others'; 0 when it no longer is.",
        unit=BITS_PER_S,
        queries=[
            Query(f"max by ({RANK}) ({of('cgx_ray_slow_link_bits_per_second')})", f"rank {{{{{RANK}}}}}"),
        ],
        empty="no link was slow",
    ),
    Panel(
        title="Which rank computes slowly?",
        meaning="1 while a rank's compute takes much longer than the others', 0 afterwards.",
        unit=COUNT,
        kind=Kind.STATES,
        colours=((None, GREEN), (1, RED)),
        queries=[Query(f"max by ({RANK}) ({of('cgx_ray_slow_rank')})", f"rank {{{{{RANK}}}}}")],
        empty="no rank was slow",
    ),
    Panel(
        title="Which node is silent?",
        meaning="1 while a node answers no other node's probes, 0 afterwards. The run goes on if its ranks do.",
        unit=COUNT,
        kind=Kind.STATES,
        colours=((None, GREEN), (1, RED)),
        queries=[Query(f"max by (peer) ({of('cgx_ray_silent_node')})", "{{peer}}")],
        empty="no node was silent",
    ),
    Panel(
        title="Does every node report?",
        meaning="Time from the last report of each node to the newest one of all. A node reports each second.",
        unit=SECONDS,
        colours=((None, GREEN), (10, YELLOW), (60, RED)),
        queries=[Query(f"max by (peer) ({of('cgx_ray_report_age_seconds')})", "{{peer}}")],
    ),
]

_CARDS = [
    Panel(
        title="How busy are the network cards?",
        meaning="Traffic by node and direction, and the speed of the fastest card where its driver reports it.",
        unit=BITS_PER_S,
        queries=[
            Query(
                f"8 * max by (instance, direction) ({of('cgx_ray_nic_bytes_per_second')})", "{{direction}} {{instance}}"
            ),
            Query(f"max by (instance) ({of('cgx_ray_nic_speed_bits_per_second')}) > 0", "speed {{instance}}"),
        ],
    ),
    Panel(
        title="What do others put on the link?",
        meaning="Traffic on the node's link that is not from this training, mean over half a minute.",
        unit=BITS_PER_S,
        queries=[Query(f"8 * max by (instance) ({of('cgx_ray_neighbour_bytes_per_second')})", "{{instance}}")],
        empty="unknown: ranks of a node share no memory",
    ),
    Panel(
        title="Do cards drop packets?",
        meaning="Packets per second that were dropped or broken, by node. More than a few slow every TCP connection.",
        unit="pps",
        colours=((None, GREEN), (1, YELLOW), (100, RED)),
        queries=[Query(f"sum by (instance) ({rate('cgx_ray_nic_errors')})", "{{instance}}")],
        empty="no packet was dropped",
    ),
]

NETWORK = Board(
    uid="cgx-ray-network",
    title="cgx_ray: network",
    meaning="How fast are the links, and who is slow?",
    sections=[("Links", _LINKS), ("Who is slow?", _SLOW), ("Cards", _CARDS)],
)

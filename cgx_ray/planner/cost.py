"""Alpha-beta cost of one exchange: seconds = hops * alpha + bytes * beta.

`scheme_costs` has the hops and bytes of each scheme; here they meet the links of a network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cgx_ray.errors import ConfigError
from cgx_ray.plan import Intra, Option, Scheme
from cgx_ray.planner.scheme_costs import Payload, Terms, cost_of_scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Network between two workers, the same for every pair.

    alpha_s           one-way latency of a message, seconds; 0 is allowed
    beta_s_per_byte   1 / bandwidth
    """

    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        if not (_is_finite(self.alpha_s) and self.alpha_s >= 0):
            raise ConfigError(f"alpha_s {self.alpha_s!r} is not allowed; give a latency of 0 s or more")
        if not (_is_finite(self.beta_s_per_byte) and self.beta_s_per_byte > 0):
            raise ConfigError(
                f"beta_s_per_byte {self.beta_s_per_byte!r} is not allowed; give 1 / bandwidth, more than 0"
            )

    @classmethod
    def from_rates(cls, *, bandwidth_gbps: float, latency_ms: float) -> Link:
        """Make a link from gigabits (1e9) per second and one-way milliseconds."""
        if not (_is_finite(bandwidth_gbps) and bandwidth_gbps > 0):
            raise ConfigError(f"bandwidth_gbps {bandwidth_gbps!r} is not allowed; give more than 0")
        if not (_is_finite(latency_ms) and latency_ms >= 0):
            raise ConfigError(f"latency_ms {latency_ms!r} is not allowed; give 0 or more")
        return cls(alpha_s=latency_ms / 1e3, beta_s_per_byte=8 / (bandwidth_gbps * 1e9))

    def slowed(self, factor: float) -> Link:
        """Return a link on which messages and bytes take `factor` times as long."""
        return Link(alpha_s=self.alpha_s * factor, beta_s_per_byte=self.beta_s_per_byte * factor)

    @property
    def bandwidth_gbps(self) -> float:
        return 8e-9 / self.beta_s_per_byte

    def seconds(self, hops: float, num_bytes: float) -> float:
        return hops * self.alpha_s + num_bytes * self.beta_s_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Nodes, which need not have the same number of ranks.

    between         link of a node to any other node, shared by its ranks
    ranks_per_node  of the node with the fewest
    inside          link between two ranks of a node; needed if a node has several
    device_sums     True if it is that of the node's GPUs, which sum without the host
    node_sizes      ranks of each node, ascending, if nodes differ; else empty
    """

    num_nodes: int
    between: Link
    ranks_per_node: int = 1
    inside: Link | None = None
    device_sums: bool = False
    node_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node"):
            _check_count(name, getattr(self, name))
        for name, link in (("between", self.between), ("inside", self.inside)):
            if not isinstance(link, Link) and (name == "between" or link is not None):
                raise ConfigError(f"link {name!r} is {link!r}; give a Link, such as Link.from_rates")
        sizes = self.node_sizes
        for size in sizes:
            _check_count("a size in node_sizes", size)
        differ = sizes == tuple(sorted(sizes)) and sizes[:1] < sizes[-1:]
        if sizes and not (differ and (len(sizes), sizes[0]) == (self.num_nodes, self.ranks_per_node)):
            raise ConfigError(
                f"node_sizes {sizes!r} are not those of {self.num_nodes} nodes that differ, ascending, the smallest "
                f"one of {self.ranks_per_node}; make the network by `Network.of_nodes`"
            )
        if self.inside is None and self.most_ranks > 1:
            raise ConfigError(f"{self.most_ranks} ranks per node and no link inside one; give `inside`, a Link")

    @classmethod
    def flat(cls, num_workers: int, link: Link) -> Network:
        """Make a network with one rank per node."""
        return cls(num_nodes=num_workers, between=link)

    @classmethod
    def of_nodes(cls, sizes: Sequence[int], between: Link, inside: Link, *, device_sums: bool = False) -> Network:
        """Make a network of nodes with `sizes` ranks."""
        least = min(sizes)
        return cls(
            num_nodes=len(sizes),
            between=between,
            ranks_per_node=least,
            inside=inside,
            device_sums=device_sums,
            node_sizes=tuple(sorted(sizes)) if max(sizes) > least else (),
        )

    def slowed(self, factor: float) -> Network:
        """Return the network with `Link.slowed` links."""
        inside = self.inside.slowed(factor) if self.inside is not None else None
        return replace(self, between=self.between.slowed(factor), inside=inside)

    @property
    def num_workers(self) -> int:
        return sum(self.node_sizes) or self.num_nodes * self.ranks_per_node

    @property
    def most_ranks(self) -> int:
        """Ranks of the node with the most."""
        return self.node_sizes[-1] if self.node_sizes else self.ranks_per_node

    def num_replicas(self, options: Iterable[Option]) -> int:
        """Return how many train alone in a round: nodes if one of `options` sums inside them, else ranks."""
        return self.num_nodes if any(option.intra is not Intra.FLAT for option in options) else self.num_workers

    def is_flat(self, intra: Intra) -> bool:
        """Return True if no work is done inside nodes under `intra`."""
        return intra is Intra.FLAT or self.most_ranks == 1

    def needs_host(self, option: Option) -> bool:
        """Return True if the host must encode, sum and decode under `option`, wherever the gradients are."""
        return option.needs_host(device_sums=self.device_sums)

    def knows_inside(self, option: Option) -> bool:
        """Return False if ranks of a node would sum on the host under `option`, and `inside` is the link of GPUs."""
        return self.is_flat(option.intra) or not (self.device_sums and self.needs_host(option))

    def terms(
        self, scheme: Scheme, intra: Intra, dense_bytes: float, wire_bytes: float, index_bytes: float = 0
    ) -> tuple[Terms, Terms]:
        """Return hops and bytes inside a node, and those between nodes at a node's link.

        Arguments as in the function `terms`. A flat exchange counts between nodes if there are several; the card of the
        largest node then carries `SchemeCost.crossing` bytes per byte of one rank.
        """
        if not self.is_flat(intra):
            return hierarchical_terms(
                scheme,
                intra,
                num_nodes=self.num_nodes,
                ranks_per_node=self.ranks_per_node,
                most_ranks=self.most_ranks,
                dense_bytes=dense_bytes,
                wire_bytes=wire_bytes,
                index_bytes=index_bytes,
            )
        hops, num_bytes = terms(scheme, self.num_workers, dense_bytes, wire_bytes, index_bytes)
        if self.num_nodes == 1:
            return (hops, num_bytes), (0.0, 0.0)
        crossing = cost_of_scheme(scheme).crossing(self.num_workers, self.most_ranks)
        return (0.0, 0.0), (hops, crossing * num_bytes)


def terms(scheme: Scheme, num_workers: int, dense_bytes: float, wire_bytes: float, index_bytes: float = 0) -> Terms:
    """Return hops and bytes of one exchange, so that seconds = hops * alpha + bytes * beta.

    dense_bytes  the group uncompressed; only `dense` uses it
    wire_bytes   one rank's encoded group, with indices and scales
    index_bytes  the part of `wire_bytes` that says which elements are sent; only AR-Topk uses it: it broadcasts indices
                 and sums values

    The bytes are those that one worker's link carries one after the other, not those of the whole network. PowerSGD's
    all-reduce takes twice the hops that are counted here.
    """
    check_exchange(num_workers, dense_bytes, wire_bytes, index_bytes)
    cost = cost_of_scheme(scheme)
    return cost.terms(num_workers, Payload(dense_bytes, wire_bytes, index_bytes)) if num_workers > 1 else (0.0, 0.0)


def exchange_s(
    scheme: Scheme, *, num_workers: int, dense_bytes: float, wire_bytes: float, link: Link, index_bytes: float = 0
) -> float:
    """Return the seconds to exchange one group without codec time, 0 with one worker. Arguments as in `terms`."""
    return link.seconds(*terms(scheme, num_workers, dense_bytes, wire_bytes, index_bytes))


def hierarchical_terms(
    scheme: Scheme,
    intra: Intra,
    *,
    num_nodes: int,
    ranks_per_node: int,
    most_ranks: int = 0,
    dense_bytes: float,
    wire_bytes: float,
    index_bytes: float = 0,
) -> tuple[Terms, Terms]:
    """Return hops and bytes of a hierarchical exchange: those inside a node, and those between nodes.

    With n nodes of L ranks it costs 2a' + 2(L-1)/L M b' inside (m if compressed), and between nodes as much as the
    scheme costs n workers. The vendor's sums (dense, allreduce, artopk_ring) go direct there, in 2 hops.

    Inside, the bytes are those of one rank's link: a reduce-scatter and an allgather of the group, dense or compressed.
    Between nodes they are those of a node's network card, which its L ranks share. Each rank exchanges an L-th of the
    group with one rank of every other node; together that is what one worker per node sends of the whole group. If all
    ranks have a card of their own, an L-th of these bytes crosses it.

    If nodes have C to L ranks (`ranks_per_node`, `most_ranks`), C ranks of each carry a chunk of the group. Inside the
    largest node a carrier gets (L-1)/C of the group, and ranks that carry nothing get all of it at the end.

    With one rank per node it is the flat scheme. Other arguments as in `terms`.
    """
    if intra is Intra.FLAT:
        raise ConfigError("intra flat is not hierarchical; ask `terms`, or give 'dense' or 'compressed'")
    check_exchange(ranks_per_node, dense_bytes, wire_bytes, index_bytes)
    hops, num_bytes = terms(scheme, num_nodes, dense_bytes, wire_bytes, index_bytes)
    n, C, L = num_nodes, ranks_per_node, max(ranks_per_node, most_ranks)
    if L == 1:
        return (0.0, 0.0), (hops, num_bytes)
    if n > 1 and cost_of_scheme(scheme).is_vendor_ring:
        hops -= 2 * (n - 1) - 2  # 2 direct hops instead of those of the ring
    inside_bytes = dense_bytes if intra is Intra.DENSE else wire_bytes
    return (2.0, ((L - 1) / C + num_foreign(C, L) / C) * inside_bytes), (hops, num_bytes)


def num_foreign(num_carriers: int, num_ranks: int) -> int:
    """Return the chunks that a rank of a node gets from others: one less for carriers, if all ranks are."""
    return num_carriers - (num_carriers == num_ranks)


def check_exchange(num_workers: int, dense_bytes: float, wire_bytes: float, index_bytes: float = 0) -> None:
    _check_count("num_workers", num_workers)
    for name, value in (("dense_bytes", dense_bytes), ("wire_bytes", wire_bytes), ("index_bytes", index_bytes)):
        if not (_is_finite(value) and value >= 0):
            raise ConfigError(f"{name} {value!r} is not allowed; give a finite number, 0 or more")
    if index_bytes > wire_bytes:
        raise ConfigError(f"index_bytes {index_bytes!r} is not allowed; give at most wire_bytes, {wire_bytes!r}")


def check_seconds(name: str, value: float) -> None:
    """Raise ConfigError unless `value` is finite and not negative."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} {value!r} is not allowed; give finite seconds, 0 or more")


def check_positive(name: str, value: float) -> float:
    """Return `value`. Raises ConfigError unless it is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} {value!r} is not allowed; give more than 0")
    return value


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} {value!r} is not allowed; give a whole number, 1 or more")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

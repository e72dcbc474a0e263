"""Alpha-beta cost of moving one group: seconds = hops * alpha + bytes * beta (docs/design.md, section 6)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cgx_ray.errors import ConfigError
from cgx_ray.plan import Intra, Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The network between two workers, taken as the same for every pair.

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
        """Make a link from gigabits (1e9) a second and one-way milliseconds."""
        if not (_is_finite(bandwidth_gbps) and bandwidth_gbps > 0):
            raise ConfigError(f"bandwidth_gbps {bandwidth_gbps!r} is not allowed; give more than 0")
        if not (_is_finite(latency_ms) and latency_ms >= 0):
            raise ConfigError(f"latency_ms {latency_ms!r} is not allowed; give 0 or more")
        return cls(alpha_s=latency_ms / 1e3, beta_s_per_byte=8 / (bandwidth_gbps * 1e9))

    @property
    def bandwidth_gbps(self) -> float:
        return 8e-9 / self.beta_s_per_byte

    def seconds(self, hops: float, num_bytes: float) -> float:
        return hops * self.alpha_s + num_bytes * self.beta_s_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Nodes of as many ranks each.

    between  the link of a node to any other, which its ranks share
    inside   the link between two ranks of a node; needed if a node has several
    """

    num_nodes: int
    between: Link
    ranks_per_node: int = 1
    inside: Link | None = None

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node"):
            _check_count(name, getattr(self, name))
        for name, link in (("between", self.between), ("inside", self.inside)):
            if not isinstance(link, Link) and (name == "between" or link is not None):
                raise ConfigError(f"link {name!r} is {link!r}; give a Link, such as Link.from_rates")
        if self.inside is None and self.ranks_per_node > 1:
            raise ConfigError(f"{self.ranks_per_node} ranks a node and no link inside one; give `inside`, a Link")

    @classmethod
    def flat(cls, num_workers: int, link: Link) -> Network:
        """One rank a node."""
        return cls(num_nodes=num_workers, between=link)

    @property
    def num_workers(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def is_flat(self, intra: Intra) -> bool:
        """Whether nodes do nothing of their own under `intra`."""
        return intra is Intra.FLAT or self.ranks_per_node == 1

    def terms(
        self, scheme: Scheme, intra: Intra, dense_bytes: float, wire_bytes: float, index_bytes: float = 0
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Hops and bytes inside a node, and those between nodes, at a node's link. Arguments as in the function.

        A flat scheme of several ranks a node: a ring in order of ranks enters and leaves each node once. Of what is
        sent to everybody L (N - L) / (N - 1) times a worker's bytes cross, of what a root sends 1 / L of that; trees
        are taken for the former, though they send more to near ranks.
        """
        n, L, N = self.num_nodes, self.ranks_per_node, self.num_workers
        if not self.is_flat(intra):
            return hierarchical_terms(
                scheme,
                intra,
                num_nodes=n,
                ranks_per_node=L,
                dense_bytes=dense_bytes,
                wire_bytes=wire_bytes,
                index_bytes=index_bytes,
            )
        hops, num_bytes = terms(scheme, N, dense_bytes, wire_bytes, index_bytes)
        if n == 1:
            return (hops, num_bytes), (0.0, 0.0)
        crossing = (N - L) / (N - 1)
        if scheme is Scheme.RING or _is_vendor_ring(scheme):
            crossing = 1.0
        elif scheme is not Scheme.BROADCAST:
            crossing *= L
        return (0.0, 0.0), (hops, crossing * num_bytes)


def terms(
    scheme: Scheme, num_workers: int, dense_bytes: float, wire_bytes: float, index_bytes: float = 0
) -> tuple[float, float]:
    """Hops and bytes of one exchange, such that seconds = hops * alpha + bytes * beta.

    dense_bytes  M, the group uncompressed; only `dense` uses it
    wire_bytes   m, one rank's encoded group, indices and scales included
    index_bytes  m_i, of m those that say which elements are sent; only AR-Topk, which broadcasts them and sums the
                 others, uses it

    The bytes are those that one worker's link carries one after the other, not those of the whole network. PowerSGD's
    all-reduce takes twice the hops that are counted here.
    """
    _check_exchange(num_workers, dense_bytes, wire_bytes, index_bytes)
    N, log_N = num_workers, math.log2(num_workers)
    if N == 1:
        return 0.0, 0.0
    match scheme:
        case Scheme.DENSE:
            return 2.0 * (N - 1), 2 * (N - 1) / N * dense_bytes
        case Scheme.ALLREDUCE:
            return 2.0 * (N - 1), 2 * (N - 1) / N * wire_bytes
        case Scheme.ALLGATHER:
            return 1.0, (N - 1.0) * wire_bytes
        case Scheme.SRA:
            return 2.0, 2 * (N - 1) / N * wire_bytes
        case Scheme.RING:
            return 2.0 * (N - 1), 2 * (N - 1) / N * wire_bytes
        case Scheme.TREE:
            return _tree_terms(N, wire_bytes)
        case Scheme.BROADCAST:
            # The root's link carries everything.
            return 2.0, 2.0 * (N - 1) * wire_bytes
        case _ if scheme.is_artopk:
            value_bytes = wire_bytes - index_bytes
            ring = 2.0 * (N - 1), 2 * (N - 1) / N * value_bytes
            hops, num_bytes = _tree_terms(N, value_bytes) if scheme.by_tree else ring
            # At most: `auto` looks for the largest gradient in some steps only.
            return hops + log_N + (scheme.choice != "star"), num_bytes + log_N * index_bytes
    raise ConfigError(f"no cost for scheme {scheme!r}; known: {', '.join(Scheme)}")


def _tree_terms(N: int, wire_bytes: float) -> tuple[float, float]:
    """Down and up among the largest power of two of workers; the others hand in their groups before and wait."""
    P = 1 << (N.bit_length() - 1)
    folds = 2 if P < N else 0
    return 2 * math.log2(P) + folds, (2 * (P - 1) / P + folds) * wire_bytes


def exchange_s(
    scheme: Scheme, *, num_workers: int, dense_bytes: float, wire_bytes: float, link: Link, index_bytes: float = 0
) -> float:
    """Seconds to exchange one group, codec time left out; 0 with one worker. Arguments as in `terms`."""
    return link.seconds(*terms(scheme, num_workers, dense_bytes, wire_bytes, index_bytes))


def hierarchical_terms(
    scheme: Scheme,
    intra: Intra,
    *,
    num_nodes: int,
    ranks_per_node: int,
    dense_bytes: float,
    wire_bytes: float,
    index_bytes: float = 0,
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Hops and bytes of a hierarchical exchange: those inside a node, and those between nodes.

    Inside, the bytes are those of one rank's link: a reduce-scatter and an allgather of the group, dense or compressed.
    Between nodes they are those of a node's network card, which its L ranks share: each exchanges an L-th of the group
    with one rank of every other node, so together as much as one worker a node with the whole group. Where all ranks
    have a card of their own, an L-th of these bytes crosses it.

    With one rank a node it is the flat scheme. Other arguments as in `terms`.
    """
    if intra is Intra.FLAT:
        raise ConfigError("intra flat is not hierarchical; ask `terms`, or give 'dense' or 'compressed'")
    _check_exchange(ranks_per_node, dense_bytes, wire_bytes, index_bytes)
    hops, num_bytes = terms(scheme, num_nodes, dense_bytes, wire_bytes, index_bytes)
    n, L = num_nodes, ranks_per_node
    if L == 1:
        return (0.0, 0.0), (hops, num_bytes)
    if n > 1 and _is_vendor_ring(scheme):
        hops -= 2 * (n - 1) - 2  # between some of the ranks a sum is not the vendor's, but direct
    inside_bytes = dense_bytes if intra is Intra.DENSE else wire_bytes
    return (2.0, 2 * (L - 1) / L * inside_bytes), (hops, num_bytes)


def _is_vendor_ring(scheme: Scheme) -> bool:
    return scheme in (Scheme.DENSE, Scheme.ALLREDUCE) or (scheme.is_artopk and not scheme.by_tree)


def allgather_tree_s(num_workers: int, wire_bytes: float, link: Link) -> float:
    """Allgather as the literature models it, by recursive doubling. For comparison: no scheme does it."""
    _check_exchange(num_workers, 0, wire_bytes)
    return link.seconds(math.log2(num_workers), (num_workers - 1) * wire_bytes)


def artopk_tree_s(num_workers: int, wire_bytes: float, link: Link, index_bytes: float = 0) -> float:
    """AR-Topk as the literature models it, all values up and down a tree; arguments as in `terms`. For comparison: ours
    halves what it sends at each level.
    """
    _check_exchange(num_workers, 0, wire_bytes, index_bytes)
    log_N = math.log2(num_workers)
    return link.seconds(3 * log_N, log_N * (2 * (wire_bytes - index_bytes) + index_bytes))


# When one collective beats another: Flexible Communication, Tyagi and Swany 2023, eqns 5a to 5c. Each follows from the
# costs of its section 3-D (for allgather as in `allgather_tree_s`; eqn 4a, what `terms` has for artopk_ring; eqn 4b,
# `artopk_tree_s`) with log to base 2. value_bytes is its Mc, of one rank's values that are sent; their indices take as
# many, so wire_bytes is 2 Mc. With one worker all cost nothing and the limit is 0.


def ring_over_tree_below(num_workers: int, value_bytes: float) -> float:
    """alpha / beta in bytes, under which artopk_ring costs less than artopk_tree. Eqn 5a.

    It is infinite for two workers, who take as many hops either way, and whom the ring sends less.
    """
    _check_exchange(num_workers, 0, value_bytes)
    N, log_N = num_workers, math.log2(num_workers)
    saved_bytes = (log_N - (N - 1) / N) * value_bytes
    if N > 2:
        return saved_bytes / (N - 1 - log_N)
    return math.inf if saved_bytes > 0 else 0.0


def ring_over_allgather_below(num_workers: int, value_bytes: float) -> float:
    """alpha / beta in bytes, under which artopk_ring costs less than allgather. Eqn 5b.

    It is 0 for two workers: never.
    """
    _check_exchange(num_workers, 0, value_bytes)
    if num_workers == 1:
        return 0.0
    N, log_N = num_workers, math.log2(num_workers)
    return (1 - 1 / N - log_N / (2 * (N - 1))) * value_bytes


def tree_over_allgather_below(num_workers: int, value_bytes: float) -> float:
    """alpha / beta in bytes, under which artopk_tree costs less than allgather. Eqn 5c.

    It is 0 for four workers and negative for two or three: never.
    """
    _check_exchange(num_workers, 0, value_bytes)
    if num_workers == 1:
        return 0.0
    return ((num_workers - 1) / math.log2(num_workers) - 1.5) * value_bytes


def _check_exchange(num_workers: int, dense_bytes: float, wire_bytes: float, index_bytes: float = 0) -> None:
    _check_count("num_workers", num_workers)
    for name, value in (("dense_bytes", dense_bytes), ("wire_bytes", wire_bytes), ("index_bytes", index_bytes)):
        if not (_is_finite(value) and value >= 0):
            raise ConfigError(f"{name} {value!r} is not allowed; give a finite number, 0 or more")
    if index_bytes > wire_bytes:
        raise ConfigError(f"index_bytes {index_bytes!r} is not allowed; give at most wire_bytes, {wire_bytes!r}")


def check_seconds(name: str, value: float) -> None:
    """Raises ConfigError unless `value` is a time that something can take."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} {value!r} is not allowed; give finite seconds, 0 or more")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} {value!r} is not allowed; give a whole number, 1 or more")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

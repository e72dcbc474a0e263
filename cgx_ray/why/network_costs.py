"""Costs of a network: a path, a card, other traffic, loss, round trips, or links that are all too slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from cgx_ray.units import format_bytes, format_count, format_measured_rate, format_rate, format_seconds
from cgx_ray.why.paths import Path, common_end, slow_paths, way
from cgx_ray.why.records import NetworkCard, RankRecord
from cgx_ray.why.step_cost import Bound, StepCost, waiting_threads
from cgx_ray.why.step_parts import StepParts

# Time-outs in a row for the same data after which nothing that is sent arrives: a busy path has one or two.
STALLED = 3
# Ratio of rates from which on a card is worth a change.
_FASTER = 1.5
# Share of bytes sent again from which on TCP slows down. Queues of switches that overflow make less than 0.1 %.
_LOSSY = 0.003
# Share of a card's bytes from others that counts as traffic, and what headers and acknowledgements add to our own.
_TRAFFIC, _OVERHEAD = 0.2, 1.1
# Share of its rate that traffic of others must keep while the training sends nothing: else it may be the training's.
_QUIET = 0.5
# Share of backward beside which the exchange must lie to count as hidden, and buckets that let it.
_HIDDEN, _NUM_BUCKETS = 0.2, 8


def network_costs(records: Sequence[RankRecord], parts: StepParts, paths: Sequence[Path]) -> Iterator[StepCost]:
    network_s = parts.network_s
    between = [path for path in paths if path.source != path.target]
    special = [
        cost
        for cost in (
            stalled_cost(records, paths, network_s),
            _other_card(records, between, network_s),
            _loss(between, network_s),
            _traffic(records, between, network_s),
            _latency(records, between, parts),
            _late_buckets(records, between, parts),
            _slow_path(between, network_s),
            _repeated(records, network_s),
        )
        if cost is not None
    ]
    yield from special
    rest_s = network_s - max((cost.seconds for cost in special), default=0.0)
    if between:
        yield _all_paths(records, parts, between, rest_s)
    elif len({record.node.name for record in records}) > 1:
        yield _unseen(records, rest_s)
    else:
        yield _inside(records, rest_s)


def _other_card(records: Sequence[RankRecord], paths: Sequence[Path], network_s: float) -> StepCost | None:
    """Find a faster card than the one that carries the gradients, on all nodes: by probes, else by its driver."""
    used = {path.source: path.card for path in paths if path.card is not None}
    nodes = {record.node.name: record.node for record in records if record.node.name in used}
    if not used:
        return None
    own = next(iter(used.values()))
    rates, how = _probed_cards(records), "probed"
    if not (own.name in rates and len(rates) > 1):
        each = [[card for card in nodes[name].cards if is_faster(card, one)] for name, one in used.items()]
        best = [max(cards, key=lambda card: card.bit_per_s) for cards in each if cards]
        if len(best) < len(used):
            return None
        rates, how = {own.name: own.bit_per_s, **{card.name: card.bit_per_s for card in best}}, "their drivers say"
    name = max(rates, key=lambda one: rates[one])
    if name == own.name or rates[name] < _FASTER * rates[own.name]:
        return None
    saves_s = network_s * (1 - rates[own.name] / rates[name])
    names = ",".join(one for one in rates if one != own.name and rates[one] >= _FASTER * rates[own.name])
    own_rate, rate = (format_measured_rate(rates[one]) for one in (own.name, name))
    return StepCost(
        bound=Bound.NETWORK,
        seconds=saves_s,
        who=f"card {own.name} of all nodes",
        phrase=f"cards {own.name} of {own_rate}, while {name} of {rate} is there",
        evidence=f"gradients use {own.name} ({own_rate}); {name} is up on every node ({rate}, {how})",
        remedy=f"`export GLOO_SOCKET_IFNAME={names} NCCL_SOCKET_IFNAME={names}` on all nodes",
        saves_s=saves_s,
    )


def _probed_cards(records: Sequence[RankRecord]) -> dict[str, float]:
    """Return the bits per second of each card that was probed, of the slowest of its paths."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        name_of = {address: card.name for card in record.node.cards for address in card.addresses}
        for probe in record.probes:
            found[name_of.get(probe.own, probe.own)].append(8 * probe.bytes_per_s)
    return {name: min(rates) for name, rates in found.items()}


def is_faster(card: NetworkCard, own: NetworkCard) -> bool:
    """Return True if `card` could carry what `own` carries, faster. Others than physical cards make up their speed."""
    is_other = card.name != own.name and bool(card.addresses) and card.kind == own.kind == "physical"
    return is_other and 0 < own.bit_per_s < card.bit_per_s


def _loss(paths: Sequence[Path], network_s: float) -> StepCost | None:
    lossy = [path for path in paths if path.resent_share >= _LOSSY]
    if not lossy:
        return None
    worst = max(lossy, key=lambda path: path.resent_share)
    good = [path.bytes_per_s for path in paths if path not in lossy and path.bytes_per_s > 0]
    ratio = min(1.0, worst.bytes_per_s / median(good)) if good else 0.0
    where = way(worst) if len(lossy) < len(paths) or len(paths) == 1 else "on all paths"
    return StepCost(
        bound=Bound.NETWORK,
        seconds=network_s * (1 - ratio),
        who=where,
        phrase=f"what TCP sends again {where}",
        evidence=f"{worst.resent_share:.1%} of the bytes were sent again; "
        f"{format_measured_rate(8 * worst.bytes_per_s)} are left",
        remedy="find where packets are dropped: `ethtool -S CARD`, `ip -s link`, the switch's counters, cables",
        saves_s=network_s * (1 - ratio) if good else 0.0,
    )


def _traffic(records: Sequence[RankRecord], paths: Sequence[Path], network_s: float) -> StepCost | None:
    """Find a card through which much more passes than the training's own connections carry."""
    worst: tuple[float, str, str, float] | None = None
    for name in dict.fromkeys(path.source for path in paths):
        ranks = [record for record in records if record.node.name == name]
        ends = [one for record in ranks for one in record.connections]
        for card in ranks[0].node.cards:
            mine = [one for one in ends if one.own.rpartition(":")[0] in card.addresses]
            seen_s, quiet = ranks[0].seen_s, _quiet_bytes_per_s(ranks, card.name)
            if not mine or card.kind == "loopback" or seen_s <= 0 or quiet is None:
                continue
            for others, all_bytes in (
                (card.sent_bytes - _OVERHEAD * sum(one.sent_bytes for one in mine), card.sent_bytes),
                (card.received_bytes - _OVERHEAD * sum(one.received_bytes for one in mine), card.received_bytes),
            ):
                share = others / all_bytes if all_bytes else 0.0
                is_others = share >= _TRAFFIC and quiet >= _QUIET * others / seen_s
                if is_others and (worst is None or share > worst[0]):
                    worst = (share, name, card.name, 8 * others / seen_s)
    if worst is None:
        return None
    share, node, card_name, bit_per_s = worst
    return StepCost(
        bound=Bound.NETWORK,
        seconds=network_s * share,
        who=f"card {card_name} of {node}",
        phrase=f"a link that {node} shares with other traffic",
        evidence=f"{share:.0%} of the bytes on {card_name} are not this training's: {format_measured_rate(bit_per_s)}, "
        "also while it exchanges nothing",
        remedy=f"`ss -tinp` or `iftop -i {card_name}` on {node} shows whose they are; move that "
        "job, or use another card",
        saves_s=network_s * share,
    )


def _quiet_bytes_per_s(ranks: Sequence[RankRecord], name: str) -> float | None:
    """Return the least that the card carried while a rank of its node had nothing under way: others may have had."""
    cards = [card for record in ranks for card in record.node.cards if card.name == name]
    return min((card.quiet_bytes_per_s for card in cards if card.quiet_bytes_per_s is not None), default=None)


def _latency(records: Sequence[RankRecord], paths: Sequence[Path], parts: StepParts) -> StepCost | None:
    """Find out whether messages wait for round trips more than for bytes: a ring takes 2 (N - 1) hops per bucket."""
    trips = [path.round_trip_s for path in paths if path.round_trip_s is not None]
    rates = [path.bytes_per_s for path in paths if path.bytes_per_s > 0]
    total = gradient_bytes(records)
    if not trips or not rates or not total:
        return None
    num_buckets = len(records[0].bucket_bytes)
    num_nodes = len({record.node.name for record in records})
    bucket_s = 2 * (num_nodes - 1) * median(trips) / 2
    latency_s = min(parts.network_s, num_buckets * bucket_s)
    bytes_s = 2 * (num_nodes - 1) / num_nodes * total / median(rates)
    if num_buckets * bucket_s < bytes_s:
        return None
    size_mb = max(1, -(-total // (2 << 20)))
    is_large = num_buckets <= 2
    saves_s = latency_s / 2 if is_large else latency_s * (1 - 2 / num_buckets)
    return StepCost(
        bound=Bound.NETWORK,
        seconds=latency_s,
        who="all paths",
        phrase=f"round trips of {format_seconds(median(trips))}",
        evidence=f"{format_count(num_buckets, 'bucket')} per step, each {2 * (num_nodes - 1)} messages one after "
        "the other",
        remedy="exchange half as often: accumulate gradients of 2 batches under `no_sync()`"
        if is_large
        else f"`DistributedDataParallel(model, bucket_cap_mb={size_mb})`: 2 buckets instead of {num_buckets}",
        saves_s=saves_s,
    )


def _late_buckets(records: Sequence[RankRecord], paths: Sequence[Path], parts: StepParts) -> StepCost | None:
    """Find out whether the exchange begins so late that it hides nothing behind backward."""
    sizes = records[0].bucket_bytes
    backward_s = median(bar.backward_s for bar in parts.bars)
    hidden_s = median(bar.hidden_s for bar in parts.bars)
    cap_mb = max(1, sum(sizes) // (_NUM_BUCKETS << 20))
    num_buckets = min(_NUM_BUCKETS, sum(sizes) // (cap_mb << 20))
    if num_buckets <= len(sizes) or hidden_s > _HIDDEN * backward_s:
        return None
    trips = [path.round_trip_s for path in paths if path.round_trip_s is not None]
    hops_s = (len(records) - 1) * median(trips) if trips else 0.0
    # All but the last of as many buckets can be sent beside backward, whatever there is of it.
    share = 1 - 1 / num_buckets
    saves_s = share * min(parts.network_s, backward_s) - (num_buckets - len(sizes)) * hops_s
    if saves_s <= 0:
        return None
    return StepCost(
        bound=Bound.NETWORK,
        seconds=saves_s,
        who="all ranks",
        phrase="an exchange that begins when backward ends",
        evidence=f"{format_count(len(sizes), 'bucket')}, so the exchange hides {format_seconds(hidden_s)} behind "
        f"{format_seconds(backward_s)} of backward",
        remedy=f"`DistributedDataParallel(model, bucket_cap_mb={cap_mb})`: about {num_buckets} buckets",
        saves_s=saves_s,
    )


def _slow_path(paths: Sequence[Path], network_s: float) -> StepCost | None:
    slow = slow_paths(paths)
    if not slow:
        return None
    worst = min(slow, key=lambda path: path.bytes_per_s)
    usual = median(path.bytes_per_s for path in paths if path.bytes_per_s > 0 and path not in slow)
    rate = format_measured_rate(8 * worst.bytes_per_s)
    end = common_end(slow, paths)
    where = end or way(worst)
    saves_s = network_s * (1 - worst.bytes_per_s / usual)
    card = worst.card
    says = (
        f"; card {card.name} of {worst.source} says {format_rate(card.bit_per_s)}"
        if card is not None and card.kind == "physical" and 8 * worst.bytes_per_s < card.bit_per_s / 2
        else ""
    )
    name = card.name if card is not None else "CARD"
    unsure = "" if end else f": the uplink of {worst.source}, or the downlink of {worst.target}; --probe tells which"
    return StepCost(
        bound=Bound.NETWORK,
        seconds=saves_s,
        who=where,
        phrase=f"a link of {rate}: {where}" if end else f"a link of {rate} {where}",
        evidence=f"other paths carry {format_measured_rate(8 * usual)}{says}{unsure}",
        remedy=f"`ethtool {name}` there: speed and duplex of card and switch port, cable; or leave that node out",
        saves_s=saves_s,
    )


def _repeated(records: Sequence[RankRecord], network_s: float) -> StepCost | None:
    times = records[0].num_exchanges
    if times < 1.5:
        return None
    return StepCost(
        bound=Bound.NETWORK,
        seconds=network_s * (1 - 1 / times),
        who="all ranks",
        phrase=f"gradients that are averaged {times:.3g} times per optimizer step",
        evidence=f"{times:.3g} backward passes with an exchange for each step of the optimizer",
        remedy="run all but the last backward of a step under `with model.no_sync():`",
        saves_s=network_s * (1 - 1 / times),
    )


def _all_paths(records: Sequence[RankRecord], parts: StepParts, paths: Sequence[Path], seconds: float) -> StepCost:
    rates = [path.bytes_per_s for path in paths if path.bytes_per_s > 0]
    total = gradient_bytes(records)
    at = f"links of {format_measured_rate(8 * median(rates))}" if rates else "the network"
    cards = [path.card for path in paths if path.card is not None and path.card.kind == "physical"]
    speeds = {card.bit_per_s for card in cards if card.bit_per_s}
    says = f"; cards say {format_rate(min(speeds))}" if speeds else ""
    sizes = f"{format_bytes(total)} of gradients per step" if total else "gradients"
    return StepCost(
        bound=Bound.NETWORK,
        seconds=seconds,
        who="all paths",
        phrase=at,
        evidence=f"{sizes} go over {at}, all alike{says}; {format_seconds(parts.bars[0].hidden_s)} of the exchange lie "
        "beside backward",
        remedy="faster links, fewer bytes (below: what compression would gain), or rarer exchanges",
        saves_s=0.0,
    )


def _inside(records: Sequence[RankRecord], seconds: float) -> StepCost:
    node = records[0].node
    crowd, num_threads = waiting_threads(records), max(record.num_threads for record in records)
    fewer_threads = (
        ", or `export OMP_NUM_THREADS=1`, so that sums have a processor" if crowd and num_threads > 1 else ""
    )
    return StepCost(
        bound=Bound.NETWORK,
        seconds=seconds,
        who=f"ranks of {node.name}",
        phrase="the exchange between ranks of one node",
        evidence=f"{format_count(len(records), 'rank')} share {format_count(node.num_processors, 'processor')}, "
        f"which also sum the gradients{crowd and f'; {crowd}'}",
        remedy=f"fewer ranks per node{fewer_threads}",
        saves_s=0.0,
    )


def _unseen(records: Sequence[RankRecord], seconds: float) -> StepCost:
    """Return the exchange between nodes that no TCP connection carries."""
    return StepCost(
        bound=Bound.NETWORK,
        seconds=seconds,
        who="all ranks",
        phrase="links between nodes that TCP does not carry",
        evidence=f"{records[0].backend} has no TCP connection with bytes between nodes: RDMA, or addresses that are "
        "translated",
        remedy="`NCCL_DEBUG=INFO` names the transport; compare with `all_reduce_perf` of nccl-tests on these nodes",
        saves_s=0.0,
    )


def stalled_cost(records: Sequence[RankRecord], paths: Sequence[Path], seconds: float) -> StepCost | None:
    """Return the cause if nothing arrives any more on a path. `seconds`: for how long, of each step or at all."""
    stalled = next((path for path in paths if path.num_timeouts >= STALLED), None)
    if stalled is None:
        return None
    mtu = stalled.card.mtu if stalled.card is not None else stalled.path_mtu
    name = stalled.card.name if stalled.card is not None else "CARD"
    return StepCost(
        bound=Bound.NETWORK,
        seconds=seconds,
        who=way(stalled),
        phrase=f"packets that get lost {way(stalled)}",
        evidence=f"{stalled.num_timeouts} time-outs in a row for the same data, with packets of up to {mtu} bytes, "
        "while connections can be made: large packets do not pass",
        remedy=f"`ping -M do -s {mtu - 28} ADDRESS` finds the size that passes; "
        f"`ip link set {name} mtu 1400` on all nodes",
        saves_s=seconds,
    )


def gradient_bytes(records: Sequence[RankRecord]) -> int:
    """Return the bytes of all gradients of a step, 0 if unknown."""
    return sum(records[0].bucket_bytes)

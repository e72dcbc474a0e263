"""The verdict on constructed records: what bounds the step, who is to blame, what mends it, and what it would gain."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from support.why.made_records import FORWARD_S, card, training

from cgx_ray.units import format_seconds
from cgx_ray.why.records import ProbedPath, RankRecord, StepTimes
from cgx_ray.why.show import show_verdict
from cgx_ray.why.verdict import EXIT_STATUS, Bound, verdict_of

SLOW = {"bytes_per_s": 11.7e6, "busy_s": 9.0, "sent_bytes": 100_000_000}


def test_a_healthy_training_is_called_healthy_and_is_sold_no_compression() -> None:
    verdict = verdict_of(training())
    assert (verdict.bound, verdict.exit_status) == (Bound.NOTHING, 0)
    assert "Nothing large to mend there, and nothing to compress." in verdict.sentence
    assert verdict.costs == ()
    assert verdict.hints == ()
    assert verdict.compression is not None
    assert verdict.compression.sentence.startswith("none:")


def test_slow_links_bound_all_ranks_alike_and_compression_would_gain() -> None:
    verdict = verdict_of(training(network_s=2.2, usual_path=SLOW))
    assert (verdict.bound, verdict.exit_status) == (Bound.NETWORK, 3)
    assert verdict.costs[0].who == "all paths"
    assert "links of 93.6 Mbit/s" in verdict.sentence
    found = verdict.compression
    assert found is not None
    assert "qsgd" in found.plan
    assert found.loss is not None
    assert found.loss <= 1.01
    assert 1 < found.saves_s < 2.2
    assert found.enough_bit_per_s is not None
    assert found.enough_bit_per_s > 5 * found.seen_bit_per_s


def test_one_slow_path_is_named_with_its_card() -> None:
    cost = verdict_of(training(network_s=2.2, paths={(1, 2): SLOW})).costs[0]
    assert cost.who == "from node-1 to node-2"
    assert "card eth0 of node-1 says 1 Gbit/s" in cost.evidence
    assert "the uplink of node-1, or the downlink of node-2; --probe tells which" in cost.evidence
    assert cost.saves_s == pytest.approx(2.2 * 0.9)


@pytest.mark.parametrize(("end", "named"), [(0, "the uplink of node-1"), (1, "the downlink of node-1")])
def test_probes_tell_an_uplink_from_a_downlink(end: int, named: str) -> None:
    records = training(network_s=2.2, paths={(1, 2) if end == 0 else (0, 1): SLOW})
    for rank, one in enumerate(records):
        probes = tuple(
            ProbedPath(
                own=f"10.0.0.{rank + 1}",
                other=f"10.0.0.{other + 1}",
                bytes_per_s=11.7e6 if (rank, other)[end] == 1 else 117e6,
                latency_s=1e-4,
            )
            for other in range(4)
            if other != rank
        )
        records[rank] = replace(one, probes=probes)
    verdict = verdict_of(records)
    assert verdict.costs[0].who == named
    assert len(verdict.paths) == 12


@pytest.mark.parametrize(
    ("node", "given", "says"),
    [
        ({}, {}, "compare its batch size"),
        ({"throttled_s": 4.0}, {}, "raise the container's limit"),
        ({"stolen_share": 0.3}, {}, "move it to another machine"),
        ({"gpus": ("GPU-own, H100, 16, 16, 0x08",)}, {"gpu": "GPU-own"}, "nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i"),
        ({"gpus": ("GPU-other, H100, 16, 16, 0x08",)}, {"gpu": "GPU-own"}, "compare its batch size"),
        ({}, {"waited_s": 4.0}, "`top` on node-2"),
    ],
)
def test_a_slow_rank_is_named_with_its_reason(node: dict[str, Any], given: dict[str, Any], says: str) -> None:
    records = training(late={2: {"forward_s": FORWARD_S, "backward_s": 0.2}}, node={2: node})
    records[2] = replace(records[2], **given)
    verdict = verdict_of(records)
    assert (verdict.bound, verdict.exit_status) == (Bound.RANK, 4)
    assert verdict.costs[0].who == "rank 2 on node-2"
    assert verdict.costs[0].seconds == pytest.approx(0.3)
    assert says in verdict.costs[0].remedy
    assert "waiting for rank 2 on node-2" in verdict.sentence
    assert "other waits" not in verdict.sentence, "compute and this wait are nearly all of it"


def test_input_of_all_ranks_and_of_one_are_both_input() -> None:
    of_all = verdict_of(training(late={rank: {"input_s": 0.4} for rank in range(4)}))
    assert (of_all.bound, of_all.exit_status, of_all.costs[0].who) == (Bound.INPUT, 5, "all ranks")
    of_one = verdict_of(training(late={3: {"input_s": 0.4}}))
    assert (of_one.bound, of_one.costs[0].who) == (Bound.INPUT, "rank 3 on node-3")
    assert "DataLoader" not in of_one.costs[0].remedy
    with_loader = [replace(one, has_loader=True) for one in training(late={3: {"input_s": 0.4}})]
    assert "DataLoader(num_workers=" in verdict_of(with_loader).costs[0].remedy


def test_the_step_of_the_sentence_is_that_of_the_longest_bar_and_pauses_are_counted() -> None:
    # Ranks note the ends of their steps at different times: of each step the longest one is longer than any mean.
    records = training(late={rank: {"input_s": 0.1} for rank in range(4)})
    records = [
        replace(
            one,
            steps=(
                *(replace(step, rest_s=0.02 * ((place + one.rank) % 4)) for place, step in enumerate(one.steps)),
                replace(one.steps[0], input_s=60.0),
            ),
        )
        for one in records
    ]
    parts = verdict_of(records).parts
    assert parts is not None
    in_bars = [
        bar.input_s + bar.forward_s + bar.backward_s + bar.waiting_s + bar.network_s + bar.rest_s for bar in parts.bars
    ]
    assert parts.step_s == pytest.approx(max(in_bars))
    assert (parts.num_steps, parts.num_pauses) == (len(records[0].steps) - 1, 1)
    file = io.StringIO()
    show_verdict(Console(file=file, width=120), verdict_of(records), [])
    assert f"mean of {parts.num_steps} steps" in file.getvalue()
    assert "left out: 1 step that took over 5x as long as usual" in file.getvalue()


def test_ranks_that_are_last_in_turns_are_told_from_one_that_always_is() -> None:
    records = training()
    long, short = (StepTimes(forward_s=seconds, backward_s=0.2, exposed_s=0.5 - seconds) for seconds in (0.4, 0.1))
    records = [
        replace(one, steps=tuple(long if step % 4 == one.rank else short for step in range(20))) for one in records
    ]
    verdict = verdict_of(records)
    assert verdict.bound is Bound.RANK
    assert verdict.costs[0].who == "ranks in turns"
    # Of two ranks each is the last in half of the steps. What the other waits is no part of the compute; the exchange
    # takes 100 ms.
    verdict = verdict_of(
        [
            replace(one, steps=tuple(long if step % 2 == one.rank else short for step in range(20)))
            for one in records[:2]
        ]
    )
    assert verdict.parts is not None
    said = "300 ms compute, 100 ms other waits, 300 ms waiting for ranks that come last in turns."
    assert verdict.sentence == f"Your step takes 700 ms: {said}"


def test_a_rank_s_gpu_is_found_although_another_rank_of_its_node_has_asked() -> None:
    gpus = ("GPU-0, H100, 16, 16, 0x00", "GPU-1, H100, 16, 16, 0x08")
    here = {"name": "here"}
    records = training(late={1: {"backward_s": 0.3}}, node={0: {**here, "gpus": gpus}, 1: here})
    records = [replace(one, gpu=f"GPU-{one.rank}") for one in records]
    cost = verdict_of(records).costs[0]
    assert cost.evidence.endswith("; its GPU: H100, 16, 16, 0x08")
    assert "-i GPU-1` on here" in cost.remedy


def test_input_that_stalls_in_turns_is_input_and_the_rest_is_the_ranks() -> None:
    records = training()
    usual = records[0].steps[0]
    stalled = replace(usual, input_s=0.3, backward_s=0.25, exposed_s=0.005)
    waits = replace(usual, exposed_s=0.005 + 0.3 - 0.002 + 0.05)
    records = [
        replace(one, steps=tuple(stalled if step % 4 == one.rank else waits for step in range(20))) for one in records
    ]
    verdict = verdict_of(records)
    assert (verdict.bound, verdict.exit_status) == (Bound.INPUT, 5)
    found = {(cost.bound, cost.who): cost.seconds for cost in verdict.costs}
    assert found[Bound.INPUT, "ranks in turns"] == pytest.approx(0.298)
    assert found[Bound.RANK, "ranks in turns"] == pytest.approx(0.05)
    assert verdict.parts is not None
    compute_s = verdict.parts.compute_s
    rest_s = verdict.parts.step_s - compute_s - 0.298
    compute, rest = format_seconds(compute_s), format_seconds(rest_s)
    assert f" {compute} compute, {rest} other waits, 298 ms waiting for the input of ranks in" in verdict.sentence


def test_round_trips_count_where_buckets_are_small_and_larger_ones_mend_it() -> None:
    records = training(network_s=1.0, usual_path={"least_round_trip_s": 0.02}, bucket_bytes=(1 << 20,) * 40)
    cost = verdict_of(records).costs[0]
    assert cost.phrase == "round trips of 20 ms"
    assert "bucket_cap_mb=20" in cost.remedy
    assert cost.saves_s == pytest.approx(1.0 * 38 / 40)


def test_a_path_that_loses_packets_is_named() -> None:
    lossy = {**SLOW, "resent_bytes": 1_000_000}
    cost = verdict_of(training(network_s=2.2, paths={(0, 1): lossy})).costs[0]
    assert cost.who == "from node-0 to node-1"
    assert "1.0% of the bytes were sent again" in cost.evidence


def test_a_faster_card_on_every_node_is_named_with_the_setting() -> None:
    cards = {rank: {"cards": (card(address=f"10.0.0.{rank + 1}", bit_per_s=1e8), fast(rank))} for rank in range(4)}
    cost = verdict_of(training(network_s=2.2, usual_path=SLOW, node=cards)).costs[0]
    assert cost.remedy.startswith("`export GLOO_SOCKET_IFNAME=fast0 NCCL_SOCKET_IFNAME=fast0`")
    assert cost.saves_s == pytest.approx(2.2 * 0.99)
    assert "their drivers say" in cost.evidence
    del cards[3]
    assert all("IFNAME" not in cost.remedy for cost in verdict_of(training(network_s=2.2, node=cards)).costs)


def test_a_faster_card_is_found_by_probes_where_drivers_do_not_say() -> None:
    cards = {
        rank: {"cards": tuple(replace(one, bit_per_s=0.0) for one in (card(address=f"10.0.0.{rank + 1}"), fast(rank)))}
        for rank in range(4)
    }
    records = training(network_s=2.2, usual_path=SLOW, node=cards)
    for rank, one in enumerate(records):
        probes = tuple(
            ProbedPath(own=f"10.{net}.0.{rank + 1}", other=f"10.{net}.0.{other + 1}", bytes_per_s=rate, latency_s=1e-4)
            for net, rate in ((0, 11.7e6), (1, 117e6))
            for other in range(4)
            if other != rank
        )
        records[rank] = replace(one, probes=probes)
    verdict = verdict_of(records)
    assert "card eth0 of all nodes" in {cost.who for cost in verdict.costs}
    assert "fast0 is up on every node (936 Mbit/s, probed)" in verdict.costs[0].evidence
    assert {round(path.bytes_per_s) for path in verdict.paths} == {11_700_000}


def fast(rank: int) -> Any:
    return card("fast0", f"10.1.0.{rank + 1}", bit_per_s=1e10)


def with_more_bytes(num_bytes: int, quiet_bytes_per_s: float | None) -> list[RankRecord]:
    """Return a training in whose 10 s one card sent more than its 100 MB of gradients."""
    own = card(address="10.0.0.3", sent_bytes=100_000_000 + num_bytes, quiet_bytes_per_s=quiet_bytes_per_s)
    return training(network_s=2.2, usual_path=SLOW, node={2: {"cards": (own,)}})


def test_traffic_of_others_is_told_from_our_own() -> None:
    cost = verdict_of(with_more_bytes(900_000_000, 80e6)).costs[0]
    assert cost.who == "card eth0 of node-2"
    assert "are not this training's" in cost.evidence


@pytest.mark.parametrize(
    ("num_bytes", "quiet_bytes_per_s"),
    [(20_000_000, 2e6), (900_000_000, 20e6), (900_000_000, None)],
    ids=["few", "only beside the exchange", "never quiet"],
)
def test_bytes_that_may_be_the_training_s_own_are_no_other_job(num_bytes: int, quiet_bytes_per_s: float | None) -> None:
    costs = verdict_of(with_more_bytes(num_bytes, quiet_bytes_per_s)).costs
    assert [cost.who for cost in costs] == ["all paths"]


def test_a_path_on_which_nothing_arrives_is_named_although_no_step_ends() -> None:
    records = [replace(one, steps=()) for one in training(paths={(2, 3): {"num_timeouts": 6}})]
    verdict = verdict_of(records)
    assert (verdict.bound, verdict.exit_status) == (Bound.NETWORK, 3)
    assert verdict.costs[0].who == "from node-2 to node-3"
    assert "large packets do not pass" in verdict.costs[0].evidence


def test_several_exchanges_per_step_ask_for_no_sync() -> None:
    assert any("no_sync" in cost.remedy for cost in verdict_of(training(network_s=1.0, num_exchanges=4.0)).costs)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_ranks_of_one_node_are_told_that_they_share_it(num_threads: int) -> None:
    records = training(network_s=1.0, num_threads=num_threads, seen_s=10.0, waited_s=9.0)
    records = [replace(one, node=replace(one.node, name="here", num_processors=2)) for one in records]
    cost = verdict_of(records).costs[0]
    assert cost.who == "ranks of here"
    assert "4 ranks share 2 processors" in cost.evidence
    assert "threads wait 90% of the time" in cost.evidence
    # Where each rank has one thread, that is in force already.
    assert ("OMP_NUM_THREADS=1" in cost.remedy) == (num_threads > 1)


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([], "no process group and no DDP model"),
        ([replace(one, num_models=0, num_warm=0, steps=()) for one in training(2)], "built no DDP model"),
        ([replace(one, num_warm=3, steps=()) for one in training(2)], "ended after 3 steps to warm up"),
    ],
)
def test_without_steps_the_verdict_says_what_was_missing(records: list[RankRecord], says: str) -> None:
    verdict = verdict_of(records)
    assert says in verdict.sentence
    assert (verdict.bound, verdict.exit_status) == (None, 1)


def test_steps_beside_a_long_pause_do_not_count() -> None:
    records = [replace(one, steps=(*one.steps, replace(one.steps[0], input_s=60.0))) for one in training()]
    verdict = verdict_of(records)
    assert verdict.bound is Bound.NOTHING
    assert verdict.parts is not None
    assert verdict.parts.num_steps == 20


def test_input_that_stalls_in_every_eighth_step_is_input() -> None:
    records = training()
    stall = replace(records[0].steps[0], input_s=7.3)
    records = [replace(one, steps=(*(one.steps[:1] * 7), stall) * 3) for one in records]
    verdict = verdict_of(records)
    assert verdict.bound is Bound.INPUT
    assert verdict.parts is not None
    assert verdict.parts.num_steps == 24


def test_a_rank_without_steps_takes_the_verdict_from_no_other() -> None:
    *records, last = training(network_s=1.0)
    verdict = verdict_of([*records, replace(last, num_models=0, steps=())])
    assert verdict.bound is Bound.NETWORK
    assert verdict.parts is not None
    assert [bar.rank for bar in verdict.parts.bars] == [0, 1, 2]


def test_nodes_without_a_tcp_connection_do_not_share_processors() -> None:
    verdict = verdict_of([replace(one, backend="nccl", connections=()) for one in training(network_s=1.0)])
    assert verdict.costs[0].phrase == "links between nodes that TCP does not carry"
    assert verdict.compression is not None
    assert "one node" not in verdict.compression.sentence


@pytest.mark.parametrize("bucket_bytes", [(1 << 20,), (1 << 20,) * 41])
def test_buckets_that_would_not_become_more_are_left_alone(bucket_bytes: tuple[int, ...]) -> None:
    records = training(network_s=0.5, bucket_bytes=bucket_bytes, num_exchanges=1.0)
    records = [replace(one, steps=tuple(replace(step, hidden_s=0.0) for step in one.steps)) for one in records]
    assert not any("hides" in cost.evidence for cost in verdict_of(records).costs)


def test_each_bound_has_an_exit_status_of_its_own() -> None:
    assert EXIT_STATUS.keys() == {*Bound, None}
    assert len(set(EXIT_STATUS.values())) == len(EXIT_STATUS)


def test_what_costs_nothing_yet_is_a_hint() -> None:
    odd = {
        0: {"shared_bytes": 64 << 20, "max_open_files": 1024},
        1: {"cards": (card("wg0", "10.0.0.2", kind="tunnel", mtu=1420),)},
        3: {"cards": (card(address="10.0.0.4", duplex="half"),), "gpus": ("GPU-0, H100, 8, 16, 0x00",)},
    }
    far = {"receiver_limited_s": 2.0, "least_round_trip_s": 0.02}
    found = "\n".join(verdict_of(training(node=odd, paths={(2, 3): far})).hints)
    for words in (
        "net.ipv4.tcp_rmem",
        "--shm-size",
        "ulimit -n",
        "pass the tunnel wg0",
        "different MTUs (1420, 1500)",
        "eth0 of node-3 says half duplex",
        "node-3: H100 uses 8 of 16 PCIe lanes",
    ):
        assert words in found

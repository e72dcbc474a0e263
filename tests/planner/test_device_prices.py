"""Prices where a GPU encodes: rows, pieces, the host's thread, the bus, and what backward loses. No GPU is needed."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.groupings import all_plans

from bench.planner.cases import earliest_finish_s
from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import HOST
from cgx_ray.collectives import pieces
from cgx_ray.collectives.pieces import chunk_bounds, cut
from cgx_ray.errors import ConfigError
from cgx_ray.plan import DENSE, DEVICE_PIECE_BYTES, PIECE_BYTES, CodecSpec, Intra, Layer, Option, Scheme
from cgx_ray.planner.candidates import FREE, CodecCost, candidate_codecs, codec_options, host_name, offloaded
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.engine_cost import HOST_ENGINE, EngineCost
from cgx_ray.planner.joint import MAX_ERROR, best_plan
from cgx_ray.planner.legs import exchange_stages, legs
from cgx_ray.planner.pipeline import Pipeline, group_cost
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured, predict
from cgx_ray.planner.profile import Profile, load_profile, save_profile
from cgx_ray.planner.search import search
from cgx_ray.planner.timeline import Resource, Stage

QSGD = CodecSpec(name="qsgd")
SRA, ALLGATHER = (Option(codec=QSGD, scheme=scheme) for scheme in (Scheme.SRA, Scheme.ALLGATHER))
TOPK = Option(codec=CodecSpec(name="topk", density=0.01), scheme=Scheme.ALLGATHER)
CODECS = candidate_codecs((0.01,))
OPTIONS = codec_options(CODECS)
GAIN = {str(codec): gain for codec, gain in zip(CODECS, (1.0, 1.0, 0.98, 0.6), strict=True)}
# As on an H100: 41 and 33 us a call, 2e-12 s per element.
KERNELS = CodecCost(
    encode_a_s=4.1e-5,
    encode_b_s_per_element=2e-12,
    decode_a_s=3.3e-5,
    decode_b_s_per_element=1e-12,
    encode_row_s=2e-6,
    decode_row_s=3e-6,
)
HOST_CODEC = CodecCost(encode_a_s=1e-4, encode_b_s_per_element=1e-9, decode_a_s=2e-5, decode_b_s_per_element=4e-10)
ENGINE = EngineCost(
    thread_s=2e-4,
    message_s=5e-5,
    byte_s=1e-10,
    piece_bytes=DEVICE_PIECE_BYTES,
    codes_rows=True,
    vendor_window_bytes=None,
)
LAN = Link.from_rates(bandwidth_gbps=10, latency_ms=0.05)
BUS = Link.from_rates(bandwidth_gbps=160, latency_ms=0.02)


def seconds_on(stages: tuple[Stage, ...], resource: Resource) -> float:
    return sum(stage.busy_s.get(resource, 0.0) for stage in stages)


class _Ends:
    takes_many = True


@pytest.mark.parametrize("num_ranks", [2, 5])
@pytest.mark.parametrize("numel", [1000, 1 << 22, 1 << 25, 1 << 26])
@pytest.mark.parametrize("option", [SRA, ALLGATHER, TOPK], ids=str)
def test_pieces_are_those_that_exchanges_cut(option: Option, numel: int, num_ranks: int) -> None:
    for device, engine, piece_bytes in (
        (HOST, HOST_ENGINE, PIECE_BYTES),
        (torch.device("cpu", 0), ENGINE, DEVICE_PIECE_BYTES),
    ):
        codec = make_codec(option.codec, device=device)
        codec.device = device
        chunks = chunk_bounds(numel, num_ranks, codec.granule) if option.scheme is Scheme.SRA else [(0, numel)]
        is_cut = option.scheme is Scheme.SRA or codec.record.is_reencoded
        num_cut = len(cut(codec, chunks, _Ends())) if is_cut else 1  # type: ignore[arg-type]
        (leg,) = legs(option, Network.flat(num_ranks, LAN), numel, engine=engine)
        assert engine.piece_bytes == piece_bytes
        assert leg.num_pieces == (num_cut if engine is ENGINE else 1)
    assert (pieces.PIECE_BYTES, pieces.DEVICE_PIECE_BYTES) == (PIECE_BYTES, DEVICE_PIECE_BYTES)


@pytest.mark.parametrize("numel", [1 << 20, 1 << 26])
def test_a_group_over_sra_costs_its_calls_its_rows_its_messages_and_its_bytes_by_piece(numel: int) -> None:
    N, m = 4, QSGD.payload_bytes(numel)
    p = math.ceil(m / N / DEVICE_PIECE_BYTES)
    assert p == (1 if numel == 1 << 20 else 3)
    stages = exchange_stages(SRA, Network.flat(N, LAN), KERNELS, numel, encodes_on="device", bus=BUS, engine=ENGINE)
    # 3 foreign chunks in one call and the own sum in another; 3 parts in one call, 4 sums in another.
    encode_s = p * (2 * 4.1e-5 + 2 * 2e-6) + numel * 2e-12
    decode_s = p * (2 * 3.3e-5 + 5 * 3e-6) + 1.75 * numel * 1e-12
    bytes_s = 2.75 * m * (1e-10 + BUS.beta_s_per_byte)
    thread_s = p * (2e-4 + 7 * 5e-5)
    assert seconds_on(stages, Resource.CODEC) == pytest.approx(encode_s + decode_s + bytes_s + thread_s)
    # Backward loses what the GPU does with elements, not what the host does, nor copies.
    assert seconds_on(stages, Resource.COMPUTE) == pytest.approx(numel * (2e-12 + 1.75 * 1e-12))


def test_codecs_whose_rows_were_not_timed_pay_a_call_for_each_message() -> None:
    plain = replace(KERNELS, encode_row_s=None, decode_row_s=None)
    (leg,) = legs(SRA, Network.flat(4, LAN), 1 << 20, engine=ENGINE)
    by_call = leg.encode_s(plain) + leg.decode_s(plain)
    as_rows = replace(KERNELS, encode_row_s=4.1e-5, decode_row_s=3.3e-5)
    assert by_call == pytest.approx(leg.encode_s(as_rows) + leg.decode_s(as_rows))
    assert leg.encode_s(KERNELS) + leg.decode_s(KERNELS) < by_call
    # Allgather decodes each message by itself.
    (leg,) = legs(ALLGATHER, Network.flat(4, LAN), 1 << 20, engine=ENGINE)
    assert leg.decode_s(KERNELS) == leg.decode_s(plain)


@pytest.mark.parametrize("numel", [1 << 20, 1 << 24, 1 << 27])
@pytest.mark.parametrize("option", [DENSE, SRA, ALLGATHER, TOPK], ids=str)
def test_the_cost_of_a_group_for_the_search_has_the_seconds_of_its_stages(option: Option, numel: int) -> None:
    network = Network.flat(4, Link.from_rates(bandwidth_gbps=1000, latency_ms=0.0))
    cost = FREE if option == DENSE else KERNELS
    stages = exchange_stages(option, network, cost, numel, encodes_on="device", bus=BUS, engine=ENGINE)
    found = group_cost(
        option, network=network, codec_cost=cost, numel=numel, encodes_on="device", bus=BUS, engine=ENGINE
    )
    assert found.compute_s(numel) == pytest.approx(seconds_on(stages, Resource.COMPUTE), abs=1e-12)
    if option != DENSE:  # the thread is busiest here
        assert found.network_s(numel) == pytest.approx(seconds_on(stages, Resource.CODEC), rel=1e-6)


def test_what_the_host_encodes_costs_the_same_whatever_the_device_costs() -> None:
    network = Network(num_nodes=4, ranks_per_node=2, between=LAN, inside=LAN)
    for option in (SRA.on("cpu"), replace(SRA, intra=Intra.DENSE), replace(SRA, intra=Intra.COMPRESSED)):
        on_host, on_device = (
            exchange_stages(option, network, HOST_CODEC, 1 << 22, encodes_on=where, bus=BUS, engine=engine)
            for where, engine in (("thread", HOST_ENGINE), ("device", ENGINE))
        )
        assert on_device == on_host
        assert seconds_on(on_device, Resource.COMPUTE) == 0


def test_gloos_window_makes_no_sum_of_nccl_slower() -> None:
    network = Network.flat(4, Link.from_rates(bandwidth_gbps=10, latency_ms=25))
    on_host, on_device = (exchange_stages(DENSE, network, FREE, 1 << 24, engine=one) for one in (HOST_ENGINE, ENGINE))
    ring_bytes = 1.5 * 4 * (1 << 24)
    assert seconds_on(on_host, Resource.INTER) == pytest.approx(ring_bytes * 0.05 / (2 << 20))
    assert seconds_on(on_device, Resource.INTER) == pytest.approx(ring_bytes * 8e-10)


def run_on_gpu(rng: random.Random) -> Measured:
    """Return one to four layers on machines whose GPUs, hosts and links are faster or slower by up to 30x."""
    layers = tuple(
        Layer(name=f"l{index}", numel=int(10 ** rng.uniform(4, 7.5)), ndim=2) for index in range(rng.randint(1, 4))
    )
    kernels, host = KERNELS.slowed(10 ** rng.uniform(-0.5, 1.5)), HOST_CODEC.slowed(10 ** rng.uniform(-1, 0.5))
    costs = {str(codec): kernels for codec in CODECS[1:]} | {host_name(codec): host for codec in CODECS[1:]}
    return Measured(
        layers=layers,
        backward_s=tuple(rng.expovariate(50) for _ in layers),
        network=Network.flat(
            rng.choice((2, 5)), Link.from_rates(bandwidth_gbps=10 ** rng.uniform(-1, 1.5), latency_ms=0.1)
        ),
        codec_costs=costs,
        gain=GAIN,
        encodes_on="device",
        bus=Link.from_rates(bandwidth_gbps=10 ** rng.uniform(2, 3), latency_ms=0.02),
        engine=replace(ENGINE, thread_s=10 ** rng.uniform(-5, -3), message_s=10 ** rng.uniform(-5, -4)),
    )


def some_options(rng: random.Random) -> list[Option]:
    flat = rng.sample([option for option in OPTIONS[1:] if option.intra is Intra.FLAT], 2)
    return [DENSE, *flat, *offloaded(flat[:1])]


def test_the_search_equals_brute_force() -> None:
    rng = random.Random(1)
    for case in range(40):
        run, options = run_on_gpu(rng), some_options(rng)
        costs = tuple(
            group_cost(
                option,
                network=run.network,
                codec_cost=run.cost_of(option),
                encodes_on=run.encodes_on,
                bus=run.bus,
                engine=run.engine,
            )
            for option in options
        )
        numel = tuple(layer.numel for layer in reversed(run.layers))
        pipeline = Pipeline(backward_s=run.backward_s, numel=numel, costs=costs)
        assert search(pipeline, max_gap=0).finish_s == pytest.approx(earliest_finish_s(pipeline), rel=1e-9), case


def test_the_joint_plan_equals_brute_force_over_simulated_steps() -> None:
    """The search knows a model of the simulated step, so the best plan may be longer than the optimum by MAX_ERROR."""
    rng = random.Random(4)
    used = set()
    for case in range(30):
        run, options = run_on_gpu(rng), some_options(rng)
        least = min(predict(run, groups).score for groups in all_plans(run.layers, options))
        found = best_plan(run, options, max_gap=0)
        assert found.best.score <= least * (1 + MAX_ERROR), (case, found.best.score, least, found.best.describe())
        used |= {group.option.is_on_host for group in found.best.groups if group.option != DENSE}
    assert used == {True, False}


def test_a_dense_sum_and_the_codec_of_another_group_overlap() -> None:
    numel = 1 << 24
    layers = tuple(Layer(name=name, numel=numel, ndim=2) for name in ("late", "early"))
    costs = {str(QSGD): replace(KERNELS, encode_b_s_per_element=1e-9), host_name(QSGD): HOST_CODEC}
    run = Measured(
        layers=layers, backward_s=(0.0, 0.0), network=Network.flat(4, LAN), codec_costs=costs, gain=GAIN, bus=BUS,
        engine=ENGINE, encodes_on="device",
    )  # fmt: skip
    both = [PlannedGroup.of(layers[1:], DENSE), PlannedGroup.of(layers[:1], SRA)]
    spans = {(span.group, span.stage.name): span for span in predict(run, both).timeline.spans}
    assert spans[1, "encode"].end_s < spans[0, "exchange"].end_s
    assert spans[1, "encode"].end_s == pytest.approx(spans[0, "encode"].end_s + spans[1, "encode"].stage.duration_s)


def test_a_profile_of_a_gpu_keeps_rows_and_engine_and_one_of_a_host_has_neither(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    gpu = Profile(package_version="1", device="a GPU", threads=1, codec_costs={"qsgd": KERNELS}, engine=ENGINE)
    save_profile(gpu, path)
    assert load_profile(path) == gpu
    save_profile(replace(gpu, codec_costs={"qsgd": HOST_CODEC}, engine=HOST_ENGINE), path)
    assert not any(word in path.read_text() for word in ("row_s", "engine"))
    assert load_profile(path).engine == HOST_ENGINE


@pytest.mark.parametrize("changes", [{"thread_s": -1.0}, {"byte_s": math.nan}, {"piece_bytes": 0}])
def test_impossible_costs_of_an_engine_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} .* is not allowed"):
        replace(ENGINE, **changes)  # type: ignore[arg-type]

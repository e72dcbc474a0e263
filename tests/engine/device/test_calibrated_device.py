"""Calibration where a device encodes. The test plays the device: its clock counts what is asked of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from cgx_ray.codecs.codec import HOST, PayloadRow
from cgx_ray.codecs.qsgd import Qsgd
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Phases, pieces
from cgx_ray.collectives.sra import Sra
from cgx_ray.plan import DEVICE_PIECE_BYTES, NONE, CodecSpec, Layer, Option, Scheme, make_plan
from cgx_ray.planner.candidates import CodecCost, host_name
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.engine_cost import HOST_ENGINE, EngineCost
from cgx_ray.planner.legs import legs
from cgx_ray.runtime_ext.streams import STREAMS, Mark, Streams
from cgx_ray.session import calibrate as module
from cgx_ray.session import engine_times
from cgx_ray.session.calibrate import (
    DEVICE_NUMELS,
    TURN_S,
    best_seconds,
    calibrate,
    measure_codec,
    measure_codecs,
    slowest,
)
from cgx_ray.session.engine_times import (
    FEW_RANKS,
    LONG_BYTES,
    MANY_RANKS,
    _connected,
    _NoCodec,
    _RankTurns,
    _seconds_of_turns,
    fit_times,
    measure_engine,
)
from cgx_ray.session.settings import Settings

DEVICE = torch.device("cpu", 0)
CALL_S, ROW_S, ELEMENT_S = 4e-5, 3e-6, 2e-12


class _Clocked(Streams):
    """Streams of a device whose time is `now_s`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self, stream: object = None) -> Mark:
        return _At(self.now_s)


class _At(Mark):
    def __init__(self, now_s: float) -> None:
        self._now_s = now_s

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _At)
        return self._now_s - earlier._now_s


class _Kernels(Qsgd):
    """Takes the clock's time for each call, row and element."""

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: object = None) -> None:
        self._spend([grad_N])

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        self._spend([out_N])

    def encode_rows(self, rows: Sequence[PayloadRow]) -> None:
        self._spend([row.part_N for row in rows])

    def decode_rows(self, rows: Sequence[PayloadRow]) -> None:
        self._spend([row.part_N for row in rows])

    def _spend(self, parts: Sequence[Tensor]) -> None:
        streams = STREAMS[DEVICE]
        assert isinstance(streams, _Clocked)
        streams.now_s += CALL_S + (len(parts) - 1) * ROW_S + sum(map(len, parts)) * ELEMENT_S


@pytest.fixture(autouse=True)
def clock() -> Iterator[_Clocked]:
    before = dict(STREAMS)
    STREAMS[DEVICE] = clock = _Clocked()
    yield clock
    STREAMS.clear()
    STREAMS.update(before)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(spec: CodecSpec, **options: object) -> _Kernels:
        codec = _Kernels(spec)
        codec.device = DEVICE
        return codec

    monkeypatch.setattr(module, "make_codec", make)


@pytest.mark.usefixtures("kernels")
def test_a_codec_of_a_device_is_timed_by_marks_with_its_rows() -> None:
    cost = measure_codec(CodecSpec(name="qsgd"), device=DEVICE)
    expected = {"encode_a_s": CALL_S, "encode_b_s_per_element": ELEMENT_S, "encode_row_s": ROW_S}
    expected |= {name.replace("encode", "decode"): seconds for name, seconds in expected.items()}
    assert cost.known() == pytest.approx(expected, rel=1e-4)
    assert DEVICE_NUMELS == (1 << 14, 1 << 18, 1 << 24)


def test_a_reading_takes_about_4_ms_of_the_device(clock: _Clocked) -> None:
    def call() -> None:
        clock.now_s += 1e-4

    found = best_seconds([call], DEVICE, num_rounds=1, turn_s=TURN_S)
    assert found == pytest.approx([1e-4])
    # To warm up, to see how long it takes, and the reading.
    assert clock.now_s == pytest.approx(2e-4 + TURN_S)


def test_a_call_that_no_clock_sees_is_repeated_a_limited_number_of_times() -> None:
    calls = []
    assert best_seconds([lambda: calls.append(0)], DEVICE, num_rounds=1, turn_s=TURN_S) == [0.0]
    assert len(calls) == 2 + module._MAX_REPEATS


def test_on_the_host_nothing_is_measured_by_rows_and_the_engine_costs_what_it_did() -> None:
    assert measure_codec(CodecSpec(name="qsgd")).encode_row_s is None
    layer = Layer(name="w", numel=1000, ndim=2)
    settings = Settings()
    plan = make_plan([layer], version=0, world_size=2)
    found = calibrate(settings, [layer], plan, HOST, measure_codecs(settings, HOST))
    assert (found.engine, found.encodes_on, found.bus) == (HOST_ENGINE, "backward", None)
    assert not any(cost.encode_row_s for cost in found.codec_costs.values())


def test_each_codec_takes_as_long_as_on_the_rank_where_a_group_takes_longest() -> None:
    def cost(call_s: float, element_s: float) -> CodecCost:
        return CodecCost(
            encode_a_s=call_s, encode_b_s_per_element=element_s, decode_a_s=call_s, decode_b_s_per_element=element_s
        )

    usual, slow, late = cost(1e-5, 1e-9), cost(1e-6, 2e-9), cost(1e-3, 1e-9)
    ranks = [{"bf16": usual, "qsgd": usual}, {"bf16": slow, "qsgd": late}, {}, {"bf16": late, "qsgd": usual}]
    assert slowest(ranks) == {"bf16": slow, "qsgd": late}
    assert slowest([{}, {}]) == {}


def test_the_times_of_the_thread_are_found_from_those_of_groups() -> None:
    thread_s, message_s, byte_s = 2e-4, 5e-5, 1e-10

    def group_s(num_ranks: int, num_bytes: int) -> float:
        num_messages = 2 * num_ranks - 1
        return thread_s + num_messages * message_s + (num_ranks + num_messages) * num_bytes * byte_s

    empty_s = group_s(FEW_RANKS, 0)
    long_s = group_s(FEW_RANKS, LONG_BYTES - engine_times.EMPTY_BYTES)
    found = fit_times(empty_s, group_s(MANY_RANKS, 0), long_s)
    assert found == pytest.approx((thread_s, message_s, byte_s))
    # Noise makes no time negative.
    assert fit_times(1e-3, 9e-4, 9e-4) == (1e-3, 0.0, 0.0)
    thread_s, message_s, byte_s = fit_times(1e-3, 9e-3, 1e-3)
    assert (thread_s, message_s) == pytest.approx((0.0, 1e-3 / 3), abs=1e-12)


def test_the_engine_of_a_device_is_measured_by_real_exchanges() -> None:
    """Sixteen groups, among two and among four ranks of this process; the numbers are of no GPU."""
    torch.set_num_threads(1)
    found = measure_engine(DEVICE)
    assert 0 < found.thread_s + 3 * found.message_s < 1
    assert 0 <= found.byte_s < 1e-6
    assert (found.piece_bytes, found.codes_rows, found.vendor_window_bytes) == (DEVICE_PIECE_BYTES, True, None)


class _Counting(_NoCodec):
    """`counts`: messages and calls that encode, then messages and calls that decode."""

    def __init__(self) -> None:
        super().__init__(DEVICE, 0)
        self.counts = [0, 0, 0, 0]

    def payload_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode_rows(self, rows: Sequence[PayloadRow]) -> None:
        self._count(len(rows), 1, 0, 0)

    def sum_rows(self, own: PayloadRow, payloads: Sequence[Tensor], num_ranks: int) -> None:
        self._count(1, 1, len(payloads), 1)

    def decode_rows(self, rows: Sequence[PayloadRow]) -> None:
        self._count(0, 0, len(rows), 1)

    def _count(self, *more: int) -> None:
        self.counts = [before + new for before, new in zip(self.counts, more, strict=True)]


@pytest.mark.parametrize("piece_bytes", [DEVICE_PIECE_BYTES, 1000])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_calls_and_messages_that_are_priced_are_those_of_an_exchange(
    num_ranks: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "DEVICE_PIECE_BYTES", piece_bytes)
    numel, codecs = 3000, [_Counting() for _ in range(num_ranks)]
    with _connected(num_ranks) as ends:
        exchanges = [Sra(codec, numel, own) for codec, own in zip(codecs, ends, strict=True)]
        stamp = Stamp(plan_version=0, step=0, group=0, codec="none")
        turns = [exchange.turns(torch.zeros(numel), None, stamp, 0, Phases()) for exchange in exchanges]
        _seconds_of_turns(deque(_RankTurns(own, 0, one) for own, one in zip(ends, turns, strict=True)))
    engine = EngineCost(codes_rows=True, piece_bytes=piece_bytes)
    network = Network.flat(num_ranks, Link.from_rates(bandwidth_gbps=10, latency_ms=0))
    # Codec none sends 4 bytes an element too.
    (leg,) = legs(Option(codec=NONE, scheme=Scheme.SRA), network, numel, engine=engine)
    assert leg.num_pieces == (1 if piece_bytes == DEVICE_PIECE_BYTES else math.ceil(4 * numel / num_ranks / 1000))
    for codec in codecs:
        assert codec.counts == [leg.encode[0], leg._calls[0], leg.decode[0], leg._calls[1]]


def test_without_connections_the_threads_times_are_those_of_hosts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("no address")

    monkeypatch.setattr(engine_times, "Mesh", refuse)
    found = measure_engine(DEVICE)
    assert (found.thread_s, found.message_s) == (HOST_ENGINE.thread_s, HOST_ENGINE.message_s)
    assert found.codes_rows
    assert "cannot be timed (no address)" in caplog.text


@pytest.mark.usefixtures("kernels")
def test_a_run_on_a_device_registers_what_it_measured_there(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = measure_engine(DEVICE)
    monkeypatch.setattr(module, "measure_engine", lambda device: engine)
    monkeypatch.setattr(module, "DEVICE_NUMELS", (1 << 10, 1 << 14))
    layer = Layer(name="w", numel=1000, ndim=2)
    settings = Settings(policy="flexible")
    plan = make_plan([layer], version=0, world_size=2)
    found = calibrate(settings, [layer], plan, DEVICE, measure_codecs(settings, DEVICE))
    assert (found.encodes_on, found.engine) == ("device", engine)
    assert all(cost.encode_a_s == pytest.approx(CALL_S, rel=1e-3) for cost in found.codec_costs.values())
    assert not any(name.endswith(host_name("")) for name in found.codec_costs)


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    """Launches may take longer than the kernels of all sizes that are timed. Then elements take no time.

    Limits are far off: other processes may use the GPU meanwhile.
    """
    device = torch.device("cuda", 0)
    cost = measure_codec(CodecSpec(name="qsgd"), device=device)
    assert 0 <= cost.encode_b_s_per_element < 1e-9
    assert 0 <= cost.decode_b_s_per_element < 1e-9
    assert cost.encode_row_s is not None
    assert 0 <= cost.encode_row_s < 1e-3
    assert 0 < cost.encode_a_s < 1e-3
    engine = measure_engine(device)
    assert 0 < engine.thread_s + 3 * engine.message_s < 1e-2
    assert engine.byte_s < 1e-8

"""Messages under way at the same time: pieces of a chunk, their order, their cost on a simulated link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import TIMEOUT_S, run_ranks

import cgx_ray
from cgx_ray.codecs import make_codec
from cgx_ray.codecs.wire import HEADER_BYTES, Stamp
from cgx_ray.collectives import Phases, Transport, make_exchange, pieces
from cgx_ray.collectives import phases as phases_module
from cgx_ray.collectives.transport import simulated_link, transport
from cgx_ray.collectives.transport.tcp import connect_mesh
from cgx_ray.plan import CodecSpec, Scheme

WORLD = 3
WHOLE = 1 << 30
# 10,000 elements in 3 chunks make 45 pieces of float32, or 6 of qsgd:bits=4, of different lengths.
CUT = 300
NUMEL = 10_000


def _transport(kind: str, link: cgx_ray.SimulatedLink | None = None) -> Transport:
    assert dist.group.WORLD is not None
    mesh = None
    if kind != "gloo":
        mesh = connect_mesh(dist.group.WORLD, TIMEOUT_S, shared_memory=kind == "shm")
    return Transport(dist.group.WORLD, link, mesh, TIMEOUT_S)


def _gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * rank + step))


# A tree of five has a guest.
WORLD_OF = {"sra": 3, "ring": 3, "tree": 5, "broadcast": 3, "allgather": 3}


def _run_scheme(
    rank: int, scheme: str, codec: str, piece_bytes: int, kind: str, num_steps: int, device: str = "cpu"
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the averages by step, and this rank's residual at the end."""
    pieces.PIECE_BYTES = pieces.DEVICE_PIECE_BYTES = piece_bytes
    made, link = make_codec(CodecSpec.parse(codec), device=torch.device(device)), _transport(kind)
    exchange, memory = make_exchange(made, Scheme(scheme), NUMEL, 4, link), made.new_memory(NUMEL)
    results = []
    for step in range(num_steps):
        grad_N = _gradient(rank, step)
        stamp = Stamp(plan_version=0, step=step, group=0, codec=made.spec.name)
        exchange.run(grad_N, memory, stamp, 0, Phases())
        if memory is not None:
            memory.commit()
        results.append(grad_N)
    dist.barrier()
    link.close()
    owed_N = memory.residual_N if memory is not None else None
    return results, owed_N if owed_N is not None else torch.zeros(NUMEL)


def _check_same_bits(scheme: str, codecs: Sequence[str], *ways: tuple[int, str, int, str]) -> None:
    """Run the scheme with each codec in two ways, arguments of `_run_scheme` after the codec, and compare the bits."""
    cases = [partial(_run_scheme, scheme=scheme, codec=codec) for codec in codecs]
    found = run_ranks(WORLD_OF[scheme], _run_each, [(case, way) for case in cases for way in ways])
    for rank, results in enumerate(found):
        for codec, first, second in zip(codecs, results[::2], results[1::2], strict=True):
            (averages, owed_N), (other_averages, other_owed_N) = first, second
            equal = [torch.equal(a, b) for a, b in zip(averages, other_averages, strict=True)]
            assert all(equal), (codec, rank, equal)
            assert torch.equal(owed_N, other_owed_N), (codec, rank)


def _run_each(rank: int, cases: Sequence[tuple[Callable[..., Any], tuple[int, str, int, str]]]) -> list[Any]:
    names = ("piece_bytes", "kind", "num_steps", "device")
    return [case(rank, **dict(zip(names, way, strict=True))) for case, way in cases]


# Trees and broadcasts of a device are traced, too: test_traced_device.py.
@pytest.mark.parametrize(
    "scheme", [pytest.param(s, marks=pytest.mark.slow if s in ("tree", "broadcast") else ()) for s in WORLD_OF]
)
def test_payloads_on_another_device_than_their_messages_change_no_bit(scheme: str) -> None:
    # "cpu:0" is the same memory, but not the device of messages, so payloads are copied as from a GPU.
    codecs = ["none", "qsgd", "onebit:bucket_size=64"]
    _check_same_bits(scheme, codecs, (CUT, "tcp", 2, "cpu"), (CUT, "tcp", 2, "cpu:0"))


@pytest.mark.parametrize(
    ("scheme", "kind"), [("sra", "gloo"), ("sra", "shm"), *((scheme, "tcp") for scheme in WORLD_OF)]
)
def test_pieces_change_no_bit_where_no_random_numbers_are_drawn(scheme: str, kind: str) -> None:
    codecs = ["none", "bf16", "qsgd:bits=4,rounding=nearest"]
    _check_same_bits(scheme, codecs, (WHOLE, kind, 3, "cpu"), (CUT, kind, 3, "cpu"))


def _average_exactly(rank: int, scheme: str) -> torch.Tensor:
    pieces.PIECE_BYTES = pieces.DEVICE_PIECE_BYTES = CUT
    codec, link = make_codec(CodecSpec.parse("none")), _transport("tcp")
    grad_N = _gradient(rank, 0)
    stamp = Stamp(plan_version=0, step=0, group=0, codec="none")
    make_exchange(codec, Scheme(scheme), NUMEL, 4, link).run(grad_N, None, stamp, 0, Phases())
    dist.barrier()
    link.close()
    return grad_N


@pytest.mark.parametrize("scheme", ["sra", "allgather"])
def test_sums_are_made_in_rank_order_whoever_comes_first(scheme: str) -> None:
    """In sra the owner of a chunk begins with its own part."""
    inputs = [_gradient(rank, 0) for rank in range(4)]
    parts = []
    for owner, (start, stop) in enumerate(pieces.chunk_bounds(NUMEL, 4, 1)):
        order = sorted(range(4), key=lambda rank: (rank != owner, rank)) if scheme == "sra" else range(4)
        total = torch.zeros(stop - start)
        for rank in order:
            total += inputs[rank][start:stop]
        parts.append(total / 4)
    for average_N in run_ranks(4, _average_exactly, scheme):
        assert torch.equal(average_N, torch.cat(parts))


@pytest.mark.parametrize(
    ("scheme", "kind"), [("sra", "gloo"), ("sra", "shm"), *((scheme, "tcp") for scheme in WORLD_OF)]
)
def test_in_pieces_what_was_not_sent_is_in_the_residuals_and_ranks_agree(scheme: str, kind: str) -> None:
    world_size = WORLD_OF[scheme]
    results = run_ranks(world_size, _run_scheme, scheme, "onebit:bucket_size=64", CUT, kind, 4)
    sent_N, owed_N = (torch.stack(results[0][0]).double().sum(0), torch.stack([o for _, o in results]).double().mean(0))
    given_RN = torch.stack([_gradient(rank, step) for rank in range(world_size) for step in range(4)]).double()
    given_N = given_RN.sum(0) / world_size
    # Float32 numbers under 40 in size. A step adds, subtracts, and sums the ranks' shares; a rank that encodes an
    # average keeps its error once for every rank.
    torch.testing.assert_close(sent_N + owed_N, given_N, rtol=0, atol=40 * 4 * (2 * world_size + 4) * 2**-24)
    assert float(owed_N.norm()) > 0
    for averages, _ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(averages, results[0][0], strict=True))


def _average_of_alike(rank: int) -> torch.Tensor:
    """Average two equal gradients of one repeated bucket: pieces of one bucket differ only by their random numbers."""
    pieces.PIECE_BYTES = pieces.DEVICE_PIECE_BYTES = 1
    codec = make_codec(CodecSpec.parse("qsgd:bits=2,bucket_size=128"))
    link = _transport("tcp")
    grad_N = torch.randn(128, generator=torch.Generator().manual_seed(0)).repeat(8)
    stamp = Stamp(plan_version=0, step=0, group=0, codec="qsgd")
    make_exchange(codec, Scheme.SRA, grad_N.numel(), 4, link).run(grad_N, None, stamp, 0, Phases())
    dist.barrier()
    link.close()
    return grad_N


def test_pieces_draw_different_random_numbers() -> None:
    pieces_BN = run_ranks(2, _average_of_alike)[0].view(8, 128)
    equal = [(i, j) for i in range(8) for j in range(i) if torch.equal(pieces_BN[i], pieces_BN[j])]
    assert equal == []


def _finish_backwards(rank: int, kind: str) -> list[bool]:
    link = _transport(kind)
    received = [{peer: torch.zeros(1000) for peer in link.peers} for _ in range(4)]
    coming = [{peer: link.start({}, {peer: of[peer]}) for peer in link.peers} for of in received]
    going = [link.start({peer: torch.full((1000,), 10.0 * rank + n) for peer in link.peers}, {}) for n in range(4)]
    for handles in reversed(coming):
        for handle in reversed(handles.values()):
            link.finish(handle)
    for handle in reversed(going):
        link.finish(handle)
    dist.barrier()
    link.close()
    return [bool((of[peer] == 10 * peer + n).all()) for n, of in enumerate(received) for peer in link.peers]


@pytest.mark.parametrize("kind", ["shm", "tcp", "gloo"])
def test_the_nth_receive_takes_the_nth_send_in_whatever_order_they_are_finished(kind: str) -> None:
    assert run_ranks(WORLD, _finish_backwards, kind) == [[True] * 4 * (WORLD - 1)] * WORLD


class _Clock:
    """A clock that passes only while someone sleeps."""

    now = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now

    @classmethod
    def sleep(cls, seconds: float) -> None:
        cls.now += seconds


def _held_back(rank: int, scheme: str, piece_bytes: int) -> tuple[float, int]:
    """Return the seconds that a simulated link held messages back in one exchange, and the bytes that a rank sent."""
    for module in (simulated_link, transport):
        module.time = _Clock  # type: ignore[attr-defined]
    pieces.PIECE_BYTES = pieces.DEVICE_PIECE_BYTES = piece_bytes
    codec = make_codec(CodecSpec.parse("none"))
    link = _transport("tcp", cgx_ray.SimulatedLink(latency_s=1000.0, schedule=((0, 8e4),)))
    exchange = make_exchange(codec, Scheme(scheme), 3 * 1000, 4, link)
    grad_N = torch.ones(3 * 1000)
    exchange.run(grad_N, None, Stamp(plan_version=0, step=0, group=0, codec="none"), 0, Phases())
    dist.barrier()
    link.close()
    return _Clock.now, exchange.sent_bytes


@pytest.mark.parametrize("piece_bytes", [WHOLE, CUT])
@pytest.mark.parametrize(("scheme", "num_hops"), [("sra", 2), ("allgather", 1), ("ring", 4)])
def test_a_simulated_link_holds_back_every_byte_and_up_to_a_hop_per_message_and_round(
    scheme: str, num_hops: int, piece_bytes: int
) -> None:
    # A chunk of 4,000 bytes makes 14 pieces.
    most_hops = num_hops * (1 if piece_bytes == WHOLE else 14)
    for held_s, sent_bytes in run_ranks(WORLD, _held_back, scheme, piece_bytes):
        # The link takes 10,000 bytes per second. Latencies overlap with bytes that are sent meanwhile.
        assert 1000 + sent_bytes / 1e4 - 1e-6 <= held_s <= 1000 * most_hops + sent_bytes / 1e4 + 1e-6


def _sent_bytes(rank: int, piece_bytes: int, kind: str) -> int:
    pieces.PIECE_BYTES = pieces.DEVICE_PIECE_BYTES = piece_bytes
    link = _transport(kind)
    sent_bytes = make_exchange(make_codec(CodecSpec.parse("none")), Scheme.SRA, 3000, 4, link).sent_bytes
    dist.barrier()
    link.close()
    return sent_bytes


def test_every_piece_costs_a_header_and_gloo_gets_whole_chunks() -> None:
    # Two of three chunks of 4,000 bytes go out, the own one goes to two ranks: 14 pieces of up to 300 bytes per chunk.
    for piece_bytes, kind, num_pieces in ((WHOLE, "tcp", 1), (CUT, "tcp", 14), (CUT, "gloo", 1)):
        sent = run_ranks(WORLD, _sent_bytes, piece_bytes, kind)
        assert sent == [16_000 + 4 * num_pieces * HEADER_BYTES] * WORLD


def test_rounds_that_overlap_count_once_and_codec_time_within_them_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(phases_module.time, "perf_counter", lambda: now)
    phases = Phases()
    now = 1.0
    phases.lap("encode")
    phases.begin_round()
    now = 3.0
    phases.lap("encode")
    now = 7.0
    phases.resume()  # the round counts time to wait within it
    phases.begin_round()
    phases.end_round()
    now = 8.0
    phases.lap("decode")
    phases.end_round()
    assert (phases.encode, phases.exchange, phases.decode) == (3.0, 7.0, 1.0)
    now = 10.0
    with phases.round():
        now = 12.0
    assert phases.exchange == 9.0
    assert phases.rounds == [(1.0, 8.0), (10.0, 12.0)]

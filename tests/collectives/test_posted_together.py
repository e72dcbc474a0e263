"""Messages of several ranks that are posted together: the same bits as one by one, in fewer calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mesh_ranks import MeshTransport, mesh_transports
from support.meshes import in_threads

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Phases, make_exchange, parcel
from cgx_ray.collectives.direct import DirectLane
from cgx_ray.collectives.parcel import Step
from cgx_ray.plan import CodecSpec, Scheme

CODECS = ("none", "bf16", "qsgd:bits=4,bucket_size=8", "topk:density=0.1", "ef_signsgd:bucket_size=8")


@pytest.fixture(scope="module")
def transports() -> Iterator[Mapping[int, list[MeshTransport]]]:
    """By number of ranks."""
    with mesh_transports(1, 3, 5) as made:
        yield made


def _average(transport: MeshTransport, codec: str, scheme: str, grad_N: torch.Tensor) -> torch.Tensor:
    """Average in two steps; return what the codec then owes."""
    made = make_codec(CodecSpec.parse(codec), world_size=transport.world_size)
    exchange = make_exchange(made, Scheme(scheme), grad_N.numel(), 4, transport)
    memory = made.new_memory(grad_N.numel())
    for step in range(2):
        stamp = Stamp(plan_version=0, step=step, group=3, codec=made.spec.name)
        exchange.run(grad_N, memory, stamp, 7, Phases())
        if memory is not None:
            memory.commit()
    return memory.residual_N if memory is not None else torch.zeros(0)


@settings(deadline=None, max_examples=100)
@given(
    world_size=st.sampled_from((1, 3, 5)),
    codec=st.sampled_from(CODECS),
    scheme=st.sampled_from(("sra", "allgather")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    numel=st.one_of(st.integers(0, 9), st.integers(0, 3000)),
    limit=st.sampled_from((300, 1000, 1 << 20)),
)
def test_bits_do_not_depend_on_what_is_posted_together(
    transports: Mapping[int, list[MeshTransport]],
    world_size: int,
    codec: str,
    scheme: str,
    dtype: torch.dtype,
    numel: int,
    limit: int,
) -> None:
    if dtype != torch.float32 and not make_codec(CodecSpec.parse(codec)).takes_16_bit:
        dtype = torch.float32
    found = []
    usual = parcel.TOGETHER_BYTES
    for together in (0, limit):
        grads = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
        grads = [grad_N.to(dtype) for grad_N in grads]
        pairs = zip(transports[world_size], grads, strict=True)
        parcel.TOGETHER_BYTES = together
        try:
            owed = in_threads(
                [lambda t=transport, g=grad_N: _average(t, codec, scheme, g) for transport, grad_N in pairs]
            )
        finally:
            parcel.TOGETHER_BYTES = usual
        assert not [error for error in owed if isinstance(error, str)]
        found.append([*grads, *owed])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([1 << 20], [(0,)]),
        ([100 << 10] * 5, [(0, 1), (2, 3), (4,)]),
        ([1 << 20, 10, 20, 1 << 20, 30], [(0,), (1, 2), (3,), (4,)]),
        ([0] * 4, [(0, 1, 2, 3)]),
        ([128 << 10] * 2, [(0, 1)]),
        ([128 << 10, (128 << 10) + 1], [(0,), (1,)]),
    ],
)
def test_batches_keep_the_order_and_the_limit(sizes: list[int], expected: list[tuple[int, ...]]) -> None:
    assert parcel.batches_of(range(len(sizes)), sizes) == expected


@pytest.mark.parametrize(("scheme", "halves"), [("sra", 2), ("allgather", 1)])
def test_short_messages_take_one_post_per_half_and_direction(
    transports: Mapping[int, list[MeshTransport]], scheme: str, halves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    posts = [0] * 5
    for rank, transport in enumerate(transports[5]):
        start = transport.start

        def count(*args: object, rank: int = rank, start: object = start) -> object:
            posts[rank] += 1
            return start(*args)  # type: ignore[operator]

        monkeypatch.setattr(transport, "start", count)
    grads = [torch.randn(1000) for _ in range(5)]
    runs = [lambda t=t, g=g: _average(t, "qsgd:bits=4", scheme, g) for t, g in zip(transports[5], grads, strict=True)]
    assert not [error for error in in_threads(runs) if isinstance(error, str)]
    assert posts == [2 * halves * 2] * 5, "in two steps, one to send and one to receive"


@pytest.mark.parametrize("together", [0, 1 << 20])
def test_a_message_has_left_before_another_is_received_in_its_memory(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcel, "TOGETHER_BYTES", together)
    posted: list[tuple[set[int], set[int]]] = []

    def start(sends: Mapping[int, object], receives: Mapping[int, object]) -> int:
        posted.append(({*sends}, {*receives}))
        return len(posted) - 1

    transport: Any = SimpleNamespace(rank=0, peers=[1, 2, 3], ranks=range(4), world_size=4, seals=True, start=start)
    lane = DirectLane(
        [(n, n + 64) for n in range(0, 256, 64)], range(4), make_codec(CodecSpec.parse("bf16")), transport
    )
    step = Step(
        grad_N=torch.randn(256),
        memory=None,
        stamp=Stamp(plan_version=0, step=0, group=0, codec="bf16"),
        seed=0,
        phases=Phases(),
    )
    lane.begin(step)
    lane.expect_parts()
    assert list(lane.send_parts(step)) == []
    left: set[int] = set()
    num_posted = len(posted)
    for handle in lane.expect_chunks():
        received = set().union(*(receives for _, receives in posted[num_posted:]))
        assert received <= left
        left |= posted[handle][0]
    assert left == {1, 2, 3} == set().union(*(receives for _, receives in posted[num_posted:]))

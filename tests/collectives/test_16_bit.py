"""16-bit gradients are averaged as their float32 copies would be, and no copy of a whole group is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mesh_ranks import MeshTransport, mesh_transports
from support.meshes import in_threads
from support.ranks import TIMEOUT_S, run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.feedback import Memories
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Phases, Transport, make_exchange, pieces
from cgx_ray.collectives.transport.tcp import connect_mesh
from cgx_ray.collectives.transport.transport_like import finish_all
from cgx_ray.engine.group import Group
from cgx_ray.plan import CODECS_OF_SCHEME, CodecSpec, GroupPlan, Layer, Option, Scheme

CODECS = ("bf16", "fp16", "qsgd:bits=4,bucket_size=64", "qsgd:bits=2,grid=linf,bucket_size=8", "terngrad")
PAIRS = [
    (codec, scheme)
    for scheme in (Scheme.SRA, Scheme.ALLGATHER, Scheme.ALLREDUCE)
    for codec in CODECS
    if CodecSpec.parse(codec).name in CODECS_OF_SCHEME[scheme]
]
DTYPES = (torch.bfloat16, torch.float16)
# Cuts 3000 elements into several pieces.
PIECE_BYTES = 200
SPECIALS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-7, -1e-40, 6e4, 3e38)


@pytest.fixture(scope="module")
def transports() -> Iterator[Mapping[int, list[MeshTransport]]]:
    """By number of ranks."""
    with mesh_transports(2, 3, 4) as made:
        yield made


def _average(transport: Any, codec: str, scheme: Scheme, grad_N: torch.Tensor) -> None:
    made = make_codec(CodecSpec.parse(codec), world_size=transport.world_size)
    stamp = Stamp(plan_version=0, step=5, group=3, codec=made.spec.name)
    make_exchange(made, scheme, grad_N.numel(), 4, transport).run(grad_N, None, stamp, 7, Phases())


def _gradient(numel: int, dtype: torch.dtype, seed: int, specials: list[tuple[int, float]]) -> torch.Tensor:
    grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    for place, value in specials:
        if numel:
            grad_N[place % numel] = value
    return grad_N.to(dtype)


def _assert_equal(actual_N: torch.Tensor, expected_N: torch.Tensor, what: str) -> None:
    """Fail unless the bits are the same; all NaNs count as equal."""
    bits, expected = (torch.where(x.isnan(), torch.nan, x).view(torch.int16) for x in (actual_N, expected_N))
    different = (bits != expected).nonzero().view(-1)[:5]
    assert not different.numel(), f"{what}: {actual_N[different].tolist()} != {expected_N[different].tolist()}"


@settings(deadline=None, max_examples=150)
@given(
    world_size=st.integers(2, 4),
    pair=st.sampled_from(PAIRS),
    dtype=st.sampled_from(DTYPES),
    numel=st.one_of(st.sampled_from((0, 1, 2, 7, 63, 64, 65, 127, 129)), st.integers(0, 3000)),
    seed=st.integers(0, 1 << 30),
    specials=st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(SPECIALS)), max_size=6),
)
def test_averages_have_the_bits_of_those_of_float32_rounded_once(
    transports: Mapping[int, list[MeshTransport]],
    world_size: int,
    pair: tuple[str, Scheme],
    dtype: torch.dtype,
    numel: int,
    seed: int,
    specials: list[tuple[int, float]],
) -> None:
    # The first rank has the special values.
    grads = [_gradient(numel, dtype, seed + rank, specials if rank == 0 else []) for rank in range(world_size)]
    wide = [grad_N.float() for grad_N in grads]
    whole, pieces.PIECE_BYTES = pieces.PIECE_BYTES, PIECE_BYTES
    try:
        for of_rank in (grads, wide):
            runs = [
                lambda t=transport, g=grad_N: _average(t, *pair, g)
                for transport, grad_N in zip(transports[world_size], of_rank, strict=True)
            ]
            assert in_threads(runs) == [None] * world_size
    finally:
        pieces.PIECE_BYTES = whole
    for rank, (grad_N, wide_N) in enumerate(zip(grads, wide, strict=True)):
        assert torch.equal(grad_N.view(torch.int16), grads[0].view(torch.int16)), f"rank {rank} has other bits"
        _assert_equal(grad_N, wide_N.to(dtype), f"rank {rank}")


class _LargestFloat32(TorchDispatchMode):
    """Notes the number of elements of the largest float32 tensor that an operation of torch returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                self.numel = max(self.numel, value.numel())
        return out


NUMELS = (40_000, 30_001)


def _largest_float32(rank: int, codec: str, scheme: Scheme, side_by_side: bool) -> int:
    """Average one group of bfloat16 layers; return the size of the largest float32 tensor."""
    pieces.PIECE_BYTES = 4000
    assert dist.group.WORLD is not None
    transport = Transport(dist.group.WORLD, None, connect_mesh(dist.group.WORLD, TIMEOUT_S), TIMEOUT_S)
    layers = {name: Layer(name=name, numel=n, ndim=1, dtype="bfloat16") for name, n in zip("ab", NUMELS, strict=True)}
    plan = GroupPlan(layers=("a", "b"), option=Option(codec=CodecSpec.parse(codec), scheme=scheme))
    bucket_N = torch.randn(sum(NUMELS), generator=torch.Generator().manual_seed(rank)).bfloat16()
    parts = bucket_N.split(NUMELS if side_by_side else NUMELS[::-1])
    views = parts if side_by_side else parts[::-1]
    with _LargestFloat32() as watch:
        group = Group(0, plan, layers, transport, Memories())
        for name, view in zip("ab", views, strict=True):
            group.arrive(name, view)
        stamp = Stamp(plan_version=0, step=0, group=0, codec=plan.option.codec.name)
        phases = Phases()
        turns = group.turns(stamp, 0, None, phases, checks_finite=True)
        finish_all(turns, transport, phases.resume)
    dist.barrier()
    transport.close()
    return watch.numel


@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize(
    ("codec", "scheme"), [("qsgd", "sra"), ("qsgd", "allgather"), ("bf16", "sra"), ("bf16", "allreduce")]
)
def test_nothing_in_float32_is_larger_than_a_piece(codec: str, scheme: str, side_by_side: bool) -> None:
    """A message of 4000 bytes carries 8000 elements of 4 bits at the most."""
    largest = run_ranks(2, _largest_float32, codec, Scheme(scheme), side_by_side)
    assert max(largest) <= 8000, f"float32 tensors of {largest} elements for a group of {sum(NUMELS)}"

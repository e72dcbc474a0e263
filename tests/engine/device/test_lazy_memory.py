"""Groups and messages take memory when they are first used: those of a dense plan on a GPU may never be."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.device.counted_memory import CountedMemory
from support.ranks import run_ranks

import cgx_ray
from cgx_ray.codecs.feedback import Memories
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Phases, Transport
from cgx_ray.collectives.exchange import finish_all
from cgx_ray.engine.group import Group
from cgx_ray.plan import Layer

NUMEL = 100_000
LAYERS = {name: Layer(name=name, numel=NUMEL, ndim=2, num_rows=100) for name in ("first", "second")}


def _bytes_taken(rank: int, codec: str, scheme: str, side_by_side: bool) -> tuple[int, int, int]:
    """Return the bytes that a group takes when it is made, in its first step, and in its second."""
    world = dist.group.WORLD
    assert world is not None
    layers = list(LAYERS.values())
    plan = cgx_ray.make_plan(layers, version=0, world_size=2, codec=codec, scheme=scheme, group_bytes=8 * NUMEL)
    (group_plan,) = plan.groups
    transport = Transport(world)
    taken = []
    with CountedMemory() as making:
        group = Group(0, group_plan, LAYERS, transport, Memories())
    taken.append(making.num_bytes)
    buffer = torch.ones(2 * NUMEL)
    parts = buffer.split(NUMEL) if side_by_side else [torch.ones(NUMEL), torch.ones(NUMEL)]
    for step in range(2):
        with CountedMemory() as working:
            for name, view in zip(group_plan.layers, parts, strict=True):
                group.arrive(name, view)
            stamp = Stamp(plan_version=0, step=step, group=0, codec=group_plan.option.codec.name)
            phases = Phases()
            finish_all(group.turns(stamp, 0, None, phases, checks_finite=False), transport, phases.resume)
        taken.append(working.num_bytes)
    return taken[0], taken[1], taken[2]


@pytest.mark.parametrize(
    ("codec", "scheme"), [("none", "dense"), ("qsgd", "sra"), ("qsgd", "allgather"), ("fp16", "allreduce")]
)
def test_a_group_takes_its_memory_in_its_first_step_and_keeps_it(codec: str, scheme: str) -> None:
    for made, first, second in run_ranks(2, _bytes_taken, codec, scheme, False):
        assert made == 0
        # The gradients lie apart, so they are copied to one place; messages come on top of it.
        assert first >= 2 * NUMEL * 4
        assert second < 0.1 * first


def test_a_dense_group_in_a_bucket_never_takes_memory() -> None:
    for taken in run_ranks(2, _bytes_taken, "none", "dense", True):
        assert taken == (0, 0, 0)

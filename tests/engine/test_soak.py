"""Thousands of steps, ranks killed at any moment, every number of ranks: nothing leaks, hangs or comes out wrong."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from support.endings import grown
from support.ranks import TIMEOUT_S, run_ranks

import cgx_ray
from cgx_ray.collectives import Transport
from cgx_ray.collectives.transport.tcp import connect_mesh
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.step import PendingBucket
from cgx_ray.errors import CGXError
from cgx_ray.plan import CODECS_OF_SCHEME, Layer, Plan, Scheme

STEPS_A_PLAN = 10
LAYERS = [
    Layer(name="a", numel=1200, ndim=2, num_rows=30),
    Layer(name="b", numel=7, ndim=1),
    Layer(name="c", numel=1500, ndim=2, num_rows=50),
]
SPARSE = ("topk", "lwtopk", "mstopk", "dgc", "sidco", "randomk")
CHOICES = [
    (f"{codec}:density=0.05" if codec in SPARSE else codec, scheme)
    for scheme in Scheme
    for codec in sorted(CODECS_OF_SCHEME[scheme])
]


def plan_of(version: int) -> Plan:
    """Return a plan with another codec and scheme for every version, and with one group or several."""
    codec, scheme = CHOICES[version % len(CHOICES)]
    group_bytes = 1 << (8 + version % 8)
    world_size = dist.get_world_size()
    return cgx_ray.make_plan(
        LAYERS, version=version, world_size=world_size, codec=codec, scheme=scheme, group_bytes=group_bytes
    )


class Loop:
    """An engine that averages random gradients, step by step."""

    def __init__(self, first: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        mesh = connect_mesh(group, TIMEOUT_S)
        self.engine = Engine(LAYERS, plan_of(first), Transport(group, mesh=mesh, timeout_s=TIMEOUT_S))
        self._buffer = torch.empty(sum(layer.numel for layer in LAYERS))
        parts = self._buffer.split([layer.numel for layer in LAYERS])
        self._views = {layer.name: part for layer, part in zip(LAYERS, parts, strict=True)}

    def step(self) -> None:
        self._buffer.normal_()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.engine.submit(PendingBucket(gradients=self._views, buffer=self._buffer, future=future))
        assert bool(torch.isfinite(future.wait()).all())


class Footprint:
    """Resources that a process holds. Threads, files and shared memory are exact; memory depends on the allocator."""

    def __init__(self) -> None:
        process = psutil.Process()
        self.rss_mb = process.memory_info().rss / 1e6
        shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
        self.num_held = (process.num_threads(), process.num_fds(), len(shared))


def _soak(rank: int, num_steps: int) -> tuple[Footprint, Footprint, int, int]:
    loop, early = Loop(0), None
    for step in range(num_steps):
        if step % STEPS_A_PLAN == 0 and step > 0:
            loop.engine.hold(plan_of(step // STEPS_A_PLAN))
        loop.step()
        # By now every plan has been in force once.
        if step == num_steps // 2:
            early = Footprint()
    late = Footprint()
    assert early is not None
    version = loop.engine.plan.version
    dist.barrier()
    loop.engine.close()
    return early, late, loop.engine.step, version


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_steps", [1700, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_steps_of_changing_plans_leave_nothing_behind(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 10,000 take about 20 s on an idle machine, minutes on a busy one.
    monkeypatch.setattr("support.ranks.TIMEOUT_S", 550)
    assert len(CHOICES) * STEPS_A_PLAN < num_steps // 2
    for early, late, num_done, version in run_ranks(2, _soak, num_steps):
        assert num_done == num_steps
        # The last plan arrives early enough for the ranks to agree on it.
        assert version == num_steps // STEPS_A_PLAN - 1
        assert grown(early.num_held, late.num_held) == [0, 0, 0]
        # A leak of one message of 6 KB per step would amount to 6 MB of 2,000 steps.
        assert late.rss_mb - early.rss_mb < 4, (early.rss_mb, late.rss_mb)


def _train_until_killed(rank: int, seed: int, folder: Path) -> None:
    chance = random.Random(seed)
    victim, first, delay_s = chance.randrange(3), chance.randrange(len(CHOICES)), chance.uniform(0, 0.1)
    loop = Loop(first)
    dist.barrier()
    if rank == victim:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    version = first
    try:
        while True:
            loop.step()
            version += 1
            loop.engine.hold(plan_of(version))
    except CGXError as error:
        (folder / f"rank{rank}").write_text(str(error))


@pytest.mark.fault("SIGKILL at any moment, while plans change", "an error on the others; none hangs")
@pytest.mark.parametrize("seed", range(10))
def test_when_a_rank_is_killed_at_any_moment_the_others_raise_and_none_hangs(seed: int, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank \d ended with exit code -9"):
        run_ranks(3, _train_until_killed, seed, tmp_path)
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(said) == 2, f"only these found out: {said}"

"""Times of an FSDP2 step on a device that works behind the host: what it computes meanwhile is no wait for messages."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.sharded import hand_over, make_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard

import cgx_ray
from cgx_ray.collectives.transport.simulated_link import SimulatedLink
from cgx_ray.engine.sharded import sharded_engine
from cgx_ray.engine.step_sample import StepSample
from cgx_ray.runtime_ext.streams import Mark, Streams

# The device is so far behind the host.
BEHIND_S = 0.2


class _LateMark(Mark):
    def __init__(self, done_s: float) -> None:
        self.done_s = done_s

    @property
    def is_done(self) -> bool:
        return time.perf_counter() >= self.done_s

    def wait(self) -> None:
        time.sleep(max(0.0, self.done_s - time.perf_counter()))

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _LateMark)
        assert self.is_done
        assert earlier.is_done
        return self.done_s - earlier.done_s


class _LateStreams(Streams):
    """The training's stream comes to its calls BEHIND_S after them, that of the engine's thread at once."""

    def __init__(self) -> None:
        self._engine_thread = 0

    def current(self) -> Any:
        return "a stream"

    def enter(self) -> None:
        self._engine_thread = threading.get_ident()

    def mark(self, stream: Any = None) -> Mark:
        is_engine = threading.get_ident() == self._engine_thread
        return _LateMark(time.perf_counter() + (0.0 if is_engine else BEHIND_S))


def _train(rank: int, codec: str) -> list[StepSample]:
    sharded_engine.streams_of = lambda device: _LateStreams()
    link = None
    if codec == "none":
        hand_over()
    else:
        # Two exchanges of 16 KB take 0.13 s.
        link = SimulatedLink(latency_s=1e-4, schedule=((0.0, 2e6),))
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    for module in (*model, model):
        fully_shard(module, mesh=make_mesh())
    attachment = cgx_ray.attach(model, codec=codec, simulated_link=link)
    for _ in range(4):
        model(torch.ones(1, 256)).sum().backward()
    samples = attachment.take_samples()
    attachment.close()
    return samples[1:]


@pytest.mark.parametrize("codec", ["qsgd:bits=4", "none"], ids=["by the engine", "by FSDP2"])
def test_what_a_device_computes_is_no_wait(codec: str) -> None:
    for sample in (sample for samples in run_ranks(2, _train, codec) for sample in samples):
        assert sample.compute_s > 0.8 * BEHIND_S
        rest_s = sample.step_s - sample.compute_s
        assert rest_s > 0.05 if codec != "none" else 0 < rest_s < BEHIND_S

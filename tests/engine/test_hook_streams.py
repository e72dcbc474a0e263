"""Streams on which DDP copies gradients, one for each layer here. The device is the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.branches import Branches, batch
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.hook import DdpBuckets, cgx_hook
from cgx_ray.engine.period.local_gradients import LocalGradients
from cgx_ray.engine.step import EarlyGradient, PendingBucket
from cgx_ray.errors import ConfigError
from cgx_ray.plan import STEPS_TOGETHER, Layer, Plan
from cgx_ray.runtime_ext.streams import Mark, Streams

Stream = Any


class NamedMark(Mark):
    """`on`: the streams that it covers."""

    def __init__(self, on: set[Stream]) -> None:
        self.on = on


class NamedStreams(Streams):
    """A stream is the name of a layer: that whose hook was called last."""

    def __init__(self) -> None:
        self.now: Stream = None
        self.captures = False
        self._joined: set[Stream] = set()

    def current(self) -> Stream:
        return self.now

    def is_capturing(self) -> bool:
        return self.captures

    def mark(self, stream: Stream = None) -> Mark:
        on, self._joined = {stream or self.now} | (set() if stream else self._joined), set()
        return NamedMark(on)

    def join(self, streams: Iterable[Stream]) -> None:
        self._joined = set(streams)


class Submitted:
    """Takes the place of an engine: gives buckets back at once."""

    def __init__(self) -> None:
        self.streams, self.step = NamedStreams(), 0
        self.plan = Plan(version=0, world_size=1, groups=())
        self.layers: list[Layer] = []
        self.agreement = SimpleNamespace(weight_check=None)
        self.early: list[EarlyGradient] = []
        self.buckets: list[PendingBucket] = []
        # For steps in which ranks train alone.
        self.device, self.sums = torch.device("cpu"), SimpleNamespace(num_nodes=1)
        self.take_residuals, self.count_step, self.failing_together = dict, lambda: None, nullcontext

    def submit(self, arrived: EarlyGradient | PendingBucket) -> None:
        if isinstance(arrived, PendingBucket):
            self.buckets.append(arrived)
            arrived.future.set_result(arrived.buffer)
        else:
            self.early.append(arrived)


def _hooked(submitted: Submitted, **ddp: Any) -> DistributedDataParallel:
    model = DistributedDataParallel(Branches(), **ddp)

    def on_stream_of(name: str, parameter: nn.Parameter) -> None:
        def begin(_: Tensor) -> None:
            submitted.streams.now = name

        # Before the hooks of `DdpBuckets`, so that they are called on it, as is DDP's copy.
        parameter.register_post_accumulate_grad_hook(begin)

    for name, parameter in model.module.named_parameters():
        on_stream_of(name, parameter)
    buckets = DdpBuckets(model, cast(Engine, submitted))
    model.register_comm_hook(buckets, cgx_hook)
    return model


def _streams_of_a_step(rank: int) -> tuple[dict[str, set[Stream]], list[tuple[set[str], set[Stream]]]]:
    """Return the streams that cover each early gradient of the third step, and layers and streams of each bucket."""
    submitted = Submitted()
    model = _hooked(submitted)
    for step in range(3):
        submitted.early, submitted.buckets = [], []
        model(batch(rank, step)).sum().backward()
    early = {one.name: cast(NamedMark, one.computed).on for one in submitted.early}
    return early, [(set(one.gradients), cast(NamedMark, one.computed).on) for one in submitted.buckets]


def test_a_gradient_is_read_after_its_own_layers_stream_has_copied_it() -> None:
    ((early, buckets),) = run_ranks(1, _streams_of_a_step)
    assert len(early) >= 5, early
    for name, streams in early.items():
        assert streams == {name}
    for layers, streams in buckets:
        assert streams >= layers, "a bucket is read after the streams of all its layers"


def _streams_before_the_end(rank: int) -> tuple[set[str], set[Stream]]:
    """Return the layers of a step without exchange, and the streams that its end comes after, with many buckets."""
    submitted = Submitted()
    layers = cgx_ray.layers_of(DistributedDataParallel(Branches()))
    submitted.layers, submitted.step = layers, STEPS_TOGETHER
    submitted.plan = cgx_ray.make_plan(layers, version=0, world_size=1, codec="none", scheme="sra", period=100)
    model = _hooked(submitted, bucket_cap_mb=0.02)
    after: dict[Stream, set[Stream]] = {}
    ends: list[set[Stream]] = []

    def join(streams: Iterable[Stream]) -> None:
        known = after.setdefault(submitted.streams.now, {submitted.streams.now})
        known.update(*(after.get(stream, {stream}) for stream in streams))

    submitted.streams.join = join  # type: ignore[method-assign]
    finish = LocalGradients.finish

    def noting(gradients: LocalGradients, rho: Mapping[str, float]) -> Tensor:
        ends.append(after[submitted.streams.now])
        return finish(gradients, rho)

    LocalGradients.finish = noting  # type: ignore[method-assign]
    for step in range(3):
        after.clear()
        model(batch(rank, step)).sum().backward()
    return {layer.name for layer in layers}, ends[-1]


def test_a_step_without_exchange_ends_after_the_streams_of_all_its_layers() -> None:
    ((layers, streams),) = run_ranks(1, _streams_before_the_end)
    assert streams >= layers


def _capture(rank: int) -> None:
    submitted = Submitted()
    model = _hooked(submitted)
    submitted.streams.captures = True
    with pytest.raises(ConfigError, match="make_graphed_callables"):
        model(torch.ones_like(batch(rank, 0))).sum().backward()
    assert not submitted.early
    assert not submitted.buckets


def test_a_backward_pass_within_a_cuda_graph_is_refused() -> None:
    run_ranks(1, _capture)

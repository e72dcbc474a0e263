"""Backward on a GPU calls all hooks long before the device has computed the gradients. The test plays the device."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.device.marks import GivenMark
from support.ranks import run_ranks
from torch import Tensor

import cgx_ray
from cgx_ray.codecs.feedback import Memories
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Handle, Phases, Transport
from cgx_ray.collectives.transport.tcp import connect_mesh
from cgx_ray.engine.agreement import Agreement
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.group import Group
from cgx_ray.engine.step import EarlyGradient, PendingBucket, StepClock
from cgx_ray.engine.weight_check import WeightHash
from cgx_ray.plan import Layer
from cgx_ray.runtime_ext.streams import DONE, STREAMS, Mark, Streams

NUMEL = 1500
LAYERS = [Layer(name=f"layer{index}", numel=NUMEL, ndim=2, num_rows=10) for index in range(8)]
# For what comes in less than a millisecond, or never.
PATIENCE_S = 20.0


class _SumStreams(Streams):
    """`waited` gets the marks that the stream of the sums was told to wait for, group by group."""

    def __init__(self) -> None:
        self.waited: list[list[Mark]] = []

    @contextmanager
    def apart(self, after: Iterable[Mark] = ()) -> Iterator[None]:
        self.waited.append(list(after))
        yield


class Training:
    """An engine with one group per layer, and the gradients of one step. `begun` gets the index of each group."""

    def __init__(
        self, rank: int, codec: str, scheme: str, *, has_mesh: bool = True, sums: _SumStreams | None = None
    ) -> None:
        """`sums`: the streams of a device on which the vendor sums."""
        group = dist.group.WORLD
        assert group is not None
        mesh = connect_mesh(group, PATIENCE_S) if has_mesh else None
        plan = cgx_ray.make_plan(LAYERS, version=0, world_size=2, codec=codec, scheme=scheme, group_bytes=1)
        self.names = [name for one in plan.groups for name in one.layers]
        assert len(plan.groups) == len(LAYERS)
        self.begun: queue.Queue[int] = queue.Queue()
        self._note_groups()
        device, vendor = torch.device("cpu"), None
        if sums is not None:
            device, vendor = torch.device("cpu", 0), dist.new_group()
            STREAMS[device] = sums
        transport = Transport(group, mesh=mesh, timeout_s=PATIENCE_S, cuda_group=vendor)
        self.engine = Engine(LAYERS, plan, transport, device=device)
        self.buffer = torch.empty(len(LAYERS) * NUMEL)
        self.views = dict(zip(self.names, self.buffer.split(NUMEL), strict=True))
        self._random = torch.Generator().manual_seed(rank)

    def _note_groups(self) -> None:
        begun, turns = self.begun, Group.turns

        def noting(group: Group, *arguments: Any, **options: Any) -> Iterator[Handle]:
            begun.put(group.index)
            yield from turns(group, *arguments, **options)

        Group.turns = noting  # type: ignore[method-assign]

    def submit(self, marks: list[Mark], scales: tuple[Tensor, ...] = ()) -> torch.futures.Future[Tensor]:
        """Submit a gradient for each of `marks`: the last with the bucket, the others early."""
        for name, mark in list(zip(self.names, marks, strict=True))[:-1]:
            self.engine.submit(EarlyGradient(name=name, gradient=self.views[name], computed=mark, scales=scales))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        bucket = PendingBucket(
            gradients=self.views, buffer=self.buffer, future=future, computed=marks[-1], scales=scales
        )
        self.engine.submit(bucket)
        return future

    def wait_until_taken(self) -> None:
        """Wait until the engine has taken all that was submitted, and so done what it can with all but the last."""
        while not self.engine._thread._inbox.is_empty:
            time.sleep(1e-3)

    def compute(self, index: int) -> None:
        """Write a gradient, as the device does when it comes to it."""
        self.views[self.names[index]].normal_(generator=self._random)


def _begin_in_turn(rank: int, has_mesh: bool) -> tuple[list[int], Tensor, Tensor]:
    """Compute a gradient whenever the group before it has begun. Return the groups and two steps' averages."""
    training = Training(rank, "qsgd", "sra", has_mesh=has_mesh)
    marks = [GivenMark() for _ in LAYERS]
    future = training.submit(list(marks))
    begun = []
    for index, mark in enumerate(marks):
        assert mark.is_awaited.wait(PATIENCE_S)
        assert training.begun.empty(), "a group has begun before its gradient was computed"
        training.compute(index)
        mark.set()
        begun.append(training.begun.get(timeout=PATIENCE_S))
    late = future.wait().clone()
    sample = training.engine.last_step
    assert sample is not None
    assert len(sample.ready_s) == len(LAYERS)
    training.engine.close()
    # The same gradients, all of them computed when they come.
    again = Training(rank, "qsgd", "sra", has_mesh=has_mesh)
    for index in range(len(LAYERS)):
        again.compute(index)
    at_once = again.submit([DONE] * len(LAYERS)).wait().clone()
    again.engine.close()
    return begun, late, at_once


@pytest.mark.parametrize("has_mesh", [True, False])
def test_a_group_begins_when_its_own_gradient_is_computed_not_when_backward_ends(has_mesh: bool) -> None:
    results = run_ranks(2, _begin_in_turn, has_mesh)
    for begun, late, at_once in results:
        assert begun == list(range(len(LAYERS)))
        assert torch.equal(late, at_once)
        assert torch.equal(late, results[0][1])


def _sums_of_the_device(rank: int) -> float:
    """Return the seconds of exchange of a step whose sums a device was given before it computed any gradient."""
    streams = _SumStreams()
    training = Training(rank, "none", "dense", sums=streams)
    training.buffer.normal_(generator=torch.Generator().manual_seed(rank))
    marks: list[Mark] = [GivenMark() for _ in LAYERS]
    future = training.submit(marks)
    begun = [training.begun.get(timeout=PATIENCE_S) for _ in LAYERS]
    assert begun == list(range(len(LAYERS)))
    future.wait()
    assert streams.waited == [[mark] for mark in marks]
    assert not any(isinstance(mark, GivenMark) and mark.is_awaited.is_set() for mark in marks)
    sample = training.engine.last_step
    training.engine.close()
    assert sample is not None
    return sample.exchange_s


def test_a_device_is_given_its_sums_before_it_has_computed_the_gradients() -> None:
    """As by DDP. Here the sums come first, so none of their time counts as exchange."""
    assert run_ranks(2, _sums_of_the_device) == [0.0, 0.0]


class _TimedMark(GivenMark):
    """A point to which the device comes at `at_s` of its own clock."""

    def __init__(self, at_s: float) -> None:
        super().__init__()
        self.at_s = at_s

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _TimedMark)
        assert self.is_done
        assert earlier.is_done
        return self.at_s - earlier.at_s


class _TimedStreams(Streams):
    def mark(self, stream: object = None) -> Mark:
        return _TimedMark(100.0)


def test_times_of_arrival_are_read_without_a_wait() -> None:
    watched: list[Mark] = []
    clock = StepClock(_TimedStreams(), watched.append)
    (end_before,) = watched
    assert isinstance(end_before, _TimedMark)
    late = EarlyGradient(name="late", gradient=torch.empty(1), computed=_TimedMark(100.25))
    now_s = time.perf_counter()
    assert clock.time_of(late) >= now_s, "the device has come to neither mark"
    end_before.set()
    end_before.seen_s = 5.0
    assert clock.time_of(late) >= now_s, "not to that of the gradient"
    assert isinstance(late.computed, _TimedMark)
    late.computed.set()
    assert clock.time_of(late) == 5.25
    at_once = EarlyGradient(name="at once", gradient=torch.empty(1))
    assert clock.time_of(at_once) == at_once.arrived_s
    clock.restart()
    assert len(watched) == 2
    assert clock.began_s >= now_s


def _keeps_order(rank: int) -> tuple[bool, bool, bool]:
    """Return whether another group may begin before, during and after the copy of a group to the host."""
    device = torch.device("cpu", 0)
    STREAMS[device] = _TimedStreams()
    plan = cgx_ray.make_plan(LAYERS, version=0, world_size=2, codec="qsgd", scheme="sra", group_bytes=1, device="cpu")
    names, world = plan.groups[0].layers, dist.group.WORLD
    assert world is not None
    layers = {layer.name: layer for layer in LAYERS}
    transport = Transport(world, mesh=connect_mesh(world, PATIENCE_S))
    group = Group(0, plan.groups[0], layers, transport, Memories(), device)
    for name in names:
        group.arrive(name, torch.ones(NUMEL))
    before = group.keeps_order
    stamp = Stamp(plan_version=0, step=0, group=0, codec="qsgd")
    turns = group.turns(stamp, 0, None, Phases(), checks_finite=False)
    assert isinstance(next(turns), _TimedMark)
    during = group.keeps_order
    # Both ranks have begun to send.
    transport.finish(next(turns))
    return before, during, group.keeps_order


def test_no_other_group_begins_while_one_is_copied_to_the_host() -> None:
    """It may have a collective to start, and those start in the same order on all ranks."""
    assert run_ranks(2, _keeps_order) == [(False, True, False)] * 2


def _scale_comes_late(rank: int) -> tuple[float, list[float], str]:
    """Return the scale of the memory after a step whose scale is written last, and what a step with two scales says."""
    training = Training(rank, "topk:density=0.1", "allgather")
    training.buffer.normal_()
    training.submit([DONE] * len(LAYERS), (torch.tensor(2.0),)).wait()
    before = [float(value.norm()) for value in training.engine.state()["residuals"].values()]
    while not training.begun.empty():
        training.begun.get()
    # The device copies the scale to the host before it computes the first gradient.
    scale, mark = torch.tensor(float("nan")), GivenMark()
    training.buffer.zero_()
    future = training.submit([mark] * len(LAYERS), (scale,))
    training.wait_until_taken()
    assert training.begun.empty()
    scale.fill_(4.0)
    mark.set()
    future.wait()
    after = training.engine.state()
    ratios = [float(value.norm()) / norm for value, norm in zip(after["residuals"].values(), before, strict=True)]
    other, mark = torch.tensor(float("nan")), GivenMark()
    for name in training.names[:-1]:
        training.engine.submit(EarlyGradient(name=name, gradient=training.views[name], scales=(scale,)))
    failing: torch.futures.Future[Tensor] = torch.futures.Future()
    bucket = PendingBucket(
        gradients=training.views, buffer=training.buffer, future=failing, computed=mark, scales=(other,)
    )
    training.engine.submit(bucket)
    other.fill_(8.0)
    mark.set()
    with pytest.raises(cgx_ray.CGXError) as caught:
        failing.wait()
    with pytest.raises(cgx_ray.CGXError):
        training.engine.state()
    training.engine.close()
    return after["loss_scale"], ratios, str(caught.value)


def test_a_loss_scale_is_read_when_the_device_has_written_it() -> None:
    results = run_ranks(2, _scale_comes_late)
    for scale, ratios, _ in results:
        assert scale == 4.0
        # Zero gradients: what was owed doubles with the scale, less what this step has sent of it.
        assert all(1.0 < ratio < 2.0 for ratio in ratios), ratios
    # The other rank may find first that this one has hung up.
    assert any("gradients of one step have loss scales 4 and 8" in said for _, _, said in results)


def _hash_comes_late(rank: int) -> list[int]:
    """Return the hashes of weights that the ranks compare, of a step whose hash is written after its gradients."""
    compared, post = [], Agreement.post

    def noting(agreement: Agreement, **state: Any) -> None:
        compared.append(state["weights"])
        post(agreement, **state)

    Agreement.post = noting  # type: ignore[method-assign]
    training = Training(rank, "qsgd", "sra")
    training.buffer.normal_()
    written, value_1 = GivenMark(), torch.tensor([0])
    first = training.names[0]
    hashed = WeightHash(value_1, written)
    training.engine.submit(EarlyGradient(name=first, gradient=training.views[first], weights=hashed))
    future = training.submit([DONE] * len(LAYERS))
    training.wait_until_taken()
    assert not compared
    value_1.fill_(77)
    written.set()
    future.wait()
    training.engine.close()
    return compared


def test_a_hash_of_weights_is_read_when_the_device_has_written_it() -> None:
    assert run_ranks(2, _hash_comes_late) == [[77]] * 2


def _bucket_before_greetings(rank: int) -> tuple[bool, int, int]:
    """Return whether the gradients came back while the engine waited for greetings, and the steps in the samples."""
    training = Training(rank, "none", "dense")
    is_back = threading.Event()
    receive, received = Transport.receive_greetings, []

    def waiting(transport: Transport) -> None:
        received.append(is_back.wait(PATIENCE_S))
        receive(transport)

    Transport.receive_greetings = waiting  # type: ignore[method-assign]
    for _ in range(3):
        training.buffer.normal_()
        training.submit([DONE] * len(LAYERS)).wait()
        is_back.set()
        # It waits for the sample of the step that has just gone back.
        sample = training.engine.last_step
        is_back.clear()
    assert sample is not None
    step = training.engine.step
    training.engine.close()
    return all(received), sample.step, step


def test_the_last_bucket_goes_back_before_greetings_and_sample() -> None:
    assert run_ranks(2, _bucket_before_greetings) == [(True, 2, 3)] * 2

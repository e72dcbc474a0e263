"""Steps of a dense plan that DDP's own all-reduce averages, where GPUs cannot have NCCL beside it. Here on CPUs."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, batch, train
from support.device.marks import GivenMark
from support.ranks import run_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.codecs.feedback import Memories
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Phases, Transport
from cgx_ray.collectives.transport.tcp import connect_mesh
from cgx_ray.collectives.transport.transport_like import VendorCall
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.group import Group
from cgx_ray.engine.hook import DdpBuckets, cgx_hook
from cgx_ray.plan import CodecSpec, Layer, Plan
from cgx_ray.runtime_ext.streams import STREAMS, Mark, Streams

TIMEOUT_S = 20.0
CANDIDATES = (CodecSpec.parse("qsgd"),)


class _Training:
    """A model behind an engine. `sums` gets the number of elements of each sum on the thread of backward, by step."""

    def __init__(self, codec: str, hands_over: bool, candidates: tuple[CodecSpec, ...] = (), **ddp: Any) -> None:
        self.model = DistributedDataParallel(Branches(), bucket_cap_mb=0.02, **ddp)
        self._layers = cgx_ray.layers_of(self.model)
        group = dist.new_group()
        transport = Transport(group, mesh=connect_mesh(group, TIMEOUT_S, shared_memory=False), timeout_s=TIMEOUT_S)
        self.engine = Engine(self._layers, self.plan(0, codec), transport, candidates=candidates)
        self._buckets = DdpBuckets(self.model, self.engine, hands_over=hands_over)
        self.model.register_comm_hook(self._buckets, cgx_hook)
        self.sums: list[list[int]] = []

    def plan(self, version: int, codec: str) -> Plan:
        return cgx_ray.make_plan(self._layers, version=version, world_size=2, codec=codec, group_bytes=1 << 14)

    def steps(self, rank: int, steps: range, **forward: Any) -> list[str]:
        hashes, all_reduce, thread = [], dist.all_reduce, threading.current_thread()

        def noted(values: Tensor, *arguments: Any, **options: Any) -> Any:
            if options["group"] is self.model.process_group:
                assert threading.current_thread() is thread
                self.sums[-1].append(values.numel())
            return all_reduce(values, *arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", noted)
            for step in steps:
                self.sums.append([])
                hashes += train(self.model, rank, range(step, step + 1), **forward)
        return hashes

    def close(self) -> None:
        self.engine.close()
        self._buckets.close()


class Outcome(NamedTuple):
    """By step: hash of the weights, whether DDP's all-reduce averaged it, and fields of the sample."""

    hashes: list[str]
    is_handed: list[bool]
    samples: list[tuple[Any, ...]]


def _switch_plans(rank: int, hands_over: bool) -> Outcome:
    """Train with a dense plan, then a compressed one, then a dense one again."""
    training = _Training("none", hands_over)
    hashes = training.steps(rank, range(4))
    for version, codec in ((1, "topk:density=0.1"), (2, "none")):
        training.engine.hold(training.plan(version, codec))
        hashes += training.steps(rank, range(4 * version, 4 * version + 4))
    taken = training.engine.take_samples()
    for one in taken:
        assert one.step_s >= one.exchange_s > 0
    samples = [
        (one.step, one.plan_version, one.wire_bytes, one.card_bytes, one.dense_bytes, len(one.transfers))
        for one in taken
    ]
    training.close()
    return Outcome(hashes, [bool(sums) for sums in training.sums], samples)


def test_plans_switch_at_the_same_steps_and_residuals_are_sent() -> None:
    (handed, other), (plain, _) = run_ranks(2, _switch_plans, True), run_ranks(2, _switch_plans, False)
    assert handed.is_handed == other.is_handed
    assert handed.hashes == other.hashes
    # With two ranks the order of a sum changes no bit.
    assert handed.hashes == plain.hashes
    assert [one[:2] for one in handed.samples] == [one[:2] for one in plain.samples]
    by_version = {version: [one for one in handed.samples if one[1] == version] for version in range(3)}
    assert all(len(found) >= 2 for found in by_version.values())
    for step, version, *_ in handed.samples:
        # The first step of the last plan sends what the codec before it has left.
        is_first = step == by_version[2][0][0]
        assert handed.is_handed[step] == (version != 1 and not is_first), step
    # Bytes on the wire are those of a ring, as of dense sums by the engine. A bucket's sum is rounded once.
    for found, wanted in zip(handed.samples, plain.samples, strict=True):
        assert found[2] == wanted[2]
        assert found[3] == pytest.approx(wanted[3], abs=8)
        assert found[4:] == wanted[4:]


def _measure(rank: int) -> tuple[list[bool], list[bool]]:
    """Return by step whether DDP's all-reduce averaged it, and whether gains were measured in it."""
    training = _Training("none", True, CANDIDATES)
    training.steps(rank, range(6))
    measured = [bool(one.gain) for one in training.engine.take_samples()]
    training.close()
    return [bool(sums) for sums in training.sums], measured


def test_steps_that_measure_gains_are_the_engines() -> None:
    first, other = run_ranks(2, _measure)
    assert first == other
    is_handed, is_measured = first
    assert True in is_measured
    assert is_handed == [not one for one in is_measured]


def _train_variant(rank: int, ddp: dict[str, Any], hands_over: bool) -> list[str]:
    training = _Training("none", hands_over, **ddp)
    hashes = training.steps(rank, range(3))
    hashes += training.steps(rank, range(3, 5), use_right=not training.model.find_unused_parameters)
    hashes += train(training.model, rank, range(5, 7), accumulate=2)
    training.close()
    return hashes


@pytest.mark.parametrize(
    "ddp", [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]
)
def test_weights_are_those_of_dense_by_the_engine(ddp: dict[str, Any]) -> None:
    handed, plain = run_ranks(2, _train_variant, ddp, True), run_ranks(2, _train_variant, ddp, False)
    assert handed[0] == handed[1] == plain[0]


def _fail(rank: int) -> str:
    """Return the error of a step that begins after the engine has failed, as when another rank has."""
    training = _Training("none", True)
    training.steps(rank, range(2))
    dist.barrier()
    with ExitStack() as stack:
        stack.callback(training.close)
        # Before the agreement of the step before is read.
        training.engine._transport.abort()
        with pytest.raises((cgx_ray.CGXError, RuntimeError)) as caught:
            training.model(batch(rank, 2)).sum().backward()
    return str(caught.value)


def test_an_error_of_the_engine_is_raised_by_the_first_hook_of_a_step() -> None:
    for rank, said in enumerate(run_ranks(2, _fail)):
        assert f"rank {rank}, step" in said, said
        assert "the connections are closed" in said, said


def _group_of_a_device(has_vendor: bool) -> tuple[Group, Transport]:
    """Return a dense group of one layer, "weight", whose gradient is on a device."""
    layer = Layer(name="weight", numel=10_000, ndim=2, num_rows=100)
    plan = cgx_ray.make_plan([layer], version=0, world_size=2, codec="none")
    world = dist.group.WORLD
    assert world is not None
    transport = Transport(world, cuda_group=dist.new_group() if has_vendor else None)
    return Group(0, plan.groups[0], {"weight": layer}, transport, Memories(), torch.device("cpu", 0)), transport


class _CountingStreams(Streams):
    """`calls` gets "mark" for each mark."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def mark(self, stream: object = None) -> Mark:
        self._calls.append("mark")
        return Mark()


def _await_a_sum(rank: int) -> list[str]:
    """Return what is done of a group whose bucket DDP sums, in order."""
    calls: list[str] = []
    STREAMS[torch.device("cpu", 0)] = _CountingStreams(calls)
    group, transport = _group_of_a_device(False)
    view, ended = torch.zeros(10_000), threading.Event()
    ended.set()
    work: Any = SimpleNamespace(wait=lambda: calls.append("the stream waits for the sum"))
    call = VendorCall("DDP's all-reduce", work, ended)
    # The device has not computed it yet, nor does anybody wait for that.
    computed = GivenMark()
    group.arrive("weight", view, computed, call)
    assert group.is_enqueued
    stamp, phases = Stamp(plan_version=0, step=0, group=0, codec="none"), Phases()
    for handle in group.turns(stamp, 0, None, phases, checks_finite=False):
        transport.finish(handle)
    assert not computed.is_awaited.is_set()
    assert view.sum() == 0
    assert len(phases.rounds) == 1
    return calls


def test_a_bucket_goes_back_after_the_sum_on_the_device() -> None:
    assert run_ranks(2, _await_a_sum) == [["the stream waits for the sum", "mark"]] * 2


def _mixed_plan(rank: int, has_vendor: bool) -> tuple[str, int]:
    """Return scheme and bytes of a dense group of gradients that are on a device."""
    group, _ = _group_of_a_device(has_vendor)
    return type(group.exchange).__name__, group.sent_bytes


def test_without_nccl_dense_groups_of_gpus_go_by_messages_and_not_through_the_vendors_ring() -> None:
    assert run_ranks(2, _mixed_plan, True) == [("Dense", 40_000)] * 2
    # Headers of two messages come on top.
    assert run_ranks(2, _mixed_plan, False) == [("Sra", 40_064)] * 2

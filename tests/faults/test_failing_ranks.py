"""A rank that fails, stops or stands still while it trains: the others say which, and do not wait for the time-out.

Errors must come long before the time-out of the engine, which is that of the process group (`GROUP_TIMEOUT_S`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, train
from support.ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives.transport.gloo_sockets import GlooSockets
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.group import Group
from cgx_ray.engine.step import PendingBucket, StepRun
from cgx_ray.plan import STEPS_TOGETHER

NUM_RANKS = 3
FAILING = 1
WAYS: dict[str, dict[str, Any]] = {
    "tcp": {"shared_memory": False},
    "shared memory": {},
    "gloo": {"transport": "gloo"},
}


def _fail_in(step: int) -> None:
    """Let this rank find a damaged message in `step`."""
    begin = StepRun._begin

    def fail(self: StepRun, group: Group) -> None:
        if self.number == step:
            raise cgx_ray.WireError(f"step {step}, group {group.index}: message of rank 0 was damaged (CRC-32C)")
        begin(self, group)

    StepRun._begin = fail  # type: ignore[method-assign]


def _train_until_error(model: DistributedDataParallel, rank: int) -> str:
    with pytest.raises((cgx_ray.CGXError, RuntimeError)) as caught:
        train(model, rank, range(100_000))
    return str(caught.value)


def _others_wait(rank: int, way: str, codec: str) -> str:
    model = DistributedDataParallel(Branches())
    arguments = {"codec": codec, "scheme": "dense" if codec == "none" else "sra", **WAYS[way]}
    attachment = cgx_ray.attach(model, **arguments)
    if rank == FAILING:
        _fail_in(2)
    said = _train_until_error(model, rank)
    attachment.close()
    return said


@pytest.mark.fault("a damaged message, over TCP, shared memory or Gloo", "that error, on all ranks")
@pytest.mark.parametrize("codec", ["none", "qsgd"])
@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_one_rank_ends_the_exchange_on_all_and_is_named(way: str, codec: str) -> None:
    results = run_ranks(NUM_RANKS, _others_wait, way, codec)
    for said in results:
        assert "message of rank 0 was damaged (CRC-32C)" in said
    assert all(
        f"the first error: rank {FAILING}: step 2" in said for rank, said in enumerate(results) if rank != FAILING
    )


def _stopped_for_ever(rank: int, way: str, period: int, num_steps: int) -> str:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="none", scheme="dense", period=period, silent_s=5, **WAYS[way])
    pids: list[int] = [0] * NUM_RANKS
    dist.all_gather_object(pids, os.getpid())
    train(model, rank, range(num_steps))
    # Else the rank may be stopped in these steps.
    dist.barrier()
    if rank == 0:
        os.kill(pids[FAILING], signal.SIGSTOP)
    said = _train_until_error(model, rank)
    if rank == 0:
        # For the end of the test. The rank then hears that the others have given up.
        os.kill(pids[FAILING], signal.SIGCONT)
    attachment.close()
    return said


@pytest.mark.fault("SIGSTOP for ever, also within a round of many steps", "named by all after `silent_s`")
@pytest.mark.parametrize(
    ("way", "period", "num_steps"), [*((way, 1, 2) for way in WAYS), ("tcp", 1024, STEPS_TOGETHER + 2)]
)
def test_a_rank_that_is_stopped_for_ever_is_named_by_all(way: str, period: int, num_steps: int) -> None:
    for said in run_ranks(NUM_RANKS, _stopped_for_ever, way, period, num_steps):
        assert f"rank {FAILING} has been silent for 5 s" in said


def _gloo_never_ends(rank: int, way: str) -> str:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="none", scheme="dense", silent_s=2, **WAYS[way])
    pids: list[int] = [0] * NUM_RANKS
    dist.all_gather_object(pids, os.getpid())
    if rank == FAILING:
        os.kill(pids[FAILING], signal.SIGSTOP)
    else:
        # As if Gloo did not notice, which happens rarely.
        GlooSockets.shut_down = lambda self: 0  # type: ignore[method-assign]
    said = _train_until_error(model, rank)
    attachment.close()
    if rank == 2:
        with suppress(psutil.NoSuchProcess):  # it may have ended
            psutil.Process(pids[0]).wait(30)
        os.kill(pids[FAILING], signal.SIGCONT)
    return said


@pytest.mark.fault("Gloo does not end a collective when all disconnect", "that error; the process ends at once")
@pytest.mark.parametrize("way", ["tcp", "gloo"])
def test_a_rank_ends_although_a_collective_of_gloo_does_not(way: str) -> None:
    for said in run_ranks(NUM_RANKS, _gloo_never_ends, way):
        assert f"rank {FAILING} has been silent for 2 s" in said


def _without_lock(rank: int) -> list[str]:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra", silent_s=2)
    hashes = train(model, rank, range(2))
    if rank == FAILING:
        # As a regular expression, or a pickle of a large object: no other thread of Python runs meanwhile.
        ctypes.PyDLL(None).sleep(7)
    hashes += train(model, rank, range(2, 4))
    attachment.close()
    return hashes


@pytest.mark.fault("a rank holds Python's lock for longer than `silent_s`", "training goes on")
def test_a_rank_that_holds_the_lock_of_python_for_long_is_not_taken_for_silent() -> None:
    results = run_ranks(NUM_RANKS, _without_lock)
    assert all(hashes == results[0] for hashes in results)


def _continue_after(stopped: psutil.Process, seconds: float) -> None:
    while stopped.status() != psutil.STATUS_STOPPED:
        time.sleep(0.05)
    time.sleep(seconds)
    stopped.resume()


def _stopped_for_a_while(rank: int) -> tuple[list[str], float]:
    """Return the hashes of the weights, and the longest time that this rank reports for its compute."""
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra", shared_memory=False)
    pids: list[int] = [0] * NUM_RANKS
    dist.all_gather_object(pids, os.getpid())
    hashes = train(model, rank, range(2))
    if rank == 0:
        threading.Thread(target=_continue_after, args=(psutil.Process(pids[FAILING]), 5)).start()
    if rank == FAILING:
        os.kill(os.getpid(), signal.SIGSTOP)
    hashes += train(model, rank, range(2, 6))
    longest_s = max(sample.compute_s for sample in attachment.take_samples())
    attachment.close()
    return hashes, longest_s


@pytest.mark.fault("SIGSTOP for 5 s", "training goes on; the rank is reported as slow")
def test_a_rank_that_is_stopped_for_a_while_is_reported_as_slow_and_all_go_on() -> None:
    results = run_ranks(NUM_RANKS, _stopped_for_a_while)
    assert len({tuple(hashes) for hashes, _ in results}) == 1
    # The controller compares these times, see `JoinedStep.slowness`.
    assert results[FAILING][1] == max(longest_s for _, longest_s in results) > 1


def _close_in_a_step(rank: int) -> str:
    """Rank 0 closes while its own backward waits for others, which never begin the step."""
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="none", scheme="dense", shared_memory=False)
    train(model, rank, range(2))
    if rank > 0:
        dist.barrier()
        return _train_until_error(model, rank)
    said, has_begun = list[str](), threading.Event()
    begin = StepRun._begin

    def note(self: StepRun, group: Group) -> None:
        begin(self, group)
        has_begun.set()

    StepRun._begin = note  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: said.append(_train_until_error(model, rank)))
    thread.start()
    assert has_begun.wait(60)
    attachment.close(timeout_s=1)
    thread.join()
    dist.barrier()
    return said[0]


@pytest.mark.fault(
    "one rank closes in the middle of a step", "it disconnects after `timeout_s` of `close`; the others report it"
)
def test_close_hangs_up_on_a_step_that_does_not_end() -> None:
    for said in run_ranks(NUM_RANKS, _close_in_a_step):
        assert "rank 0, step 2: closed, and 1 s later other ranks had not taken part in the exchange" in said


def _close_within_backward(rank: int) -> str:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra")
    # After two steps DDP itself talks to no rank any more.
    train(model, rank, range(2))
    if rank > 0:
        return _train_until_error(model, rank)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    gradient = torch.zeros(33)
    assert isinstance(attachment._engine, Engine)
    attachment._engine.submit(PendingBucket(gradients={"left.bias": gradient}, buffer=gradient, future=future))
    attachment.close()
    with pytest.raises(cgx_ray.CGXError) as caught:
        future.value()
    return str(caught.value)


@pytest.mark.fault("another thread closes in the middle of backward", "that error, at once, on all ranks")
def test_a_bucket_of_a_step_that_close_cuts_short_gets_an_error() -> None:
    for said in run_ranks(NUM_RANKS, _close_within_backward):
        assert "rank 0, step 2: closed in the middle of backward, before the gradients of " in said

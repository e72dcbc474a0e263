"""An error of one rank while it attaches: all ranks raise it, at once, and nothing is left."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.branches import Branches, train
from support.endings import grown, held
from support.failing_ranks import die, said_by_survivors
from support.ranks import run_ranks
from support.sharded import make_mesh, shard
from support.sharded import train as train_sharded
from support.shared_memory import left_behind
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives.transport import tcp
from cgx_ray.collectives.transport.gathered import Gatherer
from cgx_ray.collectives.transport.lifeline import Lifeline
from cgx_ray.errors import LimitError
from cgx_ray.runtime_ext.mesh import Mesh
from cgx_ray.session import agree, ddp

# Values that ranks gather when they attach, and which of them is the name of the shared memory.
NUM_VALUES, OF_SEGMENT = 13, 8
# By the error's text: whose, and the error. All of them on rank 1 only.
FAULTS: dict[str, tuple[Any, str, type[Exception]]] = {
    "no interface is up": (agree, "node_address", OSError),
    "out of memory in the mesh": (tcp, "Mesh", MemoryError),
    "out of memory in the engine": (ddp, "Engine", MemoryError),
    "no more threads": (ddp, "DdpBuckets", RuntimeError),
    "too many open files": (tcp, "host_key", OSError),
}


def _raising(error: Exception) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> Any:
        raise error

    return fail


def _attach_with_faults(rank: int) -> tuple[list[str], Any, Any]:
    """Return the errors, and what is held after an attachment and after many that failed."""
    model = DistributedDataParallel(Branches())
    cgx_ray.attach(DistributedDataParallel(Branches())).close()
    dist.barrier()
    before, said = held(), []
    for text, (owner, name, kind) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(owner, name, _raising(kind(text)))
            with pytest.raises(cgx_ray.CGXError) as caught:
                cgx_ray.attach(model)
        said.append(str(caught.value))
    # Its traceback holds what the last attachment had made.
    del caught
    dist.barrier()
    after = held()
    # The model has no hook yet, so it can still be attached.
    attachment = cgx_ray.attach(model)
    train(model, rank, range(2))
    attachment.close()
    return said, before, after


@pytest.mark.fault(
    "an exception on one rank: no address, memory, threads or files", "raised on all ranks at once; nothing is left"
)
def test_an_error_of_one_rank_while_it_attaches_is_raised_on_all_and_leaves_nothing() -> None:
    results = run_ranks(3, _attach_with_faults)
    for said, text in zip(results[0][0], FAULTS, strict=True):
        assert "rank 1 cannot attach" in said
        assert text in said
    for said, before, after in results:
        assert said == results[0][0]
        # A refused attachment may leave fewer threads of torch than an attachment that was closed.
        assert grown(before, after) == [0] * 4, (before, after)


def _attach_with_few_files(rank: int, num_left: int) -> str:
    model = DistributedDataParallel(Branches())
    cgx_ray.attach(DistributedDataParallel(Branches())).close()
    dist.barrier()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held()[1] + num_left, most[1]))
    with pytest.raises(LimitError) as caught:
        cgx_ray.attach(model, timeout_s=10)
    resource.setrlimit(resource.RLIMIT_NOFILE, most)
    return str(caught.value)


# With fewer files torch itself may end the process.
@pytest.mark.fault("a rank that attaches may open no more files", "an error, on all ranks, that names `ulimit -n`")
@pytest.mark.parametrize("num_left", [8, 10, 12], ids=["for signs of life", "for the mesh", "for connections"])
def test_a_rank_that_may_open_no_more_files_says_so_on_all_ranks(num_left: int) -> None:
    for said in run_ranks(2, _attach_with_few_files, num_left):
        assert "rank 1" in said
        assert "Too many open files; this process may have" in said
        assert "raise that limit with ulimit -n" in said
        assert "let TCP through" not in said


def _attach_without_threads(rank: int, owner: Any, name: str, words: str) -> str:
    model = DistributedDataParallel(Branches())
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(owner, name, _raising(RuntimeError(words)))
        with pytest.raises(LimitError) as caught:
            cgx_ray.attach(model, timeout_s=10)
    return str(caught.value)


# As Python and std::thread say it.
@pytest.mark.fault("a rank that attaches may start no more threads", "an error, on all ranks, that names `ulimit -u`")
@pytest.mark.parametrize(
    ("owner", "name", "words"),
    [
        (threading.Thread, "start", "can't start new thread"),
        (Lifeline, "connect", "Resource temporarily unavailable"),
        (Mesh, "connect", "Resource temporarily unavailable"),
    ],
)
def test_a_rank_that_may_start_no_more_threads_says_so_on_all_ranks(owner: Any, name: str, words: str) -> None:
    for said in run_ranks(2, _attach_without_threads, owner, name, words):
        assert "rank 1" in said
        assert words in said
        assert "raise that limit with ulimit -u" in said
        assert "let TCP through" not in said


def _before_each_value(act: Callable[[int], None]) -> None:
    """Let this rank call `act` with the place of each value, before it gathers that one."""
    gather, places = Gatherer.__call__, itertools.count()

    def acting(self: Gatherer, value: Any) -> list[Any]:
        act(next(places))
        return gather(self, value)

    Gatherer.__call__ = acting  # type: ignore[method-assign]


def _count_values(rank: int) -> int:
    """Return how many values ranks gather in one attachment."""
    model, places = DistributedDataParallel(Branches()), list[int]()
    _before_each_value(places.append)
    cgx_ray.attach(model).close()
    return len(places)


def test_ranks_gather_as_many_values_as_are_tested_below() -> None:
    assert run_ranks(3, _count_values) == [NUM_VALUES] * 3


def _killed_while_attaching(rank: int, folder: Path, victim: int, place: int) -> None:
    # Else a rank may be killed while the others still connect for Gloo.
    dist.barrier()
    model = DistributedDataParallel(Branches())
    if rank == victim:
        _before_each_value(lambda reached: die(folder) if reached == place else None)
    cgx_ray.attach(model)


@pytest.mark.fault("SIGKILL at each value that ranks gather", "an error on the others")
@pytest.mark.parametrize(
    "place", [pytest.param(n, marks=[] if n in (0, 2, 5, 9) else pytest.mark.slow) for n in range(NUM_VALUES)]
)
def test_a_rank_that_is_killed_while_it_attaches_is_an_error_on_the_others(place: int, tmp_path: Path) -> None:
    for rank, said in said_by_survivors(3, 1, tmp_path, _killed_while_attaching, 1, place).items():
        assert f"rank {rank} cannot attach: " in said
        assert "another rank has ended" in said or "rank 1 hung up and did not say why" in said


def _stopped_while_attaching(rank: int, place: int) -> str:
    pids: list[int] = [0] * 3
    dist.all_gather_object(pids, os.getpid())
    model = DistributedDataParallel(Branches())
    if rank == 1:
        _before_each_value(lambda reached: os.kill(os.getpid(), signal.SIGSTOP) if reached == place else None)
    with pytest.raises(cgx_ray.TransportError) as caught:
        cgx_ray.attach(model, silent_s=5)
    if rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    return str(caught.value)


@pytest.mark.fault("SIGSTOP of a rank that attaches, once ranks are connected", "named by all after `silent_s`")
@pytest.mark.parametrize(
    "place", [OF_SEGMENT, *(pytest.param(place, marks=pytest.mark.slow) for place in (2, NUM_VALUES - 1))]
)
def test_a_rank_that_is_stopped_while_it_attaches_is_named_by_all(place: int) -> None:
    for said in run_ranks(3, _stopped_while_attaching, place):
        assert "rank 1 has been silent for 5 s" in said


def _noted_and_killed(rank: int, folder: Path) -> None:
    if rank == 0:
        (folder / "pid").write_text(str(os.getpid()))
    with pytest.raises(cgx_ray.CGXError):
        _killed_while_attaching(rank, folder, 0, OF_SEGMENT)


def _attach_and_close(rank: int) -> None:
    cgx_ray.attach(DistributedDataParallel(Branches())).close()


@pytest.mark.fault("SIGKILL of the rank that has just made the shared memory", "the next `attach` removes it")
def test_a_segment_that_a_killed_rank_has_left_is_removed_by_the_next_attach(tmp_path: Path) -> None:
    # Rank 0 makes the segment and then gathers its name.
    with pytest.raises(RuntimeError, match="rank 0 ended with exit code -9"):
        run_ranks(3, _noted_and_killed, tmp_path)
    pids = [int((tmp_path / "pid").read_text())]
    assert left_behind(pids) != []
    run_ranks(2, _attach_and_close)
    assert left_behind(pids) == []


def _attach_again_and_again(rank: int, transport: str, num_times: int) -> list[Any]:
    found = []
    for _ in range(num_times):
        model = DistributedDataParallel(Branches())
        attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra", transport=transport)
        train(model, rank, range(2))
        attachment.close()
        del model, attachment
        dist.barrier()
        found.append(held())
        # A rank that goes on would open its next connections while another one still counts.
        dist.barrier()
    return found


@pytest.mark.fault("attach and close 100 times", "threads, files, shared memory and groups stay as before")
@pytest.mark.parametrize(
    ("transport", "num_times"), [("tcp", 10), pytest.param("tcp", 100, marks=pytest.mark.slow), ("gloo", 10)]
)
def test_attaching_and_closing_again_and_again_leaves_nothing(transport: str, num_times: int) -> None:
    for found in run_ranks(2, _attach_again_and_again, transport, num_times):
        # The first ones start threads of torch that stay.
        assert grown(found[2], found[-1]) == [0] * 4, found


def _attach_sharded_again_and_again(rank: int) -> list[Any]:
    mesh, found = make_mesh(2), []
    for _ in range(3):
        model = shard(Branches(), mesh)
        attachment = cgx_ray.attach(model, codec="qsgd")
        train_sharded(model, rank, range(2))
        attachment.close()
        dist.barrier()
        found.append(held()[3])
        dist.barrier()
    return found


def test_groups_of_shards_and_replicas_are_destroyed() -> None:
    for found in run_ranks(4, _attach_sharded_again_and_again):
        assert len(set(found)) == 1, found

"""Models that are collected and were never closed, as in cross-validation in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.branches import Branches, train
from support.endings import END_S, grown, held, wait_for
from support.ranks import run_ranks
from support.sharded import make_mesh, shard
from support.sharded import train as train_sharded
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives.transport.transport import Transport
from cgx_ray.session import attachment


def _attach_and_forget(rank: int, is_sharded: bool) -> list[Any]:
    # The next attachment closes the one before.
    attachment.LINGER_S = 1000.0
    found = []
    for _ in range(10):
        model: Any = shard(Branches(), make_mesh()) if is_sharded else DistributedDataParallel(Branches())
        cgx_ray.attach(model, codec="qsgd")
        (train_sharded if is_sharded else train)(model, rank, range(2))
        del model
        dist.barrier()
        found.append(held())
        dist.barrier()
    return found


@pytest.mark.fault("a new model 10 times, as in cross-validation, and none is closed", "what is held stays as before")
@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp2"])
def test_models_that_are_collected_leave_nothing_once_the_next_one_is_attached(is_sharded: bool) -> None:
    for found in run_ranks(2, _attach_and_forget, is_sharded):
        assert grown(found[2], found[-1]) == [0] * 4, found


def _forget_the_last_model(rank: int) -> None:
    attachment.LINGER_S = 0.0
    found = []
    for _ in range(2):
        model = DistributedDataParallel(Branches())
        attached = cgx_ray.attach(model, codec="qsgd")
        train(model, rank, range(2))
        if not found:
            attached.close()
            found.append(held())
    del model
    assert attached.is_closed
    wait_for(lambda: not any(grown(found[0], held())), END_S, lambda: f"{held()} instead of {found[0]}")


def test_the_end_of_a_model_closes_its_attachment() -> None:
    run_ranks(2, _forget_the_last_model)


def _slow_in_the_last_step(rank: int, folder: Path, shared_memory: bool) -> list[str]:
    attachment.LINGER_S = 0.0
    model = DistributedDataParallel(Branches())
    attached = cgx_ray.attach(model, codec="qsgd", scheme="sra", shared_memory=shared_memory)
    hashes = train(model, rank, range(2))
    if rank == 0:
        hashes += train(model, rank, range(2, 4))
        del model
        wait_for(lambda: attached._groups == (), END_S, lambda: "not closed")
        (folder / "closed").touch()
        return hashes
    # This rank takes in the last message of its last step when the other one has gone.
    finish, finished = Transport.finish, list[int]()

    def finish_late(self: Transport, *args: Any) -> None:
        finished.append(self.step)
        if finished.count(3) == finished.count(2):
            wait_for((folder / "closed").exists, END_S, lambda: "not closed")
        finish(self, *args)

    Transport.finish = finish_late  # type: ignore[method-assign]
    hashes += train(model, rank, range(2, 4))
    assert finished.count(3) == finished.count(2) > 0
    return hashes


@pytest.mark.fault("a model is gone on one rank while another one is in its last step", "that step ends as it should")
@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_rank_whose_model_is_gone_does_not_end_the_last_step_of_others(shared_memory: bool, tmp_path: Path) -> None:
    first, second = run_ranks(2, _slow_in_the_last_step, tmp_path, shared_memory)
    assert first == second

"""Restarts with other numbers of ranks: residuals and momentum keep their mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.branches import Branches, train
from support.ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray

SIZES = (4, 2, 3, 4)
NUM_STEPS = 4


def _states(checkpoint: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=True) for path in sorted(checkpoint.glob("*"))]


def _train_on(rank: int, number: int, folder: Path) -> dict[str, Any]:
    """Train as worker group `number`, from the checkpoint of the one before; return the memory at the beginning."""
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="dgc:density=0.05", scheme="allgather")
    if number > 0:
        attachment.load_state_dict(_states(folder / f"{number - 1}"))
    begin = attachment.state_dict()
    train(model, rank, range(NUM_STEPS * number, NUM_STEPS * (number + 1)))
    torch.save(attachment.state_dict(), folder / f"{number}" / f"{rank}.pt")
    attachment.close()
    return begin


@pytest.mark.fault("restarts with 4, 2, 3 and 4 ranks", "the mean of residuals, and of momentum, stays the same")
def test_the_mean_of_all_memory_is_kept_over_restarts_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    for number, size in enumerate(SIZES):
        (tmp_path / f"{number}").mkdir()
        begins = run_ranks(size, _train_on, number, tmp_path)
        assert [begin["step"] for begin in begins] == [NUM_STEPS * number] * size
        ended = _states(tmp_path / f"{number - 1}") if number > 0 else begins
        for kind in ("residuals", "momentum"):
            assert begins[0][kind].keys() == ended[0][kind].keys() != set()
            for name in begins[0][kind]:
                before_N, after_N = (
                    torch.stack([state[kind][name] for state in states]).mean(0) for states in (ended, begins)
                )
                assert float(before_N.norm()) > 0 or number == 0
                torch.testing.assert_close(after_N, before_N, rtol=0, atol=1e-6)


def _train_in_folder(rank: int, folder: Path) -> None:
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "0"
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="bf16", folder=folder)
    train(model, rank, range(NUM_STEPS))
    assert rank > 0 or (folder / "controller").exists()
    attachment.close()


def test_a_run_that_torchrun_will_not_start_again_leaves_no_history_in_its_folder(tmp_path: Path) -> None:
    run_ranks(2, _train_in_folder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["decisions.jsonl"]

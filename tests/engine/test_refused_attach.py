"""Attachments that are refused: one clear error on all ranks, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from support.branches import Branches
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.plan import Plan
from cgx_ray.session.attachment import process
from cgx_ray.session.settings import Settings


class NoPlan:
    settings = Settings()

    def first_plan(self, layers: Any, world_size: int) -> Plan:
        raise OSError("the disk is full")

    def start(self, attachment: cgx_ray.Attachment) -> None:
        raise AssertionError("there is nothing to start with")


def _attach_wrong(rank: int, case: str) -> str:
    model: nn.Module = DistributedDataParallel(Branches())
    arguments: dict[str, Any] = {}
    if case == "not ddp":
        model = Branches()
    elif case == "other layers":
        arguments["plan"] = cgx_ray.make_plan(cgx_ray.layers_of(model)[:-1], version=0, world_size=2)
    elif case == "subgroup":
        # new_group is collective: both ranks must create both groups.
        alone = [dist.new_group([0]), dist.new_group([1])]
        model = DistributedDataParallel(Branches(), process_group=alone[rank])
    elif case == "hook twice":
        cgx_ray.attach(model)
    elif case == "plan and codec":
        arguments = {"plan": cgx_ray.make_plan(cgx_ray.layers_of(model), version=0, world_size=2), "codec": "topk"}
    elif case == "other world":
        arguments["plan"] = cgx_ray.make_plan(cgx_ray.layers_of(model), version=0, world_size=3)
    elif case == "one rank has another plan":
        version = rank
        arguments["plan"] = cgx_ray.make_plan(cgx_ray.layers_of(model), version=version, world_size=2)
    elif case == "one rank alone is wrong" and rank == 1:
        model = Branches()
    elif case == "no plan":
        process.session = NoPlan()
    with pytest.raises(cgx_ray.CGXError) as caught:
        cgx_ray.attach(model, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("not ddp", "wrap it first"),
        ("other layers", "covers 7 layers, the model has 8"),
        ("subgroup", "averaged over 1 of 2 ranks"),
        ("hook twice", "attach once per model"),
        ("plan and codec", "give one of them"),
        ("other world", "world size 3"),
        ("one rank has another plan", "different plans"),
        ("one rank alone is wrong", "wrap it first"),
        ("no plan", "rank 0 cannot attach: OSError('the disk is full')"),
    ],
)
def test_a_wrong_attach_fails_on_all_ranks_with_one_clear_error(case: str, says: str) -> None:
    first, second = run_ranks(2, _attach_wrong, case)
    assert says in first
    assert first == second


def _attach_in_vain(rank: int) -> int:
    """Return the number of process groups that remain after refused attachments."""
    groups = dist.distributed_c10d._world.pg_map  # noqa: TID251 - torch has no public list
    before = len(groups)
    for _ in range(3):
        with pytest.raises(cgx_ray.ConfigError, match="attach got a Linear"):
            cgx_ray.attach(nn.Linear(2, 2))
    return len(groups) - before


def test_a_refused_attachment_leaves_no_process_group() -> None:
    assert run_ranks(2, _attach_in_vain) == [0, 0]

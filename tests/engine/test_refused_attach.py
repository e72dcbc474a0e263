"""Attachments that are refused: one clear error on all ranks, and nothing left behind."""

from __future__ import annotations

import math
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from support.branches import Branches
from support.ranks import GROUP_TIMEOUT_S, run_ranks
from support.sharded import make_mesh, shard
from support.sharded import train as train_sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives.transport.simulated_link import SimulatedLink
from cgx_ray.errors import ConfigError
from cgx_ray.plan import Plan, make_plan
from cgx_ray.session.attachment import process
from cgx_ray.session.settings import Settings


class NoPlan:
    settings = Settings()

    def first_plan(self, layers: Any, world_size: int, bucket_bytes: int, costs: Any) -> Plan:
        raise OSError("the disk is full")

    def start(self, attachment: cgx_ray.Attachment) -> None:
        raise AssertionError("there is nothing to start with")


class BadCheckpoint(NoPlan):
    settings = Settings(policy="static")

    def first_plan(self, layers: Any, world_size: int, bucket_bytes: int, costs: Any) -> Plan:
        return self.settings.first_plan(layers, world_size, bucket_bytes)

    def start(self, attachment: cgx_ray.Attachment) -> None:
        raise cgx_ray.StateError("the state is from another model")


def _attach_wrong(rank: int, case: str) -> str:
    model: nn.Module = DistributedDataParallel(Branches())
    arguments: dict[str, Any] = {}
    if case.startswith("not ddp"):
        model = Branches()
        sys.modules.update({"transformers": ModuleType("transformers")} if "Trainer" in case else {})
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


@pytest.mark.fault("other plans, models or arguments on one rank", "one `ConfigError` or `PlanError` on all ranks")
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("not ddp", "wrap it first"),
        ("not ddp, in a Trainer", "Hugging Face's Trainer is given the bare model: attach trainer.model_wrapped there"),
        ("other layers", "covers 7 layers, the model has 8"),
        ("subgroup", "averaged over 1 of 2 ranks"),
        ("hook twice", "attach once per model"),
        ("plan and codec", "give one of them"),
        ("other world", "world size 3"),
        ("one rank has another plan", "different plans"),
        ("one rank alone is wrong", "wrap it first"),
        ("no plan", "rank 0 cannot attach: the disk is full"),
    ],
)
def test_a_wrong_attach_fails_on_all_ranks_with_one_clear_error(case: str, says: str) -> None:
    first, second = run_ranks(2, _attach_wrong, case)
    assert says in first
    assert first == second


ONE_RANK = [
    ({"codec": "zip"}, "unknown codec 'zip'"),
    ({"codec": 4}, "codec 4 is not allowed"),
    ({"foldr": "x"}, "attach got unknown setting 'foldr'; did you mean 'folder'"),
    ({"policy": "adaptive", "max_loss": 0.5}, "max_loss 0.5 is not allowed; give a loss over dense's, such as 1.01"),
    ({"sead": 1}, "attach got unknown setting 'sead'; did you mean 'seed'"),
    ({"sead": 1}, "known: alpha, average_weights, bits, bucket_size, "),
    ({"policy": "adaptiv"}, "unknown policy 'adaptiv'; did you mean 'adaptive'"),
    ({"scheme": "allgater"}, "unknown scheme 'allgater'; did you mean 'allgather'"),
    ({"fidelity": "fast"}, "attach got fidelity without a policy that has it"),
    ({"exclude": "head"}, "exclude 'head' is not allowed"),
    ({"scheme": "star"}, "unknown scheme 'star'"),
    ({"codec": "topk", "scheme": "ring"}, "scheme ring cannot carry codec topk"),
    ({"intra": "dense", "shared_memory": False}, "intra 'dense' needs ranks that share memory"),
    ({"timeout_s": float("nan")}, "timeout_s nan is not allowed"),
    ({"timeout_s": -1}, "timeout_s -1 is not allowed"),
    ({"weight_check_steps": -1}, "weight_check_steps -1 is not allowed; give 0 or more"),
    ({"average_weights": 1}, "average_weights 1 is not allowed; give True or False"),
    ({"average_weights": True, "weight_check_steps": 0}, "average_weights needs comparisons of the weights; give"),
    ({"weight_check_steps": 50}, "different settings: rank 1 has weight_check_steps=50, rank 0 500"),
    ({"transport": "gloo"}, "different settings: rank 1 has transport='gloo', rank 0 'tcp'; give every rank the same"),
    ({"timeout_s": 1800}, f"different settings: rank 1 has timeout_s=1800.0, rank 0 {GROUP_TIMEOUT_S}"),
    ({"codec": "qsgd:bits=2"}, "different settings: rank 1 has policy=Static(codec='qsgd:bits=2,bucket_size=128', "),
]


def _attach_wrong_on_one_rank(rank: int) -> list[str]:
    model = DistributedDataParallel(Branches())
    said = []
    for arguments, _ in ONE_RANK:
        with pytest.raises(cgx_ray.CGXError) as caught:
            cgx_ray.attach(model, **(arguments if rank else {}))
        said.append(str(caught.value))
    # Different words for the same settings are no mistake.
    same: dict[str, Any] = {"codec": "qsgd", "scheme": "sra", "timeout_s": GROUP_TIMEOUT_S} if rank else {}
    cgx_ray.attach(model, **same).close()
    return said


@pytest.mark.parametrize("backend", ["gloo", "cgx"])
def test_arguments_of_one_rank_that_are_bad_or_different_are_one_clear_error_on_all_ranks(backend: str) -> None:
    """The time-out of a rank that is given none is that of its process group, whatever backend that has."""
    first, second = run_ranks(2, _attach_wrong_on_one_rank, backend=backend)
    assert first == second
    for said, (arguments, says) in zip(first, ONE_RANK, strict=True):
        assert says in said, arguments


def test_without_a_process_group_bad_arguments_raise_at_once() -> None:
    for arguments, says in ONE_RANK[:15]:
        with pytest.raises(cgx_ray.ConfigError, match=says):
            cgx_ray.attach(Branches(), **arguments)


def test_attach_before_the_process_group_is_an_error_in_a_job_of_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(cgx_ray.ConfigError, match="before init_process_group in a job of 2 processes"):
        cgx_ray.attach(nn.Linear(2, 2))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert repr(cgx_ray.attach(nn.Linear(2, 2))) == "<Attachment: nothing is exchanged>"


def test_attach_takes_a_policy_alone() -> None:
    static = cgx_ray.Static("bf16", "allreduce")
    for given, says in (
        ({"policy": static, "codec": "bf16"}, "codec cannot be given beside policy Static"),
        (
            {"policy": static, "plan": make_plan([], version=0, world_size=1)},
            "a plan and a policy, codec, scheme, intra or",
        ),
    ):
        with pytest.raises(cgx_ray.ConfigError, match=says):
            cgx_ray.attach(nn.Linear(2, 2), **given)  # type: ignore[arg-type]
    cgx_ray.attach(nn.Linear(2, 2), policy=static)


def _attach_a_static_policy(rank: int) -> str:
    model = DistributedDataParallel(Branches())
    with closing(cgx_ray.attach(model, policy=cgx_ray.Static("bf16", "allreduce"))) as attachment:
        assert attachment.plan is not None
        return attachment.plan.describe()


def test_a_static_policy_is_the_plan_of_all_ranks() -> None:
    assert run_ranks(2, _attach_a_static_policy) == ["bf16 over allreduce"] * 2


def _attach_with_rules(rank: int) -> list[str]:
    """Return the options by layer of a static run, and of an adaptive one in the beginning."""
    plans = []
    for given in ({"codec": "qsgd:bits=4", "scheme": "sra"}, {"policy": "adaptive", "fidelity": "fast"}):
        model = DistributedDataParallel(Branches())
        rules = {"exclude": ("left*",), "overrides": {"right.weight": ("topk:density=0.1", "allgather")}, "seed": 3}
        with closing(cgx_ray.attach(model, **given, **rules)) as attachment:
            assert attachment.plan is not None
            of_layer = {name: group.option for group in attachment.plan.groups for name in group.layers}
            plans.append([str(of_layer[name]) for name in ("first.weight", "left.weight", "right.weight")])
    return plans


def test_attach_takes_what_a_config_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    of_static, of_adaptive = run_ranks(2, _attach_with_rules)[0]
    assert of_static[:2] == ["qsgd:bits=4,bucket_size=128 over sra", "dense"]
    assert of_adaptive[:2] == ["dense", "dense"]
    assert all(option.startswith("topk:density=0.1") for option in (of_static[2], of_adaptive[2]))


def test_rules_beside_a_plan_are_refused() -> None:
    with pytest.raises(
        cgx_ray.ConfigError, match="attach got exclude, which changes no plan here; give it to make_plan"
    ):
        cgx_ray.attach(nn.Linear(2, 2), plan=make_plan([], version=0, world_size=1), exclude=("a",))


def test_arguments_of_a_policy_in_a_ray_worker_are_for_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "session", NoPlan())
    with pytest.raises(cgx_ray.ConfigError, match="give it to CGXConfig, which decides in Ray Train"):
        cgx_ray.attach(nn.Linear(2, 2), fidelity="fast")


def test_an_empty_codec_is_not_the_default() -> None:
    with pytest.raises(cgx_ray.ConfigError, match="unknown codec ''"):
        cgx_ray.attach(nn.Linear(2, 2), codec="")


@pytest.mark.parametrize("link", ["100mbit", 1e8])
def test_a_simulated_link_that_is_none_is_refused(link: Any) -> None:
    with pytest.raises(cgx_ray.ConfigError, match="give a SimulatedLink"):
        Settings(simulated_link=link)


def test_a_simulated_schedule_has_pairs() -> None:
    with pytest.raises(cgx_ray.ConfigError, match="give pairs of first step and bit/s"):
        SimulatedLink(latency_s=1e-3, schedule=(0, 1e8))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="simulated latency '1ms' is not allowed; give seconds"):
        SimulatedLink(latency_s="1ms", schedule=((0, 1e8),))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give numbers, such as"):
        SimulatedLink(latency_s=1e-3, schedule=((0, "100mbps"),))  # type: ignore[arg-type]
    for rate in (100, -1e8, math.nan, math.inf):
        with pytest.raises(ConfigError, match="give finite ones, 10000 or more, such as 1e8 for 100 Mbit/s"):
            SimulatedLink(latency_s=1e-3, schedule=((0, rate),))


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


def _resume_in_vain(rank: int, is_sharded: bool) -> tuple[int, list[str]]:
    """Return the number of process groups, and the engines' threads, that remain after a checkpoint that fails."""
    model: Any = shard(Branches(), make_mesh()) if is_sharded else DistributedDataParallel(Branches())
    groups = dist.distributed_c10d._world.pg_map  # noqa: TID251 - torch has no public list
    before = len(groups)
    process.session = BadCheckpoint()
    with pytest.raises(cgx_ray.StateError, match="from another model"):
        cgx_ray.attach(model)
    assert process.attachment is None
    if is_sharded:
        # Its hooks are removed as well.
        train_sharded(model, rank, range(1))
    return len(groups) - before, [thread.name for thread in threading.enumerate() if "cgx" in thread.name]


@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp2"])
def test_a_checkpoint_that_cannot_be_restored_leaves_nothing_attached(is_sharded: bool) -> None:
    assert run_ranks(2, _resume_in_vain, is_sharded) == [(0, []), (0, [])]

"""Attaching to FSDP2 models, their states, and the errors of both, on real processes."""

from __future__ import annotations

import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, batch
from support.ranks import log_lines, run_ranks
from support.sharded import BITS8, largest_difference, make_mesh, shard, sum_inside, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cgx_ray


def _resume(rank: int, interrupt: bool, sums_inside: bool) -> dict[str, torch.Tensor]:
    if sums_inside:
        sum_inside()
    mesh = make_mesh(2)

    def start() -> tuple[nn.Module, cgx_ray.Attachment]:
        model = shard(Branches(), mesh)
        return model, cgx_ray.attach(model, codec="onebit")

    model, attachment = start()
    train(model, rank, range(5))
    if interrupt:
        weights, states = model.state_dict(), [None] * dist.get_world_size()
        dist.all_gather_object(states, attachment.state_dict())
        attachment.close()
        model, attachment = start()
        model.load_state_dict(weights)
        attachment.load_state_dict(states)
    weights = train(model, rank, range(5, 9))
    attachment.close()
    return weights


@pytest.mark.parametrize("sums_inside", [False, True])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(sums_inside: bool) -> None:
    uninterrupted, resumed = (run_ranks(4, _resume, interrupt, sums_inside)[0] for interrupt in (False, True))
    assert largest_difference(uninterrupted, resumed) == 0.0


def _lines(rank: int, parameters: str | None, num_replicas: int) -> list[str]:
    lines = log_lines()
    logging.getLogger("cgx_ray").setLevel(logging.INFO)
    model = fully_shard(nn.Linear(1000, 100, bias=False), mesh=make_mesh(num_replicas))
    attachment = cgx_ray.attach(model, codec="qsgd:bits=4", parameters=parameters)
    model(torch.ones(1, 1000)).sum().backward()
    attachment.close()
    return lines


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "parameters", "begins", "ends"),
    [
        # 400 KB of gradients: 1/2 by the reduce-scatter; and 1/2 between two replicas of 200 KB.
        (2, 1, None, "; qsgd 4-bit over sra; ", " MB per step, dense sends 0.2 MB"),
        (4, 2, None, "; qsgd 4-bit over sra; ", " MB per step, dense sends 0.4 MB"),
        (2, 1, BITS8, "; qsgd 4-bit over sra, parameters qsgd 8-bit", " MB with the parameters per step"),
    ],
)
def test_lines_say_what_is_sent(
    num_ranks: int, num_replicas: int, parameters: str | None, begins: str, ends: str
) -> None:
    first, *_, last = run_ranks(num_ranks, _lines, parameters, num_replicas)[0]
    assert begins in first
    assert last.endswith(ends) or f"{ends};" in last, last


def _owed(rank: int, sums_inside: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of what three ranks of another run owe, and what this rank owes after it has loaded that."""
    if sums_inside:
        sum_inside()
    model = fully_shard(nn.Linear(100, 30, bias=False), mesh=make_mesh(2))
    attachment = cgx_ray.attach(model, codec="onebit")
    random = torch.Generator().manual_seed(0)
    others = [{"weight": torch.randn(3000, generator=random)} for _ in range(3)]
    own = attachment.state_dict()
    states = [{**own, "rank": one, "world_size": 3, "residuals": owed} for one, owed in enumerate(others)]
    attachment.load_state_dict(states)
    found = attachment.state_dict()["residuals"]["weight"]
    attachment.close()
    return torch.stack([owed["weight"] for owed in others]).mean(0), found


@pytest.mark.parametrize("sums_inside", [False, True])
def test_what_another_number_of_ranks_owed_is_owed_after_loading_it(sums_inside: bool) -> None:
    results = run_ranks(4, _owed, sums_inside)
    torch.testing.assert_close(torch.stack([found for _, found in results]).mean(0), results[0][0])


def _errors_inside(rank: int) -> list[str]:
    """Return what backward raises where a layer has no gradient, and then in every pass."""
    sum_inside()
    model = fully_shard(Branches(), mesh=make_mesh(2))
    attachment = cgx_ray.attach(model, codec="qsgd")
    said = []
    for _ in range(3):
        with pytest.raises(cgx_ray.CGXError) as caught:
            model(batch(rank, 0), use_right=False).sum().backward()
        said.append(str(caught.value))
    attachment.close()
    return said


def test_errors_between_replicas_end_every_backward() -> None:
    for said in run_ranks(4, _errors_inside):
        assert "set_reduce_scatter_unused_params(True)" in said[0]
        assert said[1:] == said[:1] * 2


def _train_until_killed(rank: int, folder: Path) -> None:
    model = shard(Branches(), make_mesh(2), reshard_after_forward=False)
    attachment = cgx_ray.attach(model, codec="qsgd")
    train(model, rank, range(2))
    x_BD = batch(rank, 2)
    loss = (model(x_BD) - x_BD).square().mean()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
    except cgx_ray.TransportError as error:
        (folder / f"rank{rank}").write_text(str(error))
    attachment.close()
    # Without rank 1, operations on the group of the whole run would hang.
    os._exit(0)


def test_when_a_rank_is_killed_the_others_say_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with exit code"):
        run_ranks(4, _train_until_killed, tmp_path)
    for rank in (0, 2, 3):
        said = (tmp_path / f"rank{rank}").read_text()
        assert re.match(rf"rank {rank}, step 2, module '(left|right)'", said), said
        assert "did not get through" in said, said


def _after_close(rank: int) -> bool:
    mesh = make_mesh(2)
    ours, plain = shard(Branches(), mesh), shard(Branches(), mesh)
    attachment = cgx_ray.attach(ours, codec="qsgd", parameters=BITS8)
    attachment.close()
    return largest_difference(train(ours, rank, range(3)), train(plain, rank, range(3))) == 0


def test_after_close_it_trains_like_plain_fsdp2() -> None:
    assert all(run_ranks(4, _after_close))


def _close_the_first_again(rank: int) -> int | None:
    model = shard(Branches(), make_mesh())
    first = cgx_ray.attach(model, codec="qsgd")
    first.close()
    second = cgx_ray.attach(model, codec="qsgd")
    first.close()
    train(model, rank, range(2))
    step = second.last_step
    second.close()
    return step.step if step is not None else None


def test_a_second_close_leaves_the_hooks_of_a_later_attachment() -> None:
    assert run_ranks(2, _close_the_first_again) == [1, 1]


def _attach_wrong(rank: int, case: str) -> str:
    model = shard(Branches(), make_mesh())
    arguments: dict[str, Any] = {
        "codec": {"codec": "topk:density=0.01"},
        "scheme": {"codec": "qsgd", "scheme": "ring"},
        "plan": {"plan": cgx_ray.Plan(version=0, world_size=2, groups=())},
        "parameters": {"parameters": "terngrad"},
        "average_weights": {"average_weights": True},
        "parameters of one rank": {"parameters": BITS8 if rank else None},
        "codec of one rank": {"codec": "qsgd:bits=2" if rank else "qsgd"},
        "bad codec of one rank": {"codec": "zip" if rank else "qsgd"},
        "ddp": {"parameters": BITS8},
    }.get(case, {})
    if case == "twice":
        cgx_ray.attach(model)
    elif case == "float64" or (case == "float64 of one rank" and rank == 1):
        model = shard(Branches().double(), make_mesh())
    elif case == "ddp":
        model = nn.parallel.DistributedDataParallel(Branches())
    elif case == "part of the ranks":
        alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"]
        model = shard(Branches(), alone)
    with pytest.raises(cgx_ray.CGXError) as caught:
        cgx_ray.attach(model, **arguments)
    error = caught.value
    # One traceback, and not another one with the same words.
    assert error.__suppress_context__ or str(error.__context__) != str(error)
    return str(error)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("twice", "attach once per model"),
        ("codec", "cannot use codec topk:density=0.01, which scheme sra does not carry; give one of bf16, "),
        ("scheme", "cannot use scheme ring; give 'sra', or leave scheme out"),
        ("plan", "plan 0 covers 0 layers, the model has 8"),
        ("average_weights", "not compared, so leave average_weights out"),
        ("parameters", "allowed: none, fp16, bf16, qsgd"),
        ("parameters of one rank", "different `parameters`"),
        ("part of the ranks", "sharded over 1 ranks and replicated over 1, of 2"),
        (
            "codec of one rank",
            "different settings: rank 1 has policy=Static(codec='qsgd:bits=2,bucket_size=128', ",
        ),
        ("bad codec of one rank", "unknown codec 'zip'"),
        ("float64", "torch.float64"),
        ("float64 of one rank", "torch.float64"),
        ("ddp", "DDP gathers no parameters"),
    ],
)
def test_a_wrong_attach_fails_on_all_ranks_with_one_clear_error(case: str, says: str) -> None:
    first, second = run_ranks(2, _attach_wrong, case)
    assert says in first
    assert first == second


def _attach_beside_optimizers(rank: int) -> list[str]:
    said = log_lines()
    other, model = nn.Linear(3, 5), Branches()
    old = torch.optim.AdamW(model.parameters())
    # Of another model, of another one that is sharded alike, and of this one.
    alike, own = (torch.optim.SGD(shard(one, make_mesh()).parameters()) for one in (Branches(), model))
    kept = [torch.optim.SGD(other.parameters()), alike, own]
    cgx_ray.attach(model, codec="qsgd").close()
    assert len([old, *kept]) == 4
    return said


def test_an_optimizer_made_before_fully_shard_is_warned_of() -> None:
    for rank, said in enumerate(run_ranks(2, _attach_beside_optimizers)):
        (warning,) = (line for line in said if "fully_shard" in line)
        assert warning.startswith(
            f"rank {rank}: an optimizer (AdamW) holds no parameter of this FSDP2 model, but 8 parameters of"
        )
        assert warning.endswith("make the optimizer after fully_shard")


def _unused(rank: int) -> str:
    model = fully_shard(Branches(), mesh=make_mesh())
    attachment = cgx_ray.attach(model, codec="qsgd")
    with pytest.raises(cgx_ray.CGXError) as caught:
        model(batch(rank, 0), use_right=False).sum().backward()
    attachment.close()
    return str(caught.value)


def test_a_layer_without_a_gradient_is_one_clear_error() -> None:
    for rank, said in enumerate(run_ranks(2, _unused)):
        assert said.startswith(f"rank {rank}, step 0, module '(root)'"), said
        assert "set_reduce_scatter_unused_params(True)" in said, said


def _bad_states(rank: int) -> list[str]:
    model = shard(Branches(), make_mesh())
    attachment = cgx_ray.attach(model, codec="ef_signsgd")
    good = attachment.state_dict()
    messages = []
    for bad in ({"residuals": {"other": torch.zeros(3)}}, {"momentum": {"first.weight": torch.zeros(33 * 131)}}):
        with pytest.raises(cgx_ray.StateError) as caught:
            attachment.load_state_dict({**good, **bad})
        messages.append(str(caught.value))
    attachment.load_state_dict(good)
    with pytest.raises(cgx_ray.PlanError) as refused:
        attachment.hold(cgx_ray.Plan(version=1, world_size=2, groups=()))
    attachment.close()
    return [*messages, str(refused.value)]


def test_states_and_plans_that_do_not_fit_are_refused() -> None:
    foreign, momentum, plan = run_ranks(2, _bad_states)[0]
    assert "residuals of 3 elements for layer 'other', of which ef_signsgd over sra and 1 other remembers" in foreign
    assert "momentum of 4323 elements" in momentum
    assert "plan 1 covers 0 layers" in plan


def _alone(rank: int) -> bool:
    model = shard(Branches(), make_mesh())
    attachment = cgx_ray.attach(model, codec="qsgd", parameters=BITS8)
    train(model, rank, range(2))
    attachment.close()
    return attachment.plan is None


def test_world_size_one_is_a_clean_no_op() -> None:
    assert run_ranks(1, _alone) == [True]

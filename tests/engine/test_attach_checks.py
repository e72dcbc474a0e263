"""Mistakes that would make backward wait for ever are found at attach, or end in an error after the time-out."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.branches import Branches, batch, train
from support.ranks import run_ranks
from support.sharded import make_mesh, shard
from support.sharded import train as train_sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives import Transport
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.hook import DdpBuckets, cgx_hook
from cgx_ray.plan import make_plan

TIMEOUT_S = 2.0
IS_SHARDED = [pytest.param(False, id="ddp"), pytest.param(True, id="fsdp2")]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_S", 40)


def _attach_after_change(rank: int, case: str, wrong_ranks: tuple[int, ...]) -> str:
    """Return the error of `attach` to a model that was changed after DDP was built; "" if there is none."""
    module = Branches()
    is_wrong = rank in wrong_ranks
    if case == "frozen when built":
        module.left.requires_grad_(False)
    model = DistributedDataParallel(module, find_unused_parameters=True)
    if case == "frozen when built" and is_wrong:
        module.left.requires_grad_(True)
    elif case == "frozen since" and is_wrong:
        module.first.requires_grad_(False)
        module.left.requires_grad_(False)
    elif case == "replaced" and is_wrong:
        module.left.bias = nn.Parameter(torch.zeros(33))
    elif case == "sparse":
        model = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)))
    try:
        attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra", timeout_s=20)
    except cgx_ray.ConfigError as error:
        return str(error)
    train(model, rank, range(2))
    attachment.close()
    return ""


@pytest.mark.parametrize("wrong_ranks", [(0, 1), (1,)], ids=["all ranks", "rank 1"])
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("frozen when built", "DDP does not average left.weight, left.bias, which"),
        ("frozen since", "DDP waits for gradients of first.weight, first.bias, left.weight and 1 more, which"),
        ("replaced", "DDP does not average left.bias, which"),
        ("sparse", "sparse gradients, of 0,"),
    ],
)
def test_layers_that_are_not_those_of_ddp_are_one_clear_error_on_all_ranks(
    case: str, says: str, wrong_ranks: tuple[int, ...]
) -> None:
    first, second = run_ranks(2, _attach_after_change, case, wrong_ranks)
    assert says in first
    assert first == second
    if case != "sparse":
        assert first.startswith(f"rank {wrong_ranks[0]}: ")
        assert "choose what is trained" in first


def _attach_frozen(rank: int) -> list[str]:
    module = Branches()
    module.left.requires_grad_(False)
    model = DistributedDataParallel(module)
    train(model, rank, range(2))
    attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra")
    hashes = train(model, rank, range(2, 4))
    attachment.close()
    return hashes


def test_layers_frozen_before_ddp_was_built_are_left_out_also_after_it_rebuilt_its_buckets() -> None:
    first, second = run_ranks(2, _attach_frozen)
    assert first == second


class _Words(Branches):
    """Branches with an embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 33, sparse=True)

    def forward(self, x_BD: torch.Tensor, use_right: bool = True) -> torch.Tensor:
        return super().forward(x_BD + self.words(torch.tensor(3)), use_right)


def _train_beside_a_sparse_layer(rank: int, is_frozen: bool) -> list[dict[str, torch.Tensor]]:
    """Train `_Words` without cgx_ray and with it, uncompressed; return the weights."""
    weights = []
    for attaches in (False, True):
        module = _Words()
        if is_frozen:
            module.words.requires_grad_(False)
        else:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["words.weight"])
        model = DistributedDataParallel(module)
        attachment = cgx_ray.attach(model, codec="none", weight_check_steps=1) if attaches else None
        train(model, rank, range(3))
        weights.append({name: parameter.detach().clone() for name, parameter in module.named_parameters()})
        if attachment is not None:
            attachment.close()
    return weights


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "ignored"])
def test_a_sparse_layer_that_ddp_does_not_average_is_none_of_our_business(is_frozen: bool) -> None:
    for plain, attached in run_ranks(2, _train_beside_a_sparse_layer, is_frozen):
        torch.testing.assert_close(attached, plain)


def _engine_of(model: DistributedDataParallel, layers: Any) -> Engine:
    plan = make_plan(layers, version=0, world_size=2, codec="qsgd", scheme="sra")
    engine = Engine(layers, plan, Transport(dist.new_group(), timeout_s=TIMEOUT_S))
    model.register_comm_hook(DdpBuckets(model, engine), cgx_hook)
    return engine


def _wait_for_a_layer_in_no_bucket(rank: int) -> tuple[str, str]:
    module = Branches()
    module.left.requires_grad_(False)
    model = DistributedDataParallel(module)
    module.left.requires_grad_(True)
    # `attach` would refuse this model.
    engine = _engine_of(model, cgx_ray.layers_of(model))
    said = []
    for step in range(2):
        with pytest.raises((cgx_ray.CGXError, RuntimeError)) as caught:
            train(model, rank, range(step, step + 1))
        said.append(str(caught.value))
        # After an error in backward only a new DDP can take the next step.
        model = DistributedDataParallel(Branches())
        model.register_comm_hook(DdpBuckets(model, engine), cgx_hook)
    engine.close()
    return said[0], said[1]


@pytest.mark.fault("a layer whose gradient never comes", "named after `timeout_s`")
def test_backward_ends_with_an_error_if_some_layers_never_come() -> None:
    for rank, (in_backward, later) in enumerate(run_ranks(2, _wait_for_a_layer_in_no_bucket)):
        for said in (in_backward, later):
            assert f"rank {rank}, step 0: 2 of 8 layers have no gradient" in said
            assert "left.weight" in said
            assert "left.bias" in said
            assert "timeout_s" in said


def _leave_layers_out(rank: int, missing: str, pause_s: float) -> tuple[str, str]:
    """Return the error of the engine, and then that of DDP, after a second backward that leaves layers out."""
    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.001)
    layers = cgx_ray.layers_of(model)
    engine = _engine_of(model, layers)
    # In the first step DDP has one bucket.
    train(model, rank, range(1))
    x_BD = batch(rank, 1)
    # Backward does not wait for incomplete buckets.
    if missing == "right":
        model(x_BD, use_right=False).sum().backward()
    else:
        model.module.first.requires_grad_(False)
        model(x_BD).sum().backward()
    time.sleep(pause_s)
    in_engine = str(engine._failure or "")
    with pytest.raises(RuntimeError) as caught:
        model(x_BD)
    start_s = time.monotonic()
    engine.close()
    assert time.monotonic() - start_s < TIMEOUT_S
    return in_engine, str(caught.value)


@pytest.mark.parametrize("pause_s", [0.0, TIMEOUT_S + 1])
@pytest.mark.parametrize("missing", ["right", "first"])
def test_layers_left_out_are_an_error_of_the_next_forward_and_of_the_engine_if_others_came(
    missing: str, pause_s: float
) -> None:
    for rank, (in_engine, in_ddp) in enumerate(run_ranks(2, _leave_layers_out, missing, pause_s)):
        assert "Expected to have finished reduction in the prior iteration" in in_ddp
        # DDP hands over its buckets in order. Without the first one, that of `right`, the step has not begun.
        if pause_s and missing == "first":
            assert f"rank {rank}, step 1: 2 of 8 layers have no gradient" in in_engine
            assert "first.weight" in in_engine
            assert "first.bias" in in_engine
        else:
            assert in_engine == ""


def _pause(rank: int) -> list[str]:
    """Pause between steps for longer than the time-out, and once in backward for less than it."""
    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.001)
    engine = _engine_of(model, cgx_ray.layers_of(model))
    hashes = train(model, rank, range(2))
    time.sleep(TIMEOUT_S + 0.5)
    hashes += train(model, rank, range(2, 4))
    handle = model.module.norm.weight.register_hook(lambda grad: time.sleep(TIMEOUT_S / 2))
    hashes += train(model, rank, range(4, 5))
    handle.remove()
    engine.close()
    return hashes


def test_a_pause_between_steps_is_no_reason_to_stop() -> None:
    first, second = run_ranks(2, _pause)
    assert first == second


def _submit_after_end(rank: int, is_sharded: bool) -> str:
    model: Any = shard(Branches(), make_mesh()) if is_sharded else DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd", timeout_s=TIMEOUT_S)
    step = train_sharded if is_sharded else train
    step(model, rank, range(1))
    assert attachment._engine is not None
    # As when Python ends.
    attachment._engine._thread._end_at_exit()
    with pytest.raises((cgx_ray.CGXError, RuntimeError)) as caught:
        step(model, rank, range(1, 2))
    return str(caught.value)


@pytest.mark.fault("training goes on after the engine's thread has ended", "an error at once")
@pytest.mark.parametrize("is_sharded", IS_SHARDED)
def test_nothing_is_given_to_a_thread_that_has_ended(is_sharded: bool) -> None:
    for rank, said in enumerate(run_ranks(2, _submit_after_end, is_sharded)):
        assert f"rank {rank}, step 1: the engine's thread has ended" in said


def _exit_in_thread(rank: int, is_sharded: bool) -> str:
    model: Any = shard(Branches(), make_mesh()) if is_sharded else DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd", timeout_s=TIMEOUT_S)
    engine: Any = attachment._engine

    def leave(*args: Any) -> None:
        raise SystemExit(3)

    setattr(engine, "_end_step" if is_sharded else "_begin", leave)
    with pytest.raises((cgx_ray.CGXError, RuntimeError)) as caught:
        (train_sharded if is_sharded else train)(model, rank, range(2))
    attachment.close()
    return str(caught.value)


@pytest.mark.parametrize("is_sharded", IS_SHARDED)
def test_whatever_ends_the_work_of_the_thread_is_raised_in_training(is_sharded: bool) -> None:
    for said in run_ranks(2, _exit_in_thread, is_sharded):
        assert "SystemExit(3)" in said


def _wait_too_long(rank: int) -> str:
    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.001)
    engine = _engine_of(model, cgx_ray.layers_of(model))
    # In the first step DDP has one bucket.
    train(model, rank, range(1))
    # No queue can wait this long: `take` raises OverflowError.
    engine._transport.timeout_s = 1e300
    with pytest.raises((cgx_ray.CGXError, RuntimeError)) as caught:
        train(model, rank, range(1, 2))
    engine.close()
    return str(caught.value)


def test_an_error_in_the_wait_for_a_bucket_is_raised_in_training() -> None:
    for said in run_ranks(2, _wait_too_long):
        assert "OverflowError" in said


def _alone(rank: int) -> list[list[str]]:
    """Return the hashes of weights after each step, of a model that was attached and of one that was not."""
    hashes = []
    for is_attached in (True, False):
        model = DistributedDataParallel(Branches())
        if is_attached:
            cgx_ray.attach(model, codec="topk:density=0.05")
        hashes.append(train(model, rank, range(3)))
    return hashes


def test_one_rank_trains_as_if_nothing_was_attached() -> None:
    # As a Ray run of one worker does in `make test-faults`.
    ((attached, plain),) = run_ranks(1, _alone)
    assert attached == plain


def _attach_without_config(rank: int) -> list[str]:
    lines = ranks.log_lines()
    with pytest.MonkeyPatch.context() as patch:
        # A worker of a real TorchTrainer attaches without a config in `make test-faults`.
        patch.setattr("cgx_ray.session.attach._is_ray_train_worker", lambda: True)
        cgx_ray.attach(DistributedDataParallel(Branches())).close()
        cgx_ray.attach(DistributedDataParallel(Branches()), codec="qsgd").close()
    return [line for line in lines if "without CGXConfig" in line]


def test_the_first_of_the_ranks_names_a_config_that_was_forgotten() -> None:
    first, second = run_ranks(2, _attach_without_config)
    assert len(first) == 1, first
    assert second == []

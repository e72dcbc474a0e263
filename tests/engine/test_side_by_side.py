"""Groups under way at the same time, and gradients that arrive before their buckets."""

from __future__ import annotations

import random
import re
import time
from functools import partial
from typing import Any

import pytest
import torch
from support.branches import Branches, batch, train, weights_hash
from support.ranks import log_lines, run_cases, run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives import Transport
from cgx_ray.collectives.direct import DirectLane
from cgx_ray.engine import group as engine_group
from cgx_ray.engine.step_sample import exchange_seconds
from cgx_ray.plan import CodecSpec, GroupPlan, Option, Plan, Scheme

HANG_TIMEOUT_S = 3.0
# One group per layer, with every kind of exchange: messages, sums by the vendor, and both in several turns.
OPTIONS = (
    ("qsgd", "sra"),
    ("topk:density=0.1", "artopk_ring"),
    ("topk:density=0.1", "allgather"),
    ("powersgd", "allreduce"),
    ("none", "dense"),
    ("bf16", "ring"),
    ("onebit", "tree"),
    ("topk:density=0.1", "artopk_tree_var"),
)


def _one_group_per_layer(model: DistributedDataParallel, world_size: int) -> Plan:
    names = [layer.name for layer in reversed(cgx_ray.layers_of(model))]
    groups = tuple(
        GroupPlan(layers=(name,), option=Option(codec=CodecSpec.parse(codec), scheme=Scheme(scheme)))
        for name, (codec, scheme) in zip(names, OPTIONS, strict=True)
    )
    return Plan(version=0, world_size=world_size, groups=groups)


def _one_at_a_time() -> None:
    engine_group.WINDOW_BYTES = engine_group.DEVICE_WINDOW_BYTES = 0


def _in_any_order(rank: int) -> None:
    """Delay this rank at random, and go on with any group that can, not with the oldest."""
    chance, wait_any = random.Random(rank), Transport.wait_any

    def of_any(self: Transport, handles: Any, timeout_s: float) -> int | None:
        time.sleep(chance.choice((0, 0, 0, 2e-3)))
        places = chance.sample(range(len(handles)), len(handles))
        place = wait_any(self, [handles[place] for place in places], timeout_s)
        return None if place is None else places[place]

    Transport.wait_any = of_any  # type: ignore[method-assign]


def _train_mixture(rank: int, world_size: int, prepare: str, shared_memory: bool, ddp: dict[str, Any]) -> list[str]:
    {"one at a time": _one_at_a_time, "side by side": lambda: None, "any order": lambda: _in_any_order(rank)}[prepare]()
    model = DistributedDataParallel(Branches(), **ddp)
    plan = _one_group_per_layer(model, world_size)
    attachment = cgx_ray.attach(model, plan=plan, shared_memory=shared_memory)
    hashes = train(model, rank, range(12), accumulate=2)
    attachment.close()
    return hashes


@pytest.mark.parametrize(
    ("world_size", "shared_memory"),
    [(2, True), (3, False), pytest.param(5, False, marks=pytest.mark.slow)],
)
def test_the_order_of_groups_in_time_changes_no_bit(world_size: int, shared_memory: bool) -> None:
    def hashes(prepare: str) -> list[list[str]]:
        return run_ranks(world_size, _train_mixture, world_size, prepare, shared_memory, {"bucket_cap_mb": 0.01})

    expected = hashes("one at a time")
    assert all(found == expected[0] for found in expected)
    assert hashes("side by side") == expected
    assert hashes("any order") == expected


def _num_side_by_side(rank: int) -> int:
    """Return the largest number of groups that were under way at once, on a rank that waits for a slow peer."""
    most = 0
    wait_any = Transport.wait_any

    def counting(self: Transport, handles: Any, timeout_s: float) -> int | None:
        nonlocal most
        most = max(most, len(handles))
        if rank == 1:
            time.sleep(0.02)
        return wait_any(self, handles, timeout_s)

    Transport.wait_any = counting  # type: ignore[method-assign]
    model = DistributedDataParallel(Branches())
    plan = cgx_ray.make_plan(cgx_ray.layers_of(model), version=0, world_size=2, codec="qsgd", group_bytes=1)
    attachment = cgx_ray.attach(model, plan=plan, shared_memory=False)
    train(model, rank, range(3))
    attachment.close()
    return most


def test_a_rank_that_waits_for_one_group_begins_the_next() -> None:
    assert run_ranks(2, _num_side_by_side)[0] > 1


def _ready_before_bucket(rank: int, ddp: dict[str, Any]) -> tuple[list[str], bool]:
    """Return the hashes of the weights, and whether a group was ready before the only bucket was."""
    model = DistributedDataParallel(Branches(), **ddp)
    plan = cgx_ray.make_plan(cgx_ray.layers_of(model), version=0, world_size=2, codec="qsgd", group_bytes=1)
    # Backward of the first layer takes so long that the others are ready well before.
    model.module.first.register_full_backward_pre_hook(lambda module, grad: time.sleep(0.05))
    attachment = cgx_ray.attach(model, plan=plan)
    hashes = train(model, rank, range(4))
    sample = attachment.last_step
    attachment.close()
    assert sample is not None
    return hashes, min(sample.ready_s) < sample.compute_s - 0.04


@pytest.mark.parametrize(
    ("ddp", "is_early"),
    [
        ({}, True),
        ({"gradient_as_bucket_view": True}, True),
        ({"find_unused_parameters": True}, True),
        ({"static_graph": True}, False),
    ],
)
def test_layers_do_not_wait_for_their_bucket(ddp: dict[str, Any], is_early: bool) -> None:
    results = run_ranks(2, _ready_before_bucket, ddp)
    expected = run_ranks(2, _ready_before_bucket, {"static_graph": True})
    for hashes, was_early in results:
        assert was_early == is_early
        assert hashes == expected[0][0]


def _train_around_ddp(rank: int) -> list[str]:
    """Train with backward passes that DDP does not see, and with forward passes that have no backward."""
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra")
    hashes = []
    for step in range(3):
        hashes += train(model, rank, range(step, step + 1))
        # Own gradients of the inner module, and two forwards of which the last is without gradients.
        model.module(batch(rank, step)).sum().backward()
        model.zero_grad()
        output_BD = model(batch(rank, step))
        with torch.no_grad():
            model(batch(rank, step))
        output_BD.sum().backward()
    attachment.close()
    return hashes


def test_backward_passes_that_ddp_does_not_average_send_nothing() -> None:
    first, second = run_ranks(2, _train_around_ddp)
    assert first == second


def _train_uneven(rank: int, by_all: bool, attaches: bool) -> tuple[list[str], list[str]]:
    """Train two epochs of which rank 0 has 4 steps and rank 1 has 7. Return the hashes after each, and warnings."""
    lines = log_lines()
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="none", weight_check_steps=2) if attaches else None
    hashes = []
    for epoch in range(2):
        with model.join(divide_by_initial_world_size=by_all):
            train(model, rank, range(10 * epoch, 10 * epoch + 4 + 3 * rank))
        hashes.append(weights_hash(model))
    if attachment is not None:
        attachment.close()
    return hashes, lines


def test_ranks_may_have_different_numbers_of_inputs() -> None:
    """A rank without inputs does not hold the others' weights, and its buckets lie elsewhere."""
    plain, attached = run_ranks(2, _train_uneven, True, False), run_ranks(2, _train_uneven, True, True)
    assert plain[0][0] == plain[1][0]
    assert attached == plain


def test_the_number_of_ranks_with_inputs_is_no_divisor_and_a_warning_says_so() -> None:
    (plain, _), _ = run_ranks(2, _train_uneven, True, False)
    for hashes, lines in run_ranks(2, _train_uneven, False, True):
        assert hashes == plain
        (said,) = lines
        assert "join(divide_by_initial_world_size=False) is ignored" in said


def _train_compiled(rank: int, compiled: str) -> tuple[list[str], list[str]]:
    """Return the hashes of the weights, and the names of the layers."""
    torch._dynamo.reset()
    inner: Any = torch.compile(Branches(), backend="aot_eager") if compiled == "inside DDP" else Branches()
    model: Any = DistributedDataParallel(inner)
    if compiled == "before attach":
        model = torch.compile(model, backend="aot_eager")
    attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra")
    layers = cgx_ray.layers_of(model)
    if compiled == "after attach":
        model = torch.compile(model, backend="aot_eager")
    hashes = train(model, rank, range(3))
    assert attachment.plan is not None
    attachment.plan.check(layers, 2)
    attachment.close()
    return hashes, [layer.name for layer in layers]


@pytest.mark.slow
def test_a_compiled_model_trains_wherever_it_was_compiled() -> None:
    kinds = ("never", "before attach", "after attach", "inside DDP")
    # In the same processes, because each compiler takes seconds to import.
    by_kind = dict(zip(kinds, run_cases(2, [partial(_train_compiled, compiled=kind) for kind in kinds]), strict=True))
    (plain, names), _ = by_kind.pop("never")
    for compiled, (first, second) in by_kind.items():
        assert first == second, compiled
        assert first[0] == plain
        # DDP names the layers of its module, which is the wrapper then.
        assert [name.removeprefix("_orig_mod.") for name in first[1]] == names


def _hooks_after_close(rank: int) -> int:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)

    def num_hooks() -> int:
        hooks = [parameter._post_accumulate_grad_hooks or {} for parameter in model.parameters()]  # type: ignore[attr-defined]
        return sum(map(len, hooks)) + len(model._forward_hooks)

    attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra")
    assert num_hooks() > 0
    attachment.close()
    return num_hooks()


def test_close_removes_the_hooks_from_the_parameters() -> None:
    assert run_ranks(2, _hooks_after_close) == [0, 0]


@pytest.mark.parametrize(
    ("rounds", "num_bytes", "seconds"),
    [
        ([], [], []),
        ([[(0.0, 1.0)]], [10], [1.0]),
        ([[(0.0, 1.0)], [(2.0, 4.0)]], [10, 10], [1.0, 2.0]),
        # Two at once share in proportion to their bytes.
        ([[(0.0, 4.0)], [(0.0, 4.0)]], [30, 10], [3.0, 1.0]),
        ([[(0.0, 2.0)], [(1.0, 3.0)]], [10, 10], [1.5, 1.5]),
        ([[(0.0, 1.0), (2.0, 3.0)], [(0.0, 3.0)]], [10, 10], [1.0, 2.0]),
        ([[], [(1.0, 2.0)]], [10, 0], [0.0, 1.0]),
    ],
)
def test_groups_share_the_time_in_which_they_are_under_way(
    rounds: list[list[tuple[float, float]]], num_bytes: list[int], seconds: list[float]
) -> None:
    assert exchange_seconds(rounds, num_bytes) == pytest.approx(seconds)


def _hang(rank: int) -> tuple[str, float]:
    """Return the error of a rank, and the seconds until it came, if rank 1 stops in its first half."""
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra", shared_memory=False, timeout_s=HANG_TIMEOUT_S)
    train(model, rank, range(2))
    if rank == 1:
        DirectLane.add_parts = lambda *arguments: time.sleep(5 * HANG_TIMEOUT_S)  # type: ignore[assignment,method-assign]
    start_s = time.monotonic()
    with pytest.raises((cgx_ray.CGXError, RuntimeError)) as caught:
        train(model, rank, range(2, 3))
    took_s = time.monotonic() - start_s
    attachment.close()
    return str(caught.value), took_s


@pytest.mark.fault("a rank that lives but does not go on with an exchange", "named after `timeout_s`")
def test_a_rank_that_hangs_in_an_exchange_is_named_within_the_time_out() -> None:
    results = run_ranks(3, _hang)
    for said, took_s in (results[0], results[2]):
        assert re.search(
            r"group \d: a message did not get through \((rank 1 did not answer within 3000 ms|.*hung up)", said
        )
        assert took_s < 2 * HANG_TIMEOUT_S
    assert any("rank 1 did not answer within 3000 ms" in said for said, _ in (results[0], results[2]))

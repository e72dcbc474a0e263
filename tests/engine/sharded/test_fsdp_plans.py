"""Plans of FSDP2 and HSDP models: layer rules, plans that change during a run, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.branches import Branches
from support.ranks import log_lines, run_cases, run_ranks
from support.sharded import (
    BITS8,
    backward,
    gradients_of,
    hand_over,
    largest_difference,
    make_mesh,
    shard,
    sum_inside,
    train,
    weights_of,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

import cgx_ray
from cgx_ray.engine import agreement
from cgx_ray.engine.sharded import fsdp_layout, sharded_engine
from cgx_ray.plan import Lease, Plan, make_plan

LAYERS = cgx_ray.layers_of(Branches())
WEIGHTS = ("first.weight", "left.weight", "right.weight")


def _plan(version: int, num_ranks: int, codec: str = "none") -> Plan:
    return make_plan(LAYERS, version=version, world_size=num_ranks, codec=codec)


def _switch(rank: int, num_ranks: int, num_replicas: int, *, sums_inside: bool) -> tuple[list[int], list[int], float]:
    """Return the plan in force and the bytes sent by step, and how far the last weights are from plain FSDP2's.

    Rank r gets the plan, which is dense, before step r + 1. Plain FSDP2 starts from the weights of the first such step.
    """
    if sums_inside:
        sum_inside()
    mesh = make_mesh(num_replicas)
    ours, plain = shard(Branches(), mesh), shard(Branches(), mesh)
    attachment = cgx_ray.attach(ours, codec="qsgd:bits=4")
    num_steps, weights = num_ranks + 5, []
    for step in range(num_steps):
        if step == rank + 1:
            attachment.hold(_plan(1, num_ranks))
        weights.append({name: value.clone() for name, value in ours.state_dict().items()})
        train(ours, rank, range(step, step + 1))
    samples = attachment.take_samples()
    versions = [sample.plan_version for sample in samples]
    assert attachment.plan is not None
    assert (attachment.plan.version, attachment.plan.describe()) == (1, "dense")
    attachment.close()
    first = versions.index(1)
    plain.load_state_dict(weights[first])
    different = largest_difference(weights_of(ours), train(plain, rank, range(first, num_steps)))
    return versions, [sample.wire_bytes for sample in samples], different


@pytest.mark.parametrize(("num_ranks", "num_replicas", "sums_inside"), [(2, 1, False), (4, 2, False), (4, 2, True)])
def test_a_plan_takes_effect_at_the_same_step_on_all_ranks(
    num_ranks: int, num_replicas: int, sums_inside: bool
) -> None:
    results = run_ranks(num_ranks, partial(_switch, sums_inside=sums_inside), num_ranks, num_replicas)
    versions, num_bytes, _ = results[0]
    # The step after the one that began when all ranks had it.
    assert versions == [0] * (num_ranks + 1) + [1] * 4
    for own, _, different in results:
        assert own == versions
        # In float32, of two summands in any order.
        assert different == 0 if num_replicas == 1 or sums_inside else different < 1e-6
    assert min(num_bytes[num_ranks + 1 :]) > 1.5 * max(num_bytes[: num_ranks + 1])


def _hand_over(
    rank: int, num_ranks: int, num_replicas: int, *, sums_inside: bool
) -> tuple[list[tuple[int, int, bool]], float, float]:
    """Train dense, in 4 bits and dense again, where FSDP2 reduces what is dense, in bfloat16.

    Return by step the plan, the bytes sent and whether the engine exchanged; how far the weights were from plain
    FSDP2's after the first plan; and after the last one, which plain FSDP2 entered with the same weights.
    """
    hand_over()
    if sums_inside:
        sum_inside()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    mesh = make_mesh(num_replicas)
    ours, plain = (shard(Branches(), mesh, mp_policy=policy) for _ in range(2))
    attachment = cgx_ray.attach(ours, codec="none")
    plain.load_state_dict(ours.state_dict())
    before = largest_difference(train(ours, rank, range(4)), train(plain, rank, range(4)))
    for version, codec in ((1, "qsgd:bits=4"), (2, "none")):
        attachment.hold(_plan(version, num_ranks, codec))
        # The plan is in force from the third step on, at the latest.
        for step in range(4 * version, 4 * version + 3):
            train(ours, rank, range(step, step + 1))
            assert attachment.plan is not None
        assert attachment.plan.version == version
        plain.load_state_dict(ours.state_dict())
        after = largest_difference(train(ours, rank, range(20, 24)), train(plain, rank, range(20, 24)))
    samples = attachment.take_samples()
    attachment.close()
    return [(one.plan_version, one.wire_bytes, one.exchange_s > 0) for one in samples], before, after


@pytest.mark.parametrize(("num_ranks", "num_replicas", "sums_inside"), [(2, 1, False), (4, 2, False), (4, 2, True)])
def test_dense_plans_are_handed_over_and_train_bit_for_bit_like_plain_fsdp2(
    num_ranks: int, num_replicas: int, sums_inside: bool
) -> None:
    results = run_ranks(num_ranks, partial(_hand_over, sums_inside=sums_inside), num_ranks, num_replicas)
    first, before, after = results[0]
    assert all(own[0] == first for own in results)
    assert (before, after) == (0.0, 0.0)
    assert {version for version, *_ in first} == {0, 1, 2}
    assert [exchanged for version, _, exchanged in first] == [version == 1 for version, *_ in first]
    dense, coded = ({num for version, num, _ in first if (version == 1) is is_coded} for is_coded in (False, True))
    assert len(dense) == 1
    assert max(coded) < min(dense)


def _leased(rank: int) -> list[int]:
    model = shard(Branches(), make_mesh())
    attachment = cgx_ray.attach(model, codec="qsgd:bits=4")
    attachment.hold(replace(_plan(1, 2), lease=Lease(last_step=5, fallback=_plan(2, 2, "qsgd:bits=4"))))
    train(model, rank, range(8))
    versions = [sample.plan_version for sample in attachment.take_samples()]
    attachment.close()
    return versions


def test_a_plan_with_a_lease_gives_way_to_the_one_before() -> None:
    first, second = run_ranks(2, _leased)
    assert first == second
    assert first == [0, *[1] * 6, 2]


def _held_alone(rank: int) -> list[str]:
    said = log_lines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "ARRIVES_S", 0.0)
        model = shard(Branches(), make_mesh())
        attachment = cgx_ray.attach(model, codec="bf16")
        if rank == 0:
            attachment.hold(_plan(3, 2))
        train(model, rank, range(6))
        attachment.close()
    return [line for line in said if "plan 3" in line]


def test_a_plan_that_one_rank_alone_holds_is_warned_of_once() -> None:
    said = "some ranks hold plan 3, others do not: plan 0 stays in force; call hold on every rank"
    first, second = run_ranks(2, _held_alone)
    assert ([said in line for line in first], second) == ([True], [])


def _built(rank: int) -> tuple[list[list[str]], str]:
    """Return the names of codecs whose kernels are built, at attach and in `hold`, and why many modules are refused."""
    built: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (agreement, sharded_engine):
            patch.setattr(
                module, "build_kernels", lambda codecs, device: built.append(sorted({one.name for one in codecs}))
            )
        attachment = cgx_ray.attach(shard(Branches(), make_mesh()), codec="bf16", parameters=BITS8)
        attachment.hold(replace(_plan(1, 2, "fp16"), lease=Lease(last_step=5, fallback=_plan(2, 2, "terngrad"))))
        attachment.close()
        patch.setattr(fsdp_layout, "MAX_UNITS", 1)
        with pytest.raises(cgx_ray.ConfigError) as refused:
            cgx_ray.attach(shard(Branches(), make_mesh()), codec="bf16")
    return built, str(refused.value)


def test_kernels_of_a_plan_and_of_its_fallback_are_built_before_training() -> None:
    for built, refused in run_ranks(2, _built):
        assert built == [["bf16", "none", "qsgd"], ["fp16", "none", "terngrad"]]
        assert refused.endswith("`fully_shard` was called for 4 modules; give it at most 1")


def _with_rules(rank: int, attach: Callable[..., cgx_ray.Attachment]) -> tuple[dict[str, str], list[str]]:
    """Return the codecs by layer, and the layers whose gradients are those of plain FSDP2."""
    ours, plain = shard(Branches(), make_mesh()), shard(Branches(), make_mesh())
    attachment = attach(ours)
    for model in (ours, plain):
        backward(model, rank, 0)
    attachment.close()
    plan = attachment.plan
    assert plan is not None
    codecs = {name: str(group.option.codec) for group in plan.groups for name in group.layers}
    found, expected = gradients_of(ours), gradients_of(plain)
    return codecs, [name for name in WEIGHTS if torch.equal(found[name], expected[name])]


def _by_rules(model: torch.nn.Module) -> cgx_ray.Attachment:
    return cgx_ray.attach(model, codec="qsgd:bits=4", exclude=("left*",), overrides={"right.weight": "qsgd:bits=8"})


def _by_plan(model: torch.nn.Module) -> cgx_ray.Attachment:
    rules = {"left*": "none", "right.weight": "qsgd:bits=8"}
    plan = make_plan(LAYERS, version=0, world_size=2, codec="qsgd:bits=4", overrides=rules)
    return cgx_ray.attach(model, plan=plan)


def test_layers_have_the_codecs_of_rules_and_of_a_given_plan() -> None:
    for results in run_cases(2, [partial(_with_rules, attach=attach) for attach in (_by_rules, _by_plan)]):
        for codecs, untouched in results:
            assert [codecs[name].split(",")[0] for name in WEIGHTS] == ["qsgd:bits=4", "none", "qsgd:bits=8"]
            assert codecs["norm.weight"] == "none"
            assert untouched == ["left.weight"]


REFUSED = {
    "period 4: each rank has only a shard": replace(_plan(1, 2), period=4),
    "cannot use scheme ring; give 'sra'": make_plan(LAYERS, version=1, world_size=2, codec="qsgd", scheme="ring"),
    "cannot use intra 'dense'; shard within nodes": make_plan(
        LAYERS, version=1, world_size=2, codec="qsgd", scheme="sra", intra="dense"
    ),
    "device 'cpu': its gradients are encoded where they are": make_plan(
        LAYERS, version=1, world_size=2, codec="qsgd", device="cpu"
    ),
    "cannot use codec topk:density=0.01, which scheme sra does not carry": _plan(1, 2, "topk:density=0.01"),
    "cannot go from codec qsgd:bits=4,bucket_size=128 to ef_signsgd:bucket_size=1024": _plan(1, 2, "ef_signsgd"),
    "this run has 2; make a new plan": _plan(1, 3),
    "plan 0 is not newer than plan 0": _plan(0, 2),
}


def _refused(rank: int) -> tuple[list[str], int]:
    model = shard(Branches(), make_mesh())
    attachment = cgx_ray.attach(model, codec="qsgd:bits=4")
    said = []
    for plan in REFUSED.values():
        with pytest.raises(cgx_ray.PlanError) as caught:
            attachment.hold(plan)
        said.append(str(caught.value))
    train(model, rank, range(3))
    attachment.close()
    assert attachment.plan is not None
    return said, attachment.plan.version


def test_a_plan_that_does_not_fit_is_refused_and_the_old_one_stays() -> None:
    for said, version in run_ranks(2, _refused):
        assert version == 0
        for message, found in zip(REFUSED, said, strict=True):
            assert message in found, found

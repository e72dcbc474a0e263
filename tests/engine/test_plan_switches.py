"""Changes of the plan during training, on real processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, train
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.codecs.codec import KINDS
from cgx_ray.plan import CodecSpec, Lease, Scheme


def _paid_back(rank: int, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Change from top-k to `scheme`. Return the sum of delivered gradients, the sum of true ones, and how many layers
    still have residuals."""
    layer = nn.Linear(2000, 1, bias=False)
    model = DistributedDataParallel(layer)
    attachment = cgx_ray.attach(model, codec="topk:density=0.1", scheme="allgather")
    plan = cgx_ray.make_plan(cgx_ray.layers_of(model), version=1, world_size=2, scheme=scheme)
    # A matrix of one row counts as small only if it has few elements, so make_plan compresses this layer.
    x_1N = torch.randn(1, 2000, generator=torch.Generator().manual_seed(rank))
    total_N = torch.zeros(2000)
    for step in range(6):
        if step == 2:
            attachment.hold(plan)
        layer.weight.grad = None
        model(x_1N).sum().backward()
        assert layer.weight.grad is not None
        total_N += layer.weight.grad[0]
    owed = len(attachment.state_dict()["residuals"])
    assert attachment.last_step is not None
    assert attachment.last_step.plan_version == 1
    attachment.close()
    return total_N, 6 * x_1N[0], owed


@pytest.mark.parametrize("scheme", [Scheme.DENSE, Scheme.SRA])
def test_residuals_are_paid_when_the_next_plan_needs_none(scheme: Scheme) -> None:
    (sent_N, first_N, owed), (_, second_N, _) = run_ranks(2, _paid_back, scheme)
    torch.testing.assert_close(sent_N, (first_N + second_N) / 2, rtol=0, atol=1e-4)
    assert owed == 0


def _train_two_changes(rank: int) -> tuple[list[str], list[int]]:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="none", scheme="dense")
    layers = cgx_ray.layers_of(model)
    changes = {
        # Ranks receive a plan at different steps, as from a controller.
        50 + 3 * rank: ("topk:density=0.05", "allgather"),
        120 - 2 * rank: ("qsgd", "sra"),
    }
    hashes, versions = [], []
    for step in range(200):
        if step in changes:
            codec, scheme = changes[step]
            version = 1 if step < 100 else 2
            attachment.hold(
                cgx_ray.make_plan(
                    layers,
                    version=version,
                    world_size=dist.get_world_size(),
                    codec=CodecSpec.parse(codec),
                    scheme=Scheme(scheme),
                )
            )
        hashes += train(model, rank, range(step, step + 1))
        assert attachment.last_step is not None
        versions.append(attachment.last_step.plan_version)
    attachment.close()
    return hashes, versions


def test_ranks_hold_identical_weights_through_200_steps_with_two_plan_changes() -> None:
    results = run_ranks(4, _train_two_changes)
    hashes, versions = results[0]
    for other_hashes, other_versions in results[1:]:
        assert other_hashes == hashes
        assert other_versions == versions
    assert versions == sorted(versions)
    assert set(versions) == {0, 1, 2}
    # The last rank receives plan 1 before step 59. The ranks send that in step 59 and read it in step 60.
    assert versions.index(1) == 60
    assert versions.index(2) == 121


def _lease(rank: int, accept_at: int | None) -> tuple[list[str], list[int], str]:
    """Begin a trial of top-k after step 5, until step 12; hold it for good at `accept_at`. Return hashes, versions and
    the error of a plan that has the fallback's version."""
    model = DistributedDataParallel(Branches())
    layers = cgx_ray.layers_of(model)
    attachment = cgx_ray.attach(model, codec="none", scheme="dense")
    fallback = cgx_ray.make_plan(layers, version=2, world_size=3)
    trial = cgx_ray.make_plan(layers, version=1, world_size=3, codec="topk:density=0.05")
    hashes, versions = [], []
    for step in range(24):
        if step == 3 + rank:
            attachment.hold(replace(trial, lease=Lease(last_step=12, fallback=fallback)))
            with pytest.raises(cgx_ray.PlanError) as caught:
                attachment.hold(fallback)
        if accept_at is not None and step == accept_at + rank:
            attachment.hold(replace(trial, version=3))
        hashes += train(model, rank, range(step, step + 1))
        assert attachment.last_step is not None
        versions.append(attachment.last_step.plan_version)
    attachment.close()
    return hashes, versions, str(caught.value)


@pytest.mark.fault("the outcome of a plan's trial never comes", "it ends by itself, on all ranks in the same step")
@pytest.mark.parametrize(
    ("accept_at", "expected"),
    [
        (None, [0] * 6 + [1] * 8 + [2] * 10),
        # Accepted in time: the fallback never comes into force.
        (7, [0] * 6 + [1] * 4 + [3] * 14),
        # Rank 2 hears of it after the end of the trial.
        (12, [0] * 6 + [1] * 8 + [2] * 1 + [3] * 9),
    ],
)
def test_a_plan_on_lease_returns_to_its_fallback_on_all_ranks_unless_it_is_accepted(
    accept_at: int | None, expected: list[int]
) -> None:
    results = run_ranks(3, _lease, accept_at)
    hashes, versions, refused = results[0]
    assert versions == expected
    assert all((other[0], other[1]) == (hashes, versions) for other in results)
    assert refused == "plan 2 is not newer than plan 2; give it a higher version"


def test_a_lease_travels_with_its_plan_and_its_fallback_must_fit() -> None:
    layers = cgx_ray.layers_of(Branches())
    plan = cgx_ray.make_plan(layers, version=4, world_size=2, codec="qsgd")
    fallback = cgx_ray.make_plan(layers, version=5, world_size=2)
    on_trial = replace(plan, lease=Lease(last_step=9, fallback=fallback))
    assert cgx_ray.Plan.from_json(on_trial.to_json()) == on_trial
    nested = replace(fallback, lease=Lease(last_step=9, fallback=replace(fallback, version=6)))
    for wrong in (plan, cgx_ray.make_plan(layers, version=5, world_size=3), nested):
        with pytest.raises(cgx_ray.PlanError, match="plan 4 for world size 2 has a lease with fallback"):
            replace(plan, lease=Lease(last_step=9, fallback=wrong))
    of_others = replace(plan, lease=Lease(last_step=9, fallback=cgx_ray.make_plan(layers[1:], version=5, world_size=2)))
    with pytest.raises(cgx_ray.PlanError, match="the model has"):
        of_others.check(layers, 2)
    with pytest.raises(cgx_ray.PlanError, match="not a plan"):
        cgx_ray.Plan.from_json(on_trial.to_json().replace('"last_step": 9, ', ""))


def _bad_plans(rank: int) -> list[str]:
    model = DistributedDataParallel(Branches())
    layers = cgx_ray.layers_of(model)
    attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra")
    messages = []
    offers = [
        cgx_ray.make_plan(layers, version=1, world_size=5),
        cgx_ray.make_plan(layers[1:], version=1, world_size=2),
        cgx_ray.make_plan(layers, version=0, world_size=2),
    ]
    for offer in offers:
        with pytest.raises(cgx_ray.PlanError) as caught:
            attachment.hold(offer)
        messages.append(str(caught.value))
    train(model, rank, range(4))
    assert attachment.last_step is not None
    assert attachment.last_step.plan_version == 0
    attachment.close()
    return messages


def test_a_rejected_plan_leaves_the_old_one_in_force() -> None:
    world, layers, stale = run_ranks(2, _bad_plans)[0]
    assert "world size 5" in world
    assert "first.weight" in layers
    assert "not newer" in stale


def _through_codecs(rank: int) -> tuple[list[str], list[set[str]], list[list[float]]]:
    """Train through plans that need different kinds of memory. Return hashes of weights, kinds in use, and Q."""
    model = DistributedDataParallel(Branches())
    layers = cgx_ray.layers_of(model)
    attachment = cgx_ray.attach(model, codec="powersgd:rank=3", scheme="allgather")
    hashes = train(model, rank, range(3))
    kinds, qs = [], []

    def look() -> None:
        state = attachment.state_dict()
        kinds.append({kind for kind in KINDS if state[kind]})
        qs.append([float(value) for q_M in state["powersgd_q"].values() for value in q_M])

    plans = [("powersgd:rank=3", "allreduce"), ("dgc:density=0.1", "allgather"), ("topk", "artopk_ring")]
    for version, (codec, scheme) in enumerate(plans, start=1):
        look()
        plan = cgx_ray.make_plan(
            layers, version=version, world_size=3, codec=CodecSpec.parse(codec), scheme=Scheme(scheme)
        )
        attachment.hold(plan)
        hashes += train(model, rank, range(3 * version, 3 * version + 3))
    look()
    assert attachment.last_step is not None
    assert attachment.last_step.plan_version == len(plans)
    attachment.close()
    return hashes, kinds, qs


def test_ranks_stay_identical_through_codecs_that_remember_other_things() -> None:
    """With allgather each rank has its own Q. With the all-reduce that follows, all ranks have the same Q."""
    results = run_ranks(3, _through_codecs)
    (hashes, kinds, qs), *others = results
    for other_hashes, other_kinds, other_qs in others:
        assert other_hashes == hashes
        assert other_kinds == kinds
        assert [q == other_q for q, other_q in zip(qs, other_qs, strict=True)] == [False, True, True, True]
    q, momentum, residuals = {"residuals", "powersgd_q"}, {"residuals", "momentum"}, {"residuals"}
    assert kinds == [q, q, momentum, residuals]

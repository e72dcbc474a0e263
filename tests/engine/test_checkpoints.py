"""Checkpoints of the codecs' memory: resumed runs, other world sizes, and states that are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, train
from support.ranks import run_cases, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import cgx_ray
from cgx_ray.session.states import STATE_FORMAT, named_as, no_memory, state_of


def _bad_states(rank: int) -> list[str]:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="topk:density=0.1", scheme="allgather")
    train(model, rank, range(2))
    good = attachment.state_dict()
    foreign = {**good, "residuals": {"other.weight": torch.zeros(3)}}
    larger = {**good, "momentum": {"left.weight": torch.zeros(3)}}
    messages = []
    poisoned = {**good, "residuals": {"left.weight": torch.full((4323,), float("nan"))}}
    wide = {**good, "residuals": {"left.weight": torch.zeros(4323, dtype=torch.float64)}}
    unscaled = {**good, "loss_scale": float("inf")}
    others = {**good, "rank": 1 - rank}
    bad = [foreign, larger, {**good, "format": 1}, poisoned, wide, unscaled, others, {**good, "world_size": 4}]
    for states in ([], [good], *bad):
        with pytest.raises(cgx_ray.StateError) as caught:
            attachment.load_state_dict(states)
        messages.append(str(caught.value))
    unchanged = attachment.state_dict()["residuals"]
    assert all(torch.equal(unchanged[name], value) for name, value in good["residuals"].items())
    train(model, rank, range(2, 3))
    attachment.close()
    return messages


def test_states_that_are_incomplete_not_finite_or_of_another_model_or_rank_are_refused() -> None:
    said = run_ranks(2, _bad_states)[0]
    empty, partial, foreign, larger, version, poisoned, wide, unscaled, others, other_size = said
    assert "ranks []" in empty
    assert "ranks [0]" in partial
    assert "no such layer" in foreign
    assert "momentum of 3 elements for layer 'left.weight', the model has 4323" in larger
    assert "format 1, this version reads 4" in version
    assert "the state of rank 0 of 2 has residuals of layer 'left.weight' with NaN or Inf" in poisoned
    assert "(it is torch.float64); start from another checkpoint" in wide
    assert "rank 0 of 2 has loss scale inf" in unscaled
    assert "got the state of rank 1 of 2 on rank 0 of 2; memory is each rank's own" in others
    assert "got the state of rank 0 of 4 on rank 0 of 2" in other_size


def _resume_wrapped(rank: int, before: Wrap, after: Wrap) -> bool:
    """Return True if a model in other wrappers begins with the memory that was saved."""
    torch._dynamo.reset()
    attachment = cgx_ray.attach(model := DistributedDataParallel(before(Branches())), codec="topk:density=0.1")
    train(model, rank, range(2))
    saved = attachment.state_dict()
    attachment.close()
    attachment = cgx_ray.attach(model := DistributedDataParallel(after(Branches())), codec="topk:density=0.1")
    attachment.load_state_dict(saved)
    loaded = attachment.state_dict()["residuals"]
    train(model, rank, range(2, 4))
    attachment.close()
    return len(loaded) > 2 and all(
        torch.equal(one, other) for one, other in zip(saved["residuals"].values(), loaded.values(), strict=True)
    )


def _plain(model: nn.Module) -> nn.Module:
    return model


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def _compiled_in_part(model: Branches) -> nn.Module:
    model.first = torch.compile(model.first, backend="eager")
    return model


def _averaged(model: nn.Module) -> nn.Module:
    return AveragedModel(model)


Wrap = Callable[[Any], nn.Module]


def test_memory_is_found_again_in_a_model_with_other_wrappers() -> None:
    pairs = [(_compiled, _plain), (_plain, _compiled), (_compiled_in_part, _compiled), (_averaged, _compiled_in_part)]
    # In the same processes, because the compiler takes seconds to import.
    found = run_cases(2, [partial(_resume_wrapped, before=before, after=after) for before, after in pairs])
    assert found == [[True, True]] * len(pairs)


def test_layers_whose_names_differ_in_more_than_wrappers_stay_apart() -> None:
    memory = {name: torch.zeros(1) for name in ("a.module.w", "a.w", "_orig_mod.b")}
    names = {"a.module.w": "a.module.w", "a.w": "a.w", "b": "_orig_mod.b"}
    found = named_as(memory, ["a.w", "b"])
    assert found.keys() == names.keys()
    assert all(value is memory[names[name]] for name, value in found.items())
    assert named_as(memory, ["_orig_mod.a.module.w", "_orig_mod.a.w"]).keys() == memory.keys()


RESUMED = [
    ("topk:density=0.02", "allgather"),
    ("dgc:density=0.02,warmup_steps=12", "artopk_ring"),
    ("powersgd", "allreduce"),
    ("powersgd", "allgather"),
    ("ef_signsgd", "sra"),
]


def _resume(rank: int, codec: str, scheme: str, interrupt: bool, as_list: bool = False) -> str:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
    train(model, rank, range(5))
    if interrupt:
        weights = model.state_dict()
        states: list[Any] = [None, None]
        dist.all_gather_object(states, attachment.state_dict())
        attachment.close()
        model = DistributedDataParallel(Branches())
        model.load_state_dict(weights)
        attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
        attachment.load_state_dict(reversed(states) if as_list else states[rank])
    hashes = train(model, rank, range(5, 9))
    attachment.close()
    return hashes[-1]


@pytest.mark.parametrize(("codec", "scheme"), RESUMED)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(codec: str, scheme: str) -> None:
    uninterrupted = run_ranks(2, _resume, codec, scheme, False)
    assert run_ranks(2, _resume, codec, scheme, True) == uninterrupted
    assert run_ranks(2, _resume, codec, scheme, True, True) == uninterrupted


def _state(number: int, **changed: Any) -> dict[str, Any]:
    memories = no_memory() | {
        "residuals": {"w": torch.full((3,), float(number))},
        "momentum": {"w": torch.full((3,), -float(number))},
    }
    head = {"format": STATE_FORMAT, "rank": number, "world_size": 4, "step": 7, "loss_scale": 2.0}
    return {**head, **memories, **changed}


def test_memories_keep_their_mean_when_the_world_size_changes() -> None:
    merged = state_of(1, 3, (_state(rank) for rank in (2, 0, 3, 1)))
    assert [merged[key] for key in ("rank", "world_size", "step", "loss_scale")] == [1, 3, 7, 2.0]
    assert torch.equal(merged["residuals"]["w"], torch.full((3,), 1.5))
    assert torch.equal(merged["momentum"]["w"], torch.full((3,), -1.5))
    assert merged["powersgd_q"] == {}


def test_states_given_in_a_list_are_not_changed() -> None:
    states = [_state(rank) for rank in range(4)]
    state_of(0, 2, states)
    own = state_of(2, 4, states)
    own["residuals"]["w"] += 1
    assert [float(state["residuals"]["w"].sum()) for state in states] == [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"momentum": {}}, "not every rank's state has momentum of 'w', of the same size"),
        ({"residuals": {"w": torch.zeros(2)}}, "not every rank's state has residuals of 'w', of the same size"),
        ({"step": 8}, r"ranks \[0, 1, 2, 3\] with .* \[\(4, 7, 2.0\), \(4, 8, 2.0\)\]; give the states of all"),
        ({"loss_scale": 1.0}, r"\[\(4, 7, 1.0\), \(4, 7, 2.0\)\]"),
        ({"world_size": 3}, r"\[\(3, 7, 2.0\), \(4, 7, 2.0\)\]"),
        ({"rank": 3}, r"got states of ranks \[0, 2, 3, 3\]"),
        ({"format": 2}, "state has format 2, this version reads 4"),
    ],
)
def test_states_that_do_not_belong_together_are_refused(changed: dict[str, Any], says: str) -> None:
    # Of as many ranks each takes its own state, and does not look at the others' layers.
    for world_size in [3] if says.startswith("not every") else [3, 4]:
        with pytest.raises(cgx_ray.StateError, match=says):
            state_of(0, world_size, [_state(0), _state(1, **changed), _state(2), _state(3)])


@pytest.mark.parametrize("given", [None, 3, {}, {"weight": torch.zeros(3)}, [{"weight": torch.zeros(3)}], [None]])
def test_what_is_no_state_is_refused(given: Any) -> None:
    with pytest.raises(cgx_ray.StateError, match=r"is no state; give what attachment.state_dict\(\) has returned"):
        cgx_ray.attach(torch.nn.Linear(1, 1)).load_state_dict(given)


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(cgx_ray.PlanError, match="plan None is no Plan; give one that make_plan"):
        cgx_ray.attach(torch.nn.Linear(1, 1)).hold(None)  # type: ignore[arg-type]


def test_a_worker_that_is_alone_keeps_what_more_ranks_still_owed_for_the_next_checkpoint() -> None:
    def state(rank: int, value: float) -> dict[str, Any]:
        memories = no_memory() | {"residuals": {"weight": torch.full((3,), value)}}
        return {"format": STATE_FORMAT, "rank": rank, "world_size": 2, "step": 7, "loss_scale": 2.0, **memories}

    alone = cgx_ray.attach(torch.nn.Linear(1, 1))
    assert not alone.has_state
    with pytest.raises(cgx_ray.StateError, match="got the state of rank 0 of 2 on rank 0 of 1"):
        alone.load_state_dict(state(0, 1.0))
    alone.load_state_dict([state(0, 1.0), state(1, 4.0)])
    assert alone.has_state
    kept = alone.state_dict()
    assert (kept["rank"], kept["world_size"], kept["step"], kept["loss_scale"]) == (0, 1, 7, 2.0)
    assert kept["residuals"]["weight"].tolist() == [2.5] * 3
    again = cgx_ray.attach(torch.nn.Linear(1, 1))
    again.load_state_dict(kept)
    assert again.state_dict()["residuals"]["weight"].tolist() == [2.5] * 3

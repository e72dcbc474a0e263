"""The backend "cgx" with a registered model: each layer in DDP's buckets is reduced as it should be."""

from __future__ import annotations

import copy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.backend_cases import ERRORS, noise
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray


class Wide(nn.Module):
    """Uses layers in another order than registered, so DDP rebuilds its buckets. Two buckets have the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(60, 40)
        self.exempt = nn.Linear(60, 60)
        self.norm = nn.LayerNorm(60, elementwise_affine=False)
        self.first = nn.Linear(60, 60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.norm(self.exempt(self.first(x).tanh())))
        return y * self.scale.float() if hasattr(self, "scale") else y


PLANNED = {"first.weight": "qsgd:bits=8,bucket_size=64", "last.weight": "qsgd:bits=2", "exempt.weight": "fp16"}


def _gradients(
    rank: int, bucket_cap_mb: float, *, is_planned: bool = False, is_static: bool = False, has_double: bool = False
) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Return, by step and name, DDP's average of the gradients and the exact average."""
    torch.manual_seed(0)
    wide = Wide()
    if has_double:
        # float64 has a bucket of its own, which this backend leaves to Gloo.
        wide.register_parameter("scale", nn.Parameter(torch.ones(1, dtype=torch.float64)))
    plain = copy.deepcopy(wide)
    model = DistributedDataParallel(wide, bucket_cap_mb=bucket_cap_mb, static_graph=is_static)
    plan = None
    if is_planned:
        overrides = {name: (codec, "allgather" if "fp16" in codec else "sra") for name, codec in PLANNED.items()}
        plan = cgx_ray.make_plan(cgx_ray.layers_of(model), version=0, world_size=2, codec="qsgd", overrides=overrides)
    cgx_ray.register_model(model, plan)
    if not is_planned:
        cgx_ray.exclude_layers("exempt")
    steps = []
    for step in range(4):
        inputs = [noise(10 * step + peer, 960).view(16, 60) for peer in range(2)]
        exact = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
        for x in inputs:
            plain.zero_grad()
            plain(x).square().sum().backward()
            for name, p in plain.named_parameters():
                exact[name] += p.grad / 2
        model.zero_grad()
        model(inputs[rank]).square().sum().backward()
        steps.append({name: (p.grad.clone(), exact[name]) for name, p in model.module.named_parameters()})
        # It has the size of two of the buckets, but is none of them.
        dist.all_reduce(torch.ones(3660))
    return steps


# With a static graph DDP rebuilds its buckets a step later, and Gloo may reduce some of them.
@pytest.mark.parametrize(
    ("bucket_cap_mb", "options"), [(0.009, {}), (25, {}), (0.009, {"is_static": True}), (0.009, {"has_double": True})]
)
def test_small_and_excluded_layers_of_a_registered_model_are_exact(
    bucket_cap_mb: float, options: dict[str, bool]
) -> None:
    first, second = run_ranks(2, partial(_gradients, **options), bucket_cap_mb, backend="cgx")
    for step, (of_first, of_second) in enumerate(zip(first, second, strict=True)):
        for name, (got, exact) in of_first.items():
            assert torch.equal(got, of_second[name][0]), (step, name)
            # Exact, since halving is, and the sum of two numbers is the same in either order.
            is_exact = torch.equal(got, exact)
            assert is_exact == (name not in ("first.weight", "last.weight")), (step, name)


@pytest.mark.parametrize("bucket_cap_mb", [0.009, 25])
def test_layers_of_a_registered_model_are_compressed_as_its_plan_says(bucket_cap_mb: float) -> None:
    first, second = run_ranks(2, partial(_gradients, is_planned=True), bucket_cap_mb, backend="cgx")
    bounds = {name: ERRORS.get(codec, 2 * (1 + 2**-6) / 3) for name, codec in PLANNED.items()}
    for step, (of_first, of_second) in enumerate(zip(first, second, strict=True)):
        for name, (got, exact) in of_first.items():
            assert torch.equal(got, of_second[name][0]), (step, name)
            # Ranks' gradients are larger than their average.
            error = (got - exact).abs().max() / exact.abs().max()
            assert error <= 3 * bounds.get(name, 0), (step, name)
            assert name not in PLANNED or error > bounds[name] / 20, (step, name)


def _plans_that_do_not_fit(rank: int) -> list[str]:
    model = DistributedDataParallel(Wide())
    layers = cgx_ray.layers_of(model)
    make = partial(cgx_ray.make_plan, version=0)
    messages = []
    cgx_ray.register_model(model, make(layers, world_size=2, codec="none"))
    for plan in (
        {"head.weight": 8},
        make(layers, world_size=3, codec="qsgd"),
        make(layers[1:], world_size=2, codec="qsgd"),
        make(layers, world_size=2, codec="topk:density=0.1"),
        make(layers, world_size=2, codec="qsgd", scheme="ring"),
        make(layers, world_size=2, codec="qsgd", intra="dense"),
    ):
        with pytest.raises(cgx_ray.CGXError) as error:
            cgx_ray.register_model(model, plan)
        messages.append(str(error.value))
    # None of them has replaced the first one.
    x = noise(0, 960).view(16, 60)
    model(x).square().sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.module.zero_grad()
    model.module(x).square().sum().backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(got, model.parameters(), strict=True))
    plain = DistributedDataParallel(Wide(), process_group=dist.new_group(backend="gloo"))
    with pytest.raises(cgx_ray.ConfigError) as error:
        cgx_ray.register_model(plain, make(layers, world_size=2, codec="qsgd"))
    return [*messages, str(error.value)]


def test_a_plan_that_does_not_fit_is_refused_and_what_was_registered_stays() -> None:
    expected = ["got a dict", "world size 3", "5 layers", "no error feedback", "scheme 'ring'", "intra", "backend cgx"]
    for messages in run_ranks(2, _plans_that_do_not_fit, backend="cgx"):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def _models_that_cannot_be_told_apart(rank: int) -> list[str]:
    sparse = DistributedDataParallel(nn.Embedding(100, 20, sparse=True))
    with pytest.raises(cgx_ray.ConfigError) as of_sparse:
        cgx_ray.register_model(sparse)
    model = DistributedDataParallel(Wide())
    cgx_ray.register_model(model)
    with pytest.raises(cgx_ray.ConfigError) as of_join, model.join():
        model(torch.ones(2, 60))
    return [str(of_sparse.value), str(of_join.value)]


def test_models_whose_buckets_cannot_be_told_apart_are_refused() -> None:
    for of_sparse, of_join in run_ranks(2, _models_that_cannot_be_told_apart, backend="cgx"):
        assert "sparse gradients" in of_sparse
        assert "cannot train inside model.join()" in of_join


def _saved_and_compiled(rank: int, folder: Path) -> bool:
    torch.manual_seed(0)
    model = DistributedDataParallel(Wide())
    compiled: Any = torch.compile(model, backend="eager")
    cgx_ray.register_model(compiled)
    torch.save(model.module, folder / f"{rank}.pt")
    x = noise(rank, 960).view(16, 60)
    for _ in range(4):
        model.zero_grad()
        compiled(x).square().sum().backward()
    loaded = torch.load(folder / f"{rank}.pt", weights_only=False)
    return torch.equal(loaded(x), model(x))


def test_a_registered_model_can_be_saved_and_compiled(tmp_path: Path) -> None:
    assert run_ranks(2, _saved_and_compiled, tmp_path, backend="cgx") == [True, True]


def _differ(rank: int, folder: Path, in_what: str) -> str:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("cgx", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=10))
    model = DistributedDataParallel(Wide())
    if rank == 0 or in_what == "exclude_layers":
        cgx_ray.register_model(model)
    if rank == 0:
        cgx_ray.exclude_layers("exempt")
    with pytest.raises(RuntimeError if rank == 1 and in_what == "register_model" else cgx_ray.ConfigError) as error:
        model(torch.ones(2, 60)).sum().backward()
    return str(error.value)


def test_ranks_that_leave_other_layers_uncompressed_say_so(tmp_path: Path) -> None:
    for message in run_ranks(2, _differ, tmp_path, "exclude_layers", backend=None):
        assert "ranks 0 and 1 differ in how they compress layers" in message


def test_a_model_that_only_one_rank_registers_is_an_error_and_does_not_end_the_process(tmp_path: Path) -> None:
    registered, other = run_ranks(2, _differ, tmp_path, "register_model", backend=None)
    assert "rank 0 has registered a model, or excluded layers, and did not get the same from ranks [1]" in registered
    assert "[1] within 10 s" in registered
    assert "did not get through" in other


def _with_turns_in_a_sub_group(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Wide(), bucket_cap_mb=0.009)
    cgx_ray.register_model(model)
    cgx_ray.exclude_layers("exempt")
    group = dist.new_group([0, 1])
    for step in range(3):
        model.zero_grad()
        loss = model(noise(10 * step + rank, 960).view(16, 60)).square().sum()
        if rank < 2:
            # It has the size of two of the model's buckets, of which one is excluded.
            dist.all_reduce(torch.ones(3660), group=group)
        loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_sub_group_does_not_take_a_models_turn() -> None:
    first, second, third = run_ranks(3, _with_turns_in_a_sub_group, backend="cgx")
    for of_first, of_second, of_third in zip(first, second, third, strict=True):
        assert torch.equal(of_first, of_second)
        assert torch.equal(of_first, of_third)

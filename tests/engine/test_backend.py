"""The backend "cgx" of torch.distributed: what it reduces, and what it passes through. On real processes."""

from __future__ import annotations

import copy
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.branches import Branches, batch, weights_hash
from support.ranks import join_group, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.backend import CgxProcessGroup

NUMELS = (5000, 1024, 40_001)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def noise(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


# The bound of one rounding, relative to the largest magnitude; as in test_schemes.
ERRORS = {
    "qsgd": 2 * (1 + 2**-6) / 15,
    "qsgd:bits=8,bucket_size=64": 2 * (1 + 2**-6) / 255,
    "terngrad": 1 + 2**-7,
    "fp16": 2**-11,
    "bf16": 2**-8,
}


def _reduced(rank: int) -> list[torch.Tensor]:
    """In order of NUMELS, DTYPES, OPS; all under way at once, waited for in reverse."""
    tensors, works = [], []
    for numel in NUMELS:
        for dtype in DTYPES:
            for op in OPS:
                tensors.append(noise(rank, numel, dtype))
                works.append(dist.all_reduce(tensors[-1], op=op, async_op=True))
    for work in reversed(works):
        assert work is not None
        assert type(work).__name__ == "CompressedWork"
        assert work.wait()
        assert work.is_success()
    return tensors


def _reduced_by(rank: int, folder: Path, codec: str, scheme: str) -> list[torch.Tensor]:
    cgx_ray.configure_backend(codec=codec, scheme=scheme)
    join_group(rank, 3, folder, "cgx")
    return _reduced(rank)


@pytest.mark.parametrize(
    ("codec", "scheme"), [*((codec, "sra") for codec in ERRORS), ("qsgd", "allgather"), ("fp16", "allgather")]
)
def test_all_reduce_is_within_the_codecs_error_and_the_same_on_all_ranks(
    tmp_path: Path, codec: str, scheme: str
) -> None:
    results = run_ranks(3, _reduced_by, tmp_path, codec, scheme, backend=None)
    cases = [(numel, dtype, op) for numel in NUMELS for dtype in DTYPES for op in OPS]
    for (numel, dtype, op), first, *others in zip(cases, *results, strict=True):
        assert all(torch.equal(first, other) for other in others)
        inputs_RN = torch.stack([noise(rank, numel, dtype) for rank in range(3)]).double()
        num = 3 if op == dist.ReduceOp.SUM else 1
        # Two roundings by the codec and one to the tensor's own type, of a number three times as large at most.
        relative = 2 * ERRORS[codec] + 3 * torch.finfo(dtype).eps
        error = float((first.double() - inputs_RN.mean(0) * num).abs().max())
        assert error <= relative * num * float(inputs_RN.abs().max()), (numel, dtype, op)
        if codec in ("qsgd", "terngrad"):
            assert error > 1e-3, "this was not compressed"


def _edges(rank: int) -> dict[str, torch.Tensor]:
    tensors = {
        "sum fits": torch.full((2000,), 20_000.0, dtype=torch.float16),
        "sum overflows": torch.full((2000,), 40_000.0, dtype=torch.float16),
        "not finite": noise(rank, 2000).index_fill_(0, torch.tensor([1500]), torch.inf if rank == 1 else 0.0),
        "leaf": torch.ones(2000, requires_grad=True),
    }
    for tensor in tensors.values():
        dist.all_reduce(tensor)
    average = torch.full((2000,), 40_000.0, dtype=torch.float16)
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    with torch.inference_mode():
        inference = torch.ones(50, 40)
        dist.all_reduce(inference)
    tensors |= {"average fits": average, "inference": inference.clone()}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def test_sums_overflow_only_where_their_type_cannot_hold_them() -> None:
    for got in run_ranks(3, _edges, backend="cgx"):
        # All elements are equal, so the grid's ends are exact up to their bfloat16.
        assert (got["sum fits"] - 60_000).abs().max() <= 60_000 * 2**-7
        assert got["sum overflows"].isinf().all()
        assert (got["average fits"] - 40_000).abs().max() <= 40_000 * 2**-7
        assert not got["not finite"][1500].isfinite()
        assert got["not finite"][:1024].isfinite().all(), "more than the bucket was lost"
        assert torch.equal(got["leaf"], torch.full((2000,), 3.0))
        assert torch.equal(got["inference"], torch.full((50, 40), 3.0))


def _differentiate_a_callbacks_result(rank: int) -> list[float]:
    work = dist.all_reduce(torch.ones(2000), async_op=True)
    assert work is not None
    weight_N = torch.ones(2000, requires_grad=True)
    doubled_N = work.get_future().then(lambda future: 2 * future.value()[0]).wait()
    (weight_N * doubled_N).sum().backward()
    assert weight_N.grad is not None
    return weight_N.grad.unique().tolist()


def test_what_a_callback_of_the_future_makes_can_be_differentiated() -> None:
    # All elements are equal, and 3 is a bfloat16.
    assert run_ranks(3, _differentiate_a_callbacks_result, backend="cgx") == [[6.0]] * 3


def _passed_through(rank: int) -> None:
    rows_RN = torch.stack([noise(r, 5000) for r in range(3)])
    whole_RN = (rows_RN * 1000).long()

    def reduce(values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        values = values.clone()
        dist.all_reduce(values, op=op)
        return values

    assert torch.equal(reduce(whole_RN[rank]), whole_RN.sum(0))
    assert torch.equal(reduce(rows_RN[rank], dist.ReduceOp.MAX), rows_RN.amax(0))
    assert torch.equal(reduce(rows_RN[rank], dist.ReduceOp.MIN), rows_RN.amin(0))
    for exact in (rows_RN[rank].double(), rows_RN[rank][:1023]):
        expected = rows_RN.double().sum(0)[: exact.numel()]
        assert float((reduce(exact).double() - expected).abs().max()) <= 1e-5
    assert reduce(torch.empty(0)).numel() == 0

    broadcast = rows_RN[rank].clone()
    dist.broadcast(broadcast, 2)
    assert torch.equal(broadcast, rows_RN[2])
    gathered = [torch.empty(5000) for _ in range(3)]
    dist.all_gather(gathered, rows_RN[rank])
    assert torch.equal(torch.stack(gathered), rows_RN)
    reduced = torch.empty(5000)
    dist.reduce_scatter(reduced, list(whole_RN[rank] * torch.ones(3, 1)))
    assert torch.equal(reduced, whole_RN.sum(0).float())
    received = torch.empty(5000)
    neighbours = [
        dist.P2POp(dist.isend, rows_RN[rank], (rank + 1) % 3),
        dist.P2POp(dist.irecv, received, (rank - 1) % 3),
    ]
    for work in dist.batch_isend_irecv(neighbours):
        work.wait()
    assert torch.equal(received, rows_RN[rank - 1])
    objects: list[Any] = [None] * 3
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    dist.barrier()


def test_everything_but_large_float_sums_passes_through_exactly() -> None:
    assert run_ranks(3, _passed_through, backend="cgx") == [None] * 3


def _collectives_while_works_are_freed(rank: int) -> int:
    """Before each collective this thread keeps the interpreter lock until Gloo's thread waits for it to free a work."""
    sys.setswitchinterval(1000)
    group: Any = dist.group.WORLD
    x, y, whole = torch.ones(2000), torch.empty(2000), torch.ones(2000, dtype=torch.long)
    collectives: list[Callable[[], Any]] = [
        lambda: dist.all_gather([y], x),
        lambda: dist.all_gather_single(y, x),
        lambda: group.all_gather_single_coalesced([y], [x]).wait(),
        lambda: dist.all_gather_object([None], rank),
        lambda: dist.all_reduce(whole),
        lambda: dist.all_reduce(x),
        lambda: funcol.all_reduce(whole, "sum", group).wait(),
        lambda: group.allreduce_coalesced([whole]).wait(),
        lambda: dist.all_to_all_single(y, x),
        dist.barrier,
        lambda: dist.broadcast(x, 0),
        lambda: dist.gather(x, [y]),
        lambda: dist.reduce(x, 0),
        lambda: dist.reduce_scatter(y, [x]),
        lambda: dist.reduce_scatter_single(y, x),
        lambda: group.reduce_scatter_single_coalesced([y], [x]).wait(),
        lambda: dist.scatter(y, [x]),
    ]
    for collective in [*collectives * 5, dist.destroy_process_group]:
        # The work is let go of, the tensors are not.
        dist.all_gather([gathered := torch.empty(2000)], own := torch.ones(2000), async_op=True)
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            pass
        collective()
        del gathered, own
    return len(collectives)


def test_no_collective_waits_for_gloo_with_the_interpreter_lock() -> None:
    """A hang is what fails here: Gloo's threads free works under the mutex of their queue, with that lock."""
    assert run_ranks(1, _collectives_while_works_are_freed, backend="cgx") == [17]


def test_all_methods_that_torch_would_run_with_the_interpreter_lock_are_overridden() -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/PyProcessGroup.hpp"
    text = re.sub(r"//.*|/\*.*?\*/", "", header.read_text())
    # It names them in one macro, or where it looks for a name first and for an older one if there is none.
    in_macro = re.findall(r"\bWORK_OVERRIDE\(\s*ProcessGroup,\s*(\w+)", text)
    by_hand = re.findall(r"get_override\(\s*static_cast<const ProcessGroup\*>\(this\),\s*\"(\w+)\"", text)
    assert len(in_macro) >= 8
    assert len(by_hand) >= 6
    assert {*in_macro, *by_hand} <= set(vars(CgxProcessGroup))


def _with_a_sub_group(rank: int) -> tuple[float, float, list[int]]:
    group = dist.new_group([0, 2])
    other = dist.new_group([0, 1, 2], backend="gloo")
    error = 0.0
    if rank != 1:
        assert dist.get_backend(group) == "cgx"
        mine = noise(rank, 5000)
        dist.all_reduce(mine, group=group)
        error = float((mine - noise(0, 5000) - noise(2, 5000)).abs().max())
        dist.destroy_process_group(group)
    exact = torch.ones(5000) * 0.1 * (rank + 1)
    dist.all_reduce(exact, group=other)
    everyone = torch.ones(5000) * (rank + 1)
    dist.all_reduce(everyone)
    return error, float((exact - 0.6).abs().max()), everyone.unique().tolist()


def test_a_sub_group_compresses_among_its_own_ranks() -> None:
    (error, exact, everyone), left_out, *_ = run_ranks(3, _with_a_sub_group, backend="cgx")
    assert 1e-3 < error <= 2 * 2 * ERRORS["qsgd"] * 5
    assert left_out[0] == 0.0
    assert exact <= 1e-6
    assert everyone == [6.0]


def _train(rank: int) -> tuple[list[str], list[float]]:
    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    hashes, losses = [], []
    for _ in range(12):
        loss = model(batch(rank, 0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hashes.append(weights_hash(model))
        losses.append(loss.item())
    return hashes, losses


def test_ddp_holds_identical_weights_and_its_loss_falls() -> None:
    results = run_ranks(3, _train, backend="cgx")
    for hashes, losses in results:
        assert hashes == results[0][0]
        assert len(set(hashes)) == 12, "weights did not move"
        assert losses[-1] < 0.9 * losses[0], losses


class Wide(nn.Module):
    """Used in another order than registered, so that DDP rebuilds its buckets; two of them of the same size."""

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
    """By step and name: what DDP made of the gradients, and their exact average."""
    torch.manual_seed(0)
    wide = Wide()
    if has_double:
        # A bucket of its own, which this backend leaves to Gloo.
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
        # As large as two of the buckets, and none of them.
        dist.all_reduce(torch.ones(3660))
    return steps


# DDP rebuilds its buckets a step later with a static graph, and some of them may be Gloo's.
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
            # Of two ranks: half a number and the sum of two are the same in any order.
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
    # None of them has taken the first one's place.
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
    cgx_ray.register_model(model)
    torch.save(model.module, folder / f"{rank}.pt")
    compiled = torch.compile(model, backend="eager")
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
    assert "rank 0 has registered a model, or excluded layers, and did not hear the same of ranks [1]" in registered
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
            # As large as two of the model's buckets, of which one is excluded.
            dist.all_reduce(torch.ones(3660), group=group)
        loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_sub_group_does_not_take_a_models_turn() -> None:
    first, second, third = run_ranks(3, _with_turns_in_a_sub_group, backend="cgx")
    for of_first, of_second, of_third in zip(first, second, third, strict=True):
        assert torch.equal(of_first, of_second)
        assert torch.equal(of_first, of_third)

"""The backend "cgx" on real processes: all-reduces that it compresses, and collectives that it passes through."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.backend_cases import ERRORS, noise
from support.branches import Branches, batch, weights_hash
from support.ranks import join_group, run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.backend import CgxProcessGroup
from cgx_ray.torch_compat import collective

NUMELS = (5000, 1024, 40_001)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def _reduced(rank: int) -> list[torch.Tensor]:
    """Return results in order of NUMELS, DTYPES, OPS. All are under way at once, and waited for in reverse."""
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
        # Two roundings by the codec, and one to the tensor's dtype of a number that is up to three times as large.
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
        # All elements are equal, so the grid's ends are exact except for rounding to bfloat16.
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
    # All elements are equal, and bfloat16 can represent 3.
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
        lambda: collective(dist, "all_gather_single")(y, x),
        # Torch before 2.13 has no such method.
        lambda: getattr(group, "all_gather_single_coalesced", group.allgather_into_tensor_coalesced)([y], [x]).wait(),
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
        lambda: collective(dist, "reduce_scatter_single")(y, x),
        lambda: collective(group, "reduce_scatter_single_coalesced")([y], [x]).wait(),
        lambda: dist.scatter(y, [x]),
    ]
    for call in [*collectives * 5, dist.destroy_process_group]:
        # Free the work but not the tensors.
        dist.all_gather([gathered := torch.empty(2000)], own := torch.ones(2000), async_op=True)
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            pass
        call()
        del gathered, own
    return len(collectives)


def test_no_collective_waits_for_gloo_with_the_interpreter_lock() -> None:
    """It would hang: Gloo's threads free works under the mutex of their queue, with the interpreter lock."""
    assert run_ranks(1, _collectives_while_works_are_freed, backend="cgx") == [17]


def test_all_methods_that_torch_would_run_with_the_interpreter_lock_are_overridden() -> None:
    (header,) = (Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d").rglob("PyProcessGroup.hpp")
    text = re.sub(r"//.*|/\*.*?\*/", "", header.read_text())
    # The header names them in one macro, and where it looks for a name and then for an older one.
    in_macro = re.findall(r"\bWORK_OVERRIDE\(\s*ProcessGroup,\s*(\w+)", text)
    by_hand = re.findall(r"get_override\(\s*static_cast<const ProcessGroup\*>\(this\),\s*\"(\w+)\"", text)
    # Torch before 2.13 has the macro only.
    assert len(in_macro) + len(by_hand) >= 11
    # These wait for nothing.
    assert {*in_macro, *by_hand} - {"start_coalescing", "end_coalescing", "reconfigure"} <= set(vars(CgxProcessGroup))


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

"""The backend "cgx" of torch.distributed, on real processes."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from branches import Branches, batch, weights_hash
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.backend import CgxProcessGroup
from cgx_ray.backend.options import current_options
from cgx_ray.plan import CodecSpec

NUMELS = (5000, 1024, 40_001)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def _in_cgx(rank: int, folder: Path, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` in a group of backend cgx."""
    store = dist.FileStore(str(folder / "cgx"), world_size)
    dist.init_process_group("cgx", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    # Whoever is through at once must not hang up on ranks that are still connecting.
    dist.barrier()
    return function(rank, *args)


def run_cgx(folder: Path, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(world_size, _in_cgx, folder, world_size, function, *args, in_group=False)


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
    return _in_cgx(rank, folder, 3, _reduced)


@pytest.mark.parametrize(
    ("codec", "scheme"), [*((codec, "sra") for codec in ERRORS), ("qsgd", "allgather"), ("fp16", "allgather")]
)
def test_all_reduce_is_within_the_codecs_error_and_the_same_on_all_ranks(
    tmp_path: Path, codec: str, scheme: str
) -> None:
    results = run_ranks(3, _reduced_by, tmp_path, codec, scheme, in_group=False)
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


def test_sums_overflow_only_where_their_type_cannot_hold_them(tmp_path: Path) -> None:
    for got in run_cgx(tmp_path, 3, _edges):
        # All elements are equal, so the grid's ends are exact up to their bfloat16.
        assert (got["sum fits"] - 60_000).abs().max() <= 60_000 * 2**-7
        assert got["sum overflows"].isinf().all()
        assert (got["average fits"] - 40_000).abs().max() <= 40_000 * 2**-7
        assert not got["not finite"][1500].isfinite()
        assert got["not finite"][:1024].isfinite().all(), "more than the bucket was lost"
        assert torch.equal(got["leaf"], torch.full((2000,), 3.0))
        assert torch.equal(got["inference"], torch.full((50, 40), 3.0))


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


def test_everything_but_large_float_sums_passes_through_exactly(tmp_path: Path) -> None:
    assert run_cgx(tmp_path, 3, _passed_through) == [None] * 3


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


def test_no_collective_waits_for_gloo_with_the_interpreter_lock(tmp_path: Path) -> None:
    """A hang is what fails here: Gloo's threads free works under the mutex of their queue, with that lock."""
    assert run_cgx(tmp_path, 1, _collectives_while_works_are_freed) == [17]


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


def test_a_sub_group_compresses_among_its_own_ranks(tmp_path: Path) -> None:
    (error, exact, everyone), left_out, *_ = run_cgx(tmp_path, 3, _with_a_sub_group)
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


def test_ddp_holds_identical_weights_and_its_loss_falls(tmp_path: Path) -> None:
    results = run_cgx(tmp_path, 3, _train)
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
        return self.last(self.norm(self.exempt(self.first(x).tanh())))


def _gradients(rank: int, bucket_cap_mb: float) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """By step and name: what DDP made of the gradients, and their exact average."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Wide(), bucket_cap_mb=bucket_cap_mb)
    cgx_ray.register_model(model)
    cgx_ray.exclude_layers("exempt")
    steps = []
    for step in range(4):
        inputs = [noise(10 * step + peer, 960).view(16, 60) for peer in range(2)]
        exact = {name: torch.zeros_like(p) for name, p in model.module.named_parameters()}
        for x in inputs:
            model.module.zero_grad()
            model.module(x).square().sum().backward()
            for name, p in model.module.named_parameters():
                exact[name] += p.grad / 2
        model.zero_grad()
        model(inputs[rank]).square().sum().backward()
        steps.append({name: (p.grad.clone(), exact[name]) for name, p in model.module.named_parameters()})
        # As large as two of the buckets, and none of them.
        dist.all_reduce(torch.ones(3660))
    return steps


@pytest.mark.parametrize("bucket_cap_mb", [0.009, 25])
def test_small_and_excluded_layers_of_a_registered_model_are_exact(tmp_path: Path, bucket_cap_mb: float) -> None:
    first, second = run_cgx(tmp_path, 2, _gradients, bucket_cap_mb)
    for step, (of_first, of_second) in enumerate(zip(first, second, strict=True)):
        for name, (got, exact) in of_first.items():
            assert torch.equal(got, of_second[name][0]), (step, name)
            # Of two ranks: half a number and the sum of two are the same in any order.
            is_exact = torch.equal(got, exact)
            assert is_exact == (name not in ("first.weight", "last.weight")), (step, name)


def _variables(patch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ("QUANTIZATION_BITS", "BUCKET_SIZE", "MINIMAL_SIZE", "FAKE_RATIO"):
        patch.delenv(f"CGX_COMPRESSION_{name}", raising=False)
    for name, value in variables.items():
        patch.setenv(f"CGX_COMPRESSION_{name}", value)


@pytest.fixture
def _fresh_options() -> Any:
    yield
    cgx_ray.configure_backend()


@pytest.mark.usefixtures("_fresh_options")
def test_variables_of_cgx_are_honoured_and_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    _variables(monkeypatch)
    assert str(current_options()) == "qsgd:bits=4,bucket_size=128 over sra from 1024 elements on"
    _variables(monkeypatch, QUANTIZATION_BITS="2", BUCKET_SIZE="512", MINIMAL_SIZE="16")
    assert str(current_options()) == "qsgd:bits=2,bucket_size=512 over sra from 16 elements on"
    _variables(monkeypatch, QUANTIZATION_BITS="32", BUCKET_SIZE="")
    assert current_options().codec.name == "none"
    _variables(monkeypatch, QUANTIZATION_BITS="8", FAKE_RATIO="0.25")
    assert current_options().codec == CodecSpec(name="prefix", ratio=4.0)
    _variables(monkeypatch, QUANTIZATION_BITS="8", FAKE_RATIO="1")
    assert str(current_options().codec) == "qsgd:bits=8,bucket_size=128"
    _variables(monkeypatch, QUANTIZATION_BITS="9", MINIMAL_SIZE="16")
    cgx_ray.configure_backend(codec="qsgd:bits=8", scheme="allgather", min_numel=7)
    assert str(current_options()) == "qsgd:bits=8,bucket_size=128 over allgather from 7 elements on"
    cgx_ray.configure_backend(codec="fp16")
    assert str(current_options()) == "fp16 over sra from 16 elements on"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("QUANTIZATION_BITS", "9", "1 to 8, or 32"),
        ("QUANTIZATION_BITS", "four", "1 to 8, or 32"),
        ("BUCKET_SIZE", "100", "a multiple of 8"),
        ("MINIMAL_SIZE", "-1", "0 or more"),
        ("FAKE_RATIO", "4", "or less, such as 0.25"),
        ("FAKE_RATIO", "nan", "share of elements"),
    ],
)
def test_a_variable_with_a_wrong_value_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    _variables(monkeypatch, **{name: value})
    with pytest.raises(cgx_ray.ConfigError, match=f"CGX_COMPRESSION_{name} is '{value}'.*{allowed}"):
        current_options()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codec": "topk"}, "keeps no error feedback.*cgx_ray.attach"),
        ({"codec": "qsgd:rounding=nearest"}, "rounding=stochastic"),
        ({"codec": "zip"}, "unknown codec"),
        ({"scheme": "dense"}, "give one of sra, allgather"),
        ({"scheme": "star"}, "scheme 'star' is not for"),
        ({"min_numel": -1}, "min_numel -1"),
        ({"min_numel": 1.5}, "min_numel 1.5"),
    ],
)
def test_a_wrong_argument_is_one_clear_error(arguments: dict[str, Any], message: str) -> None:
    before = current_options()
    with pytest.raises(cgx_ray.ConfigError, match=message):
        cgx_ray.configure_backend(**arguments)
    assert current_options() == before


def test_wrong_layers_and_models_are_refused() -> None:
    with pytest.raises(cgx_ray.ConfigError, match="parts of parameter names"):
        cgx_ray.exclude_layers("")


def _register_an_unwrapped_model(rank: int) -> str:
    with pytest.raises(cgx_ray.ConfigError) as error:
        cgx_ray.register_model(nn.Linear(2, 2))
    return str(error.value)


def test_a_registered_model_must_be_wrapped(tmp_path: Path) -> None:
    for message in run_cgx(tmp_path, 2, _register_an_unwrapped_model):
        assert "register_model got a Linear; wrap it first" in message


def _switched_off(rank: int, folder: Path) -> list[float]:
    os.environ["CGX_COMPRESSION_QUANTIZATION_BITS"] = "32"
    return _in_cgx(rank, folder, 2, _sum_of_noise)


def _sum_of_noise(rank: int) -> list[float]:
    values = noise(rank, 5000)
    dist.all_reduce(values)
    return values.tolist()


def test_32_bits_switch_compression_off(tmp_path: Path) -> None:
    for got in run_ranks(2, _switched_off, tmp_path, in_group=False):
        assert got == (noise(0, 5000) + noise(1, 5000)).tolist()


def _disagree(rank: int, folder: Path, values: tuple[str, str]) -> str:
    os.environ["CGX_COMPRESSION_QUANTIZATION_BITS"] = values[rank]
    with pytest.raises(cgx_ray.ConfigError) as error:
        _in_cgx(rank, folder, 2, _sum_of_noise)
    return str(error.value)


def test_ranks_with_other_options_find_out_before_they_exchange(tmp_path: Path) -> None:
    for rank, message in enumerate(run_ranks(2, _disagree, tmp_path, ("4", "32"), in_group=False)):
        assert f"on rank {rank}" in message
        assert "qsgd:bits=4" in message
        assert "none over sra" in message


def test_a_wrong_variable_on_one_rank_stops_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, _disagree, tmp_path, ("4", "12"), in_group=False)
    assert "on rank 1" in first
    for message in (first, second):
        assert "CGX_COMPRESSION_QUANTIZATION_BITS is '12'" in message


def _hang_up(rank: int) -> tuple[str, str, str]:
    model = DistributedDataParallel(nn.Linear(100, 100))
    loss = model(torch.ones(2, 100)).sum()
    if rank == 1:
        group = dist.group.WORLD
        assert group is not None
        group.abort()
    # Through DDP's C++, through Work and through its future.
    with pytest.raises(RuntimeError) as of_ddp:
        loss.backward()
    with pytest.raises(cgx_ray.TransportError) as of_wait:
        dist.all_reduce(torch.ones(5000))
    work = dist.all_reduce(torch.ones(5000), async_op=True)
    assert work is not None
    with pytest.raises(RuntimeError) as of_future:
        work.get_future().wait()
    assert not work.is_success()
    assert isinstance(work.exception(), cgx_ray.TransportError)
    return str(of_ddp.value), str(of_wait.value), str(of_future.value)


def test_a_rank_that_hangs_up_is_an_error_and_no_hang_on_the_others(tmp_path: Path) -> None:
    for rank, messages in enumerate(run_cgx(tmp_path, 2, _hang_up)):
        for message in messages:
            assert f"rank {rank}, step 0, group 0: a message did not get through" in message
            assert rank == 1 or "rank 1 hung up" in message


def _reduce_until_killed(rank: int, folder: Path) -> None:
    dist.all_reduce(torch.ones(5000))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(cgx_ray.TransportError) as error:
        dist.all_reduce(torch.ones(5000))
    (folder / f"rank{rank}").write_text(str(error.value))
    dist.destroy_process_group()


def test_when_a_rank_is_killed_the_others_say_which(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code -9"):
        run_cgx(tmp_path, 3, _reduce_until_killed, tmp_path)
    for rank in (0, 2):
        said = (tmp_path / f"rank{rank}").read_text()
        assert re.search(rf"rank {rank}, step 1, group 0: .* did not get through \(rank \d hung up", said), said


def _threads_with_groups(rank: int) -> list[list[float]]:
    """Each thread reduces in a group of its own, all at once; results by thread."""
    groups = [dist.new_group() for _ in range(3)]
    results: list[list[float]] = [[] for _ in groups]

    def reduce(index: int) -> None:
        for step in range(20):
            tensors = [torch.full((2000 + index,), float(rank + step)), torch.full((10,), float(rank + step))]
            works = [dist.all_reduce(tensor, group=groups[index], async_op=True) for tensor in tensors]
            for work in works:
                assert work is not None
                work.wait()
            assert tensors[0].unique().numel() == 1
            results[index] += [float(tensor[0]) for tensor in tensors]

    threads = [threading.Thread(target=reduce, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_reduce_in_groups_of_their_own_at_once(tmp_path: Path) -> None:
    sums = [float(3 * step + 3) for step in range(20) for _ in range(2)]
    for results in run_cgx(tmp_path, 3, _threads_with_groups):
        # The ends of a bucket's grid are bfloat16: exact for these.
        assert results == [sums] * 3


def _make_and_destroy(rank: int, folder: Path) -> list[int]:
    """Threads, and open files, when there was no group and after each of three."""
    counts = []
    for attempt in range(3):
        store = dist.FileStore(str(folder / f"store{attempt}"), 2)
        dist.init_process_group("cgx", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        dist.all_reduce(torch.ones(5000))
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        counts += [threading.active_count(), psutil.Process().num_fds()]
    return counts


def test_a_destroyed_group_leaves_no_thread_and_no_connection(tmp_path: Path) -> None:
    for counts in run_ranks(2, _make_and_destroy, tmp_path, in_group=False):
        assert counts[0::2] == [1, 1, 1]
        assert counts[1] == counts[3] == counts[5], counts


def _reduce_after_shutdown(rank: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    group.shutdown()
    with pytest.raises(cgx_ray.CGXError) as error:
        dist.all_reduce(torch.ones(5000))
    return str(error.value)


def test_a_group_that_is_shut_down_says_so(tmp_path: Path) -> None:
    for message in run_cgx(tmp_path, 2, _reduce_after_shutdown):
        assert "shut down" in message


def _alone(rank: int) -> list[float]:
    values = noise(0, 5000)
    dist.all_reduce(values)
    model = DistributedDataParallel(nn.Linear(50, 50))
    cgx_ray.register_model(model)
    cgx_ray.register_model(nn.Linear(2, 2))
    model(torch.ones(1, 50)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.ones(50, 50))
    return values.tolist()


def test_one_rank_keeps_what_it_has(tmp_path: Path) -> None:
    assert run_cgx(tmp_path, 1, _alone) == [noise(0, 5000).tolist()]


def _reduce_ever_new_sizes(rank: int) -> int:
    for numel in range(2000, 2080):
        dist.all_reduce(torch.ones(numel))
    group: Any = dist.group.WORLD
    return len(group._lane._exchanges)


def test_buffers_of_old_sizes_are_let_go(tmp_path: Path) -> None:
    assert run_cgx(tmp_path, 2, _reduce_ever_new_sizes) == [32, 32]


def run_python(*arguments: str) -> str:
    """What a new interpreter prints. Entry points are those of the last installation."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_backend_is_there_without_an_import_of_cgx_ray(tmp_path: Path) -> None:
    code = f"""
import sys, torch
import torch.distributed as dist
print("cgx" in dist.Backend.backend_list, "cgx_ray" in sys.modules, "ray" in sys.modules, "psutil" in sys.modules)
dist.init_process_group("cgx", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0, world_size=1)
print(type(dist.group.WORLD).__name__, dist.get_backend(), "ray" in sys.modules, "matplotlib" in sys.modules)
dist.destroy_process_group()
"""
    assert run_python("-c", code).split("\n")[:2] == ["True False False False", "CgxProcessGroup cgx False False"]


def test_cgx_ray_may_be_imported_before_torch() -> None:
    code = """
import sys, cgx_ray
import torch.distributed as dist
print("cgx_ray_autoload" in sys.modules, dist.Backend._plugins["CGX"].creator_fn.__module__)
"""
    assert run_python("-c", code).strip() == "True cgx_ray.backend.process_group"


def test_a_script_under_torchrun_needs_no_import_of_cgx_ray(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # Without destroy_process_group, as many scripts end.
    script.write_text("""
import sys, torch
import torch.distributed as dist
dist.init_process_group("cgx")
values = torch.linspace(-1, 1, 5000)
dist.all_reduce(values)
error = (values - 2 * torch.linspace(-1, 1, 5000)).abs().max().item()
print(dist.get_backend(), 0 < error < 1e-2)
""")
    output = run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    assert output.split("\n")[:2] == ["cgx True", "cgx True"]

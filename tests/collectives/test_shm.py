"""Shared memory between ranks of one host: sums, gathers, messages, and the errors when a rank is gone."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from support.endings import grown
from support.ranks import run_ranks
from support.shared_memory import TIMEOUT_S, connect, left_behind
from torch import Tensor

from cgx_ray.runtime_ext.mesh import Mesh
from cgx_ray.runtime_ext.shm import DTYPES, LocalGroup, Segment

MANTISSA_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _connect_group() -> tuple[Mesh, LocalGroup]:
    mesh = connect()
    assert mesh.local is not None
    return mesh, mesh.local


def _sizes(dtype: torch.dtype) -> list[int]:
    slot = Segment.SLOT_BYTES // dtype.itemsize
    return [0, 1, 7, 1000, slot - 1, slot, slot + 1, 10 * slot + 13]


def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def _bounds(numel: int, size: int) -> list[tuple[int, int]]:
    """Return bounds of different lengths, in no order, one of them empty, with a gap before each."""
    cuts = [numel * part * part // size**2 for part in range(size + 1)]
    bounds = [(min(start + 1, stop), stop) for start, stop in itertools.pairwise(cuts)]
    return bounds[1:] + bounds[:1]


def _sum_everything(rank: int) -> list[str]:
    """Return the sums that are wrong, of all sizes and types."""
    world_size = dist.get_world_size()
    mesh, group = _connect_group()
    wrong = []
    for dtype in DTYPES:
        for numel in _sizes(dtype):
            each = [_values(other, numel, dtype) for other in range(world_size)]
            exact = torch.stack(each).double().sum(0)
            magnitude = torch.stack(each).double().abs().sum(0)
            # Each of R - 1 additions is off by half an ulp of a partial sum, the rounding by half an ulp of the sum.
            bits = max(MANTISSA_BITS[dtype], 24)
            bound = (world_size - 1) * 2.0**-bits * magnitude
            bound += 2.0 ** -MANTISSA_BITS[dtype] * (exact.abs() + bound)
            reduced = each[rank].clone()
            group.all_reduce(reduced)
            # Sums are made in rank order, so the bits are known.
            total = each[0].to(torch.float64 if dtype == torch.float64 else torch.float32, copy=True)
            for other in each[1:]:
                total += other
            if not torch.equal(reduced, total.to(dtype)) or bool(((reduced.double() - exact).abs() > bound).any()):
                wrong.append(f"all_reduce {dtype} {numel}: off by {float((reduced.double() - exact).abs().max())}")
            start, stop = _bounds(numel, world_size)[rank]
            scattered, expected = each[rank].clone(), each[rank].clone()
            expected[start:stop] = reduced[start:stop]
            group.reduce_scatter(scattered, _bounds(numel, world_size))
            if not torch.equal(scattered, expected):
                wrong.append(f"reduce_scatter {dtype} {numel}")
    dist.barrier()
    mesh.close()
    return wrong


@pytest.mark.parametrize(
    "world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_sums_of_any_size_and_type_are_right_and_the_same_bits_on_all_ranks(world_size: int) -> None:
    assert run_ranks(world_size, _sum_everything) == [[]] * world_size


def _gather_everything(rank: int) -> list[str]:
    world_size = dist.get_world_size()
    mesh, group = _connect_group()
    wrong = []
    for dtype in DTYPES:
        for numel in _sizes(dtype):
            bounds = _bounds(numel, world_size)
            # All bit patterns, with those of NaN.
            parts = [
                torch.randint(
                    0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(other)
                )
                for other in range(world_size)
            ]
            values, expected = parts[rank].clone(), parts[rank].clone()
            for other, (start, stop) in enumerate(bounds):
                part = slice(start * dtype.itemsize, stop * dtype.itemsize)
                expected[part] = parts[other][part]
            group.all_gather(values.view(dtype), bounds)
            if not torch.equal(values, expected):
                wrong.append(f"{dtype} {numel}")
    dist.barrier()
    mesh.close()
    return wrong


@pytest.mark.parametrize("world_size", [2, 5])
def test_what_is_gathered_arrives_bit_for_bit_and_the_rest_stays(world_size: int) -> None:
    assert run_ranks(world_size, _gather_everything) == [[]] * world_size


def _round_16_bits(rank: int) -> list[int]:
    mesh, group = _connect_group()
    different = []
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        # Addends that are small, of similar size, and of random size and sign.
        for addend in (every * 2**-9, every * 0.3, every[torch.randperm(1 << 16, generator=torch.Generator())]):
            values = (every, addend)[rank].clone()
            group.all_reduce(values)
            expected = (every.float() + addend.float()).to(dtype)
            is_same = (values.view(torch.int16) == expected.view(torch.int16)) | (values.isnan() & expected.isnan())
            different.append(int((~is_same).sum()))
    dist.barrier()
    mesh.close()
    return different


def test_16_bit_sums_are_rounded_once_as_pytorch_rounds() -> None:
    assert run_ranks(2, _round_16_bits) == [[0] * 6] * 2


def _sum_integers(rank: int, num_groups: int) -> bool:
    world_size = dist.get_world_size()
    meshes = [connect() for _ in range(num_groups)]
    results: dict[int, bool] = {}

    def run(which: int) -> None:
        group = meshes[which].local
        assert group is not None
        # 1 to 300,000 elements; the sum is the same whichever rank is first.
        is_right = True
        for numel in random.Random(which).choices(range(1, 300_000), k=10):
            values = (torch.arange(numel) % 1000 + rank * 1000).float()
            group.all_reduce(values)
            expected = (torch.arange(numel) % 1000) * world_size + 1000 * sum(range(world_size))
            is_right = is_right and torch.equal(values, expected.float())
        results[which] = is_right

    threads = [threading.Thread(target=run, args=(which,)) for which in range(num_groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    for mesh in meshes:
        mesh.close()
    return [results[which] for which in range(num_groups)] == [True] * num_groups


@pytest.mark.parametrize(("world_size", "num_groups"), [(6, 1), (3, 3)])
def test_small_integers_are_summed_exactly_by_several_groups_at_once(world_size: int, num_groups: int) -> None:
    assert run_ranks(world_size, _sum_integers, num_groups) == [True] * world_size


def _exchange_at_random(mesh: Mesh, rank: int, num_operations: int, *, seed: int = 0) -> int:
    """Run operations and messages in a random order, equal on all ranks; return the number of wrong results."""
    group, drawn, num_wrong = mesh.local, random.Random(seed), 0
    assert group is not None
    peers = [peer for peer in range(group.size) if peer != rank]
    for _ in range(num_operations):
        numel = drawn.choice([1, 100, 5000, 100_000])
        values = torch.full((numel,), float(rank))
        match drawn.choice(["messages", "all_reduce", "reduce_scatter", "all_gather"]):
            case "messages":
                received = {peer: torch.empty(numel) for peer in peers}
                mesh.wait(mesh.post(dict.fromkeys(peers, values), received), TIMEOUT_S)
                num_wrong += sum(not bool((received[peer] == peer).all()) for peer in peers)
            case "all_reduce":
                group.all_reduce(values)
                num_wrong += not bool((values == sum(range(group.size))).all())
            case "reduce_scatter":
                start, stop = _bounds(numel, group.size)[rank]
                group.reduce_scatter(values, _bounds(numel, group.size))
                num_wrong += not bool((values[start:stop] == sum(range(group.size))).all())
            case _:
                group.all_gather(values, _bounds(numel, group.size))
                wrong = [
                    bool((values[start:stop] != r).any()) for r, (start, stop) in enumerate(_bounds(numel, group.size))
                ]
                num_wrong += sum(wrong)
    return num_wrong


def _exchange_long(rank: int) -> tuple[int, int, int]:
    """Return the number of wrong results, and the growth of memory and open files."""
    mesh, _ = _connect_group()
    num_wrong = _exchange_at_random(mesh, rank, 500)
    process = psutil.Process()
    before = process.memory_info().rss, process.num_fds()
    num_wrong += _exchange_at_random(mesh, rank, 3000, seed=1)
    grown = process.memory_info().rss - before[0], process.num_fds() - before[1]
    dist.barrier()
    mesh.close()
    return (num_wrong, *grown)


def test_thousands_of_mixed_operations_are_right_and_take_no_more_memory() -> None:
    for num_wrong, bytes_grown, fds_grown in run_ranks(3, _exchange_long):
        assert num_wrong == 0
        assert fds_grown <= 0
        # The allocator's memory varies; one buffer lost per message would be 80 MB.
        assert bytes_grown < 4 << 20, f"grew by {bytes_grown} bytes"


def _connect_often(rank: int) -> list[int]:
    process = psutil.Process()

    def state() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count("/cgx-ray-")
        return process.num_fds(), process.num_threads(), maps

    before = (0, 0, 0)
    for number in range(12):
        mesh, _ = _connect_group()
        _exchange_at_random(mesh, rank, 3)
        dist.barrier()
        mesh.close()
        del mesh, _
        if number == 1:
            before = state()
        # A rank that goes on would open its next connections while another one still counts.
        dist.barrier()
    assert left_behind([os.getpid()]) == []
    return grown(before, state())


def test_connecting_and_closing_again_leaves_nothing() -> None:
    assert run_ranks(2, _connect_often) == [[0, 0, 0]] * 2


def _exchange_until_killed(rank: int, folder: Path, after_s: float, victim: int) -> None:
    mesh, _ = _connect_group()
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    dist.barrier()
    if rank == victim:
        threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        _exchange_at_random(mesh, rank, 1 << 40)
    except RuntimeError as error:
        (folder / f"rank{rank}").write_text(str(error))


@pytest.mark.fault("SIGKILL amid sums and messages in shared memory", "named; no shared memory is left")
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_killed_at_a_random_moment_is_named_and_leaves_nothing(seed: int, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    victim, world_size = drawn.randrange(3), 3
    with pytest.raises(RuntimeError, match=f"rank {victim} ended with exit code -9"):
        run_ranks(world_size, _exchange_until_killed, tmp_path, drawn.uniform(0, 0.3), victim)
    for rank in set(range(world_size)) - {victim}:
        # A rank that hears first from another survivor names that one.
        said = (tmp_path / f"rank{rank}").read_text()
        assert "hung up" in said
    assert any(f"rank {victim} hung up" in path.read_text() for path in tmp_path.glob("rank*"))
    assert left_behind([int(path.read_text()) for path in tmp_path.glob("pid*")]) == []


def _stay_silent(rank: int) -> str:
    mesh = connect(timeout_s=0.5)
    assert mesh.local is not None
    said = ""
    if rank != 1:
        with pytest.raises(RuntimeError) as raised:
            mesh.local.all_reduce(torch.zeros(10))
        said = str(raised.value)
        with pytest.raises(RuntimeError, match="closed"):
            mesh.post({}, {1: torch.zeros(1)})
        with pytest.raises(RuntimeError, match="closed"):
            mesh.local.all_reduce(torch.zeros(10))
    dist.barrier()
    mesh.close()
    return said


def test_a_silent_rank_is_named_and_everything_is_closed() -> None:
    said = run_ranks(3, _stay_silent)
    assert "rank 1 did not answer within 500 ms" in (said[0], said[2])
    assert all(text == "rank 1 did not answer within 500 ms" or "hung up" in text for text in (said[0], said[2]))


def _call_another(rank: int, others: Callable[[LocalGroup, int], None]) -> str:
    mesh, group = _connect_group()
    try:
        others(group, rank)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
        mesh.close()
    return ""


def _other_numel(group: LocalGroup, rank: int) -> None:
    group.all_reduce(torch.zeros(10 + rank))


def _other_dtype(group: LocalGroup, rank: int) -> None:
    group.all_reduce(torch.zeros(10, dtype=DTYPES[rank]))


def _other_operation(group: LocalGroup, rank: int) -> None:
    (group.all_gather if rank == 0 else group.reduce_scatter)(torch.zeros(10), [(0, 5), (5, 10)])


def _other_bounds(group: LocalGroup, rank: int) -> None:
    group.all_gather(torch.zeros(0 if rank == 0 else 10), [(0, 0), (0, 10 * rank)])


@pytest.mark.parametrize("others", [_other_numel, _other_dtype, _other_operation, _other_bounds])
def test_ranks_that_do_not_do_the_same_find_out(others: Callable[[LocalGroup, int], None]) -> None:
    said = run_ranks(2, _call_another, others)
    assert all("called another operation" in text or "hung up" in text for text in said), said
    assert any("called another operation, or with other sizes or types" in text for text in said), said


def test_tensors_and_bounds_that_are_not_allowed_are_refused() -> None:
    segment = Segment(2)
    group = LocalGroup(segment, 0, [0, 1], TIMEOUT_S, hang_up=lambda: None)
    with pytest.raises(TypeError, match=r"values_N is torch.int64; give torch.float32, "):
        group.all_reduce(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="strided; give a contiguous CPU tensor"):
        group.all_reduce(torch.zeros(6)[::2])
    for bounds in ([(0, 3)], [(0, 3), (2, 4)], [(0, 3), (3, 5)], [(3, 0), (3, 4)], [(-1, 0), (0, 4)]):
        with pytest.raises(ValueError, match="do not fit 4 elements and 2 ranks; give one"):
            group.all_gather(torch.zeros(4), bounds)

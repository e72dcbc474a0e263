"""Shared memory between ranks of one host: sums, what is said when a rank is gone, and what is left behind."""

from __future__ import annotations

import itertools
import logging
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from support.emulated import needs_lab
from support.ranks import run_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives import Transport
from cgx_ray.collectives.tcp import connect_mesh
from cgx_ray.errors import ConfigError
from cgx_ray.lab.namespaces import Lab
from cgx_ray.runtime_ext.mesh import Mesh
from cgx_ray.runtime_ext.shm import DTYPES, LocalGroup, Segment, host_key
from cgx_ray.session.attachment import open_session
from cgx_ray.session.settings import Settings

TIMEOUT_S = 30.0
FOLDER = Path("/dev/shm")
MANTISSA_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _connect(*, timeout_s: float = TIMEOUT_S, shared_memory: bool = True) -> Mesh:
    assert dist.group.WORLD is not None
    return connect_mesh(dist.group.WORLD, timeout_s, shared_memory=shared_memory)


def _connect_group() -> tuple[Mesh, LocalGroup]:
    mesh = _connect()
    assert mesh.local is not None
    return mesh, mesh.local


def _left_behind(pids: Sequence[int]) -> list[str]:
    """Segments that these processes made. Other runs of this machine may have some."""
    return [path.name for path in FOLDER.glob("cgx-ray-*") if int(path.name.split("-")[2]) in pids]


def _sizes(dtype: torch.dtype) -> list[int]:
    slot = Segment.SLOT_BYTES // dtype.itemsize
    return [0, 1, 7, 1000, slot - 1, slot, slot + 1, 10 * slot + 13]


def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def _bounds(numel: int, size: int) -> list[tuple[int, int]]:
    """Of different lengths, in no order, one of them empty, with a gap before each."""
    cuts = [numel * part * part // size**2 for part in range(size + 1)]
    bounds = [(min(start + 1, stop), stop) for start, stop in itertools.pairwise(cuts)]
    return bounds[1:] + bounds[:1]


def _sum_everything(rank: int) -> list[str]:
    """What is wrong with the sums of all sizes and types, and a hash of their bits."""
    world_size = dist.get_world_size()
    mesh, group = _connect_group()
    wrong = []
    for dtype in DTYPES:
        for numel in _sizes(dtype):
            each = [_values(other, numel, dtype) for other in range(world_size)]
            exact = torch.stack(each).double().sum(0)
            magnitude = torch.stack(each).double().abs().sum(0)
            # Each of R - 1 additions is off by half an ulp of a partial sum, the rounding by one of the sum.
            bits = max(MANTISSA_BITS[dtype], 24)
            bound = (world_size - 1) * 2.0**-bits * magnitude
            bound += 2.0 ** -MANTISSA_BITS[dtype] * (exact.abs() + bound)
            reduced = each[rank].clone()
            group.all_reduce(reduced)
            # In rank order, so the bits are known.
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


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_sums_of_any_size_and_type_are_right_and_the_same_bits_on_all_ranks(world_size: int) -> None:
    assert run_ranks(world_size, _sum_everything) == [[]] * world_size


def _gather_everything(rank: int) -> list[str]:
    world_size = dist.get_world_size()
    mesh, group = _connect_group()
    wrong = []
    for dtype in DTYPES:
        for numel in _sizes(dtype):
            bounds = _bounds(numel, world_size)
            # All bit patterns, those of NaN among them.
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
        # A small one, one of its own size and sign or not, and one of random size.
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
    meshes = [_connect() for _ in range(num_groups)]
    results: dict[int, bool] = {}

    def run(which: int) -> None:
        group = meshes[which].local
        assert group is not None
        # Any number of 1 to 300,000 elements; the sum is the same whoever is first.
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
    """Operations of the group and messages, in an order that all ranks draw; returns how many were wrong."""
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
    """How many results were wrong, and what memory and open files grew by."""
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
        assert (num_wrong, fds_grown) == (0, 0)
        # The allocator moves about; one buffer lost at every message would be 80 MB.
        assert bytes_grown < 4 << 20, f"grew by {bytes_grown} bytes"


def _connect_often(rank: int) -> tuple[int, int, int]:
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
    assert _left_behind([os.getpid()]) == []
    fds, threads, maps = (now - then for now, then in zip(state(), before, strict=True))
    return fds, threads, maps


def test_connecting_and_closing_again_leaves_nothing() -> None:
    assert run_ranks(2, _connect_often) == [(0, 0, 0)] * 2


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


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_killed_at_a_random_moment_is_named_and_leaves_nothing(seed: int, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    victim, world_size = drawn.randrange(3), 3
    with pytest.raises(RuntimeError, match=f"rank {victim} ended with exit code -9"):
        run_ranks(world_size, _exchange_until_killed, tmp_path, drawn.uniform(0, 0.3), victim)
    for rank in set(range(world_size)) - {victim}:
        # Who is told by another survivor that it gave up names that one.
        said = (tmp_path / f"rank{rank}").read_text()
        assert "hung up" in said
    assert any(f"rank {victim} hung up" in path.read_text() for path in tmp_path.glob("rank*"))
    assert _left_behind([int(path.read_text()) for path in tmp_path.glob("pid*")]) == []


def _stay_silent(rank: int) -> str:
    mesh = _connect(timeout_s=0.5)
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


def test_a_segment_is_private_to_its_user_and_has_no_name_once_unlinked() -> None:
    segment = Segment(2)
    path = FOLDER / segment.name.lstrip("/")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_blocks * 512 >= path.stat().st_size, "pages are missing: SIGBUS when the folder is full"
    with pytest.raises(RuntimeError, match="is of another run"):
        Segment(2, segment.name, bytes(16))
    with pytest.raises(RuntimeError, match="has another size"):
        Segment(3, segment.name, segment.nonce)
    segment.unlink()
    assert not path.exists()
    with pytest.raises(RuntimeError, match="cannot open shared memory"):
        Segment(2, segment.name, segment.nonce)


def test_segments_for_8_ranks_are_far_smaller_than_what_docker_gives() -> None:
    segment = Segment(8)
    assert (FOLDER / segment.name.lstrip("/")).stat().st_size < 32 << 20
    segment.unlink()


def test_the_next_start_removes_what_a_killed_process_left_and_no_more() -> None:
    script = "from cgx_ray.runtime_ext.shm import Segment; s = Segment(2); print(s.name, flush=True); input()"
    maker = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    path = FOLDER / maker.stdout.readline().strip().lstrip("/")
    Segment(2).unlink()
    assert path.exists(), "a segment that is being set up was removed"
    maker.kill()
    maker.communicate()
    assert path.exists()
    Segment(2).unlink()
    assert not path.exists()


def _connect_with(rank: int, wish: Callable[[int], bool]) -> tuple[list[int], int]:
    """Nodes, and how many share memory with this rank."""
    mesh = _connect(shared_memory=wish(rank))
    size = mesh.local.size if mesh.local is not None else 1
    received = {peer: torch.zeros(50_000) for peer in range(dist.get_world_size()) if peer != rank}
    mesh.wait(mesh.post(dict.fromkeys(received, torch.full((50_000,), float(rank))), received), TIMEOUT_S)
    if mesh.local is not None:
        mesh.local.all_reduce(torch.zeros(10))
    assert all(bool((buffer == peer).all()) for peer, buffer in received.items())
    dist.barrier()
    mesh.close()
    return mesh.nodes, size


def _all_but_the_second(rank: int) -> bool:
    return rank != 1


def _none(rank: int) -> bool:
    return False


def test_ranks_without_shared_memory_are_nodes_of_their_own_and_reach_the_others() -> None:
    nodes = [0, 1, 0, 0]
    assert run_ranks(4, _connect_with, _all_but_the_second) == [(nodes, 3), (nodes, 1), (nodes, 3), (nodes, 3)]
    assert run_ranks(2, _connect_with, _none) == [([0, 1], 1)] * 2


@needs_lab()
def test_hosts_of_a_lab_do_not_share_although_they_are_one_machine() -> None:
    script = "from cgx_ray.runtime_ext.shm import host_key; print(host_key())"
    with Lab(2, rate_bit_per_s=1e9) as lab:
        asked = [
            lab.popen(host, [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for host in (0, 0, 1)
        ]
        keys = [process.communicate()[0].strip() for process in asked]
    assert keys[0] == keys[1], "one host sees two folders"
    assert len({*keys, host_key()}) == 3, f"keys of host 0, 0, 1: {keys}, of this one: {host_key()}"


def _connect_without_room(rank: int) -> tuple[list[int], list[str], bool]:
    class Records(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.texts: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.texts.append(record.getMessage())

    records = Records()
    logging.getLogger("cgx_ray").addHandler(records)
    # The kernel's answer is EFBIG then and ENOSPC in a full folder; posix_fallocate hands on either.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    mesh = _connect()
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    transport = Transport(dist.group.WORLD, mesh=mesh, timeout_s=TIMEOUT_S)
    values = torch.full((1000,), float(rank))
    transport.all_reduce(values)
    dist.barrier()
    mesh.close()
    assert _left_behind([os.getpid()]) == []
    return mesh.nodes, records.texts, bool((values == 3).all())


def test_where_there_is_no_room_ranks_go_over_tcp_and_the_first_logs_how_much_it_takes() -> None:
    first, *others = run_ranks(3, _connect_without_room)
    assert others == [([0, 1, 2], [], True)] * 2
    assert (first[0], first[2]) == ([0, 1, 2], True)
    (text,) = first[1]
    assert "ranks [0, 1, 2] share no memory and go over TCP: /dev/shm has no room for 5 MiB" in text


def _attach(rank: int, shared_memory: bool) -> tuple[bool, list[int]]:
    class Session:
        settings = Settings(policy="static", shared_memory=shared_memory)

        def first_plan(self, layers: Any, world_size: int) -> cgx_ray.Plan:
            return self.settings.static_plan(layers, world_size)

        def start(self, attachment: cgx_ray.Attachment) -> None: ...

    open_session(Session())
    model = DistributedDataParallel(torch.nn.Linear(100, 100))
    attachment = cgx_ray.attach(model)
    model(torch.ones(1, 100)).sum().backward()
    transport = attachment._engine._transport
    found = transport.local is not None, transport.nodes
    attachment.close()
    return found


def test_settings_reach_the_transport() -> None:
    assert run_ranks(2, _attach, True) == [(True, [0, 0])] * 2
    assert run_ranks(2, _attach, False) == [(False, [0, 1])] * 2
    assert cgx_ray.CGXConfig(shared_memory=False).settings().shared_memory is False
    with pytest.raises(ConfigError, match="shared_memory 'no' is not allowed; give True or False"):
        cgx_ray.CGXConfig(shared_memory="no")

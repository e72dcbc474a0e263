"""The backend "cgx" from the import to the end of its groups: entry point, threads, errors, killed ranks."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from support.ranks import join_group, log_lines, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray


def _hang_up(rank: int) -> tuple[str, str, str]:
    model = DistributedDataParallel(nn.Linear(100, 100))
    loss = model(torch.ones(2, 100)).sum()
    if rank == 1:
        group = dist.group.WORLD
        assert group is not None
        group.abort()
    # The error comes through DDP's C++, through Work and through its future.
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


def test_a_rank_that_hangs_up_is_an_error_and_no_hang_on_the_others() -> None:
    for rank, messages in enumerate(run_ranks(2, _hang_up, backend="cgx")):
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
        run_ranks(3, _reduce_until_killed, tmp_path, backend="cgx")
    for rank in (0, 2):
        said = (tmp_path / f"rank{rank}").read_text()
        assert re.search(rf"rank {rank}, step 1, group 0: .* did not get through \(rank \d hung up", said), said


def _threads_with_groups(rank: int) -> list[list[float]]:
    """Reduce on several threads at once, each in a group of its own; return the results by thread."""
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


def test_threads_reduce_in_groups_of_their_own_at_once() -> None:
    sums = [float(3 * step + 3) for step in range(20) for _ in range(2)]
    for results in run_ranks(3, _threads_with_groups, backend="cgx"):
        # bfloat16, the type of a grid's ends, can represent these sums.
        assert results == [sums] * 3


def _make_and_destroy(rank: int, folder: Path) -> list[int]:
    """Return the numbers of threads and open files after each of three groups."""
    counts = []
    for attempt in range(3):
        (folder / str(attempt)).mkdir(exist_ok=True)
        join_group(rank, 2, folder / str(attempt), "cgx")
        dist.all_reduce(torch.ones(5000))
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        counts += [threading.active_count(), psutil.Process().num_fds()]
    return counts


def test_a_destroyed_group_leaves_no_thread_and_no_connection(tmp_path: Path) -> None:
    for counts in run_ranks(2, _make_and_destroy, tmp_path, backend=None):
        assert counts[0::2] == [1, 1, 1]
        assert max(counts[3], counts[5]) <= counts[1], counts


def _begin_and_end(rank: int, folder: Path) -> list[str]:
    said = log_lines()
    logging.getLogger("cgx_ray").setLevel(logging.INFO)
    join_group(rank, 2, folder, "cgx")
    model = DistributedDataParallel(nn.Linear(100, 50))
    cgx_ray.register_model(model)
    dist.all_reduce(torch.ones(5000))
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
    return said


def test_rank_0_says_what_begins_and_what_was_sent(tmp_path: Path) -> None:
    said, others = run_ranks(2, _begin_and_end, tmp_path, backend=None)
    assert others == []
    start, model, end = said
    rest = "for sums and averages of float tensors from 1024 elements on, Gloo for the rest"
    assert start == f"backend cgx on 2 ranks: qsgd 4-bit over sra {rest}"
    assert model == "backend cgx: 2 layers, 0.0202 MB, registered"
    sent = r"a rank sent 0\.00\d+ MB in them, uncompressed 0\.02 MB"
    assert re.fullmatch(f"backend cgx: 1 all-reduce compressed; {sent}", end), end


def _reduce_after_shutdown(rank: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    group.shutdown()
    with pytest.raises(cgx_ray.CGXError) as error:
        dist.all_reduce(torch.ones(5000))
    return str(error.value)


def test_a_group_that_is_shut_down_says_so() -> None:
    for message in run_ranks(2, _reduce_after_shutdown, backend="cgx"):
        assert "shut down" in message


def _alone(rank: int) -> list[float]:
    values = torch.linspace(-1, 1, 5000)
    dist.all_reduce(values)
    model = DistributedDataParallel(nn.Linear(50, 50))
    cgx_ray.register_model(model)
    cgx_ray.register_model(model, cgx_ray.make_plan(cgx_ray.layers_of(model), version=0, world_size=7, codec="topk"))
    cgx_ray.register_model(nn.Linear(2, 2))
    model(torch.ones(1, 50)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.ones(50, 50))
    return values.tolist()


def test_one_rank_keeps_what_it_has() -> None:
    assert run_ranks(1, _alone, backend="cgx") == [torch.linspace(-1, 1, 5000).tolist()]


def _reduce_ever_new_sizes(rank: int) -> int:
    for numel in range(2000, 2080):
        dist.all_reduce(torch.ones(numel))
    group: Any = dist.group.WORLD
    return len(group._thread._exchanges)


def test_buffers_of_old_sizes_are_let_go() -> None:
    assert run_ranks(2, _reduce_ever_new_sizes, backend="cgx") == [64, 64]


def run_python(*arguments: str) -> str:
    """Return the output of a new interpreter. Entry points are those of the last installation."""
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
cgx_ray.configure_backend
print(dist.Backend._plugins["CGX"].creator_fn.__module__)
"""
    assert run_python("-c", code).split() == ["True", "cgx_ray_autoload", "cgx_ray.backend.process_group"]


@pytest.mark.slow  # without torchrun: above
def test_a_script_under_torchrun_needs_no_import_of_cgx_ray(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # It ends as many scripts do: without destroy_process_group, while the group's thread is still busy.
    script.write_text("""
import sys, time, torch
import torch.distributed as dist
dist.init_process_group("cgx")
values = torch.linspace(-1, 1, 5000)
work = dist.all_reduce(values, async_op=True)
work.get_future().then(lambda _: time.sleep(0.3))
work.wait()
error = (values - 2 * torch.linspace(-1, 1, 5000)).abs().max().item()
sys.stdout.write(f"{dist.get_backend()} {0 < error < 1e-2}\\n")  # one write, else lines of ranks mix
""")
    output = run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    assert output.split("\n")[:2] == ["cgx True", "cgx True"]


def test_torch_is_imported_even_if_the_backend_cannot_be_registered() -> None:
    code = """
import warnings
from unittest.mock import patch
import torch.distributed as dist
import cgx_ray_autoload

dist.Backend.backend_list.remove("cgx")
with patch.object(dist.Backend, "register_backend", side_effect=RuntimeError("no such device")):
    with warnings.catch_warnings(record=True) as caught:
        cgx_ray_autoload.register()
print([str(warning.message) for warning in caught])
"""
    assert run_python("-c", code).strip() == (
        """["backend 'cgx' is not registered (RuntimeError('no such device')); see `cgx-ray doctor`"]"""
    )

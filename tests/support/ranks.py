"""Run a function on several real processes that form a process group over loopback."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120
# Of the process group, and so of what attaches to it.
GROUP_TIMEOUT_S = TIMEOUT_S / 2


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, backend: str | None = "gloo") -> list[Any]:
    """Return the results of `function(rank, *args)` by rank. If a rank raises, raise its error.

    backend  of the process group; None: no group, for a `function` that calls `join_group`
    """
    context = multiprocessing.get_context("forkserver")
    # Importing torch, and the modules that the first DDP imports, takes seconds: the server does it once for all ranks.
    context.set_forkserver_preload(["pytest", "cgx_ray.session.attach", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank_main, args=(rank, world_size, Path(folder), function, args, backend))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT_S)
        alive = [process for process in processes if process.is_alive()]
        for process in alive:
            process.kill()
            process.join()
        assert not alive, f"{len(alive)} of {world_size} ranks did not end within {TIMEOUT_S} s"
        outcomes = [_outcome(Path(folder), rank, processes[rank].exitcode) for rank in range(world_size)]
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def _outcome(folder: Path, rank: int, exitcode: int | None) -> Any:
    path = folder / f"out{rank}"
    if not path.exists():
        return RuntimeError(f"rank {rank} ended with exit code {exitcode} and no result")
    return pickle.loads(path.read_bytes())


def run_cases(world_size: int, cases: Sequence[Callable[[int], Any]]) -> list[list[Any]]:
    """Return by case the results of `case(rank)` by rank. The same processes run all cases, one after the other.

    The error of a case takes the place of its result. The cases after it run all the same.
    """
    return [list(results) for results in zip(*run_ranks(world_size, _run_each, cases), strict=True)]


def _run_each(rank: int, cases: Sequence[Callable[[int], Any]]) -> list[Any]:
    results: list[Any] = []
    for case in cases:
        try:
            results.append(case(rank))
        except Exception:  # noqa: BLE001 - for the test of this case
            results.append(RuntimeError(traceback.format_exc()))
    return results


def join_group(rank: int, world_size: int, folder: Path, backend: str) -> None:
    """Make the process group with the other ranks, by a file in `folder`."""
    store = dist.FileStore(str(folder / "store"), world_size)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    # A rank that ends at once must not disconnect ranks that are still connecting.
    dist.barrier()


def _rank_main(
    rank: int, world_size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...], backend: str | None
) -> None:
    torch.set_num_threads(1)
    if backend is not None:
        join_group(rank, world_size, folder, backend)
    try:
        outcome = function(rank, *args)
    except Exception as error:  # noqa: BLE001 - raised again in the parent
        outcome = error
    (folder / f"out{rank}.part").write_bytes(pickle.dumps(outcome))
    (folder / f"out{rank}.part").rename(folder / f"out{rank}")
    if not isinstance(outcome, BaseException) and dist.is_initialized():
        dist.destroy_process_group()


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def log_lines() -> list[str]:
    """Return a list that gets what cgx_ray logs in this process from now on."""
    handler = _Lines()
    logging.getLogger("cgx_ray").addHandler(handler)
    return handler.lines


def free_port() -> int:
    """Return a port of loopback that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

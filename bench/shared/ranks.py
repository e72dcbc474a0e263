"""Start the ranks of a bench, each in a host of its own lab or all on loopback, and read what rank 0 writes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cgx_ray.errors import CGXError
from cgx_ray.lab.link import LinkChange
from cgx_ray.lab.namespaces import Lab


class BenchError(CGXError, RuntimeError):
    """A rank ended early; the message holds its last lines."""


def run_ranks(
    module: str,
    job: Mapping[str, Any],
    *,
    name: str,
    num_ranks: int,
    rate_bit_per_s: float | None = None,
    latency_s: float = 0.0,
) -> Iterator[str]:
    """Start `num_ranks` processes of `module` and yield the lines that rank 0 writes.

    module          runs `rank_process.run_rank`, which gets `job` with rank, ranks and store
    name            begins the message of an error
    rate_bit_per_s  of every link of a lab; None: loopback
    latency_s       one way

    Raises BenchError if a rank ends early, LabError if the lab cannot be made.
    """
    with tempfile.TemporaryDirectory() as folder:
        whole: dict[str, Any] = {
            **job,
            "world_size": num_ranks,
            # Hosts of a lab share this folder: only their own temporary folders are private.
            "store": str(Path(folder) / "store"),
            "is_loopback": rate_bit_per_s is None,
        }
        with _starter(num_ranks, rate_bit_per_s, latency_s) as start, _logs(Path(folder), num_ranks) as logs:
            ranks = [
                start(
                    rank,
                    [sys.executable, "-m", module, json.dumps({**whole, "rank": rank})],
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=logs[rank],
                    text=True,
                )
                for rank in range(num_ranks)
            ]
            assert ranks[0].stdout is not None
            with ranks[0].stdout as lines:
                yield from (line.rstrip("\n") for line in lines)
            statuses = [process.wait() for process in ranks]
        for rank, status in enumerate(statuses):
            if status != 0:
                tail = "\n".join((Path(folder) / f"rank{rank}.log").read_text(errors="replace").splitlines()[-20:])
                raise BenchError(f"{name}: rank {rank} ended with status {status}:\n{tail}")


@contextmanager
def _logs(folder: Path, num_ranks: int) -> Iterator[list[Any]]:
    logs = [(folder / f"rank{rank}.log").open("w") for rank in range(num_ranks)]
    try:
        yield logs
    finally:
        for log in logs:
            log.close()


@contextmanager
def _starter(
    num_ranks: int, rate_bit_per_s: float | None, latency_s: float
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Yield a function that starts the process of a rank, with options of `subprocess.Popen`; all end with the body."""
    if rate_bit_per_s is not None:
        # A lab with rates only takes less processor time, and has the frames of stock hosts.
        link = LinkChange(rate_bit_per_s=rate_bit_per_s)
        if latency_s:
            link["latency_s"] = latency_s
        with Lab(num_ranks, **link) as lab:
            yield lab.popen
        return
    started: list[subprocess.Popen[str]] = []

    def start(rank: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(argv, **options))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()

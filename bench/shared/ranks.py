"""Start the ranks of a bench, each in a host of its own lab or all on loopback, and read what rank 0 writes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cgx_ray.errors import CGXError
from cgx_ray.lab.link import LinkChange
from cgx_ray.lab.namespaces import Lab
from cgx_ray.lab.schedule import Schedule, play


class BenchError(CGXError, RuntimeError):
    """A rank ended early; the message holds its last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes of a bench. `name`: begins the message of an error; `folder`: of their logs."""

    name: str
    folder: Path
    processes: Sequence[subprocess.Popen[str]]

    def send_line(self, line: str, *, rank_0_only: bool = False) -> None:
        """Write a line to the standard input of every rank, or of rank 0."""
        for process in self.processes[:1] if rank_0_only else self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()

    def lines(self) -> Iterator[str]:
        """Yield the lines that rank 0 writes. Raises BenchError if a rank ends early."""
        assert self.processes[0].stdout is not None
        yield from (line.rstrip("\n") for line in self.processes[0].stdout)
        for process in self.processes:
            _close(process.stdin)  # else a rank that waits for a line would wait for ever
        for rank, status in enumerate([process.wait() for process in self.processes]):
            if status != 0:
                self._fail(rank, status)

    def check(self) -> None:
        """Raise BenchError if a rank has ended."""
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                self._fail(rank, process.returncode)

    def _fail(self, rank: int, status: int) -> None:
        tail = "\n".join((self.folder / f"rank{rank}.log").read_text(errors="replace").splitlines()[-20:])
        raise BenchError(f"{self.name}: rank {rank} ended with status {status}:\n{tail}")


def run_ranks(
    module: str,
    job: Mapping[str, Any],
    *,
    name: str,
    num_ranks: int,
    rate_bit_per_s: float | None = None,
    latency_s: float = 0.0,
    schedule: Schedule | None = None,
) -> Iterator[str]:
    """Start `num_ranks` processes of `module` and yield the lines that rank 0 writes.

    rate_bit_per_s  of every link of a lab; None: loopback
    latency_s       one way
    schedule        of the lab's links, in steps that rank 0 writes into the file `job["step_file"]`

    `started_ranks` has the other arguments. Raises BenchError if a rank ends early, LabError if the lab cannot be made.
    """
    with ExitStack() as stack:
        lab = None
        if rate_bit_per_s is not None:
            # A lab with rates only takes less processor time, and has the frames of stock hosts.
            link = LinkChange(rate_bit_per_s=rate_bit_per_s)
            if latency_s:
                link["latency_s"] = latency_s
            lab = stack.enter_context(Lab(num_ranks, **link))
        elif schedule is not None:
            lab = stack.enter_context(Lab(num_ranks, **schedule.events[0].change))
            step_file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "step"
            job = {**job, "step_file": str(step_file)}
            stack.enter_context(_played(schedule, lab, step_file))
        yield from stack.enter_context(started_ranks(module, job, name=name, num_ranks=num_ranks, lab=lab)).lines()


@contextmanager
def _played(schedule: Schedule, lab: Lab, step_file: Path) -> Iterator[None]:
    """Play `schedule` during the body. Raises LabError at its end if an action was refused."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        played = pool.submit(play, schedule, lab, step_file, lambda event: None, stop)
        try:
            yield
        finally:
            stop.set()
        played.result()


@contextmanager
def started_ranks(
    module: str, job: Mapping[str, Any], *, name: str, num_ranks: int, lab: Lab | None
) -> Iterator[Ranks]:
    """Start `num_ranks` processes of `module`, one per host of `lab` or all on loopback; they end with the body.

    module  runs `rank_process.run_rank`, which gets `job` with rank, ranks and store
    name    begins the message of an error
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Hosts of a lab share this folder: only their own temporary folders are private.
        shared = {"world_size": num_ranks, "store": str(folder / "store"), "is_loopback": lab is None}
        processes: list[subprocess.Popen[str]] = []
        for rank in range(num_ranks):
            argv = [sys.executable, "-m", module, json.dumps({**job, **shared, "rank": rank})]
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                "stderr": stack.enter_context((folder / f"rank{rank}.log").open("w")),
                "text": True,
            }
            process = subprocess.Popen(argv, **pipes) if lab is None else lab.popen(rank, argv, **pipes)
            stack.callback(_end, process)
            processes.append(process)
        yield Ranks(name=name, folder=folder, processes=processes)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    _close(process.stdin)
    _close(process.stdout)


def _close(pipe: IO[str] | None) -> None:
    if pipe is not None:
        # What was not yet written has no reader any more.
        with suppress(BrokenPipeError):
            pipe.close()

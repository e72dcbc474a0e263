"""Run a program in hosts of a lab, one process per host, or as a job on a Ray cluster of the lab."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cgx_ray.lab.handle import LabHandle
from cgx_ray.lab.ray_nodes import OWN_PROCESS_TREE, RayNodes, ray_env
from cgx_ray.lab.system import wait_for_first

_MASTER_PORT = 29500


def run_in_hosts(
    lab: LabHandle,
    hosts: Sequence[int],
    argv: Sequence[str],
    on_line: Callable[[int, str], None],
    env: Mapping[str, str],
) -> int:
    """Run a program in each of `hosts` at once. Return 0, or the status of the first that fails, which ends the others.

    on_line  called with the host and the line for each line of output; a single program writes to the terminal itself

    Process i gets the environment that torch.distributed ("env://") and torchrun read, as rank i of len(hosts). So
    `torchrun SCRIPT` needs no options.
    """
    started: list[subprocess.Popen[Any]] = []
    readers: list[threading.Thread] = []
    single: dict[str, Any] = {} if len(hosts) == 1 else {"stdin": subprocess.DEVNULL}
    pipes: dict[str, Any] = {} if len(hosts) == 1 else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        for rank, host in enumerate(hosts):
            where = _rank_env(rank, len(hosts), lab.hosts[hosts[0]].address)
            process = lab.popen(host, [*OWN_PROCESS_TREE, *argv], {**env, **where}, text=True, **single, **pipes)
            started.append(process)
            if process.stdout is not None:
                readers.append(threading.Thread(target=_forward_lines, args=(host, process, on_line), daemon=True))
                readers[-1].start()
        running = set(started)
        while running:
            process = wait_for_first(running)
            if process.returncode:
                return process.returncode
            running.discard(process)
        return 0
    finally:
        for process in started:
            process.kill()
            process.wait()
        for reader in readers:
            reader.join()


def run_on_ray(lab: LabHandle, argv: Sequence[str], log_dir: Path, cpus_per_node: int, env: Mapping[str, str]) -> int:
    """Start a Ray node in every host, submit the program as a job from host 0, and return its exit status.

    The job's output appears here. The job runs in this process's folder: hosts share the file system, so nothing is
    uploaded.
    """
    # A job finds this environment's `python`, as if it were activated.
    env = {**env, **ray_env(), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with ExitStack() as stack:
        nodes = stack.enter_context(RayNodes(lab, log_dir, cpus_per_node=cpus_per_node, takes_jobs=True, env=env))
        nodes.wait()
        submit = [*OWN_PROCESS_TREE, sys.executable, "-m", "ray.scripts.scripts", "job", "submit"]
        submit += ["--address", nodes.jobs_address, "--", "env", "-C", os.getcwd(), *argv]
        job = lab.popen(0, submit, env)
        stack.callback(job.wait)
        stack.callback(job.kill)
        return job.wait()


def _rank_env(rank: int, size: int, address: str) -> dict[str, str]:
    port = str(_MASTER_PORT)
    return {
        "CGX_LAB_RANK": str(rank),
        "CGX_LAB_SIZE": str(size),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "PET_NNODES": str(size),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": port,
    }


def _forward_lines(host: int, process: subprocess.Popen[str], on_line: Callable[[int, str], None]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            on_line(host, line)

"""Programs in the hosts of a lab, one a host or one for all, or a job on a Ray cluster of the lab."""

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
    """Run a program in each of `hosts` at once; when one fails the others are ended. Its exit status, or 0.

    on_line  gets each line that one writes, with its host; not when there is only one, which writes by itself

    Each has the environment that torch.distributed ("env://") and torchrun read, as rank i of len(hosts), so that
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
                readers.append(threading.Thread(target=_hand_on, args=(host, process, on_line), daemon=True))
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
    """Start a Ray node in every host, submit the program as a job from host 0, show what it writes. Its exit status.

    The job runs in this process's folder: hosts share the file system, so nothing is uploaded.
    """
    # `python` in a job is found as in an activated environment.
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


def _hand_on(host: int, process: subprocess.Popen[str], on_line: Callable[[int, str], None]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            on_line(host, line)

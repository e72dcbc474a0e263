"""Ray nodes that a test starts as processes of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from support.endings import living

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
# Without "disabled" Ray writes a token file to the user's home.
ENV = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def end_with_children(head: subprocess.Popen[bytes]) -> None:
    """End `head` and its children. It is frozen first, or it would report the end of its children."""
    head.send_signal(signal.SIGSTOP)
    while left := living(*(process.pid for process in psutil.Process(head.pid).children(recursive=True))):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)
    head.kill()
    head.wait()


class RayNodes:
    """A Ray cluster of nodes on this machine, each of which can be killed. `folder` is for logs.

    No other process of this machine finds it by itself, unlike one of `ray.cluster_utils`.
    """

    def __init__(self, folder: Path, temp_dir: str, num_cpus: int) -> None:
        """Start the head. Paths of Ray's sockets must be shorter than 107 characters, so `temp_dir` must be short."""
        self._folder, self._nodes = folder, list[subprocess.Popen[bytes]]()
        (gcs,) = free_ports(1)
        self.address = f"127.0.0.1:{gcs}"
        head = ["--head", f"--port={gcs}", f"--temp-dir={temp_dir}", "--include-dashboard=false"]
        self.head = self._start([*head, f"--num-cpus={num_cpus}"])

    def add_node(self, num_cpus: int) -> subprocess.Popen[bytes]:
        """Start another node."""
        return self._start([f"--address={self.address}", f"--num-cpus={num_cpus}"])

    def end(self) -> None:
        """Kill all nodes, the head last."""
        for node in reversed(self._nodes):
            if node.poll() is None:
                end_with_children(node)

    def _start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        argv = [*RAY, "start", "--block", "--node-ip-address=127.0.0.1", "--disable-usage-stats", *arguments]
        path = self._folder / f"node{len(self._nodes)}.log"
        with path.open("w") as log:
            node = subprocess.Popen([*argv, f"--object-store-memory={128 << 20}"], env=ENV, stdout=log, stderr=log)
        self._nodes.append(node)
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in path.read_text():
            assert node.poll() is None, path.read_text()
            assert time.monotonic() < deadline, path.read_text()
            time.sleep(0.2)
        return node

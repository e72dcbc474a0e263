"""Hosts as Linux network namespaces behind one switch, with a rate limit on every link.

    host 0 (cgx<pid>-0)      host 1 (cgx<pid>-1)   ...
      eth0 | tbf uplink        eth0 |
    ---------------------------------------
      v0   | tbf downlink      v1   |          bridge in a namespace of its own (cgx<pid>-sw)

Nothing touches the machine's own network. Each host has its own host name, /etc/hosts, process ids, temporary
folder and /dev/shm. All of it ends with this process: by `__exit__`, by parent-death signals when this process
is killed, and what even those leave behind is removed by the next lab that starts.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from cgx_ray.errors import LabError

_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "env", "mount")
_NAMESPACES = Path("/run/netns")
_RUN = Path("/run")
_OWNED = re.compile(r"cgx(\d+)-\w+")
_START_TIMEOUT_S = 20.0

# A network card: its own kernel waits instead of dropping, so the queue must hold what all sockets of a host
# may have in flight. Drops would make a rate change look like loss.
_QUEUE_BYTES = 16 << 20
# The largest GSO packet with the headers of its segments, 64 KiB + 45 * 66. With smaller bursts tbf cuts each, which
# costs CPU time; and one that is queued when the burst gets smaller than it never goes out, nor does what is behind it.
_MIN_BURST_BYTES = 80 << 10
_BURST_S = 0.001

_TRIAL = """
ip link add b type bridge && ip link add v0 type veth peer name v1
tc qdisc add dev lo root tbf rate 1mbit burst 32kb limit 64kb
"""

# Becomes process 1 of the host: when it dies, the kernel ends every process there. SIGCHLD is ignored so that
# orphans are reaped.
_INIT = """
set -e
echo "$1" > /proc/sys/kernel/hostname
ip link set lo up
# What stock hosts have; BBR, which some machines hand on, is 20 % over the bound at 100 Mbit/s. Without cubic, reno.
cc=/proc/sys/net/ipv4/tcp_congestion_control
{ echo cubic > $cc; } 2> /dev/null || echo reno > $cc
mount --bind "$2/hosts" /etc/hosts
if [ -e /etc/resolv.conf ]; then mount --bind "$2/resolv.conf" /etc/resolv.conf; fi
mount -t tmpfs -o mode=1777 tmpfs "$2/tmp"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
echo ready
exec env --ignore-signal=CHLD sleep infinity
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One emulated machine."""

    index: int
    name: str
    address: str
    namespace: str


class Lab:
    """`num_hosts` hosts behind a switch; a context manager.

    rate_bit_per_s  of every uplink and every downlink; `set_rate` changes it while traffic flows
    temp_dir        a path that exists in every host and is private to it: give it to programs as their temporary
                    folder

    Raises LabError if this machine cannot do it; `Lab.available()` says so beforehand.
    """

    def __init__(self, num_hosts: int, *, rate_bit_per_s: float) -> None:
        if not 1 <= num_hosts <= 64:
            raise LabError(f"num_hosts {num_hosts} is not allowed; give 1 to 64")
        prefix = f"cgx{os.getpid()}-"
        self.rate_bit_per_s = rate_bit_per_s
        self.switch = f"{prefix}sw"
        self.state_dir = _RUN / f"{prefix}lab"
        self.temp_dir = self.state_dir / "tmp"
        self.hosts = tuple(
            Host(index=i, name=f"cgx-host-{i}", address=f"10.77.0.{i + 1}", namespace=f"{prefix}{i}")
            for i in range(num_hosts)
        )
        self._holders: list[subprocess.Popen[str]] = []
        self._init_pids: list[int] = []
        self._started: list[subprocess.Popen[Any]] = []

    @staticmethod
    def available() -> str | None:
        """Why this machine cannot run a lab, or None if it can."""
        if platform.system() != "Linux":
            return f"a lab needs Linux, this is {platform.system()}"
        if os.geteuid() != 0:
            return "a lab needs root: network namespaces are made by `ip netns`"
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            return f"a lab needs {', '.join(missing)}; install iproute2, util-linux and coreutils"
        trial = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-ec", _TRIAL]
        done = subprocess.run(trial, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"a lab needs namespaces, veth and tbf, but: {done.stderr.strip()}"
        return None

    def __enter__(self) -> Lab:
        reason = Lab.available()
        if reason:
            raise LabError(reason)
        remove_leftovers()
        if self.state_dir.exists():
            raise LabError(f"{self.state_dir} exists: this process already runs a lab; leave that one first")
        try:
            self._write_files()
            self._make_network()
            for host in self.hosts:
                self._start_host(host)
            self.set_rate(self.rate_bit_per_s)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process in the lab and remove its namespaces. Can be called twice."""
        with uninterrupted():
            for holder in self._holders:
                holder.kill()
            for process in (*self._holders, *self._started):
                process.wait()
            for name in (*(host.namespace for host in self.hosts), self.switch):
                if (_NAMESPACES / name).exists():
                    _remove_namespace(name)
            shutil.rmtree(self.state_dir, ignore_errors=True)
            self._holders, self._init_pids, self._started = [], [], []

    def set_rate(self, bit_per_s: float) -> None:
        """Limit every uplink and downlink to `bit_per_s`, now, with traffic flowing."""
        if bit_per_s < 1e5:
            raise LabError(f"rate {bit_per_s:g} bit/s is not allowed; give at least 1e5 (100 kbit/s)")
        burst = max(_MIN_BURST_BYTES, int(bit_per_s / 8 * _BURST_S))
        shape = f"root tbf rate {int(bit_per_s)}bit burst {burst} limit {_QUEUE_BYTES}"
        for host in self.hosts:
            _tc_batch(host.namespace, [f"qdisc replace dev eth0 {shape}"])
        _tc_batch(self.switch, [f"qdisc replace dev v{host.index} {shape}" for host in self.hosts])
        self.rate_bit_per_s = bit_per_s

    def popen(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        **popen_options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a process in a host, in this process's folder; it ends with the lab.

        env            added to this process's environment
        popen_options  of `subprocess.Popen`: stdin, stdout, stderr, text ...

        The returned handle waits for the process and has its exit status; signals sent through it do not reach it.
        """
        enter = ["nsenter", "--target", str(self._init_pids[host]), "--net", "--mount", "--uts", "--pid"]
        # nsenter starts in /, so the folder has to be entered again inside.
        inside = ["env", "-C", os.getcwd(), f"TMPDIR={self.temp_dir}"]
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *enter, *inside, *argv],
            env={**os.environ, **(env or {})},
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the lab in order
            **popen_options,
        )
        self._started.append(process)
        return process

    def _write_files(self) -> None:
        self.temp_dir.mkdir(parents=True)
        names = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        (self.state_dir / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        # No name server: a look-up that the hosts file does not answer fails at once instead of after 10 s.
        (self.state_dir / "resolv.conf").write_text("")

    def _make_network(self) -> None:
        _run("ip", "netns", "add", self.switch)
        lines = ["link add br0 type bridge", "link set br0 up"]
        for host in self.hosts:
            _run("ip", "netns", "add", host.namespace)
            port = f"v{host.index}"
            lines.append(f"link add {port} type veth peer name eth0 netns {host.namespace}")
            lines.append(f"link set {port} master br0 up")
        _run("ip", "-netns", self.switch, "-batch", "-", text="\n".join(lines))
        for host in self.hosts:
            lines = [f"address add {host.address}/24 dev eth0", "link set eth0 up"]
            _run("ip", "-netns", host.namespace, "-batch", "-", text="\n".join(lines))

    def _start_host(self, host: Host) -> None:
        argv = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", host.namespace]
        argv += ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        argv += ["sh", "-c", _INIT, "init", host.name, str(self.state_dir)]
        holder = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        with holder.stdout:
            first = holder.stdout.readline().strip()
        if first != "ready":
            raise LabError(f"host {host.index} did not start: {first or 'no output'}")
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        self._init_pids.append(int(children[0]))


def remove_leftovers() -> None:
    """Remove labs whose process is gone: their processes, namespaces and files."""
    names = [path.name for path in (*_NAMESPACES.glob("cgx*-*"), *_RUN.glob("cgx*-lab"))]
    for name in names:
        match = _OWNED.fullmatch(name)
        if match is None or _is_alive(int(match[1])):
            continue
        if (_NAMESPACES / name).exists():
            _remove_namespace(name)
        else:
            shutil.rmtree(_RUN / name, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _remove_namespace(name: str) -> None:
    """End the processes in it, wait until they are gone, delete it."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while pids := _run("ip", "netns", "pids", name).split():
        for pid in pids:
            if _is_alive(int(pid)):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabError(f"processes {', '.join(pids)} in namespace {name} do not end; end them by hand")
        time.sleep(0.02)
    _run("ip", "netns", "delete", name)


def _tc_batch(namespace: str, lines: list[str]) -> None:
    _run("tc", "-netns", namespace, "-batch", "-", text="\n".join(lines))


def _run(*argv: str, text: str = "") -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the body is done: half a teardown leaves namespaces behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)

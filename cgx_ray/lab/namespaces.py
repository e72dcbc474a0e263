"""Hosts as Linux network namespaces behind one switch.

    host 0 (cgx<pid>-0)      host 1 (cgx<pid>-1)   ...
      eth0 | uplink            eth0 |
    ---------------------------------------
           | downlink               |             the switch, in a namespace of its own (cgx<pid>-sw)

The machine's own network stays as it is. Each host has its own host name, /etc/hosts, process ids, temporary folder and
/dev/shm. A lab ends with this process: by `__exit__`, or by parent-death signals when this process is killed. The next
lab that starts removes the rest.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Unpack

from cgx_ray.errors import LabConfigError, LabError
from cgx_ray.lab.handle import OWNED, RUN, Host, LabHandle, owner_lives
from cgx_ray.lab.link import DIRECTIONS, LinkChange, LinkState
from cgx_ray.lab.switch import SwitchNetwork, program
from cgx_ray.lab.system import NAMESPACES, ip_batch, remove_namespace, run, start_time, wait_for_first

__all__ = ["Host", "Lab", "LinkState", "remove_leftovers", "uninterrupted"]

_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "env", "mount")
_TRIAL = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-ec"]
_HAS_HTB = "tc qdisc add dev lo root handle 1: htb default 1"
_HAS_VETH = "ip link add br0 type bridge && ip link add v0 type veth peer name v1"
_TRIALS = {
    "netem": f"{_HAS_VETH} && {_HAS_HTB} && tc qdisc add dev v0 root netem delay 1ms",
    "switch": f"{_HAS_HTB} && : < /dev/net/tun",
    "tc": f"{_HAS_VETH} && {_HAS_HTB}",
}

# Becomes process 1 of the host: when it dies, the kernel ends every process there. SIGCHLD is ignored, so the kernel
# reaps orphans. TCP windows of up to 256 MB fill fast links with high latency. Congestion control is cubic, as on stock
# hosts, or reno: BBR, which a namespace inherits on some machines, takes 20 % longer than the bound at 100 Mbit/s.
_INIT = """
set -e
echo "$1" > /proc/sys/kernel/hostname
ip link set lo up
cd /proc/sys/net/ipv4
echo "4096 131072 268435456" > tcp_rmem
echo "4096 65536 268435456" > tcp_wmem
{ echo cubic > tcp_congestion_control; } 2> /dev/null || echo reno > tcp_congestion_control
# The switch handles IPv4 only; packets of IPv6 would show up in its counters as drops.
if [ -e ../ipv6/conf/eth0 ]; then echo 1 > ../ipv6/conf/eth0/disable_ipv6; fi
cd /
mount --bind "$2/hosts" /etc/hosts
if [ -e /etc/resolv.conf ]; then mount --bind "$2/resolv.conf" /etc/resolv.conf; fi
mount -t tmpfs -o mode=1777 tmpfs "$2/tmp"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
echo ready
exec env --ignore-signal=CHLD sleep infinity
"""


class Lab(LabHandle):
    """`num_hosts` hosts behind a switch, as a context manager. `link`: fields of `LinkState`, for all links at first.

        with Lab(4, rate_bit_per_s=1e9, latency_s=5e-3) as lab:
            lab.set(host=2, direction="up", rate_bit_per_s=1e8)

    seed  seed of loss and jitter

    If only a rate is given, only rates can be changed later on a kernel without netem. Raises LabError if this machine
    cannot run a lab; `Lab.available()` tells the reason beforehand.
    """

    def __init__(self, num_hosts: int, *, seed: int = 0, **link: Unpack[LinkChange]) -> None:
        if not 1 <= num_hosts <= 64:
            raise LabConfigError(f"num_hosts {num_hosts} is not allowed; give 1 to 64")
        self._first_link = LinkState(**link)
        self._rates_only = link.keys() == {"rate_bit_per_s"}
        self._seed = seed
        self._held: list[subprocess.Popen[str]] = []
        super().__init__(os.getpid(), num_hosts, "tc")

    @staticmethod
    def available(*, rates_only: bool = True) -> str | None:
        """Return the reason why this machine cannot run a lab, with rates only or with everything; None if it can."""
        try:
            choose_backend(rates_only=rates_only)
        except LabError as error:
            return str(error)
        return None

    def __enter__(self) -> Lab:
        backend = choose_backend(rates_only=self._rates_only)
        remove_leftovers()
        if self.state_dir.exists():
            raise LabError(f"{self.state_dir} exists: this process already runs a lab; end that one first")
        super().__init__(self.pid, len(self.hosts), backend)
        try:
            self._write_files()
            self._make_network()
            init_pids = [self._start_host(host) for host in self.hosts]
            link = asdict(self._first_link)
            links = [dict.fromkeys(DIRECTIONS, link) for _ in self.hosts]
            connected = [True] * len(self.hosts)
            self._write({"backend": backend, "links": links, "connected": connected, "init_pids": init_pids})
            self.set()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(self) -> None:
        """Wait until a process of the lab ends, which none should. Raises LabError then."""
        ended = wait_for_first(self._held)
        raise LabError(f"the lab fell apart: {ended.args!r} ended with status {ended.returncode}")

    def close(self) -> None:
        """End every process in the lab and remove its namespaces. A second call does nothing."""
        with uninterrupted():
            for process in self._held:
                process.kill()
            for process in (*self._held, *self._started):
                process.wait()
            for name in (*(host.namespace for host in self.hosts), self.switch):
                if (NAMESPACES / name).exists():
                    remove_namespace(name)
            shutil.rmtree(self.state_dir, ignore_errors=True)
            self._held, self._started = [], []

    def _write_files(self) -> None:
        self.temp_dir.mkdir(parents=True)
        (self.state_dir / "owner").write_text(start_time(self.pid) or "")
        names = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        (self.state_dir / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        # No name server: a name that the hosts file lacks fails at once instead of after 10 s.
        (self.state_dir / "resolv.conf").write_text("")

    def _make_network(self) -> None:
        for name in (self.switch, *(host.namespace for host in self.hosts)):
            run("ip", "netns", "add", name)
        if isinstance(self._network, SwitchNetwork):
            self._held.append(self._network.make(self._seed))
        else:
            self._network.make()
        for host in self.hosts:
            ip_batch(host.namespace, [f"address add {host.address}/24 dev eth0", "link set eth0 up"])

    def _start_host(self, host: Host) -> int:
        argv = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", host.namespace]
        argv += ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        argv += ["sh", "-c", _INIT, "init", host.name, str(self.state_dir)]
        holder = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._held.append(holder)
        assert holder.stdout is not None
        with holder.stdout:
            first = holder.stdout.readline().strip()
        if first != "ready":
            raise LabError(f"host {host.index} did not start: {first or 'no output'}")
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        return int(children[0])


def choose_backend(*, rates_only: bool) -> str:
    """Return the back end for a lab that sets rates only, or everything. Raises LabError if there is none.

    Everything: "tc" if the kernel has netem, else "switch". Rates only: "tc", which takes less processor time.
    """
    if platform.system() != "Linux":
        raise LabError(f"a lab needs Linux, this is {platform.system()}")
    if os.geteuid() != 0:
        raise LabError("a lab needs root, because it makes network namespaces")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise LabError(f"a lab needs {', '.join(missing)}; install iproute2, util-linux and coreutils")
    reasons = []
    for name in ("tc",) if rates_only else ("netem", "switch"):
        done = subprocess.run([*_TRIAL, _TRIALS[name]], capture_output=True, text=True, check=False)
        if done.returncode == 0 and (name != "switch" or program() is not None):
            return "switch" if name == "switch" else "tc"
        reasons.append(f"{name}: {done.stderr.strip() or 'cgx-switch was not built'}")
    needed = "veth and htb" if rates_only else "htb and either netem or /dev/net/tun"
    raise LabError(f"a lab needs namespaces, {needed}, but: {'; '.join(reasons)}")


def remove_leftovers() -> None:
    """Remove the processes, namespaces and files of labs whose process is gone."""
    names = [path.name for path in (*NAMESPACES.glob("cgx*-*"), *RUN.glob("cgx*-lab"))]
    for name in names:
        match = OWNED.fullmatch(name)
        if match is None or owner_lives(int(match[1])):
            continue
        if (NAMESPACES / name).exists():
            remove_namespace(name)
        else:
            shutil.rmtree(RUN / name, ignore_errors=True)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM during the body: an interrupted teardown leaves namespaces behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

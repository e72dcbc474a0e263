"""A running lab, whichever process started it: change its links, start programs in its hosts."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from cgx_ray.errors import LabError
from cgx_ray.lab.link import DIRECTIONS, Direction, LinkChange, LinkState
from cgx_ray.lab.switch import Counters, SwitchNetwork
from cgx_ray.lab.system import start_time
from cgx_ray.lab.tc import TcNetwork

RUN = Path("/run")
OWNED = re.compile(r"cgx(\d+)-\w+")


def owner_lives(pid: int) -> bool:
    """Return True if the process that made a lab still runs. Another process may have got its number since."""
    now = start_time(pid)
    owner = RUN / f"cgx{pid}-lab" / "owner"
    return now is not None and (not owner.exists() or owner.read_text() == now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One emulated machine."""

    index: int
    name: str
    address: str
    namespace: str


class LabHandle:
    """The lab that process `pid` runs. `backend` is "switch" or "tc".

    temp_dir   path that exists in every host and is private to it: the temporary folder of programs there
    """

    def __init__(self, pid: int, num_hosts: int, backend: str) -> None:
        prefix = f"cgx{pid}-"
        self.pid = pid
        self.backend = backend
        self.state_dir = RUN / f"{prefix}lab"
        self.temp_dir = self.state_dir / "tmp"
        self.hosts = tuple(
            Host(index=i, name=f"cgx-host-{i}", address=f"10.77.0.{i + 1}", namespace=f"{prefix}{i}")
            for i in range(num_hosts)
        )
        self.switch = f"{prefix}sw"
        namespaces = [host.namespace for host in self.hosts]
        self._network: TcNetwork | SwitchNetwork
        if backend == "tc":
            self._network = TcNetwork(self.switch, namespaces)
        else:
            self._network = SwitchNetwork(self.switch, namespaces, self.state_dir / "switch.sock")
        self._started: list[subprocess.Popen[Any]] = []

    @staticmethod
    def running() -> list[int]:
        """Return the ids of the processes that run a lab."""
        names = [OWNED.fullmatch(path.parent.name) for path in RUN.glob("cgx*-lab/lab.json")]
        return sorted(pid for name in names if name and owner_lives(pid := int(name[1])))

    @staticmethod
    def find(pid: int | None = None) -> LabHandle:
        """Return the lab of process `pid`, by default the only one. Raises LabError if there is none, or several."""
        pids = LabHandle.running()
        if pid is None and len(pids) > 1:
            raise LabError(f"{len(pids)} labs are up; give one of them: --lab {' or '.join(map(str, pids))}")
        if not pids or (pid is not None and pid not in pids):
            raise LabError("no lab is up" + (f" in process {pid}" if pid else "") + "; start one: cgx-ray lab up")
        pid = pids[0] if pid is None else pid
        state = json.loads((RUN / f"cgx{pid}-lab" / "lab.json").read_text())
        return LabHandle(pid, len(state["links"]), state["backend"])

    def link(self, host: int, direction: Direction) -> LinkState:
        return LinkState(**self._state()["links"][host][direction])

    def is_connected(self, host: int) -> bool:
        return bool(self._state()["connected"][host])

    def set(self, host: int | None = None, direction: Direction | None = None, **change: Unpack[LinkChange]) -> None:
        """Change links now, while traffic flows: of one host or all, in one direction or both."""
        if host is not None:
            self.check(host)
        with self._changed() as state:
            for index in range(len(self.hosts)) if host is None else (host,):
                for one_way in DIRECTIONS if direction is None else (direction,):
                    link = replace(LinkState(**state["links"][index][one_way]), **change)
                    self._network.set(index, one_way, link)
                    state["links"][index][one_way] = asdict(link)

    def set_rate(self, bit_per_s: float) -> None:
        """Limit every uplink and downlink to `bit_per_s` now, while traffic flows."""
        self.set(rate_bit_per_s=bit_per_s)

    def cut(self, host: int) -> None:
        """Lose all packets to and from the host, until `reconnect`. The host sees no interface go down."""
        self._connect(host, False)

    def reconnect(self, host: int) -> None:
        self._connect(host, True)

    def counters(self) -> Counters:
        """Return packets, drops and lateness. Raises LabError for back end tc, which measures no lateness."""
        return self._switch().counters()

    def clear_counters(self) -> None:
        self._switch().clear_counters()

    def popen(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **popen_options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process in a host, in this process's folder; it ends with the lab and with this process.

        env            added to this process's environment
        popen_options  options of `subprocess.Popen`: stdin, stdout, stderr, text ...

        The returned handle can wait for the process and `kill` it, and has its exit status. Other signals do not reach
        the process.
        """
        die = ["setpriv", "--pdeathsig", "KILL"]
        init_pid = self._state()["init_pids"][self.check(host)]
        enter = ["nsenter", "--target", str(init_pid), "--net", "--mount", "--uts", "--pid"]
        # nsenter starts in /, so `env -C` enters the folder again. nsenter also forks, so the program needs a
        # parent-death signal of its own.
        inside = [*die, "env", "-C", os.getcwd(), f"TMPDIR={self.temp_dir}"]
        process = subprocess.Popen(
            [*die, *enter, *inside, *argv],
            env={**os.environ, **(env or {})},
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the lab in order
            **popen_options,
        )
        self._started.append(process)
        return process

    def check(self, host: int) -> int:
        """Return `host`. Raises LabError if the lab does not have it."""
        if not 0 <= host < len(self.hosts):
            raise LabError(f"host {host} is not in the lab; it has 0 to {len(self.hosts) - 1}")
        return host

    def _connect(self, host: int, is_connected: bool) -> None:
        self.check(host)
        with self._changed() as state:
            self._network.connect(host, is_connected)
            state["connected"][host] = is_connected

    def _switch(self) -> SwitchNetwork:
        if not isinstance(self._network, SwitchNetwork):
            raise LabError("back end tc has no counters of its own; run `tc -s qdisc` in the namespaces")
        return self._network

    def _state(self) -> dict[str, Any]:
        """Return links, connections and first processes of the hosts, as the last change left them."""
        try:
            state: dict[str, Any] = json.loads((self.state_dir / "lab.json").read_text())
        except FileNotFoundError:
            raise LabError("the lab is not up, or has ended") from None
        return state

    def _write(self, state: dict[str, Any]) -> None:
        new = self.state_dir / "lab.json.new"
        new.write_text(json.dumps(state, indent=1))
        new.replace(self.state_dir / "lab.json")

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        """Yield the state to change, to one process at a time, and write it even if the body raises."""
        try:
            folder = os.open(self.state_dir, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise LabError("the lab is not up, or has ended") from None
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            state = self._state()
            try:
                yield state
            finally:
                self._write(state)
        finally:
            os.close(folder)

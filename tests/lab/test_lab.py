"""The lab: real namespaces, real sockets. Needs root; `Lab.available()` names the reason if a test is skipped."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.emulated import needs_lab

from cgx_ray.errors import LabError
from cgx_ray.lab.namespaces import Lab, remove_leftovers
from cgx_ray.lab.ray_nodes import RayNodes

NEEDS_LAB = needs_lab()

_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""
# Times from the first piece to the last, so that starting Python does not count.
_RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    first = len(connection.recv(1 << 20)); start = time.perf_counter(); received = 0
    while piece := connection.recv(1 << 20):
        received += len(piece)
    print(received * 8 / (time.perf_counter() - start), flush=True)
"""
_SEND_ON = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    while True:
        connection.sendall(bytes(1 << 20))
"""
# Writes a dot per megabyte.
_RECEIVE_ON = """
import os, socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    os.write(1, b"ready")
    connection, _ = server.accept()
    received = 0
    while piece := connection.recv(1 << 20):
        os.write(1, b"." * ((received + len(piece) >> 20) - (received >> 20)))
        received += len(piece)
"""


def measure_bit_per_s(lab: Lab, num_bytes: int) -> float:
    address = lab.hosts[1].address
    receiver = lab.popen(1, [sys.executable, "-c", _RECEIVE, address], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout.readline() == "ready\n"
    sender = lab.popen(0, [sys.executable, "-c", _SEND, address, str(num_bytes)])
    rate = float(receiver.stdout.readline())
    receiver.stdout.close()
    assert (sender.wait(), receiver.wait()) == (0, 0)
    return rate


def namespaces_of(pid: int) -> list[str]:
    return sorted(path.name for path in Path("/run/netns").glob(f"cgx{pid}-*"))


@NEEDS_LAB
def test_links_have_the_set_rate_and_a_new_one_holds_at_once():
    with Lab(2, rate_bit_per_s=200e6) as lab:
        fast = measure_bit_per_s(lab, 10_000_000)
        lab.set_rate(40e6)
        slow = measure_bit_per_s(lab, 4_000_000)
    # tbf counts whole frames, of which payload is 95 %. A busy machine lowers the rate; the burst raises it.
    assert 100e6 < fast < 205e6, f"200 Mbit/s set, {fast / 1e6:.0f} measured"
    assert 20e6 < slow < 43e6, f"40 Mbit/s set, {slow / 1e6:.0f} measured"


@NEEDS_LAB
def test_traffic_goes_on_whenever_the_rate_is_lowered():
    with Lab(2, rate_bit_per_s=1e9) as lab:
        address = lab.hosts[1].address
        receiver = lab.popen(1, [sys.executable, "-c", _RECEIVE_ON, address], stdout=subprocess.PIPE)
        assert receiver.stdout.read(5) == b"ready"
        lab.popen(0, [sys.executable, "-c", _SEND_ON, address])
        for change in range(24):
            lab.set_rate(500e6 if change % 2 else 1e9)
            received_mb = 0
            while received_mb < 6:
                ready, _, _ = select.select([receiver.stdout], [], [], 20)
                assert ready, f"nothing gets through after change {change}"
                received_mb += len(os.read(receiver.stdout.fileno(), 1 << 16))
        receiver.stdout.close()


@NEEDS_LAB
def test_a_host_has_its_own_name_processes_and_temporary_folder():
    script = 'cat /proc/sys/kernel/hostname; touch "$TMPDIR/x" /dev/shm/cgx-x; ls /proc | grep -c "^[0-9]"; pwd; exit 3'
    with Lab(2, rate_bit_per_s=1e9) as lab:
        process = lab.popen(1, ["sh", "-c", script], stdout=subprocess.PIPE, text=True)
        name, num_processes, folder = process.communicate()[0].split()
        assert process.returncode == 3
        assert name == lab.hosts[1].name
        assert int(num_processes) < 10
        assert folder == str(Path.cwd())
        assert list(lab.temp_dir.iterdir()) == []
        assert not Path("/dev/shm/cgx-x").exists()


@NEEDS_LAB
def test_nothing_is_left_when_the_body_raises():
    lab = Lab(2, rate_bit_per_s=1e9)
    with contextlib.suppress(ZeroDivisionError), lab:
        process = lab.popen(0, ["sleep", "1000"])
        assert len(namespaces_of(os.getpid())) == 3
        raise ZeroDivisionError
    assert process.returncode is not None
    assert namespaces_of(os.getpid()) == []
    assert not lab.state_dir.exists()


@NEEDS_LAB
def test_what_a_killed_owner_leaves_is_removed_by_the_next_start():
    code = (
        "import time; from cgx_ray.lab.namespaces import Lab;"
        "lab = Lab(2, rate_bit_per_s=1e9, latency_s=0).__enter__();"
        "lab.popen(1, ['sleep', '1000']); print('ready', flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "ready\n"
        inside = psutil.Process(owner.pid).children(recursive=True)
        assert len(inside) >= 4
        owner.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(inside, timeout=60)
    assert not alive, "a parent-death signal ends everything in the lab"
    assert len(namespaces_of(owner.pid)) == 3, "names outlive a killed owner: this test would prove nothing"
    remove_leftovers()
    assert namespaces_of(owner.pid) == []
    assert not Path(f"/run/cgx{owner.pid}-lab").exists()


@NEEDS_LAB
def test_a_running_owners_lab_is_not_removed():
    with Lab(1, rate_bit_per_s=1e9):
        remove_leftovers()
        assert len(namespaces_of(os.getpid())) == 2


@NEEDS_LAB
def test_two_labs_in_one_process_are_one_clear_error():
    with Lab(1, rate_bit_per_s=1e9), pytest.raises(LabError, match="already runs a lab"):
        Lab(1, rate_bit_per_s=1e9).__enter__()


def test_without_root_there_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root"):
        Lab(2, rate_bit_per_s=1e9).__enter__()


def test_bad_arguments_are_refused():
    with pytest.raises(LabError, match="give 1 to 64"):
        Lab(0, rate_bit_per_s=1e9)
    with pytest.raises(LabError, match="at least 1e5"):
        Lab(1, rate_bit_per_s=0)


@NEEDS_LAB
@pytest.mark.slow
def test_a_ray_node_that_does_not_start_shows_its_log(tmp_path):
    start = time.monotonic()
    with (
        Lab(1, rate_bit_per_s=1e9) as lab,
        pytest.raises(LabError, match=r"(?s)host 0 (ended at start|does not answer):.*'CPU': -1"),
        RayNodes(lab, tmp_path, cpus_per_node=-1) as nodes,
    ):
        nodes.wait()
    assert time.monotonic() - start < 60

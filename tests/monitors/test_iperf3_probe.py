"""iperf3's library in processes of its own: what it finds, how it fails, and that no process is left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from cgx_ray.monitors import iperf3_probe, iperf3_process
from cgx_ray.monitors.iperf3_probe import Iperf3Server, measure_iperf3

HOST = "127.0.0.1"
BLOCK_BYTES = 1 << 17
# Far more than socket buffers hold, so that the server has read most of it when the client has written all.
MANY_BYTES = 200_000_000
PROGRAM = [sys.executable, "-P", iperf3_process.__file__]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", [HOST, "::1"] if has_ipv6() else [HOST])
def test_a_server_measures_once(host: str) -> None:
    with closing(Iperf3Server(host, host)) as server:
        assert server.address[0] == host
        assert measure_iperf3(*server.address, MANY_BYTES, host) > 0
        with pytest.raises(OSError, match=f"iperf3 to {host}:{server.address[1]}: .*refused"):
            measure_iperf3(*server.address, 1000, host)


@pytest.mark.parametrize("num_bytes", [1000, 3_000_000])
def test_a_client_sends_its_bytes_and_less_than_a_block_more(num_bytes: int) -> None:
    with closing(Iperf3Server(HOST, HOST)) as server:
        words = ["client", HOST, str(server.address[1]), str(num_bytes), "5", HOST]
        with subprocess.Popen([*PROGRAM, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            found = json.loads(client.stdout.readline())
    assert num_bytes <= found["sent_bytes"] < num_bytes + BLOCK_BYTES


def test_two_servers_of_a_node_have_ports_of_their_own() -> None:
    with closing(Iperf3Server(HOST, HOST)) as one, closing(Iperf3Server(HOST, HOST)) as other:
        assert one.address != other.address
        assert measure_iperf3(*one.address, MANY_BYTES, HOST) > 0
        assert measure_iperf3(*other.address, MANY_BYTES, HOST) > 0


def test_an_address_of_another_node_is_an_error() -> None:
    with pytest.raises(OSError, match=r"iperf3 server on 192\.0\.2\.1: unable to start listener"):
        Iperf3Server("192.0.2.1", HOST)


def test_a_port_where_nobody_listens_is_refused() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(OSError, match=f"iperf3 to {HOST}:{port}: unable to connect to server: Connection refused"):
        measure_iperf3(HOST, port, 1000, HOST)


def test_a_server_that_dies_in_the_middle_is_an_error() -> None:
    server = Iperf3Server(HOST, HOST)
    errors: list[OSError] = []

    def measure() -> None:
        try:
            measure_iperf3(*server.address, 1 << 50, HOST)
        except OSError as error:
            errors.append(error)

    client = threading.Thread(target=measure)
    client.start()
    # One connection is for control, the other for data.
    while client.is_alive() and num_connections(server.address[1]) < 2:
        time.sleep(0.01)
    server.close()
    client.join()
    assert f"iperf3 to {HOST}:{server.address[1]}: " in str(errors[0]), errors


def num_connections(port: int) -> int:
    return sum(
        connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port
        for connection in psutil.net_connections("tcp4")
    )


def test_a_server_that_does_not_answer_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iperf3_probe, "ANSWER_TIMEOUT_S", 0.5)
    with socket.create_server((HOST, 0)) as silent, pytest.raises(TimeoutError, match=r"took longer than 0\.5 s"):
        measure_iperf3(HOST, silent.getsockname()[1], 1000, HOST)


def test_libiperf_that_ends_its_process_is_an_error() -> None:
    process = piped([sys.executable, "-c", "import sys; sys.exit('first line\\nlast line')"])
    with pytest.raises(OSError, match="iperf3: its process ended with 1 and no answer; last line"):
        iperf3_probe._answer(process, "iperf3", "version")


@pytest.mark.parametrize(("line", "cause"), [("no JSON", "is not JSON"), ('{"part": 1}', "has no 'port'")])
def test_a_server_with_a_wrong_answer_is_an_error_and_ends(
    line: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"import time; print({line!r}, flush=True); time.sleep(60)"
    monkeypatch.setattr(iperf3_probe, "_start", lambda *words: piped([sys.executable, "-c", program]))
    with pytest.raises(OSError, match=f"iperf3 server on {HOST}: its process answered .*{cause}"):
        Iperf3Server(HOST, HOST)


def piped(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_iperf3_is_tried_again_after_a_time_out_and_after_a_process_that_could_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = iperf3_probe._start
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]

    def refused(*words: str) -> subprocess.Popen[bytes]:
        raise BlockingIOError("no more processes")

    iperf3_probe._loads.cache_clear()
    monkeypatch.setattr(iperf3_probe, "ANSWER_TIMEOUT_S", 0.2)
    for failing in (lambda *words: piped(sleeping), refused):
        monkeypatch.setattr(iperf3_probe, "_start", failing)
        assert not iperf3_probe.available()
    monkeypatch.setattr(iperf3_probe, "ANSWER_TIMEOUT_S", 20.0)
    monkeypatch.setattr(iperf3_probe, "_start", start)
    assert iperf3_probe.available()


def test_a_parent_that_is_killed_takes_its_processes_along() -> None:
    with socket.create_server((HOST, 0)) as silent:
        words = [HOST, str(silent.getsockname()[1])]
        with subprocess.Popen([sys.executable, "-c", _PARENT, *words], stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"serving\n"
            client, _ = silent.accept()  # the other process is at work, too
            children = psutil.Process(parent.pid).children()
            parent.kill()
        assert len(children) == 2, children
        client.close()
    gone, left = psutil.wait_procs(children, timeout=60)
    assert not left, left
    assert len(gone) == 2


_PARENT = """
import sys
from cgx_ray.monitors.iperf3_probe import Iperf3Server, measure_iperf3
server = Iperf3Server(sys.argv[1], sys.argv[1])
print("serving", flush=True)
measure_iperf3(sys.argv[1], int(sys.argv[2]), 1000, sys.argv[1])
"""


def test_without_libiperf_one_line_says_what_to_install_and_tcp_measures(tmp_path: Path) -> None:
    (tmp_path / "libiperf.so.0").write_text("no library")
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, HOST],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {"served": [None, None], "tools": ["tcp", "tcp"]}
    (line,) = done.stderr.splitlines()
    assert "apt-get install libiperf0" in line


_WITHOUT = """
import json, sys
from cgx_ray.monitors.probe import Prober
here, there = Prober(sys.argv[1]), Prober(sys.argv[1])
served = [there.start_iperf3(sys.argv[1]) for _ in range(2)]
# A node that has libiperf serves it nevertheless.
tools = [here.probe(*there.addresses(), (sys.argv[1], 1)).tool for _ in range(2)]
print(json.dumps({"served": served, "tools": tools}))
here.close()
there.close()
"""

"""CGX_PORTS: ranks and monitors listen within a range of ports, and say what is wrong with one that cannot do."""

from __future__ import annotations

import re
import socket
from contextlib import closing

import pytest
import torch.distributed as dist
from support.meshes import TIMEOUT_S, close_all, in_threads
from support.ranks import run_ranks
from support.strangers import honest_rate

from cgx_ray import ports
from cgx_ray.collectives.transport.tcp import connect_mesh, connect_mesh_by_store, node_address
from cgx_ray.errors import ConfigError
from cgx_ray.monitors.iperf3_probe import Iperf3Server, measure_iperf3
from cgx_ray.monitors.probe import BulkServer, Prober
from cgx_ray.monitors.round_trip import EchoServer, round_trip_s

HOST = "127.0.0.1"


@pytest.fixture
def free() -> int:
    """First of eight ports that no process listens on, below those that the kernel picks."""
    for first in range(12000, 20000, 8):
        try:
            for port in range(first, first + 8):
                socket.create_server((HOST, port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no eight free ports from 12000 to 20000")


def use(monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> None:
    monkeypatch.setenv(ports.VARIABLE, f"{first}-{last}")


@pytest.mark.parametrize("text", ["20000", "20000-", "a-b", "20999-20000", "80-90", "60000-70000", "-1-5", "1;2"])
def test_a_range_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ports.VARIABLE, text)
    with pytest.raises(ConfigError, match=rf"^CGX_PORTS '{text}' is not allowed; give the first and the last port"):
        ports.port_range()


@pytest.mark.parametrize("text", ["", "  "])
def test_without_a_range_the_kernel_picks(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ports.VARIABLE, text)
    assert ports.port_range() == ports.ANY
    assert ports.free_port(HOST) == 0
    with ports.listen(HOST) as found:
        assert found.getsockname()[1] > 0


def test_a_port_in_use_is_passed_over_and_when_all_are_one_error_says_so(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, free, free + 1)
    with ports.listen(HOST) as first, ports.listen(HOST) as second:
        assert [one.getsockname()[1] for one in (first, second)] == [free, free + 1]
        with pytest.raises(ConfigError) as error:
            ports.listen(HOST)
    assert str(error.value) == (
        f"all ports from {free} to {free + 1} are in use on 127.0.0.1; "
        "give CGX_PORTS at least one port per rank of the node and 5 for its monitors"
    )


def test_an_address_of_another_machine_stays_that_error(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, free, free + 7)
    with pytest.raises(OSError, match="assign requested address"):
        EchoServer("192.0.2.1")


def test_monitors_listen_in_the_range(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, free, free + 7)
    servers = EchoServer(HOST), BulkServer(HOST), Iperf3Server(HOST, HOST)
    with closing(servers[0]) as echo, closing(servers[1]) as bulk, closing(servers[2]) as iperf3:
        assert [server.address[1] for server in (echo, bulk, iperf3)] == [free, free + 1, free + 2]
        assert round_trip_s(*echo.address) > 0
        assert honest_rate(bulk.address) > 0
        assert measure_iperf3(*iperf3.address, 200_000_000, HOST) > 0


def test_without_a_port_for_iperf3_a_prober_goes_on_over_tcp(
    free: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, free, free + 1)
    with closing(Prober(HOST)) as prober:
        assert prober.start_iperf3(HOST) is None
        assert f"go over TCP without iperf3: all ports from {free} to {free + 1} are in use" in caplog.text


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def test_ranks_take_the_first_free_ports_and_take_them_again(
    free: int, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time, connections of the first are still open or waiting for their end at the same ports."""
    use(monkeypatch, free, free + 1)
    kept = []
    for time in ("first", "second", "third"):
        at = dist.PrefixStore(time, store)
        meshes = in_threads([lambda r=rank, s=at: connect_mesh_by_store(s, r, 2, TIMEOUT_S) for rank in range(2)])
        assert {mesh.port for mesh in meshes} == {free, free + 1}
        kept += meshes
        if time == "second":
            close_all(meshes)
    close_all(kept)


def _connect_with_a_port_for_one(rank: int, port: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        use(patch, port, port)
        blocker = ports.listen(node_address()) if rank == 1 else None
        dist.barrier()
        if rank != 1:
            use(patch, port + 1, port + 7)
        with pytest.raises(ConfigError) as error:
            connect_mesh(dist.group.WORLD, TIMEOUT_S)
        if blocker is not None:
            blocker.close()
    return str(error.value)


def test_all_ranks_say_which_has_no_port_left(free: int) -> None:
    """Ranks that could listen must not wait for the one that cannot until the time-out of the group."""
    for message in run_ranks(3, _connect_with_a_port_for_one, free):
        assert re.match(
            rf"rank 1 cannot be reached: all ports from {free} to {free} are in use on \S+; give CGX_PORTS at least",
            message,
        ), message

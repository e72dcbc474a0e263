"""Shared memory between ranks of one host: who shares, where there is no room, and what is left behind."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import log_lines, run_ranks
from support.shared_memory import FOLDER, TIMEOUT_S, connect, left_behind
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives import Transport
from cgx_ray.collectives.transport.transport_like import finish_all
from cgx_ray.errors import ConfigError
from cgx_ray.runtime_ext.shm import Segment
from cgx_ray.session.attachment import process
from cgx_ray.session.settings import Settings


def test_a_segment_is_private_to_its_user_and_has_no_name_once_unlinked() -> None:
    segment = Segment(2)
    path = FOLDER / segment.name.lstrip("/")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_blocks * 512 >= path.stat().st_size, "pages are missing: SIGBUS when the folder is full"
    with pytest.raises(RuntimeError, match="is of another run"):
        Segment(2, segment.name, bytes(16))
    with pytest.raises(RuntimeError, match="has another size"):
        Segment(3, segment.name, segment.nonce)
    segment.unlink()
    assert not path.exists()
    with pytest.raises(RuntimeError, match="cannot open shared memory"):
        Segment(2, segment.name, segment.nonce)


def test_segments_for_8_ranks_are_far_smaller_than_what_docker_gives() -> None:
    segment = Segment(8)
    assert (FOLDER / segment.name.lstrip("/")).stat().st_size < 32 << 20
    segment.unlink()


@pytest.mark.fault("SIGKILL between a segment of shared memory and its removal", "the next start removes it")
def test_the_next_start_removes_what_a_killed_process_left_and_no_more() -> None:
    script = "from cgx_ray.runtime_ext.shm import Segment; s = Segment(2); print(s.name, flush=True); input()"
    maker = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    path = FOLDER / maker.stdout.readline().strip().lstrip("/")
    Segment(2).unlink()
    assert path.exists(), "a segment that is being set up was removed"
    maker.kill()
    maker.communicate()
    assert path.exists()
    Segment(2).unlink()
    assert not path.exists()


def _connect_with(rank: int, wish: Callable[[int], bool]) -> tuple[list[int], int]:
    """Return the nodes, and the number of ranks that share memory with this one, itself included."""
    mesh = connect(shared_memory=wish(rank))
    size = mesh.local.size if mesh.local is not None else 1
    received = {peer: torch.zeros(50_000) for peer in range(dist.get_world_size()) if peer != rank}
    mesh.wait(mesh.post(dict.fromkeys(received, torch.full((50_000,), float(rank))), received), TIMEOUT_S)
    if mesh.local is not None:
        mesh.local.all_reduce(torch.zeros(10))
    assert all(bool((buffer == peer).all()) for peer, buffer in received.items())
    dist.barrier()
    mesh.close()
    return mesh.nodes, size


def _all_but_the_second(rank: int) -> bool:
    return rank != 1


def _none(rank: int) -> bool:
    return False


def test_ranks_without_shared_memory_are_nodes_of_their_own_and_reach_the_others() -> None:
    nodes = [0, 1, 0, 0]
    assert run_ranks(4, _connect_with, _all_but_the_second) == [(nodes, 3), (nodes, 1), (nodes, 3), (nodes, 3)]
    assert run_ranks(2, _connect_with, _none) == [([0, 1], 1)] * 2


def _connect_without_room(rank: int) -> tuple[list[int], list[str], bool]:
    lines = log_lines()
    # The kernel answers EFBIG here and ENOSPC in a full folder; posix_fallocate returns either.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    mesh = connect()
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    transport = Transport(dist.group.WORLD, mesh=mesh, timeout_s=TIMEOUT_S)
    values = torch.full((1000,), float(rank))
    finish_all(transport.all_reduce(values), transport, lambda: None)
    dist.barrier()
    mesh.close()
    assert left_behind([os.getpid()]) == []
    return mesh.nodes, lines, bool((values == 3).all())


def test_where_there_is_no_room_ranks_go_over_tcp_and_the_first_logs_how_much_it_takes() -> None:
    first, *others = run_ranks(3, _connect_without_room)
    assert others == [([0, 1, 2], [], True)] * 2
    assert (first[0], first[2]) == ([0, 1, 2], True)
    (text,) = first[1]
    assert "ranks [0, 1, 2] share no memory and go over TCP: /dev/shm has no room for 5 MiB" in text


def _attach(rank: int, shared_memory: bool) -> tuple[bool, list[int]]:
    class Session:
        settings = Settings(policy="static", shared_memory=shared_memory)

        def first_plan(self, layers: Any, world_size: int, bucket_bytes: int, costs: Any) -> cgx_ray.Plan:
            return self.settings.first_plan(layers, world_size, bucket_bytes)

        def start(self, attachment: cgx_ray.Attachment) -> None: ...

    process.session = Session()
    model = DistributedDataParallel(torch.nn.Linear(100, 100))
    attachment = cgx_ray.attach(model)
    model(torch.ones(1, 100)).sum().backward()
    transport = attachment._engine._transport
    found = transport.local is not None, transport.nodes
    attachment.close()
    return found


def test_settings_reach_the_transport() -> None:
    assert run_ranks(2, _attach, True) == [(True, [0, 0])] * 2
    assert run_ranks(2, _attach, False) == [(False, [0, 1])] * 2
    assert cgx_ray.CGXConfig(shared_memory=False).settings().shared_memory is False
    with pytest.raises(ConfigError, match="shared_memory 'no' is not allowed; give True or False"):
        cgx_ray.CGXConfig(shared_memory="no")

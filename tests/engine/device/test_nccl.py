"""Whether GPUs get an NCCL group of ours, and how it is connected. There is no GPU: the tests play torch's part."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, train
from support.ranks import log_lines, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives.transport import tcp, vendor_group
from cgx_ray.collectives.transport.gathered import Gatherer
from cgx_ray.runtime_ext.streams import STREAMS, Streams
from cgx_ray.session import ddp as session
from cgx_ray.session import nccl

GPU = torch.device("cuda", 0)
TIMEOUT_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """By rank: bus and slice of the GPU, None on a CPU, the number of the machine; and what its NCCL is and does."""

    buses: tuple[int | None, ...] = (1, 2)
    slices: tuple[int, ...] = (0, 0)
    machines: tuple[int, ...] = (0, 0)
    version: tuple[int, ...] = (2, 27, 5)
    is_built: bool = True
    fails_on: int | None = None
    hangs_on: int | None = None


class Vendor:
    """Takes the place of torch's NCCL: makes groups of Gloo. `calls` gets what it is asked for, in order."""

    def __init__(self, rank: int, machine: Machine, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.goes_on = threading.Event()
        self._rank, self._machine, self._new_group, self._sum = rank, machine, dist.new_group, dist.all_reduce
        address = {"pci_domain_id": 0, "pci_bus_id": machine.buses[rank], "pci_device_id": 0}
        uuid = f"{machine.buses[rank]}/{machine.slices[rank]}"
        boot = SimpleNamespace(read_text=lambda: f"{machine.machines[rank]}\n")
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**address, uuid=uuid))
        patch.setattr(torch.cuda.nccl, "version", lambda: machine.version)
        patch.setattr(dist, "is_nccl_available", lambda: machine.is_built)
        patch.setattr(vendor_group, "_BOOT_ID", boot)
        patch.setitem(STREAMS, GPU, Streams())
        zeros = torch.zeros
        patch.setattr(torch, "ones", lambda size, dtype, device: zeros(size, dtype=dtype) + 1)
        self.group = dist.new_group()
        patch.setattr(dist, "new_group", self._make)
        patch.setattr(dist, "all_reduce", self._add)
        patch.setattr(dist, "destroy_process_group", lambda group: self.calls.append("destroyed"))

    def _make(self, ranks: Sequence[int] | None, **options: Any) -> dist.ProcessGroup | None:
        self.calls.append({"ranks": ranks, **options})
        if self._rank == self._machine.fails_on:
            raise RuntimeError("no route to host")
        if self._rank == self._machine.hangs_on:
            self.goes_on.wait()
        return self.group if ranks is None or self._rank in ranks else None

    def _add(self, values: torch.Tensor, **options: Any) -> None:
        assert options["group"] is self.group
        self.calls.append("sum")
        if self._machine.fails_on is None and self._machine.hangs_on is None:
            self._sum(values, group=self.group)


def _ask(
    rank: int, machine: Machine, model: str, environment: dict[str, str], nodes: Sequence[int] = ()
) -> tuple[bool, list[Any], list[str]]:
    """Return whether there is a group, what the vendor was asked for, and the log. `nodes`: of the group of a node."""
    lines = log_lines()
    nccl.logger.setLevel("INFO")
    module: nn.Module = Branches()
    if model == "batch norm":
        module.norm = nn.SyncBatchNorm(131)
    # DDP takes SyncBatchNorm on a CPU only if it is put in afterwards.
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=model.startswith("unused"))
    ddp.module = module
    ddp.static_graph = model == "unused, static"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        world = dist.group.WORLD
        assert world is not None
        gather = Gatherer(world)
        vendor = Vendor(rank, machine, patch)
        device = torch.device("cpu") if machine.buses[rank] is None else GPU
        if nodes:
            group = nccl.inside_group(nodes, device, gather, TIMEOUT_S)
        else:
            group = nccl.nccl_group(ddp, device, gather, TIMEOUT_S)
        assert group is None or group is vendor.group
        # Its thread has not come back yet.
        vendor.goes_on.set()
        for thread in threading.enumerate():
            if thread.name == "cgx-ray-nccl":
                thread.join()
        return group is not None, vendor.calls, lines


@pytest.mark.parametrize(
    "machine",
    [
        Machine(),
        Machine(buses=(1, 1), machines=(0, 1)),
        Machine(buses=(1, 1), slices=(0, 1), version=(2, 30, 0)),
        Machine(buses=(1, 1), version=(2, 30, 0)),
    ],
    ids=["a GPU each", "two machines", "slices, NCCL 2.30", "one GPU, NCCL 2.30"],
)
def test_ranks_get_an_nccl_group_that_is_connected_at_once(machine: Machine) -> None:
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if machine.slices == (0, 0) else {}
    for has_group, (made, first_sum), lines in run_ranks(2, _ask, machine, "plain", environment):
        assert has_group
        assert made["ranks"] is None
        assert made["backend"] == "nccl"
        assert made["device_id"] == GPU
        assert made["timeout"].total_seconds() == TIMEOUT_S
        assert first_sum == "sum"
        assert not lines


@pytest.mark.parametrize(
    ("machine", "model", "environment", "says"),
    [
        (Machine(buses=(1, 1)), "plain", {}, "ranks 0, 1 are on one GPU, which needs NCCL 2.30, and this is 2.27.5"),
        (
            Machine(buses=(1, 1), slices=(0, 1)),
            "plain",
            {},
            "ranks 0, 1 are on one GPU, which needs NCCL 2.30, and this is 2.27.5",
        ),
        (
            Machine(buses=(1, 1), version=(2, 30, 7)),
            "plain",
            {},
            "ranks 0, 1 are on one GPU, which NCCL takes with NCCL_MULTI_RANK_GPU_ENABLE=1 only",
        ),
        (Machine(is_built=False), "plain", {}, "this torch was built without it (rank 0)"),
        (Machine(), "plain", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS=1 puts"),
        (Machine(), "unused", {}, "with find_unused_parameters DDP sums during backward as well"),
        (Machine(), "batch norm", {}, "SyncBatchNorm sums during backward as well"),
    ],
)
def test_nccl_is_not_used_where_two_communicators_cannot_be_and_one_line_says_why(
    machine: Machine, model: str, environment: dict[str, str], says: str
) -> None:
    (first, other) = run_ranks(2, _ask, machine, model, environment)
    assert first[:2] == other[:2] == (False, [])
    (line,) = first[2]
    assert line.startswith(f"cgx_ray does not sum by NCCL: {says}")
    assert "DDP's own all-reduce" in line
    assert not other[2]


def test_more_connections_and_a_static_graph_are_no_reason() -> None:
    for has_group, _, _ in run_ranks(2, _ask, Machine(), "unused, static", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}):
        assert has_group


@pytest.mark.fault("NCCL does not connect on one rank", "no rank uses it, and a warning names `NCCL_SOCKET_IFNAME`")
@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (Machine(fails_on=1), "rank 1: RuntimeError('no route to host')"),
        (Machine(hangs_on=1), "rank 1: no connection after 4 s"),
    ],
    ids=["error", "silence"],
)
def test_all_ranks_use_nccl_or_none_does(machine: Machine, says: str) -> None:
    (first, other) = run_ranks(2, _ask, machine, "plain", {})
    assert not first[0]
    assert not other[0]
    assert first[1][1:] == ["sum", "destroyed"]
    # A group that comes too late goes at once.
    assert other[1][1:] == ([] if machine.hangs_on is None else ["destroyed"])
    (line,) = first[2]
    assert says in line
    assert "NCCL_SOCKET_IFNAME" in line
    assert not other[2]


def test_ranks_of_a_node_get_a_group_of_their_own() -> None:
    for has_group, (made, first_sum), lines in run_ranks(2, _ask, Machine(), "plain", {}, (7, 7)):
        assert has_group
        assert (made["backend"], made["device_id"], made["ranks"]) == ("nccl", GPU, [0, 1])
        assert made["timeout"].total_seconds() == TIMEOUT_S
        assert first_sum == "sum"
        assert not lines


def _names(rank: int, machine: Machine, nodes: Sequence[int]) -> tuple[int, tuple[bool, list[Any], list[str]]]:
    """Return by how many the number in the next group's name has grown, where only the vendor's groups count."""
    skipped: list[int] = []
    nccl.skip_group_names = skipped.append
    asked = _ask(rank, machine, "plain", {}, nodes)
    return sum(skipped) + sum(isinstance(call, dict) for call in asked[1]), asked


@pytest.mark.fault("NCCL does not connect the ranks of a node", "no rank uses it there; a warning says so")
@pytest.mark.parametrize("machine", [Machine(fails_on=0), Machine(hangs_on=0)], ids=["error", "silence"])
@pytest.mark.parametrize("nodes", [(0, 0), (0, 1)], ids=["one node", "two nodes"])
def test_all_nodes_use_nccl_inside_or_none_does(machine: Machine, nodes: Sequence[int]) -> None:
    (first_number, first), (other_number, other) = run_ranks(2, _names, machine, nodes)
    assert not first[0]
    assert not other[0]
    assert other[1][-2:] == ["sum", "destroyed"]
    # Names of later groups are the same on all ranks.
    assert first_number == other_number == len(set(nodes))
    (line,) = first[2]
    assert "NCCL does not connect the ranks of each node within 4 s (rank 0: " in line
    assert "hierarchical groups are summed by the host" in line
    assert not other[2]


def _attached(rank: int, nodes: Sequence[int], given: dict[str, str]) -> tuple[list[Sequence[int]], bool]:
    """Return the nodes for which `attach` asked for groups, and whether it uses them."""
    tcp.host_key = lambda: f"node {nodes[rank]}"
    asked: list[Sequence[int]] = []

    def inside(nodes: Sequence[int], *others: Any) -> dist.ProcessGroup:
        asked.append(nodes)
        here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        return dist.new_group(here, use_local_synchronization=True)

    session.nccl_group = lambda *others: dist.new_group()
    session.inside_group = inside
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, **given)
    assert attachment._engine is not None
    is_used = attachment._engine._transport.inside is not None
    train(model, rank, range(1))
    attachment.close()
    return asked, is_used


@pytest.mark.parametrize(
    ("nodes", "given", "is_asked"),
    [
        ((0, 0, 1), {"codec": "qsgd", "intra": "dense"}, True),
        ((0, 0, 1), {"codec": "qsgd"}, False),
        ((0, 1, 2), {"codec": "qsgd", "intra": "dense"}, False),
    ],
    ids=["hierarchical", "flat", "a rank a node"],
)
def test_attach_asks_for_groups_of_nodes_where_a_plan_may_use_them(
    nodes: Sequence[int], given: dict[str, str], is_asked: bool
) -> None:
    for asked, is_used in run_ranks(3, _attached, nodes, given):
        assert [list(one) for one in asked] == ([list(nodes)] if is_asked else [])
        assert is_used == is_asked


def _mixed(rank: int) -> str:
    with pytest.raises(cgx_ray.ConfigError) as caught:
        _ask(rank, Machine(buses=(1, None)), "plain", {})
    return str(caught.value)


def test_gpus_and_cpus_in_one_run_are_one_error_on_all_ranks() -> None:
    for said in run_ranks(2, _mixed):
        assert said.startswith("the model is on the CPU on ranks 1 and on a GPU on the others")

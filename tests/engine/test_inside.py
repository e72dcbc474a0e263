"""The link between the ranks of a node is measured when they attach, and the planner gets it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.control_runs import WORLD, start
from support.ranks import run_ranks

from cgx_ray.collectives.transport import tcp
from cgx_ray.collectives.transport.vendor_group import VendorGroup
from cgx_ray.control.joined_steps import StepJoiner
from cgx_ray.control.learned.measured import DEFAULT_INSIDE
from cgx_ray.monitors.sample import InsideLink, node_steps
from cgx_ray.plan import Layer, Plan
from cgx_ray.runtime_ext.streams import Mark, Streams
from cgx_ray.session.attach import attach
from cgx_ray.session.attachment import Attachment, process
from cgx_ray.session.inside import measure_inside
from cgx_ray.session.settings import Settings


class _Session:
    """Stands for Ray's: `attach` asks it for the first plan."""

    settings = Settings()

    def first_plan(self, layers: Sequence[Layer], world_size: int, bucket_bytes: int, costs: Any) -> Plan:
        return self.settings.first_plan(layers, world_size, bucket_bytes)

    def start(self, attachment: Attachment) -> None: ...


def _reported_link(rank: int, nodes: Sequence[int]) -> InsideLink | None:
    """Return the link in the samples of a rank; ranks with the same number in `nodes` share a node."""
    tcp.host_key = lambda: f"node {nodes[rank]}"
    process.session = _Session()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
    attachment = attach(model)
    model(torch.ones(1, 10)).sum().backward()
    (sample,) = attachment.take_samples()
    attachment.close()
    return sample.inside


def test_ranks_of_a_node_report_the_link_between_them() -> None:
    found = run_ranks(4, _reported_link, (0, 0, 1, 1))
    for link in found:
        assert link is not None
        # Between 1 us and 1 s, and between 1 MB/s and 10 TB/s.
        assert 1e-6 < link.alpha_s < 1, found
        assert 1e-13 < link.beta_s_per_byte < 1e-6, found


@pytest.mark.parametrize("nodes", [(0, 0), (0, 1)], ids=["one node", "nodes of one rank"])
def test_a_network_of_one_kind_of_link_has_none_inside(nodes: Sequence[int]) -> None:
    assert run_ranks(2, _reported_link, nodes) == [None, None]


class _HostMark(Mark):
    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _HostMark)
        return self._at_s - earlier._at_s


class _HostStreams(Streams):
    """Streams of a device that is done with each call when it returns, so that its clock is the host's."""

    def mark(self, stream: object = None) -> Mark:
        return _HostMark()


def _link_of_a_device(rank: int) -> InsideLink:
    group = dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True)
    return measure_inside(VendorGroup(group, _HostStreams()), torch.device("cpu"))


def test_the_link_between_gpus_of_a_node_is_measured_by_the_marks_of_their_sums() -> None:
    """Gloo's, in the place of NCCL."""
    for link in run_ranks(4, _link_of_a_device):
        assert link.is_of_device
        assert 1e-6 < link.alpha_s < 1, link
        assert 1e-13 < link.beta_s_per_byte < 1e-6, link


def test_plans_use_the_link_of_the_slowest_node_and_the_default_until_one_is_reported(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.num_local = 2
    run.run(8)
    state = run.loop._state
    assert state is not None
    measured = state.measured()
    assert measured is not None
    assert measured.network.inside == DEFAULT_INSIDE
    assert not measured.network.device_sums
    run.inside = {0: InsideLink(1e-5, 1e-10), 3: InsideLink(2e-5, 3e-10)}
    parts = [part for rank in range(WORLD) for part in node_steps([run.sample(rank)])]
    assert StepJoiner(WORLD).add_node_steps(parts, 0.0)[0].inside == InsideLink(2e-5, 3e-10)
    run.run(1)
    measured = state.measured()
    assert measured is not None
    assert measured.network.inside is not None
    assert measured.network.inside.alpha_s == 2e-5
    assert measured.network.inside.beta_s_per_byte == 3e-10
    assert not measured.network.device_sums
    run.inside = {0: InsideLink(1e-5, 1e-12, is_of_device=True)}
    run.run(1)
    measured = state.measured()
    assert measured is not None
    assert measured.network.device_sums

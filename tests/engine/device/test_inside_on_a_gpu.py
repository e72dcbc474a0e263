"""Trainings whose nodes sum in the memory of a device, untraced: of a GPU that all ranks share, or of the CPU.

NCCL takes no two ranks on one GPU. Gloo takes its place; of GPU memory it makes all-reduces only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.device.traced_device import DEVICE
from support.given_gradients import GivenParts
from support.ranks import run_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives.transport import tcp
from cgx_ray.collectives.transport.vendor_group import VendorGroup
from cgx_ray.engine.engine import Engine
from cgx_ray.runtime_ext.streams import STREAMS, Streams
from cgx_ray.session import ddp as session

NODES = (0, 0, 1, 1)
NUMELS = (6000, 2500)
STEPS = 4


def _sum_rows(inside: VendorGroup, rows_LC: Tensor) -> None:
    dist.all_reduce(rows_LC, group=inside._group)


def _gather_rows(inside: VendorGroup, rows_LC: Tensor) -> None:
    for rank in set(range(inside.size)) - {inside.rank}:
        rows_LC[rank].zero_()
    dist.all_reduce(rows_LC, group=inside._group)


def _use_device(device: str) -> None:
    """Let `attach` give nodes groups of Gloo, and take the memory of a CPU for that of a device."""

    def inside(nodes: Sequence[int], *others: Any) -> dist.ProcessGroup:
        here = [rank for rank, node in enumerate(nodes) if node == nodes[dist.get_rank()]]
        return dist.new_group(here, use_local_synchronization=True)

    def engine(*arguments: Any, device: torch.device, **options: Any) -> Engine:
        return Engine(*arguments, device=DEVICE if device.type == "cpu" else device, **options)

    session.nccl_group = lambda *others: dist.new_group()
    session.inside_group = inside
    session.Engine = engine  # type: ignore[assignment, misc]
    STREAMS.setdefault(DEVICE, Streams())
    if device == "cuda":
        VendorGroup._sum_rows = _sum_rows  # type: ignore[method-assign]
        VendorGroup._gather_rows = _gather_rows  # type: ignore[method-assign]


def _train(rank: int, device: str, dtype: torch.dtype, codec: str, scheme: str, *, inside: bool) -> list[Tensor]:
    """Return the averages of all steps, then the residuals."""
    tcp.host_key = lambda: f"node {NODES[rank]}"
    if inside:
        _use_device(device)
    model = DistributedDataParallel(GivenParts(NUMELS).to(device, dtype))
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme, intra="dense")
    averages: list[Tensor] = []
    for step in range(STEPS):
        x_1N = torch.randn(1, sum(NUMELS), generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        model(x_1N.to(device, dtype)).backward()
        averages += [one.grad.cpu().clone() for one in model.parameters() if one.grad is not None]
    assert attachment._engine is not None
    assert not any(group._crosses for group in attachment._engine._banks.gradients.groups)
    residuals = [left.cpu() for left in attachment.state_dict()["residuals"].values()]
    attachment.close()
    return averages + residuals


def _on_device(rank: int, *case: Any) -> list[Tensor]:
    return _train(rank, *case, inside=True)


def _on_host(rank: int, device: str, *case: Any) -> list[Tensor]:
    return _train(rank, "cpu", *case, inside=False)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("dtype", "codec", "scheme"),
    [
        (torch.float32, "qsgd", "sra"),
        (torch.bfloat16, "qsgd", "allgather"),
        (torch.float32, "topk:density=0.05", "allgather"),
    ],
    ids=["qsgd", "qsgd of bfloat16", "topk"],
)
def test_nodes_of_two_ranks_make_the_bits_of_the_host(device: str, dtype: torch.dtype, codec: str, scheme: str) -> None:
    case = (device, dtype, codec, scheme)
    for found, expected in zip(run_ranks(4, _on_device, *case), run_ranks(4, _on_host, *case), strict=True):
        assert len(found) >= len(NUMELS) * STEPS
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

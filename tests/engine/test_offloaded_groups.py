"""Groups that the host encodes for a GPU. Without one: they are plain groups, and gradients of another type are copied
in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.codecs.codec import HOST
from cgx_ray.runtime_ext.streams import streams_of

NUMEL = 2048
# The ranks agree on the next plan meanwhile.
STEPS_OF_A_PLAN = 4


class TwoLayers(nn.Module):
    """Two layers whose gradients are the two parts of the input, bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(numel, 1, bias=False) for numel in (NUMEL, 2 * NUMEL))

    def forward(self, x_1N: Tensor) -> Tensor:
        return (self.first(x_1N[:, :NUMEL]) + self.second(x_1N[:, NUMEL:])).sum()


def _average(rank: int, step: int, model: nn.Module) -> list[Tensor]:
    """Return the average gradients of a step."""
    weight = next(model.parameters())
    x_1N = torch.randn(1, 3 * NUMEL, generator=torch.Generator().manual_seed(10 * step + rank)).to(weight)
    model.zero_grad()
    model(x_1N).backward()
    return [one.grad.cpu().clone() for one in model.parameters() if one.grad is not None]


def _averages_on(rank: int, device: str, dtype: torch.dtype, plan_devices: Sequence[str]) -> list[Tensor]:
    """Train on `device`, some steps with a plan for each of `plan_devices`. Return the averages, then the residuals."""
    model = DistributedDataParallel(TwoLayers().to(device, dtype))
    plans = [
        cgx_ray.make_plan(
            cgx_ray.layers_of(model),
            version=version,
            world_size=2,
            codec="topk:density=0.05",
            scheme="allgather",
            device=where,
        )
        for version, where in enumerate(plan_devices)
    ]
    attachment = cgx_ray.attach(model, plan=plans[0])
    averages: list[Tensor] = []
    for step in range(STEPS_OF_A_PLAN * len(plans)):
        if step and step % STEPS_OF_A_PLAN == 0:
            attachment.hold(plans[step // STEPS_OF_A_PLAN])
        averages += _average(rank, step, model)
    assert attachment.plan is not None
    assert attachment.plan.version == plans[-1].version
    averages += [owed.cpu() for owed in attachment.state_dict()["residuals"].values()]
    attachment.close()
    return averages


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residuals_go_on_bit_for_bit_when_offload_begins_and_ends(device: str, dtype: torch.dtype) -> None:
    expected = run_ranks(2, _averages_on, "cpu", dtype, ("auto",) * 3)
    found = run_ranks(2, _averages_on, device, dtype, ("auto", "cpu", "auto"))
    for rank in range(2):
        assert all(torch.equal(one, other) for one, other in zip(expected[rank], found[rank], strict=True))
        assert found[rank][-1].count_nonzero() > 0, "the residuals"


def _averages_in_order(rank: int, device: str, order: int) -> list[Tensor]:
    """Average bfloat16 gradients, which codec none gets as float32. `order`: of the layers in their group, 1 or -1."""
    model = DistributedDataParallel(TwoLayers().to(device, torch.bfloat16))
    plan = cgx_ray.make_plan(
        cgx_ray.layers_of(model), version=0, world_size=2, codec="none", scheme="sra", first_bytes=1 << 20, device="cpu"
    )
    (group,) = plan.groups
    attachment = cgx_ray.attach(model, plan=replace(plan, groups=(replace(group, layers=group.layers[::order]),)))
    averages = [average for step in range(3) for average in _average(rank, step, model)]
    attachment.close()
    return averages


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_are_copied_to_the_same_bits_in_one_piece_and_layer_by_layer(device: str) -> None:
    """In one order of its layers a group lies in one piece in DDP's bucket."""
    (first, _), (second, _) = (run_ranks(2, _averages_in_order, device, order) for order in (1, -1))
    assert len(first) == 6
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(one.count_nonzero() > NUMEL // 2 for one in first)


def test_copies_take_any_shape_and_type() -> None:
    sources = [torch.arange(6.0).view(2, 3), torch.arange(4, dtype=torch.float64)]
    targets = [torch.empty(6, dtype=torch.bfloat16), torch.empty(2, 2)]
    streams_of(HOST).copy_each(list(zip(sources, targets, strict=True)))
    streams_of(HOST).copy_each([])
    assert targets[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert targets[1].tolist() == [[0, 1], [2, 3]]

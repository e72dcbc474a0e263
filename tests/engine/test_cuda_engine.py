"""Gradients on a CUDA device: the same bits as on the CPU. Two ranks share one GPU, over Gloo, which NCCL refuses."""

from __future__ import annotations

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.plan import CODECS_OF_SCHEME

NUMEL = 1 << 18
# PowerSGD's products come from the vendor's library, which adds in another order on the GPU.
PAIRS = [
    (f"{name}:density=0.05" if name in ("topk", "lwtopk", "mstopk", "dgc", "sidco", "randomk") else name, str(scheme))
    for scheme, names in CODECS_OF_SCHEME.items()
    for name in sorted(names - {"powersgd"})
]


def _averages(rank: int, device: str, codec: str, scheme: str, plan_device: str = "auto") -> list[Tensor]:
    """Return the averaged gradients of three steps, and the residuals at the end."""
    if device == "cuda":
        pytest.importorskip("cupy")
    layer = nn.Linear(NUMEL, 1, bias=False, device=device)
    model = DistributedDataParallel(layer)
    plan = cgx_ray.make_plan(
        cgx_ray.layers_of(model), version=0, world_size=2, codec=codec, scheme=scheme, device=plan_device
    )
    attachment = cgx_ray.attach(model, plan=plan)
    averages = []
    for step in range(3):
        # The gradient of a sum of one output is the input, bit for bit.
        x_1N = torch.randn(1, NUMEL, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        layer.weight.grad = None
        model(x_1N).sum().backward()
        assert layer.weight.grad is not None
        averages.append(layer.weight.grad.cpu().clone())
    averages += [owed for kind in ("residuals", "momentum") for owed in attachment.state_dict()[kind].values()]
    attachment.close()
    return averages


@pytest.mark.gpu
@pytest.mark.parametrize(("codec", "scheme"), PAIRS)
def test_a_gpu_averages_to_the_same_bits_as_the_cpu(codec: str, scheme: str) -> None:
    expected, found = (run_ranks(2, _averages, device, codec, scheme) for device in ("cpu", "cuda"))
    for rank in range(2):
        for one, other in zip(expected[rank], found[rank], strict=True):
            assert torch.equal(one, other), f"{(one != other).sum()} of {one.numel()} elements differ"


@pytest.mark.gpu
@pytest.mark.parametrize(("codec", "scheme"), PAIRS)
def test_gradients_of_a_gpu_that_the_host_encodes_have_the_bits_of_the_cpu(codec: str, scheme: str) -> None:
    expected, found = (run_ranks(2, _averages, device, codec, scheme, "cpu") for device in ("cpu", "cuda"))
    for rank in range(2):
        assert all(torch.equal(one, other) for one, other in zip(expected[rank], found[rank], strict=True))


def _train(rank: int, codec: str, scheme: str) -> tuple[list[float], list[float]]:
    """Return the losses of a small network with and without cgx_ray."""
    losses: tuple[list[float], list[float]] = ([], [])
    for compressed, into in zip((True, False), losses, strict=True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).cuda())
        attachment = cgx_ray.attach(model, codec=codec, scheme=scheme) if compressed else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x_BN = torch.randn(256, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(rank))
        y_B = x_BN[:, :10].argmax(1)
        for _ in range(60):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x_BN), y_B)
            loss.backward()
            optimizer.step()
            into.append(float(loss))
        if attachment is not None:
            attachment.close()
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize(("codec", "scheme"), [("qsgd", "sra"), ("powersgd", "allreduce"), ("none", "dense")])
def test_training_on_a_gpu_learns_what_plain_ddp_learns(codec: str, scheme: str) -> None:
    for ours, plain in run_ranks(2, _train, codec, scheme):
        assert ours[-1] < 0.5 * ours[0], f"loss went from {ours[0]:.3f} to {ours[-1]:.3f}"
        assert ours[-1] < plain[-1] + 0.1 * plain[0], f"{ours[-1]:.3f}, plain DDP {plain[-1]:.3f}"

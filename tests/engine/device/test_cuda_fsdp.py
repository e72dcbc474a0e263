"""FSDP2 and HSDP models of ranks that share one GPU: the CPU's bits, and trainings in the ways that FSDP2 offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, batch
from support.given_gradients import Given
from support.ranks import run_cases, run_ranks
from support.sharded import BITS8, make_mesh, shard, try_codecs
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import cgx_ray

STEPS = 12
SHAPES = [(64, 300), (3, 700), (5,), (13, 170), (2, 2)]
# With residuals of what a step has not sent, and without.
CODECS = ("none", "qsgd:bits=4", "qsgd:bits=2,rounding=nearest", "ef_signsgd", "bf16")


class _Seen(Given):
    """`seen` gets the weights of the last forward pass."""

    seen: Sequence[Tensor] = ()

    def forward(self, gradients: Sequence[Tensor | None]) -> Tensor:
        # FSDP2 frees the memory after the pass.
        self.seen = [weight.detach().clone().cpu() for weight in self.weights]
        return super().forward(gradients)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _bits(rank: int, device: str, codec: str, num_replicas: int) -> list[Tensor]:
    """Return this rank's shards of the gradients of three steps, and the weights that the last one computed with."""
    model = _Seen(SHAPES).to(device)
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
    fully_shard(model, mesh=make_mesh(num_replicas, device))
    attachment = cgx_ray.attach(model, codec=codec, parameters=BITS8)
    found = []
    for _ in range(3):
        model(gradients).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            found.append(_local(parameter.grad).cpu())
            # By a power of two, so a device that adds in one operation rounds as another.
            _local(parameter.detach()).sub_(_local(parameter.grad), alpha=2**-4)
            parameter.grad = None
    attachment.close()
    return [*found, *model.seen]


@pytest.mark.gpu
@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(2, 1), (4, 2)])
def test_shards_have_the_bits_of_a_cpu(num_ranks: int, num_replicas: int) -> None:
    on_cpu, on_cuda = (
        run_cases(
            num_ranks, [partial(_bits, device=device, codec=codec, num_replicas=num_replicas) for codec in CODECS]
        )
        for device in ("cpu", "cuda")
    )
    for codec, expected, found in zip(CODECS, on_cpu, on_cuda, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert isinstance(other, list), other
            for index, (tensor, on_gpu) in enumerate(zip(one, other, strict=True)):
                assert torch.equal(tensor, on_gpu), (codec, index, tensor.shape, float((tensor - on_gpu).abs().max()))


def _changing(rank: int, device: str, num_replicas: int) -> tuple[list[int], list[Tensor]]:
    """Return the plan in force by step, and this rank's shards of all gradients, from 4 bits to bf16 to 3 bits."""
    model = Given(SHAPES).to(device)
    layers = cgx_ray.layers_of(model)
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
    fully_shard(model, mesh=make_mesh(num_replicas, device))
    attachment = cgx_ray.attach(model, codec="qsgd:bits=4")
    found = []
    for step in range(8):
        if step in (2, 5):
            codec, world_size = "bf16" if step == 2 else "qsgd:bits=3", dist.get_world_size()
            attachment.hold(cgx_ray.make_plan(layers, version=step, world_size=world_size, codec=codec))
        model(gradients).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            found.append(_local(parameter.grad).cpu())
            parameter.grad = None
    versions = [sample.plan_version for sample in attachment.take_samples()]
    attachment.close()
    return versions, found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(2, 1), (4, 2)])
def test_plans_change_at_the_same_step_to_the_bits_of_a_cpu(num_ranks: int, num_replicas: int, device: str) -> None:
    on_cpu, on_device = run_cases(
        num_ranks, [partial(_changing, device=one, num_replicas=num_replicas) for one in ("cpu", device)]
    )
    for one, other in zip(on_cpu, on_device, strict=True):
        assert isinstance(other, tuple), other
        assert one[0] == other[0] == [0, 0, 0, 2, 2, 2, 5, 5]
        assert all(torch.equal(expected, found) for expected, found in zip(one[1], other[1], strict=True))


def _tried(rank: int, device: str, folder: str) -> list[str]:
    return try_codecs(rank, device, folder, 1)[1]


# On CPUs, with what it writes: tests/engine/sharded/test_fsdp_adapt.py.
@pytest.mark.gpu
def test_codecs_are_tried_on_a_gpu(tmp_path: Path) -> None:
    first, second = run_ranks(2, _tried, "cuda", str(tmp_path))
    assert first == second
    assert first[:2] == ["dense", "qsgd 3-bit over sra"]
    assert first[-1].startswith("qsgd ")


# By name: arguments of `fully_shard`.
VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "kept after forward": lambda: {"reshard_after_forward": False},
    "bf16": lambda: {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "offloaded": lambda: {"offload_policy": CPUOffloadPolicy()},
}


def _losses(rank: int, device: str, variant: str, num_replicas: int) -> list[float]:
    """Train; every third step adds the gradients of two passes. The loss scale is too large for float16 at first.

    Gradients on the host are not scaled: GradScaler reads its own tensors there before they have arrived from the GPU
    (pytorch/pytorch#176429), and leaves out steps.
    """
    model = shard(Branches().to(device), make_mesh(num_replicas, device), **VARIANTS[variant]())
    attachment = cgx_ray.attach(model, codec="qsgd:bits=8,rounding=nearest", parameters=BITS8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**20, growth_interval=1000, enabled=variant != "offloaded")
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2 if step % 3 == 2 else 1):
            model.set_is_last_backward(part == step % 3 // 2)
            x_BD = batch(rank, part).to(device)
            loss = (model(x_BD).float() - x_BD).square().mean()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    attachment.close()
    return losses


# On CPUs tests/engine/sharded/test_fsdp.py trains in more ways, beside plain FSDP2.
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(2, 1), (4, 2)])
def test_models_learn_as_on_a_cpu(num_ranks: int, num_replicas: int, device: str) -> None:
    names = [name for name in VARIANTS if device == "cuda" or name != "offloaded"]
    (expected,) = run_cases(num_ranks, [partial(_losses, device="cpu", variant="plain", num_replicas=num_replicas)])
    cases = [partial(_losses, device=device, variant=name, num_replicas=num_replicas) for name in names]
    for name, results in zip(names, run_cases(num_ranks, cases), strict=True):
        for losses, wanted in zip(results, expected, strict=True):
            assert isinstance(losses, list), losses
            assert losses[-1] < 0.9 * losses[0], (name, losses)
            assert losses == pytest.approx(wanted, rel=0.05), name

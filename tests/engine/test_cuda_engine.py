"""Gradients on a CUDA device: the same bits as on the CPU. Two ranks share one GPU, over Gloo, which NCCL refuses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from support import ranks
from support.ranks import run_cases, run_ranks
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


TRAINED = [("qsgd", "sra"), ("powersgd", "allreduce"), ("none", "dense")]
# Seconds of all cases on one kind of device.
ALL_CASES_S = 240

Outcomes = Mapping[tuple[str, ...], list[Any]]


def _averages(rank: int, device: str, codec: str, scheme: str, plan_device: str = "auto") -> list[Tensor]:
    """Return the averaged gradients of three steps, and the residuals at the end."""
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
    averages += [owed.cpu() for kind in ("residuals", "momentum") for owed in attachment.state_dict()[kind].values()]
    attachment.close()
    return averages


def _train(rank: int, device: str, codec: str, scheme: str) -> tuple[list[float], list[float]]:
    """Return the losses of a small network with and without cgx_ray."""
    losses: tuple[list[float], list[float]] = ([], [])
    for compressed, into in zip((True, False), losses, strict=True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device))
        attachment = cgx_ray.attach(model, codec=codec, scheme=scheme) if compressed else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x_BN = torch.randn(256, 64, device=device, generator=torch.Generator(device).manual_seed(rank))
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


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    """Return what the selected tests ask for. One pair of processes trains on CPUs, another on the GPU.

    To start a pair, with CUDA in both processes, takes longer than a case.
    """
    cases: dict[tuple[str, ...], Any] = {}
    for item in request.session.items:
        chosen = getattr(item, "callspec", None)
        if item.path == request.path and chosen is not None and item.get_closest_marker("gpu"):
            pair = chosen.params["codec"], chosen.params["scheme"]
            if "plan_device" in chosen.params:
                cases["cpu", *pair] = partial(_averages, device="cpu", codec=pair[0], scheme=pair[1])
                where = chosen.params["plan_device"]
                cases["cuda", *pair, where] = partial(
                    _averages, device="cuda", codec=pair[0], scheme=pair[1], plan_device=where
                )
            else:
                cases["cuda", *pair] = partial(_train, device="cuda", codec=pair[0], scheme=pair[1])
    found: dict[tuple[str, ...], list[Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "TIMEOUT_S", ALL_CASES_S)
        for device in ("cpu", "cuda"):
            chosen_keys = [key for key in cases if key[0] == device]
            found |= zip(chosen_keys, run_cases(2, [cases[key] for key in chosen_keys]), strict=True)
    return found


def _results(outcome: list[Any]) -> list[Any]:
    """Return the results of both ranks, or raise the error of one."""
    for result in outcome:
        if isinstance(result, BaseException):
            raise result
    return outcome


# On "cpu" the host encodes what the GPU has computed.
@pytest.mark.gpu
@pytest.mark.timeout(3 * ALL_CASES_S)
@pytest.mark.parametrize("plan_device", ["auto", "cpu"])
@pytest.mark.parametrize(("codec", "scheme"), PAIRS)
def test_a_gpu_averages_to_the_same_bits_as_the_cpu(
    codec: str, scheme: str, plan_device: str, outcomes: Outcomes
) -> None:
    expected = _results(outcomes["cpu", codec, scheme])
    found = _results(outcomes["cuda", codec, scheme, plan_device])
    for rank in range(2):
        for one, other in zip(expected[rank], found[rank], strict=True):
            assert torch.equal(one, other), f"{(one != other).sum()} of {one.numel()} elements differ"


@pytest.mark.gpu
@pytest.mark.timeout(3 * ALL_CASES_S)
@pytest.mark.parametrize(("codec", "scheme"), TRAINED)
def test_training_on_a_gpu_learns_what_plain_ddp_learns(codec: str, scheme: str, outcomes: Outcomes) -> None:
    _check_losses(_results(outcomes["cuda", codec, scheme]))


def test_training_on_cpus_learns_what_plain_ddp_learns() -> None:
    """Shows that what is asked of a GPU can be met."""
    _check_losses(run_ranks(2, _train, "cpu", "qsgd", "sra"))


def _check_losses(of_ranks: list[tuple[list[float], list[float]]]) -> None:
    for ours, plain in of_ranks:
        assert ours[-1] < 0.5 * ours[0], f"loss went from {ours[0]:.3f} to {ours[-1]:.3f}"
        assert ours[-1] < plain[-1] + 0.1 * plain[0], f"{ours[-1]:.3f}, plain DDP {plain[-1]:.3f}"


def test_cases_in_one_pair_of_processes_give_what_each_gives_in_its_own() -> None:
    """On CPUs. A case that fails leaves those after it as they are."""
    pairs = [
        ("topk:density=0.05", "allgather"),
        ("no codec", "sra"),
        ("qsgd", "sra"),
        ("topk:density=0.05", "artopk_ring"),
    ]
    together = run_cases(2, [partial(_averages, device="cpu", codec=codec, scheme=scheme) for codec, scheme in pairs])
    for (codec, scheme), outcome in zip(pairs, together, strict=True):
        if codec == "no codec":
            assert all("unknown codec 'no codec'" in str(error) for error in outcome)
            continue
        alone = run_ranks(2, _averages, "cpu", codec, scheme)
        for one, other in zip(alone, _results(outcome), strict=True):
            assert len(one) >= 3
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(one, other, strict=True))

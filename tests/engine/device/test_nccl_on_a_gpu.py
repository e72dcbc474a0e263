"""Trainings whose process group is NCCL's, as Ray Train makes it on GPUs. Ranks share a GPU if there are not enough."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, batch, weights_hash
from support.failing_ranks import die, said_by_survivors
from support.given_gradients import GivenParts
from support.ranks import GROUP_TIMEOUT_S, run_ranks
from support.sharded import largest_difference, make_mesh, shard, weights_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives.transport import tcp
from cgx_ray.engine.sharded.sharded_engine import ShardedEngine
from cgx_ray.session.nccl import SHARES_GPUS, SHARING

NUMELS = (6000, 2500, 4000)
STEPS = 4


def _loaded_version() -> tuple[int, ...]:
    """Return the version of the library that is loaded, perhaps by LD_PRELOAD: torch says that it was built for."""
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def _can_run() -> bool:
    return torch.cuda.is_available() and (torch.cuda.device_count() > 1 or _loaded_version() >= SHARES_GPUS)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _can_run(), reason="needs two GPUs, or NCCL 2.30 for two ranks on one"),
]


def _join(rank: int, world_size: int, folder: str) -> torch.device:
    num_gpus = torch.cuda.device_count()
    if num_gpus < world_size:
        os.environ[SHARING] = "1"
        torch.cuda.nccl.version = _loaded_version
    device = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        device_id=device,
    )
    return device


def _run(world_size: int, train: Callable[..., Any], tmp_path: Path, *arguments: Any) -> list[Any]:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    return run_ranks(world_size, train, world_size, str(folder), *arguments, backend=None)


def _gradients(step: int, rank: int) -> Tensor:
    return torch.randn(1, sum(NUMELS), generator=torch.Generator().manual_seed(10 * step + rank))


def _averages(model: DistributedDataParallel, rank: int, device: torch.device) -> list[list[Tensor]]:
    """Return the averages of all steps, by step and layer."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        model(_gradients(step, rank).to(device)).backward()
        found.append([one.grad.cpu().flatten() for one in model.parameters() if one.grad is not None])
    return found


def _dense_and_coded(rank: int, world_size: int, folder: str, codecs: dict[str, str]) -> Any:
    """Return the averages, and whether the engine sums by NCCL."""
    device = _join(rank, world_size, folder)
    model = DistributedDataParallel(GivenParts(NUMELS).to(device))
    plan = cgx_ray.make_plan(
        cgx_ray.layers_of(model), version=0, world_size=world_size, group_bytes=1, overrides=codecs, codec="none"
    )
    attachment = cgx_ray.attach(model, plan=plan)
    assert attachment._engine is not None
    by_nccl = attachment._engine._transport.sums_on_device
    averages = _averages(model, rank, device)
    attachment.close()
    return averages, by_nccl


@pytest.mark.parametrize("codecs", [{}, {"parts.1.weight": "qsgd:bits=4"}], ids=["dense", "one layer coded"])
def test_dense_groups_are_summed_by_nccl_beside_coded_ones(codecs: dict[str, str], tmp_path: Path) -> None:
    (first, by_nccl), (other, _) = _run(2, _dense_and_coded, tmp_path, codecs)
    assert by_nccl
    for step, (averages, others) in enumerate(zip(first, other, strict=True)):
        wanted = ((_gradients(step, 0) + _gradients(step, 1)) / 2)[0].split(NUMELS)
        for index, (found, mean) in enumerate(zip(averages, wanted, strict=True)):
            assert torch.equal(found, others[index])
            error = float((found - mean).abs().max())
            assert error <= (1.0 if codecs and index == 1 else 1e-6), (step, index, error)


def _nodes(rank: int, world_size: int, folder: str, codec: str, scheme: str, *, by_nccl: bool) -> list[list[Tensor]]:
    """Two nodes of two ranks, with sums inside by NCCL, or by the host of CPU ranks."""
    device = torch.device("cpu")
    tcp.host_key = lambda: f"node {rank // 2}"
    if by_nccl:
        device = _join(rank, world_size, folder)
    else:
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    model = DistributedDataParallel(GivenParts(NUMELS).to(device))
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme, intra="dense")
    assert attachment._engine is not None
    assert (attachment._engine._transport.inside is not None) is by_nccl
    averages = _averages(model, rank, device)
    attachment.close()
    return averages


@pytest.mark.parametrize(("codec", "scheme"), [("qsgd", "sra"), ("topk:density=0.05", "allgather")])
def test_nodes_that_sum_by_nccl_make_the_bits_of_the_host(codec: str, scheme: str, tmp_path: Path) -> None:
    on_gpu, on_host = (_run(4, partial(_nodes, by_nccl=by_nccl), tmp_path, codec, scheme) for by_nccl in (True, False))
    for found, expected in zip(on_gpu, on_host, strict=True):
        for averages, wanted in zip(found, expected, strict=True):
            assert all(map(torch.equal, averages, wanted))


def _sharded(rank: int, world_size: int, folder: str, num_replicas: int, parameters: str | None) -> float:
    """Return the largest difference of weights from those of plain FSDP2, whose collectives are NCCL's."""
    device = _join(rank, world_size, folder)
    weights = []
    for is_ours in (True, False):
        model = shard(Branches().to(device), make_mesh(num_replicas, "cuda"))
        attachment = cgx_ray.attach(model, codec="none", parameters=parameters) if is_ours else None
        if attachment is not None:
            assert isinstance(attachment._engine, ShardedEngine)
            assert attachment._engine.sums_inside is (num_replicas > 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(8):
            optimizer.zero_grad()
            for part in range(2):
                model.set_is_last_backward(part == 1)
                x_BD = batch(rank, 2 * step + part).to(device)
                (model(x_BD) - x_BD).square().mean().backward()
            optimizer.step()
        weights.append({name: one.cpu() for name, one in weights_of(model).items()})
        if attachment is not None:
            samples = attachment.take_samples()
            attachment.close()
            # NCCL alone reduces, unless our own thread gathers the parameters.
            assert all((one.exchange_s == 0) is (parameters is None) for one in samples)
            assert all(0 < one.compute_s < one.step_s for one in samples)
    return largest_difference(*weights)


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "parameters"), [(2, 1, None), (2, 1, "none"), (4, 2, None)], ids=str
)
def test_fsdp2_without_a_codec_trains_bit_for_bit_as_with_nccl(
    num_ranks: int, num_replicas: int, parameters: str | None, tmp_path: Path
) -> None:
    assert _run(num_ranks, _sharded, tmp_path, num_replicas, parameters) == [0.0] * num_ranks


def _adaptive(rank: int, world_size: int, folder: str) -> Any:
    device = _join(rank, world_size, folder)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    model = DistributedDataParallel(layers.to(device))
    attachment = cgx_ray.attach(model, policy="adaptive", folder=folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x_BN = torch.randn(256, 64, generator=torch.Generator().manual_seed(rank)).to(device)
    y_B = x_BN[:, :10].argmax(1)
    losses = []
    for _ in range(120):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x_BN), y_B)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    plan = str(attachment.plan)
    attachment.close()
    return float(losses[0]), float(losses[-1]), weights_hash(model), plan


def test_an_adaptive_run_learns_and_holds_the_same_weights(tmp_path: Path) -> None:
    (first, last, weights, plan), other = _run(2, _adaptive, tmp_path)
    assert last < 0.7 * first, plan
    assert other[2:] == (weights, plan)


def _until_one_is_killed(rank: int, folder: Path, codec: str, scheme: str) -> None:
    dist.destroy_process_group()
    (folder / "nccl").mkdir(exist_ok=True)
    device = _join(rank, 2, str(folder / "nccl"))
    model = DistributedDataParallel(GivenParts(NUMELS).to(device))
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
    try:
        for step in range(10_000):
            if step == 5 and rank == 1:
                die(folder)
            model.zero_grad()
            model(_gradients(step, rank).to(device)).backward()
            assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())
    finally:
        attachment.close()


@pytest.mark.parametrize(("codec", "scheme"), [("none", "dense"), ("qsgd", "sra")])
def test_when_a_rank_is_killed_the_other_says_so(codec: str, scheme: str, tmp_path: Path) -> None:
    (said,) = said_by_survivors(2, 1, tmp_path, _until_one_is_killed, codec, scheme).values()
    assert "rank 1" in said

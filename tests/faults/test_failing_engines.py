"""Errors inside the engine of one rank: a codec that raises, a thread that ends. All ranks raise the same error."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.branches import Branches, train
from support.ranks import run_ranks
from support.sharded import make_mesh, shard
from support.sharded import train as train_sharded
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.codecs import make_codec
from cgx_ray.collectives.transport import tcp
from cgx_ray.engine.step import StepRun
from cgx_ray.engine.telemetry import Telemetry
from cgx_ray.plan import CodecSpec

FAILING = 1
# Codec, scheme, intra and the nodes of the ranks.
WAYS: list[tuple[str, str, str, tuple[int, ...]]] = [
    ("qsgd", "sra", "flat", (0, 1, 2)),
    ("topk:density=0.05", "allgather", "flat", (0, 0, 0)),
    ("powersgd", "allgather", "flat", (0, 0, 0)),
    ("qsgd", "ring", "compressed", (0, 0, 1, 1)),
]


def _raise(*args: object, **kwargs: object) -> Any:
    raise ZeroDivisionError("nothing to see")


def _error_of(rank: int, step: Any, model: Any) -> str:
    # A rank that fails hangs up, also on ranks that are still in the step before.
    dist.barrier()
    with pytest.raises((cgx_ray.CGXError, RuntimeError)) as caught:
        step(model, rank, range(2, 1000))
    return str(caught.value)


def _codec_raises(rank: int, way: tuple[str, str, str, tuple[int, ...]], method: str) -> str:
    codec, scheme, intra, nodes = way
    tcp.host_key = lambda: f"node {nodes[rank]}"
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme, intra=intra)
    train(model, rank, range(2))
    if rank == FAILING:
        setattr(type(make_codec(CodecSpec.parse(codec))), method, _raise)
    said = _error_of(rank, train, model)
    attachment.close()
    return said


def _check(results: list[str], error: str) -> None:
    first = f"rank {FAILING}, step 2: the engine stopped: {error}"
    for rank, said in enumerate(results):
        assert first in said
        assert rank == FAILING or f"the first error: {first}" in said


@pytest.mark.fault("Python exception in a codec on one rank", "that error, on all ranks")
@pytest.mark.parametrize("method", ["encode", "decode"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0]} over {way[1]}, {way[2]}")
def test_an_exception_in_a_codec_of_one_rank_is_raised_on_all(
    way: tuple[str, str, str, tuple[int, ...]], method: str
) -> None:
    _check(run_ranks(len(way[3]), _codec_raises, way, method), "ZeroDivisionError('nothing to see')")


def _codec_of_shards_raises(rank: int, reports: bool) -> str:
    model = shard(Branches(), make_mesh())
    attachment = cgx_ray.attach(model, codec="qsgd")
    train_sharded(model, rank, range(2))
    if rank == FAILING:
        type(make_codec(CodecSpec.parse("qsgd"))).encode = _raise  # type: ignore[method-assign]
        if not reports:
            Telemetry.note_fault = _raise  # type: ignore[method-assign]
    said = _error_of(rank, train_sharded, model)
    attachment.close()
    return said


@pytest.mark.fault("the same with FSDP2", "that error, on all ranks, with the module")
@pytest.mark.parametrize("reports", [True, False])
def test_an_exception_in_a_codec_of_shards_is_raised_on_all(reports: bool) -> None:
    for said in run_ranks(3, _codec_of_shards_raises, reports):
        assert f"rank {FAILING}, step 2, module" in said
        assert "ZeroDivisionError('nothing to see')" in said


def _thread_dies(rank: int, way: str, folder: Path) -> str:
    """Let the engine's thread of one rank end, while that rank's process stays until the others have noticed."""
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra", shared_memory=False)
    train(model, rank, range(2))
    if rank == FAILING and way == "an error while it handles an error":
        Telemetry.note_fault = _raise  # type: ignore[method-assign]
        StepRun.work = _raise  # type: ignore[method-assign]
    elif rank == FAILING:
        StepRun.work = _exit  # type: ignore[method-assign]
    said = _error_of(rank, train, model)
    (folder / f"rank{rank}").touch()
    while len(list(folder.iterdir())) < 3:
        time.sleep(0.01)
    attachment.close()
    return said


def _exit(*args: object) -> None:
    raise SystemExit("the thread ends")


@pytest.mark.fault("the engine's thread dies on one rank", "that error, on all ranks")
@pytest.mark.parametrize("way", ["SystemExit", "an error while it handles an error"])
def test_a_thread_that_dies_on_one_rank_ends_the_step_on_all(way: str, tmp_path: Path) -> None:
    error = "SystemExit('the thread ends')" if way == "SystemExit" else "ZeroDivisionError('nothing to see')"
    _check(run_ranks(3, _thread_dies, way, tmp_path), error)

"""Runs under other defaults of torch (dtype, device, inference mode) have the bits of runs under the usual ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import sharded
from support.branches import Branches, train
from support.ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.engine.gains.gain_schedule import FIRST_STEP
from cgx_ray.plan import Layer, Plan
from cgx_ray.session.attachment import process
from cgx_ray.session.settings import Settings

DEFAULTS = ["usual", "float64", "bfloat16", "meta", "inference"]


@contextmanager
def _under(default: str) -> Iterator[None]:
    """Change a default of torch, except inference mode, see `_inference_mode`."""
    dtypes = {"float64": torch.float64, "bfloat16": torch.bfloat16}
    torch.set_default_dtype(dtypes.get(default, torch.float32))
    torch.set_default_device("meta" if default == "meta" else None)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def _inference_mode(default: str) -> AbstractContextManager[Any]:
    return torch.inference_mode() if default == "inference" else nullcontext()


def _in_each(make_model: Callable[[], Any], run: Callable[[Any, str], Any]) -> list[Any]:
    """Return the results of `run` under all defaults, with models that are made under the usual ones."""
    outcomes = []
    for default in DEFAULTS:
        model = make_model()
        with _under(default):
            outcomes.append(run(model, default))
    return outcomes


def _train(rank: int, options: dict[str, Any]) -> list[list[str]]:
    """Return by default the weights after each step, with a checkpoint that is loaded, and a new plan."""

    def run(module: Branches, default: str) -> list[str]:
        model = DistributedDataParallel(module, find_unused_parameters=True)
        with _inference_mode(default):
            attachment = cgx_ray.attach(model, **options)
        hashes = train(model, rank, range(3))
        with _inference_mode(default):
            attachment.load_state_dict(attachment.state_dict())
        hashes += train(model, rank, range(3, 5), use_right=False)
        if process.session is None:
            layers = cgx_ray.layers_of(model)
            attachment.hold(cgx_ray.make_plan(layers, version=1, world_size=2, codec="qsgd:bits=2"))
        hashes += train(model, rank, range(5, 8))
        attachment.close()
        return hashes

    return _in_each(Branches, run)


@pytest.mark.parametrize(
    ("codec", "scheme"),
    [
        ("none", "dense"),
        pytest.param("none", "sra", marks=pytest.mark.slow),
        ("qsgd", "ring"),
        ("dgc:density=0.05", "artopk_ring_auto"),
        pytest.param("topk:density=0.05,value_bits=16", "allgather", marks=pytest.mark.slow),
        pytest.param("randomk:density=0.05", "allreduce", marks=pytest.mark.slow),
        ("powersgd", "allreduce"),
        pytest.param("powersgd", "allgather", marks=pytest.mark.slow),
    ],
)
def test_ddp_models_train_to_the_same_bits_under_all_defaults(codec: str, scheme: str) -> None:
    first, other = run_ranks(2, _train, {"codec": codec, "scheme": scheme})
    assert first == other
    assert first == [first[0]] * len(DEFAULTS)


class _Adaptive:
    """A stand-in for the session of a Ray worker, which times codecs while it attaches, and measures gains."""

    settings = Settings()

    def first_plan(self, layers: Sequence[Layer], world_size: int, bucket_bytes: int, costs: Any) -> Plan:
        assert costs
        return self.settings.first_plan(layers, world_size, bucket_bytes)

    def start(self, attachment: cgx_ray.Attachment) -> None: ...


def _train_adaptively(rank: int) -> list[tuple[list[str], dict[str, float]]]:
    """Return weights by step, and gains of the first step that is measured: time decides whether others are."""

    def run(module: Branches, default: str) -> tuple[list[str], dict[str, float]]:
        process.session = _Adaptive()
        model = DistributedDataParallel(module)
        with _inference_mode(default):
            attachment = cgx_ray.attach(model)
        hashes = train(model, rank, range(5))
        attachment.close()
        (gain,) = [sample.gain for sample in attachment.take_samples() if sample.step == FIRST_STEP]
        return hashes, gain

    return _in_each(Branches, run)


def test_adaptive_runs_measure_the_same_gains_under_all_defaults() -> None:
    for outcomes in run_ranks(2, _train_adaptively):
        assert len(outcomes[0][1]) > 1
        assert outcomes == [outcomes[0]] * len(DEFAULTS)


def _train_sharded(rank: int, codec: str, num_replicas: int) -> list[str]:
    """`parameters` are encoded too."""
    mesh = sharded.make_mesh(num_replicas)

    def run(model: Any, default: str) -> str:
        with _inference_mode(default):
            attachment = cgx_ray.attach(model, codec=codec, parameters=sharded.BITS8)
        weights = sharded.train(model, rank, range(3))
        with _inference_mode(default):
            attachment.load_state_dict(attachment.state_dict())
        weights = sharded.train(model, rank, range(3, 5))
        attachment.close()
        return str([weight.double().sum().item() for weight in weights.values()])

    return _in_each(lambda: sharded.shard(Branches(), mesh), run)


@pytest.mark.parametrize(
    ("codec", "num_replicas"), [("qsgd", 1), pytest.param("ef_signsgd", 1, marks=pytest.mark.slow), ("ef_signsgd", 2)]
)
def test_fsdp2_models_train_to_the_same_bits_under_all_defaults(codec: str, num_replicas: int) -> None:
    outcomes = run_ranks(2 * num_replicas, _train_sharded, codec, num_replicas)
    assert outcomes == [[outcomes[0][0]] * len(DEFAULTS)] * len(outcomes)


def _train_over_backend(rank: int) -> list[list[str]]:
    def run(module: Branches, default: str) -> list[str]:
        cgx_ray.configure_backend(codec="qsgd")
        with _inference_mode(default):
            group = dist.new_group(backend="cgx")
        assert group.is_compressing
        model = DistributedDataParallel(module, process_group=group)
        hashes = train(model, rank, range(4))
        dist.destroy_process_group(group)
        return hashes

    return _in_each(Branches, run)


def test_backend_cgx_reduces_to_the_same_bits_under_all_defaults() -> None:
    first, other = run_ranks(2, _train_over_backend)
    assert first == other
    assert first == [first[0]] * len(DEFAULTS)

"""Steps with NaN or Inf in some layers: optimizer and engine agree on what was applied, on real processes.

A and B are two layers of one group. Their gradients are given, so it is known what a model without compression gets.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.given_gradients import Given, errors_at_end
from support.ranks import run_ranks
from support.sharded import make_mesh, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cgx_ray

SIDE = 64
CODECS = [
    ("topk:density=0.05", "allgather"),
    ("topk:density=0.05,value_bits=8", "allgather"),
    ("topk:density=0.05", "artopk_ring"),
    ("lwtopk:density=0.05", "allgather"),
    ("mstopk:density=0.05", "allgather"),
    ("sidco:density=0.05", "allgather"),
    ("dgc:density=0.05,momentum=0", "allgather"),
    ("randomk:density=0.05", "allreduce"),
    ("randomk:density=0.05", "allgather"),
    ("powersgd:rank=2", "allreduce"),
    ("ef_signsgd", "sra"),
    ("onebit", "ring"),
]
# One of each kind: sums of values, rows and messages of a layer, and a codec without a choice of elements.
FEW = [CODECS[i] for i in (0, 2, 5, 6, 9, 10)]
REST = [pytest.param(*case, marks=pytest.mark.slow) for case in CODECS if case not in FEW]
# Relative rounding errors of 60 sums in float32, with a few roundings in each encoding.
MAX_ERROR = 1e-5


class Run:
    """Ranks that train `Given` with SGD at a learning rate of 1, so weights are minus the sum of what was applied."""

    def __init__(self, rank: int, codec: str, scheme: str, num_layers: int = 2, **ddp: Any) -> None:
        self.generator = torch.Generator().manual_seed(rank)
        self.model = DistributedDataParallel(Given([(SIDE, SIDE)] * num_layers), **ddp)
        self.attachment = cgx_ray.attach(self.model, codec=codec, scheme=scheme, timeout_s=20)
        self.weights = list(self.model.module.weights)
        self.true = torch.zeros(num_layers, SIDE, SIDE, dtype=torch.float64)

    def gradient(self) -> torch.Tensor:
        return torch.rand(SIDE, SIDE, generator=self.generator) + 0.5

    def errors(self, loss_scale: float | None = None) -> list[float]:
        """Close, and return the errors by layer, see `errors_at_end`."""
        return errors_at_end(self.attachment, self.model.module, self.true, loss_scale)


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10**6)


def _left_out(rank: int, codec: str, scheme: str) -> tuple[int, float]:
    """Leave B out from step 10 on. Return how many of three bad steps of A are skipped, and the error of A."""
    run, scaler = Run(rank, codec, scheme, find_unused_parameters=True), _scaler()
    optimizer, num_skipped = torch.optim.SGD(run.model.parameters(), lr=1.0), 0
    for step in range(40):
        gradient = run.gradient()
        given = gradient.clone()
        if step in (10, 20, 30) and rank == 1:
            given[3, 3] = float("inf")
        optimizer.zero_grad()
        scaler.scale(run.model([given, given if step < 10 else None])).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        is_skipped = scaler.get_scale() < before
        num_skipped += is_skipped
        run.true[0] += 0 if is_skipped else gradient
        run.true[1] += gradient if step < 10 else 0
    return num_skipped, run.errors()[0]


@pytest.mark.fault("Inf in one layer while another one is not used", "all ranks skip the step; nothing is lost")
@pytest.mark.parametrize(("codec", "scheme"), [*FEW, *REST])
def test_an_inf_is_seen_although_the_layer_that_carries_it_is_not_used(codec: str, scheme: str) -> None:
    for num_skipped, error in run_ranks(2, _left_out, codec, scheme):
        assert num_skipped == 3
        assert error <= MAX_ERROR, error


def test_an_inf_that_prefix_leaves_out_is_seen() -> None:
    assert {num_skipped for num_skipped, _ in run_ranks(2, _left_out, "prefix:ratio=4", "allgather")} == {3}


def _two_optimizers(
    rank: int, codec: str, scheme: str, bad_steps: range, bad_layers: int, whole_layer: bool
) -> tuple[int, list[float]]:
    """Train A and B with an optimizer each; the first `bad_layers` overflow in `bad_steps`.

    Return in how many steps B is skipped, and the errors.
    """
    run, scaler = Run(rank, codec, scheme), _scaler()
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in run.weights]
    num_skipped = 0
    for step in range(40):
        gradients = [run.gradient(), run.gradient()]
        given = [gradient.clone() for gradient in gradients]
        if step in bad_steps and rank == 1:
            for gradient in given[:bad_layers]:
                gradient[slice(None) if whole_layer else 3] = float("inf")
        run.model.zero_grad()
        scaler.scale(run.model(given)).backward()
        is_finite = [bool(weight.grad.isfinite().all()) for weight in run.weights]
        num_skipped += not is_finite[1]
        run.true += torch.stack(gradients) * torch.tensor(is_finite)[:, None, None]
        if step in bad_steps:
            assert not any(is_finite[:bad_layers])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return num_skipped, run.errors()


# They send NaN and Inf where they are, so B gets what it would get without those of A.
EXACT = ("topk:density=0.05", "lwtopk:density=0.05", "mstopk:density=0.05", "powersgd:rank=2", "ef_signsgd", "onebit")


@pytest.mark.fault("one of two optimizers skips its step", "memory of the layers of the other one goes on")
# Also in the first step, before the other optimizer has ever stepped.
@pytest.mark.parametrize(
    ("codec", "scheme", "bad_steps"),
    [
        *((*case, range(20, 30)) for case in CODECS),
        *((*case, range(1)) for case in FEW),
        *(pytest.param(*case.values, range(1), marks=case.marks) for case in REST),
    ],
)
def test_an_optimizer_that_skips_does_not_undo_the_memory_of_the_others(
    codec: str, scheme: str, bad_steps: range
) -> None:
    for num_skipped, errors in run_ranks(2, _two_optimizers, codec, scheme, bad_steps, 1, False):
        assert max(errors) <= MAX_ERROR, errors
        if codec in EXACT and scheme != "artopk_ring":
            assert num_skipped == 0


@pytest.mark.parametrize("bad_layers", [1, 2])
@pytest.mark.parametrize("codec", ["topk:density=0.001", "randomk:density=0.001", "sidco:density=0.001"])
def test_layers_with_more_infs_than_are_sent_are_skipped(codec: str, bad_layers: int) -> None:
    for _, errors in run_ranks(2, _two_optimizers, codec, "allgather", range(20, 21), bad_layers, True):
        assert max(errors) <= MAX_ERROR, errors


class _Pair(nn.Module):
    """Two layers with inputs of their own, so that one may overflow alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(SIDE, SIDE, bias=False) for _ in range(2))
        for layer in (self.a, self.b):
            nn.init.zeros_(layer.weight)

    def forward(self, a_BD: torch.Tensor, b_BD: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.a(a_BD).sum() + self.b(b_BD).sum()
        return total


def _sharded(rank: int, num_replicas: int, codec: str) -> float:
    """Return the error of B, a layer with an optimizer of its own, where A overflows in some steps."""
    # One unit, so that both layers share messages.
    model: Any = fully_shard(_Pair(), mesh=make_mesh(num_replicas))
    attachment = cgx_ray.attach(model, codec=codec, timeout_s=20)
    scaler, true = _scaler(), torch.zeros(SIDE, SIDE, dtype=torch.float64)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (model.a, model.b)]
    generator = torch.Generator().manual_seed(rank)
    for step in range(30):
        a_BD, b_BD = (torch.rand(4, SIDE, generator=generator) for _ in range(2))
        if step in (0, 10, 11) and rank == 1:
            a_BD[0, 0] = float("inf")
        model.zero_grad()
        scaler.scale(model(a_BD, b_BD)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        true += b_BD.double().sum(0).expand(SIDE, SIDE)
    state = attachment.state_dict()
    owed = state["residuals"]["b.weight"].double().view(SIDE, SIDE) / state["loss_scale"]
    attachment.close()
    for summed in (owed, true):
        dist.all_reduce(summed)
    applied, world_size = -whole(model.b.weight).double(), dist.get_world_size()
    return float((applied + (owed - true) / world_size).norm() / true.norm()) * world_size


@pytest.mark.parametrize(
    ("codec", "num_ranks", "num_replicas"),
    [
        ("ef_signsgd", 4, 2),
        ("onebit", 2, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("ef_signsgd", 2, 1), ("onebit", 4, 2))),
    ],
)
def test_an_optimizer_that_skips_does_not_undo_the_memory_of_other_shards(
    codec: str, num_ranks: int, num_replicas: int
) -> None:
    for error in run_ranks(num_ranks, _sharded, num_replicas, codec):
        assert error <= MAX_ERROR, error


def _few_elements(rank: int) -> tuple[list[int], bool, bool]:
    """Keep fewer elements than there are layers. Return the elements that each layer has changed; if a step with a NaN
    in the first layer is finite; and if the memory is.
    """
    run = Run(rank, "lwtopk:density=0.0001", "allgather", num_layers=3)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=1.0)
    for step in range(20):
        gradients = [run.gradient() for _ in run.weights]
        if step == 19 and rank == 1:
            gradients[0][5, 5] = float("nan")
        optimizer.zero_grad()
        run.model(gradients).backward()
        is_finite = all(bool(weight.grad.isfinite().all()) for weight in run.weights)
        if is_finite:
            optimizer.step()
    owed = run.attachment.state_dict()["residuals"].values()
    run.attachment.close()
    changed = [int((weight != 0).sum()) for weight in run.weights]
    return changed, is_finite, all(bool(value.isfinite().all()) for value in owed)


def test_lwtopk_sends_an_element_of_each_layer_at_any_density() -> None:
    for changed, is_finite, is_owed_finite in run_ranks(2, _few_elements):
        assert min(changed) > 0, changed
        assert not is_finite
        assert is_owed_finite


def _two_stages(rank: int, is_forgotten: list[bool]) -> bool:
    """Train B alone, then A and B with another optimizer. Return True if a step of both that is skipped changes B.

    is_forgotten  by rank, the first optimizer is gone by then
    """
    run, scaler = Run(rank, "topk:density=0.05", "allgather"), _scaler()
    first, second = torch.optim.SGD([run.weights[1]], lr=1.0), torch.optim.SGD(run.weights, lr=1.0)
    owed: list[torch.Tensor] = []
    for step in range(8):
        optimizer = first if step < 3 else second
        gradients = [run.gradient(), run.gradient()]
        if step == 7:
            gradients[0][3, 3] = float("nan")
        run.model.zero_grad()
        scaler.scale(run.model(gradients)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 3 and is_forgotten[rank]:
            del first, optimizer
        state = run.attachment.state_dict()
        owed.append(state["residuals"]["weights.1"] / state["loss_scale"])
    run.attachment.close()
    return not torch.equal(owed[-1], owed[-2])


@pytest.mark.parametrize("is_forgotten", [[False, False], [True, False]])
def test_an_optimizer_of_an_earlier_stage_judges_no_layer(is_forgotten: list[bool]) -> None:
    assert run_ranks(2, _two_stages, is_forgotten) == [False, False]


def _two_threads(rank: int, scales: list[float]) -> list[float]:
    """Train a model in each of two threads, with a GradScaler of its own unless the scale is 1. Return all errors."""
    runs = []
    for scale in scales:
        group = dist.new_group()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6, enabled=scale != 1)
        runs.append((Run(rank, "topk:density=0.05", "allgather", process_group=group), scaler))

    def train(run: Run, scaler: torch.amp.GradScaler) -> None:
        optimizer = torch.optim.SGD(run.model.parameters(), lr=1.0)
        for _ in range(100):
            gradients = [run.gradient() for _ in run.weights]
            run.true += torch.stack(gradients)
            optimizer.zero_grad()
            scaler.scale(run.model(gradients)).backward()
            scaler.step(optimizer)
            scaler.update()

    threads = [threading.Thread(target=train, args=pair) for pair in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [error for run, scaler in runs for error in run.errors(scaler.get_scale())]


@pytest.mark.parametrize("scales", [[2.0**4, 2.0**12], [2.0**10, 1.0]])
def test_models_in_two_threads_follow_the_scale_of_their_own_scaler(scales: list[float]) -> None:
    for errors in run_ranks(2, _two_threads, scales):
        assert max(errors) <= MAX_ERROR, errors

"""Random trainings: plans that change, NaN and Inf, several optimizers, unused layers, accumulation, checkpoints.

Gradients are given, so it is known by layer what an uncompressed training applies; what is applied and what is owed
must add up to it. A failure prints the seed: `_schedule(rank, [seed])` repeats it.
"""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from support.given_gradients import Given, errors_at_end
from support.ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.plan import Layer, Plan

SHAPES = [(64, 64), (40, 30), (200,), (33, 17), (5,)]
PLACES = range(len(SHAPES))
OPTIONS = [
    ("none", "dense"),
    ("none", "sra"),
    ("topk:density=0.05", "allgather"),
    ("topk:density=0.02,value_bits=16", "allgather"),
    ("topk:density=0.05", "artopk_ring"),
    ("dgc:density=0.05,momentum=0", "artopk_tree_var"),
    ("lwtopk:density=0.01", "allgather"),
    ("mstopk:density=0.05", "allgather"),
    ("sidco:density=0.05", "allgather"),
    ("randomk:density=0.05", "allreduce"),
    ("randomk:density=0.05", "allgather"),
    ("powersgd:rank=2", "allreduce"),
    ("powersgd:rank=1", "allgather"),
    ("ef_signsgd", "sra"),
    ("onebit", "ring"),
]
# Layers of each optimizer.
PARTS = [[[0, 1, 2, 3, 4]], [[0, 2], [1, 3, 4]], [[0], [1], [2, 3, 4]], [[0, 3], [1], [2], [4]]]
NUM_STEPS = 30
# Relative rounding errors of 60 sums in float32, with a few roundings in each encoding.
MAX_ERROR = 2e-5


class Schedule:
    """A training of this rank. `shared` draws alike on all ranks, `own` does not."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank, self.shared, self.own = rank, random.Random(seed), random.Random(f"{seed} on rank {rank}")
        self.generator = torch.Generator().manual_seed(1000 * seed + rank)
        self.leaves_out = self.shared.random() < 0.5
        self.model = DistributedDataParallel(
            Given(SHAPES),
            find_unused_parameters=self.leaves_out,
            gradient_as_bucket_view=self.shared.random() < 0.5,
            bucket_cap_mb=self.shared.choice([0.005, 0.01, 25]),
        )
        self.weights = list(self.model.module.weights)
        self.attachment = cgx_ray.attach(self.model, plan=self.plan(0, cgx_ray.layers_of(self.model)), timeout_s=20)
        self.parts = self.shared.choice(PARTS)
        self.optimizers = [torch.optim.SGD([self.weights[place] for place in part], lr=1.0) for part in self.parts]
        growth_interval = self.shared.choice([3, 7, 10**6])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=growth_interval)
        self.true = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]

    def plan(self, version: int, layers: list[Layer]) -> Plan:
        codec, scheme = self.shared.choice(OPTIONS)
        group_bytes, uniform = self.shared.choice([1, 4000, 20000, 10**7]), self.shared.random() < 0.5
        return cgx_ray.make_plan(
            layers, version=version, world_size=2, codec=codec, scheme=scheme, group_bytes=group_bytes, uniform=uniform
        )

    def backward(self, used: list[bool], *, is_synchronised: bool) -> None:
        """Add gradients of one pass; some may have NaN or Inf, on one rank or both, in one element or in all."""
        gradients = [torch.rand(shape, generator=self.generator) + 0.5 for shape in SHAPES]
        given = [gradient.clone() for gradient in gradients]
        bad_layers = [place for place in PLACES if self.shared.random() < 0.5] if self.shared.random() < 0.2 else []
        bad_ranks = self.shared.choice([[0], [1], [0, 1]])
        value = self.shared.choice([float("inf"), float("nan"), -float("inf")])
        fills = self.shared.random() < 0.3
        for place in bad_layers if self.rank in bad_ranks else []:
            flat_N = given[place].view(-1)
            flat_N[slice(None) if fills else self.own.randrange(flat_N.numel())] = value
        with contextlib.nullcontext() if is_synchronised else self.model.no_sync():
            self.scaler.scale(self.model([g if u else None for g, u in zip(given, used, strict=True)])).backward()
        self.sums = [s + g * u for s, g, u in zip(self.sums, gradients, used, strict=True)]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.sums = [torch.zeros(shape) for shape in SHAPES]
        used = [not self.leaves_out or self.shared.random() < 0.7 for _ in PLACES]
        used[self.shared.choice(PLACES)] = True
        mine = [u and not (self.leaves_out and self.own.random() < 0.2) for u in used]
        mine = mine if any(mine) else used
        for is_synchronised in [False, True] if self.shared.random() < 0.15 else [True]:
            self.backward(mine, is_synchronised=is_synchronised)
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            got = [self.weights[place].grad for place in part]
            if all(gradient is None or bool(gradient.isfinite().all()) for gradient in got):
                for place in part:
                    self.true[place] += self.sums[place]
            if any(gradient is not None for gradient in got):
                self.scaler.step(optimizer)
        self.scaler.update()


def _schedule(rank: int, seeds: list[int]) -> dict[int, list[float]]:
    """Return the errors by layer of each seed."""
    errors = {}
    for seed in seeds:
        run, version = Schedule(rank, seed), 0
        for _ in range(NUM_STEPS):
            if run.shared.random() < 0.15:
                version += 1
                run.attachment.hold(run.plan(version, cgx_ray.layers_of(run.model)))
            run.step()
            if run.shared.random() < 0.1:
                run.attachment.load_state_dict(run.attachment.state_dict())
        errors[seed] = errors_at_end(run.attachment, run.model.module, run.true)
    return errors


@pytest.mark.parametrize(
    "first", [0, pytest.param(100, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.slow)]
)
def test_applied_and_owed_add_up_in_random_trainings(first: int) -> None:
    num_seeds = 8 if first == 0 else 100
    for errors in run_ranks(2, _schedule, list(range(first, first + num_seeds))):
        # Not `<=` alone: NaN is an error too.
        wrong = {seed: found for seed, found in errors.items() if not max(found) <= MAX_ERROR}
        assert not wrong, wrong

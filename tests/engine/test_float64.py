"""Gradients of float64: those that are not compressed keep their type on the wire, the others say what they lose."""

from __future__ import annotations

import pytest
import torch
from support.ranks import log_lines, run_ranks
from support.scheme_cases import Given
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives.transport import tcp
from cgx_ray.plan import CODECS_OF_SCHEME, Scheme

LARGE, SMALL = (40, 50), (9,)
UNCOMPRESSED = [("none", str(scheme), "flat") for scheme in Scheme if "none" in CODECS_OF_SCHEME[scheme]]


def _gradients(rank: int, step: int) -> list[Tensor]:
    """Return values that float32 does not have: precise, huge and tiny ones."""
    chance = torch.Generator().manual_seed(2 * step + rank)
    gradients = [torch.randn(shape, generator=chance, dtype=torch.float64) for shape in (LARGE, SMALL)]
    for gradient in gradients:
        gradient[0] *= 1e300
        gradient[1] *= 1e-300
    return gradients


def _averages(rank: int, codec: str, scheme: str, intra: str) -> tuple[list[Tensor], list[str]]:
    """Return the gradients that the model gets in the last of three steps, and what is logged."""
    tcp.host_key = lambda: f"node {rank // 2}"
    model = DistributedDataParallel(Given(LARGE, SMALL).double())
    said = log_lines()
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme, intra=intra)
    for step in range(3):
        model.zero_grad()
        model(*_gradients(rank, step)).backward()
    attachment.close()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], said


@pytest.mark.parametrize(("codec", "scheme", "intra"), [*UNCOMPRESSED, ("none", "sra", "dense")])
def test_gradients_of_float64_that_are_not_compressed_keep_their_range_and_precision(
    codec: str, scheme: str, intra: str
) -> None:
    world_size = 2 if intra == "flat" else 4
    each = [_gradients(rank, 2) for rank in range(world_size)]
    for averages, said in run_ranks(world_size, _averages, codec, scheme, intra):
        assert said == []
        for place, average in enumerate(averages):
            given = torch.stack([gradients[place] for gradients in each])
            # Both divide, and add as many numbers as ranks, with 53 bits.
            allowed = 2 * world_size * torch.finfo(torch.float64).eps * given.abs().mean(0)
            assert bool(((average - given.mean(0)).abs() <= allowed).all())


@pytest.mark.parametrize(("codec", "scheme"), [("qsgd", "sra"), ("topk:density=0.1", "allgather")])
def test_small_layers_beside_compressed_ones_keep_float64_and_the_first_rank_says_what_these_lose(
    codec: str, scheme: str
) -> None:
    first, second = (_gradients(rank, 2)[1] for rank in range(2))
    results = run_ranks(2, _averages, codec, scheme, "flat")
    for averages, _ in results:
        assert torch.equal(averages[1], first / 2 + second / 2)
    (warning,) = results[0][1]
    assert warning.startswith("gradients of float64 are compressed by way of float32, of layers.0: values beyond")
    assert results[1][1] == []

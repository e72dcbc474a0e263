"""Selectors on gradients that do not fit the assumptions of their thresholds: every step must make progress."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.codec_cases import decoded, encoded, noise

from cgx_ray.codecs import make_codec
from cgx_ray.plan import CodecSpec

NUM_STEPS = 100


def _sparse_rows(step: int) -> torch.Tensor:
    """Return a gradient like that of an embedding: 2 of 1000 rows are not zero."""
    generator = torch.Generator().manual_seed(step)
    grad_RC = torch.zeros(1000, 20)
    grad_RC[torch.randperm(1000, generator=generator)[:2]] = torch.randn(2, 20, generator=generator)
    return grad_RC.view(-1)


def test_dgc_sends_all_of_fewer_nonzero_elements_than_k() -> None:
    grad_N = torch.zeros(200_000)
    grad_N[torch.randperm(200_000, generator=torch.Generator().manual_seed(3))[:1000]] = noise(1000)
    codec = make_codec(CodecSpec(name="dgc", density=0.01))
    for key in range(10):
        sent_N = decoded(codec, encoded(codec, grad_N, key), 200_000, key)
        assert torch.equal(sent_N, grad_N), f"key {key}: {int(sent_N.count_nonzero())} of 1000 sent"


GRADIENTS: dict[str, tuple[float, Callable[[int], torch.Tensor]]] = {
    "constant": (0.1, lambda step: torch.full((5000,), -0.25)),
    "sparse rows": (0.01, _sparse_rows),
    "uniform": (0.001, lambda step: torch.rand(20_000, generator=torch.Generator().manual_seed(step)) - 0.5),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_sidco_sends_half_of_k_or_all_there_is_at_every_step(kind: str) -> None:
    density, gradient = GRADIENTS[kind]
    numel = gradient(0).numel()
    codec = make_codec(CodecSpec(name="sidco", density=density))
    memory = codec.new_memory(numel)
    assert memory is not None
    for step in range(NUM_STEPS):
        grad_N, owed_N = gradient(step), memory.residual_N
        assert owed_N is not None
        num_nonzero = int((grad_N + owed_N).count_nonzero())
        num_sent = int(decoded(codec, encoded(codec, grad_N, step, memory), numel, step).count_nonzero())
        memory.commit()
        least = min(codec.spec.num_kept(numel) / 2, num_nonzero)
        assert num_sent >= least, f"step {step}: {num_sent} of {num_nonzero} sent, least {least}"


# At least K / 2 elements are sent per step, so each of the 5000 constant elements waits at most 2 / density steps. Of
# the sparse rows all elements are sent, because there are fewer than K.
@pytest.mark.parametrize(("kind", "limit"), [("constant", 0.25 * (2 / 0.1 + 1)), ("sparse rows", 0.0)])
def test_what_sidco_owes_stays_bounded(kind: str, limit: float) -> None:
    density, gradient = GRADIENTS[kind]
    codec = make_codec(CodecSpec(name="sidco", density=density))
    memory = codec.new_memory(gradient(0).numel())
    assert memory is not None
    most = []
    for step in range(NUM_STEPS):
        encoded(codec, gradient(step), step, memory)
        memory.commit()
        assert memory.residual_N is not None
        most.append(float(memory.residual_N.abs().max()))
    assert max(most) <= limit, f"a residual of {max(most)} at step {most.index(max(most))}, limit {limit}"

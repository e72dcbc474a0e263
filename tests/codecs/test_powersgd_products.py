"""PowerSGD's products where torch may round their operands to TF32, which needs a GPU: the test says that it does."""

from __future__ import annotations

import pytest
import torch

from cgx_ray.codecs import make_codec, powersgd
from cgx_ray.plan import CodecSpec, Layer

# Whole matrices, a padded one, and a single row.
LAYERS = [
    Layer(name="whole", numel=60, ndim=2, num_rows=6),
    Layer(name="padded", numel=53, ndim=1),
    Layer(name="row", numel=7, ndim=2, num_rows=1),
]
NUMEL = sum(layer.numel for layer in LAYERS)


def _coded(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradient of three steps as decoded, the residual, and what a rank keeps of the gradient with both."""
    codec = make_codec(CodecSpec(name="powersgd", rank=rank), LAYERS)
    memory = codec.new_memory(NUMEL)
    assert memory is not None
    grad_N = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    payload = torch.empty(codec.payload_bytes(NUMEL), dtype=torch.uint8)
    for _ in range(3):
        fed_N = grad_N + memory.now["residuals"]
        codec.encode(grad_N, payload, 0, memory)
        memory.commit()
    decoded_N = torch.ones(NUMEL)
    codec.decode(payload, decoded_N, add=True)
    return decoded_N - 1, memory.now["residuals"], fed_N


@pytest.mark.parametrize("rank", [1, 4])
def test_products_by_columns_are_those_of_matrices_except_for_rounding(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, left, _ = _coded(rank)
    monkeypatch.setattr(powersgd, "_rounds_products", lambda factor: True)
    monkeypatch.setattr(torch, "mm", None)
    monkeypatch.setattr(torch.Tensor, "addmm_", None)
    found, found_left, fed = _coded(rank)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found_left, left, rtol=1e-4, atol=1e-5)
    # What was not sent stays.
    torch.testing.assert_close(found + found_left, fed, rtol=1e-5, atol=1e-6)


def test_on_a_cpu_products_are_those_of_matrices_whatever_the_user_lets_gpus_do() -> None:
    expected = _coded(2)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        found = _coded(2)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert all(map(torch.equal, found, expected))

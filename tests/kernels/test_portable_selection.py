"""The selection without AVX2, as on machines that lack it: against the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.sparse_checks import KINDS, check_topk, gradient

from cgx_ray.runtime_ext.checks import native


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    native.use_instruction_set("portable")
    yield
    native.use_instruction_set(native.instruction_sets()[-1])


@pytest.mark.long
@pytest.mark.parametrize("numel", [1025, 70_001])
@pytest.mark.parametrize("kind", KINDS)
def test_the_portable_selection_equals_the_reference_bit_for_bit(kind: str, numel: int) -> None:
    for num_kept in (0, 1, numel // 100, numel // 2):
        grad_N, residual_N = gradient(kind, numel), gradient("normal", numel)
        check_topk(grad_N, num_kept)
        check_topk(grad_N, num_kept, None, gradient("normal", numel))
        check_topk(grad_N, num_kept, residual_N, gradient("normal", numel))
        check_topk(grad_N, num_kept, residual_N, residual_N)

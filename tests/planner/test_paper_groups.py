"""The pipeline on which the papers' searches work."""

from __future__ import annotations

import pytest

from cgx_ray.plan import DENSE, Layer
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.papers.groups import pipeline_of
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured

EMBED = Layer(name="embed", numel=1_000_000, ndim=2)


def measured(dtype: str, *fixed: Layer) -> Measured:
    return Measured(
        layers=(
            EMBED,
            Layer(name="body", numel=1_000_000, ndim=2),
            Layer(name="head", numel=2**21, ndim=2, dtype=dtype),
        ),
        backward_s=(0.1, 0.2, 0.4),
        network=Network.flat(4, Link.from_rates(bandwidth_gbps=1, latency_ms=0)),
        codec_costs={},
        gain={},
        fixed=tuple(PlannedGroup.of([layer], DENSE, is_fixed=True) for layer in fixed),
    )


def test_no_backward_is_lost_where_layers_with_a_rule_come_last() -> None:
    assert pipeline_of(measured("float32"), (DENSE,)).backward_s == (0.1, 0.2, 0.4)
    assert pipeline_of(measured("float32", EMBED), (DENSE,)).backward_s == (0.1, pytest.approx(0.6))


def test_elements_have_the_mean_size_of_the_layers_that_are_grouped() -> None:
    """Dense sums of 1,000,000 float32 and 2^21 bfloat16 elements, whichever layer backward begins with."""
    mixed, wide = (pipeline_of(measured(dtype, EMBED), (DENSE,)).costs[0] for dtype in ("bfloat16", "float32"))
    numel = 1_000_000 + 2**21
    ratio = mixed.network_b_s_per_element / wide.network_b_s_per_element
    assert ratio == pytest.approx((4_000_000 + 2 * 2**21) / (4 * numel))

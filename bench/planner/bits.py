"""Rows of `bench planner`: bits per layer and the gain from a histogram, on gradients of the byte-level GPT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cgx_ray.codecs.gain import GainCurve
from cgx_ray.demo.gpt import GPTConfig, StdlibBytes, build_gpt
from cgx_ray.plan import CodecSpec, Layer
from cgx_ray.planner.bits import BitsProblem, dp
from cgx_ray.planner.papers.cgx import bayes, kmeans, linear
from cgx_ray.report.result import Row
from cgx_ray.session.calibrate import measure_errors

# CGX, table 7: compression over that of 4 bits everywhere, Transformer-XL base.
CGX_TABLE_7 = {"kmeans": 0.68, "bayes": 0.65, "linear": 0.53}
# CGX uses 1.5 to 3.
CGX_ALPHA = 2.0
# Gradients change fast in the first steps, and slowly later.
RECORDED_STEPS = (0, 4, 8)
GAIN_DENSITIES = tuple(0.0005 * 1000 ** (step / 30) for step in range(31))


def record_gradients(
    steps: tuple[int, ...] = RECORDED_STEPS, config: GPTConfig | None = None, *, seed: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Train the GPT alone and yield its gradients at `steps`, flat float32 by layer, without small layers."""
    model = build_gpt(seed, config)
    data = StdlibBytes(context=model.config.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(max(steps) + 1):
        optimizer.zero_grad()
        model(*data.train_batch(seed=seed, step=step, rank=0, batch_size=2)).backward()
        optimizer.step()
        if step in steps:
            yield {
                name: parameter.grad.flatten().clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
                and not Layer(name=name, numel=parameter.numel(), ndim=parameter.ndim).is_small
            }


def measure_bits(gradients: list[dict[str, Tensor]] | None = None) -> list[Row]:
    """Return wire bytes over those of 4 bits everywhere: at the same error, then with CGX's table 7 as the baseline."""
    errors = measure_errors(gradients or list(record_gradients()))
    same = BitsProblem(layers=tuple(errors.values()))
    more = replace(same, alpha=CGX_ALPHA)
    kmeans_ratio = kmeans(same).wire_bytes / same.static_bytes
    best = dp(same)
    return [
        Row(name="bits_kmeans_over_4_bits", value=kmeans_ratio, unit="of wire bytes", goal="<= 1"),
        Row(
            name="bits_dp_over_4_bits",
            value=best.wire_bytes / same.static_bytes,
            unit="of wire bytes",
            baseline=kmeans_ratio,
            limit=best.bound_bytes / same.static_bytes,
            goal=f"<= {kmeans_ratio!r}",
        ),
        *(
            Row(
                name=f"bits_{solve.__name__}_at_error_x{CGX_ALPHA:g}_over_4_bits",
                value=choice.wire_bytes / more.static_bytes,
                unit="of wire bytes",
                baseline=CGX_TABLE_7.get(solve.__name__),
                limit=choice.bound_bytes / more.static_bytes,
            )
            for solve in (kmeans, bayes, linear, dp)
            for choice in (solve(more),)
        ),
    ]


def measure_gain(gradients: list[dict[str, Tensor]] | None = None) -> list[Row]:
    """Return the largest relative error of the gain from one histogram, over densities and steps.

    The goal is for the whole model, which the gain describes. Single layers have no goal: some keep 17 elements at the
    smallest density.
    """
    steps = gradients or list(record_gradients())
    whole = max(gain_error(torch.cat(tuple(layers.values()))) for layers in steps)
    by_layer = max(gain_error(grad_N) for layers in steps for grad_N in layers.values())
    return [
        Row(name="gain_from_histogram_error", value=100 * whole, unit="%", goal="<= 1"),
        Row(name="gain_from_histogram_error_by_layer", value=100 * by_layer, unit="%"),
    ]


def gain_error(grad_N: Tensor) -> float:
    """Return the largest relative error of the histogram's gain against exact top-k, over GAIN_DENSITIES."""
    energy_N = grad_N.double().square().sort(descending=True).values.cumsum(0)
    worst = 0.0
    for density, gain in zip(GAIN_DENSITIES, GainCurve(grad_N).gain(GAIN_DENSITIES), strict=True):
        num_kept = CodecSpec(name="topk", density=density).num_kept(grad_N.numel())
        true = float(energy_N[num_kept - 1] / energy_N[-1])
        worst = max(worst, abs(gain / true - 1))
    return worst

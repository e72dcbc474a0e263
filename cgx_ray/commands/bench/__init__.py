"""`cgx-ray bench`: one module per benchmark, from its options to tables, pictures and JSON."""

from __future__ import annotations

import click

from cgx_ray.commands.lazy import LazyGroup

_BENCHES = {
    "accuracy": (
        "cgx_ray.commands.bench.accuracy:accuracy",
        "Train small models with each codec and dense, and compare the losses.",
    ),
    "adapt": ("cgx_ray.commands.bench.adapt:adapt", "Drive the control loop in a simulated cluster, or in a lab."),
    "chaos": ("cgx_ray.commands.bench.chaos:chaos", "Train beside random faults, and compare with a quiet run."),
    "collectives": ("cgx_ray.commands.bench.collectives:collectives", "Time schemes against Gloo and the bound."),
    "kernels": ("cgx_ray.commands.bench.kernels:kernels", "Measure throughput, latency and error of codecs."),
    "lab": ("cgx_ray.commands.bench.lab:lab", "Compare the lab with the alpha-beta model."),
    "network": ("cgx_ray.commands.bench.network:network", "Compare the monitors' estimates with the lab's links."),
    "planner": ("cgx_ray.commands.bench.planner:planner", "Check that plans are optimal, and time the planner."),
    "scale": ("cgx_ray.commands.bench.scale:scale", "Load one controller with the reports of thousands of ranks."),
    "step": ("cgx_ray.commands.bench.step:step", "Time a step with DDP, torch's hooks and the engine."),
}


@click.group(cls=LazyGroup, places=_BENCHES)
def bench() -> None:
    """Measure a part of cgx_ray."""

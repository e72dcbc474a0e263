"""`python -m bench NAME`, from the root of a checkout: one folder per benchmark, with its options in `command`."""

from __future__ import annotations

import sys

import click

from cgx_ray.commands.lazy import MainGroup

_BENCHES = {
    "accuracy": (
        "bench.accuracy.command:accuracy",
        "Train small models with each codec and dense, and compare the losses.",
    ),
    "adapt": ("bench.adapt.command:adapt", "Drive the control loop in a simulated cluster, or in a lab."),
    "chaos": ("bench.chaos.command:chaos", "Train beside random faults, and compare with a quiet run."),
    "collectives": ("bench.collectives.command:collectives", "Time schemes against Gloo and the bound."),
    "kernels": ("bench.kernels.command:kernels", "Measure throughput, latency and error of codecs."),
    "lab": ("bench.lab.command:lab", "Compare the lab with the alpha-beta model."),
    "network": ("bench.network.command:network", "Compare the monitors' estimates with the lab's links."),
    "planner": ("bench.planner.command:planner", "Check that plans are optimal, and time the planner."),
    "scale": ("bench.scale.command:scale", "Load one controller with the reports of thousands of ranks."),
    "step": ("bench.step.command:step", "Time a step with DDP, torch's hooks and the engine."),
}


@click.group(cls=MainGroup, places=_BENCHES)
def bench() -> None:
    """Measure a part of cgx_ray."""


if __name__ == "__main__":
    sys.exit(bench(prog_name="python -m bench"))

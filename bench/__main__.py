"""`python -m bench NAME`, from the root of a checkout: one folder per benchmark, whose `measure` has its options."""

from __future__ import annotations

import sys

import click

from cgx_ray.commands.lazy import MainGroup

_BENCHES = {
    "accuracy": (
        "bench.accuracy.measure:accuracy",
        "Train small models with each codec and dense, and compare the losses.",
    ),
    "adapt": ("bench.adapt.measure:adapt", "Drive the control loop in a simulated cluster, or in a lab."),
    "collectives": ("bench.collectives.measure:collectives", "Time schemes against Gloo and the bound."),
    "gpu": ("bench.gpu.measure:gpu", "Count calls of CUDA, and time steps on a GPU."),
    "kernels": ("bench.kernels.measure:kernels", "Measure throughput, latency and error of codecs."),
    "lab": ("bench.lab.measure:lab", "Compare the lab with the alpha-beta model."),
    "network": ("bench.network.measure:network", "Compare the monitors' estimates with the lab's links."),
    "peers": ("bench.peers.measure:peers", "Time a step with the ways that others offer, and with ours."),
    "planner": ("bench.planner.measure:planner", "Check that plans are optimal, and time the planner."),
    "scale": ("bench.scale.measure:scale", "Load one controller with the reports of thousands of ranks."),
    "step": ("bench.step.measure:step", "Time a step with DDP, torch's hooks and the engine."),
    "why": ("bench.why.measure:why", "Time steps that `cgx-ray why` observes beside others."),
}


@click.group(cls=MainGroup, places=_BENCHES, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure a part of cgx_ray."""


if __name__ == "__main__":
    sys.exit(bench(prog_name="python -m bench"))

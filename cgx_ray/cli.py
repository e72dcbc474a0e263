"""The command line `cgx-ray`. A command lies in `cgx_ray.commands`, in a module of its own."""

from __future__ import annotations

import sys

import click

from cgx_ray.commands.lazy import MainGroup

_COMMANDS = {
    "collective": ("cgx_ray.commands.collective:collective", "Compare collectives for a top-k gradient on a link."),
    "compare": ("cgx_ray.commands.compare:compare", "Compare two runs: time per step, loss and plans side by side."),
    "demo": (
        "cgx_ray.commands.demo:demo",
        "Train a small GPT, dense and under a policy, on a network that slows down.",
    ),
    "doctor": ("cgx_ray.commands.doctor:doctor", "Say what this machine has, what is missing, and how to get it."),
    "lab": ("cgx_ray.commands.lab:lab", "Emulate hosts and links on this machine; needs root."),
    "plan": ("cgx_ray.commands.plan.plan:plan", "Predict the best plan of a model on a network, and its step time."),
    "probe": ("cgx_ray.commands.probe:probe", "Measure latency and bandwidth between all nodes of a Ray cluster."),
    "profile": ("cgx_ray.commands.profile:profile", "Measure the time of all codecs on this device, for `plan`."),
    "profile-model": ("cgx_ray.commands.profile_model:profile_model", "Measure a model that runs here, for `plan`."),
    "replay": (
        "cgx_ray.commands.replay:replay",
        "Decide again from a journal, and list where this version decides otherwise.",
    ),
    "report": (
        "cgx_ray.commands.report:report",
        "Explain a run: where its time went, its decisions and predictions, and what to try next.",
    ),
    "top": ("cgx_ray.commands.top:top", "Watch a running training: ranks, links, plan and decisions, until it ends."),
    "why": (
        "cgx_ray.commands.why:why",
        "Observe a DDP training that runs as COMMAND, and say what bounds its steps.",
    ),
}


@click.group(cls=MainGroup, places=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cgx-ray")
def main() -> None:
    """Adaptive gradient compression for Ray Train and PyTorch DDP."""


if __name__ == "__main__":
    sys.exit(main())

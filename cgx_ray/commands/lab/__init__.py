"""`cgx-ray lab`: a lab from the shell. `up` runs it; the other commands find it and may run at any time."""

from __future__ import annotations

import click

from cgx_ray.commands.lazy import LazyGroup

_LAB_COMMANDS = {
    "cut": ("cgx_ray.commands.lab.links:cut", "Lose all packets to and from a host."),
    "down": ("cgx_ray.commands.lab.up:down", "End a lab and everything in it."),
    "reconnect": ("cgx_ray.commands.lab.links:reconnect", "Connect a host again."),
    "run": ("cgx_ray.commands.lab.run:run", "Run COMMAND in every host, as one rank each."),
    "schedule": ("cgx_ray.commands.lab.schedule:show_schedule", "Check, print and draw a schedule."),
    "set": ("cgx_ray.commands.lab.links:set_links", "Change links now, while traffic flows."),
    "status": ("cgx_ray.commands.lab.links:status", "Show links, packets, drops and lateness."),
    "up": ("cgx_ray.commands.lab.up:up", "Start a lab and run it until Ctrl-C or `lab down`."),
}


@click.group(cls=LazyGroup, places=_LAB_COMMANDS)
def lab() -> None:
    """Emulate hosts and links on this machine; needs root."""

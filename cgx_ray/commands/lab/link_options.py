"""Options that commands of a lab share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from cgx_ray.errors import LabConfigError
from cgx_ray.lab.handle import LabHandle
from cgx_ray.lab.link import LINK_WORDS, LinkChange, parse_change
from cgx_ray.lab.schedule import Schedule

_Command = TypeVar("_Command", bound=Callable[..., None])
_HELP = {
    "rate": "Rate of IP packets, such as 1gbit or 250mbit.",
    "latency": "Latency one way between two hosts, such as 5ms or 100us.",
    "jitter": "Latency varies by up to this, up or down.",
    "loss": "Fraction of packets lost between two hosts, such as 1% or 0.01.",
    "queue": "Bytes that wait at a link before it drops packets, such as 250kb; none: senders wait instead.",
    "mtu": "Bytes of the largest IP packet that passes, such as 1500; senders are not told of lost ones.",
}

lab_option = click.option("--lab", "pid", type=int, help="Process id of the lab; needed if several are up.")
slower_option = click.option(
    "--slower", default=1.0, show_default=True, help="Play the schedule on a network this many times slower."
)
epoch_option = click.option("--epoch", help="Length of an epoch of the schedule, such as 30s or 200steps.")


def link_options(defaults: dict[str, str]) -> Callable[[_Command], _Command]:
    """Return an option per property of a link; the command gets their texts, or None, as keywords."""

    def decorate(function: _Command) -> _Command:
        for word in reversed(LINK_WORDS):
            default = defaults.get(word)
            option = click.option(f"--{word}", default=default, show_default=default is not None, help=_HELP[word])
            function = option(function)
        return function

    return decorate


def change_of(words: dict[str, str | None]) -> LinkChange:
    """Return the change that the options of `link_options` ask for."""
    return parse_change((word, text) for word, text in words.items() if text is not None)


def read_schedule(name: str, epoch: str | None, slower: float) -> Schedule:
    """Read a schedule with the options `--epoch` and `--slower`. Raises LabError if something is wrong with them."""
    schedule = Schedule.read(name)
    if epoch is not None:
        number = epoch.removesuffix("steps").removesuffix("s")
        try:
            length = float(number)
        except ValueError:
            raise LabConfigError(f"epoch {epoch!r} is not allowed; give 30s or 200steps") from None
        schedule = schedule.with_epoch(length, "step" if epoch.endswith("steps") else "s")
    return schedule.slower(slower)


def describe_backend(handle: LabHandle) -> str:
    if handle.backend == "tc":
        return "back end tc (htb and netem)"
    return "back end switch (cgx-switch over TUN devices: this kernel has no netem)"

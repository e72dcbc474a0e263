"""The command line `cgx-ray`. A command lies in `cgx_ray.commands`, in a module of its own."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import click

from cgx_ray.commands.lazy import LazyGroup
from cgx_ray.errors import CGXError
from cgx_ray.untrusted import printable_lines

_COMMANDS = {
    "bench": ("cgx_ray.commands.bench:bench", "Measure a part of cgx_ray."),
    "collective": ("cgx_ray.commands.collective:collective", "Compare collectives for a top-k gradient on a link."),
    "demo": (
        "cgx_ray.commands.demo:demo",
        "Train a small GPT, dense and under a policy, on a network that slows down.",
    ),
    "doctor": ("cgx_ray.commands.doctor:doctor", "Say what this machine has, what is missing, and how to get it."),
    "lab": ("cgx_ray.commands.lab:lab", "Emulate hosts and links on this machine; needs root."),
    "plan": ("cgx_ray.commands.plan:plan", "Predict the best plan of a model on a network, and its step time."),
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
}


class _MainGroup(LazyGroup):
    """Shows our own errors, and files that cannot be read or written, as one message instead of a traceback.

    SIGTERM and SIGINT end a command in order: nothing is left behind, and the exit status is 143 or 130.
    """

    def invoke(self, ctx: click.Context) -> object:
        # Not in the exception: Ray's C++ code raises another one.
        received: list[int] = []

        def end(number: int, frame: FrameType | None) -> None:
            received.append(number)
            raise KeyboardInterrupt

        for number in (signal.SIGTERM, signal.SIGINT):
            # A shell lets programs in the background ignore Ctrl-C.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, end)
        try:
            return self._invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(128 + (received[0] if received else signal.SIGINT))
        except SystemExit as error:
            # Ray sets a handler of SIGTERM of its own while it starts, which exits with the signal's number.
            if error.code != signal.SIGTERM:
                raise
            ctx.exit(128 + signal.SIGTERM)

    def _invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            error.message = printable_lines(error.message)  # type: ignore[misc]
            raise
        except CGXError as error:
            raise click.ClickException(printable_lines(str(error))) from error
        except OSError as error:
            if error.filename is None:
                raise
            raise click.ClickException(printable_lines(f"{error.filename}: {error.strerror}")) from error


@click.group(cls=_MainGroup, places=_COMMANDS)
@click.version_option(package_name="cgx-ray")
def main() -> None:
    """Adaptive gradient compression for Ray Train and PyTorch DDP."""


if __name__ == "__main__":
    sys.exit(main())

"""Groups of commands: imported when used, ended in order, with our own errors as one line."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING

import click

from cgx_ray.errors import CGXError, nearest
from cgx_ray.untrusted import printable_lines

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

AGAIN_S = 0.05


class _NotAllowed(click.ClickException):
    """A value that is not allowed; the exit status is click's own for an option."""

    exit_code = 2


class LazyGroup(click.Group):
    """Commands by name, each with its place, "module:attribute", and its one line of help.

    `--help` shows these lines and imports no command.
    """

    def __init__(self, *args: object, places: Mapping[str, tuple[str, str]], **attributes: object) -> None:
        super().__init__(*args, **attributes)  # type: ignore[arg-type]
        self.places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.places:
            return None
        module, _, attribute = self.places[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = nearest(args[0], self.places)
            error.message += f" Did you mean {near!r}?" if near else ""  # type: ignore[misc]
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.places[name][1]) for name in self.list_commands(ctx)])


class _Signal(KeyboardInterrupt):
    """Raised by a signal.

    A KeyboardInterrupt itself has `python -m` end by SIGINT, whatever its exit status, if it once passed through code
    that `exec` runs from text, as dataclasses do.
    """


class MainGroup(LazyGroup):
    """Shows our own errors, and files that cannot be read or written, as one message instead of a traceback.

    SIGTERM and SIGINT end a command in order: nothing is left behind, and the exit status is 143 or 130.
    """

    def invoke(self, ctx: click.Context) -> object:
        # Not in the exception: Ray's C++ code raises another one.
        received: list[int] = []

        def end(number: int, frame: FrameType | None) -> None:
            received.append(number)
            raise _Signal

        def end_again(unraisable: UnraisableHookArgs) -> None:
            """Send the signal again if it came in a callback of the import system or in `__del__`, which lost it."""
            if unraisable.exc_type is not _Signal:
                sys.__unraisablehook__(unraisable)
                return
            threading.Timer(AGAIN_S, os.kill, (os.getpid(), received[-1])).start()

        sys.unraisablehook = end_again
        for number in (signal.SIGTERM, signal.SIGINT):
            # A shell lets programs in the background ignore Ctrl-C.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, end)
        try:
            return self._invoke(ctx)
        except KeyboardInterrupt:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: None)  # a second one would change the exit status
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
            shown = _NotAllowed if isinstance(error, ValueError) else click.ClickException
            raise shown(printable_lines(str(error))) from error
        except OSError as error:
            if error.filename is None:
                raise
            raise click.ClickException(printable_lines(f"{error.filename}: {error.strerror}")) from error

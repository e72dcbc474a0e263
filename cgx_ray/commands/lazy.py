"""A group of commands that imports a command's module when that command is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click


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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.places[name][1]) for name in self.list_commands(ctx)])

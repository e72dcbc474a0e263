"""Hook of MkDocs: the page of commands, made from the help of click."""

from __future__ import annotations

from collections.abc import Iterator

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from cgx_ray.cli import main

_HEAD = """# Commands

The help of each command. Pages about them: [why is it slow](why.md), [first run](first-run.md),
[planning](planning.md), [watching](watching.md), [the lab](lab.md).
"""
_WIDTH = 110


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    files.append(File.generated(config, "commands.md", content=commands_page()))
    return files


def commands_page() -> str:
    """Return the page: a section per command, and one per subcommand."""
    return "\n".join([_HEAD, *_sections(main, "cgx-ray")])


def _sections(group: click.Group, path: str) -> Iterator[str]:
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield _section(command, f"{path} {name}")
        if isinstance(command, click.Group):
            yield from _sections(command, f"{path} {name}")


def _section(command: click.Command, path: str) -> str:
    # The parent is in `path` already, so the context has none.
    context = click.Context(command, info_name=path, terminal_width=_WIDTH, max_content_width=_WIDTH)
    return f"## {path}\n\n```text\n{context.get_help().rstrip()}\n```\n"

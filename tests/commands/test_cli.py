"""The command line itself: its help is quick, and every command is where the tables say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from bench.__main__ import bench
from cgx_ray.cli import main
from cgx_ray.commands.lazy import LazyGroup

HEAVY = ("torch", "ray", "matplotlib", "numpy", "rich")


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        ("cgx_ray.cli --help", set()),
        ("cgx_ray.cli --version", set()),
        ("bench.__main__ --help", set()),
        ("cgx_ray.cli lab --help", set()),
        ("cgx_ray.cli collective --help", {"rich", "numpy"}),
    ],
)
def test_help_imports_no_library_that_only_commands_need(words: str, allowed: set[str]) -> None:
    module, *arguments = words.split()
    code = f"""
import sys
from {module} import {"bench" if module.startswith("bench") else "main"} as command
command({arguments!r}, standalone_mode=False)
print([name for name in {HEAVY!r} if name in sys.modules and name not in {sorted(allowed)!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def groups(group: LazyGroup, path: str = "cgx-ray") -> Iterator[tuple[str, LazyGroup]]:
    yield path, group
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, LazyGroup):
            yield from groups(command, f"{path} {name}")


def test_each_table_has_the_names_and_the_short_help_of_its_commands() -> None:
    assert isinstance(main, LazyGroup)
    assert isinstance(bench, LazyGroup)
    found = {**dict(groups(main)), **dict(groups(bench, "bench"))}
    assert found.keys() == {"cgx-ray", "cgx-ray lab", "bench"}
    for path, group in found.items():
        for name, (_, line) in group.places.items():
            command = group.get_command(click.Context(group), name)
            assert command is not None
            assert (command.name, command.get_short_help_str(limit=200).rstrip(".")) == (name, line.rstrip(".")), path


def test_an_unknown_command_is_one_clear_error() -> None:
    done = subprocess.run([sys.executable, "-m", "cgx_ray", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "No such command 'nonsense'" in done.stderr

"""The code of README and docs: Python runs as the pages show it, and commands have the options that they name."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from support.doc_blocks import MODES, ROOT, Block, blocks_of, run_on_a_rank
from support.ranks import free_port, run_ranks

import cgx_ray
from bench.__main__ import bench
from cgx_ray.cli import main

PAGES = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "papers").glob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "dashboards/README.md", "deploy/k8s/README.md")),
        *(ROOT / "examples").glob("*.md"),
    ]
)
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
# Commands in running text, such as `cgx-ray plan --sweep`, and the first words of lines of blocks.
_INLINE = re.compile(r"`((?:cgx-ray|python -m bench) [^`]*--[^`]*)`")


def modes(mode: str) -> Any:
    chosen = [block for block in PYTHON if block.mode == mode]
    return pytest.mark.parametrize("block", chosen, ids=str)


def test_every_block_is_found_and_says_how_it_runs() -> None:
    fences = {page: page.read_text().count("\n```") for page in PAGES}
    assert sum(fences.values()) == 2 * len(BLOCKS), "each block begins and ends with ``` at the start of a line"
    assert {str(block): block.mode for block in PYTHON if block.mode not in MODES} == {}
    # A new page would not be read if it lay elsewhere.
    assert len(PYTHON) > 15


def test_code_fits_its_column() -> None:
    """76 characters are what the site shows of a line. The pages of developers are read in an editor."""
    own = ("docs/design.md", "CONTRIBUTING.md")
    blocks = [block for block in BLOCKS if block.file not in own]
    wide = {str(block): line for block in blocks for line in block.code.splitlines() if len(line) > 76}
    assert wide == {}


@modes("run")
def test_a_block_runs_by_itself(block: Block) -> None:
    block.run({"cgx_ray": cgx_ray})


@modes("run on 2 ranks")
def test_a_block_runs_on_two_ranks(block: Block) -> None:
    run_ranks(2, run_on_a_rank, block)


def _run_without_a_group(rank: int, block: Block, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    run_on_a_rank(rank, block)


@modes("run on 2 new ranks")
def test_a_block_runs_on_two_ranks_that_it_connects(block: Block) -> None:
    run_ranks(2, _run_without_a_group, block, free_port(), backend=None)


@modes("compile only")
def test_a_block_that_cannot_run_here_compiles(block: Block) -> None:
    compile(block.code, str(block), "exec")


def test_a_block_that_fails_is_found_with_its_line() -> None:
    (block,) = (block for block in PYTHON if block.file == "docs/first-run.md")
    wrong = Block(
        file=block.file, line=block.line, language="python", code="cgx_ray.CGXConfig(polcy='x')", mode="run", before=""
    )
    with pytest.raises(cgx_ray.ConfigError, match="polcy") as caught:
        wrong.run({"cgx_ray": cgx_ray})
    assert caught.traceback[-1].lineno + 1 == block.line or caught.traceback[-2].lineno + 1 == block.line


def commands() -> Iterator[tuple[str, str]]:
    """Yield each command and bench of the pages with its place.

    In running text a FILE may be missing at the end.
    """
    for block in BLOCKS:
        if block.language in ("", "bash"):
            for line in block.code.replace("\\\n", " ").splitlines():
                word = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
                if word.startswith(("cgx-ray ", "python -m bench ")):
                    yield str(block), word
    for page in PAGES:
        for found in _INLINE.finditer(page.read_text()):
            text = " ".join(found[1].split())
            yield str(page.relative_to(ROOT)), f"{text} FILE" if re.search(r"--(json|trace)$", text) else text


def find_command(command: click.Command, words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command inside `command` that `words` name, and the words after it."""
    while isinstance(command, click.Group) and words and not words[0].startswith(("-", "...")):
        found = command.get_command(click.Context(command), words[0])
        if found is None:
            raise click.UsageError(f"no command {words[0]!r}")
        command, words = found, words[1:]
    return command, words


def check_command(text: str) -> None:
    """Raise UsageError if `text` has an unknown command or option, or an option without its value."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|")
    lexer.whitespace_split = True
    for is_end, part in itertools.groupby(lexer, lambda word: word in (";", "|")):
        words = list(part)
        if is_end or words[:1] not in (["cgx-ray"], ["python"]):
            continue
        group, first = (main, 1) if words[0] == "cgx-ray" else (bench, 3)
        command, rest = find_command(group, words[first:])
        if isinstance(command, click.Group) and rest[:1] == ["..."]:
            continue  # any of its commands
        context = click.Context(command)
        command.make_parser(context).parse_args([word for word in rest if word != "..."])


def test_commands_of_the_pages_exist_with_their_options() -> None:
    found = list(commands())
    wrong = {}
    for place, text in found:
        try:
            check_command(text)
        except click.UsageError as error:
            wrong[f"{place}: {text}"] = error.format_message()
    assert wrong == {}
    assert len(found) > 30


@pytest.mark.parametrize(
    "text", ["cgx-ray paln", "cgx-ray plan --modle x", "cgx-ray top run --svg", "python -m bench stpe"]
)
def test_a_wrong_command_would_be_found(text: str) -> None:
    with pytest.raises(click.UsageError):
        check_command(text)


def test_scripts_and_files_that_commands_name_exist() -> None:
    named = {word for _, text in commands() for word in text.split() if re.match(r"(examples|tests|docs)/\w", word)}
    assert {word for word in named if not Path(ROOT / word).parent.is_dir()} == set()

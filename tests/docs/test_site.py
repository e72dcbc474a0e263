"""The site of the documentation: it builds without a warning, holds every page, and its links and references work."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from making import fault_tables, papers, who_wins, worth_table
from making.docstrings import with_lists
from making.links import ELSEWHERE, with_site_links
from making.words import abbreviations

import cgx_ray
from cgx_ray.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # A line of advertising by the theme is no warning of the build.
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")}
    pages |= {Path(name).with_suffix(".html").name for name in ELSEWHERE.values()}
    assert pages - {path.name for path in site.glob("*.html")} == set()
    about_papers = {path.name for path in (ROOT / "docs" / "papers").glob("*.md")} - {"README.md"}
    assert about_papers == set(papers.PAGES)
    assert all((site / "papers" / name).with_suffix(".html").exists() for name in ("index.md", *about_papers))
    assert not (site / "making").exists()


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*\s(?:src|href)="(https?://[^"]*)"', page.read_text())
        assert [url for url in loaded if not url.startswith("https://example.org/")] == [], page.name


def test_the_reference_has_every_public_name_with_its_docstring(site: Path) -> None:
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "api.html").read_text()))
    for name in cgx_ray.__all__:
        first_line = (getattr(cgx_ray, name).__doc__ or "").strip().partition("\n")[0]
        assert name in page
        assert first_line.replace("`", "") in page, name


def test_the_page_of_commands_has_each_command_and_its_options(site: Path) -> None:
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "commands.html").read_text()))
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        words = [f"cgx-ray {name}", *(option for one in command.params for option in one.opts if option[0] == "-")]
        assert [word for word in words if word not in page] == []


def test_words_have_a_page_and_tooltips_and_the_search_works_from_the_disk(site: Path) -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    assert "gain" in abbreviations()
    for line in abbreviations().splitlines():
        word = line[2 : line.index("]")]
        assert f"| {word} | " in design
        assert word in (site / "words.html").read_text()
    assert '<abbr title="error-feedback memory, by layer name">residual</abbr>' in (site / "codecs.html").read_text()
    assert (site / "search" / "search_index.js").exists()


def test_the_table_of_worth_is_what_the_planner_says_today() -> None:
    assert worth_table.PAGE.read_text() == worth_table.page(), "run: .venv/bin/python docs/making/worth_table.py"


@pytest.mark.parametrize("name", papers.PAGES)
def test_the_tables_of_a_paper_are_what_the_files_of_the_benches_say(name: str) -> None:
    assert (papers.FOLDER / name).read_text() == papers.page(name), "run: .venv/bin/python -m docs.making.papers"


def test_the_picture_of_who_wins_shows_each_choice_and_none_that_a_small_model_pays_for() -> None:
    gpu = who_wins.MACHINES["a node sustains 100 TFLOP/s (one large GPU)"]
    rates = (1e12, 100e9, 20e9, 1e9)
    assert [who_wins.winner(1e9, rate, gpu) for rate in rates] == [0, 1, 2, 3]
    assert who_wins.winner(who_wins.LEAST_FOR_30_STEPS / 2, 1e9, gpu) == 2


def test_pictures_that_pages_show_exist_and_every_picture_is_shown() -> None:
    shown = set()
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in ELSEWHERE)]:
        for target in re.findall(r"\]\((?!https?:)([^()\s#]+\.(?:png|svg))\)", path.read_text()):
            shown.add((path.parent / target).resolve())
    assert shown == set((ROOT / "docs" / "img").iterdir())


def test_every_entry_of_the_lab_notebook_has_its_row_in_the_table() -> None:
    days = "".join(path.read_text() for path in sorted((ROOT / "docs" / "log").glob("*.md")))
    entries = {
        (day, f"docs/log/{day}.md#{number}")
        for number, day in re.findall(r'^<a id="(\d+)"></a>\n\n## (\S+) ', days, re.MULTILINE)
    }
    log = (ROOT / "LOG.md").read_text()
    links = dict(re.findall(r"^\[(\d+)\]: (\S+)$", log, re.MULTILINE))
    rows = re.findall(r"^\|.* \| ([\d-]+) \| \[(\d+)\] \|$", log, re.MULTILINE)
    assert len(entries) == days.count("\n## ") > 0, "each entry has an anchor of its own"
    assert {(day, links[number]) for day, number in rows} == entries


def test_the_tables_of_faults_are_up_to_date_and_have_every_marked_test() -> None:
    assert fault_tables.PAGE.read_text() == fault_tables.page(), "run: .venv/bin/python docs/making/fault_tables.py"
    listed = [name for names in fault_tables.THEMES.values() for name in names]
    assert sorted(listed) == sorted(fault_tables.marked_files())


@pytest.mark.parametrize(
    ("text", "source", "made"),
    [
        ("[a](docs/codecs.md#accuracy)", "README.md", "[a](codecs.md#accuracy)"),
        ("![a](../docs/img/boards.png)", "dashboards/README.md", "![a](img/boards.png)"),
        ("[boards](../../dashboards)", "deploy/k8s/README.md", "[boards](boards.md)"),
        ("[`f`](../examples/torchrun_fsdp2.py)", "docs/fsdp2.md", "`f`"),
        ("[1]: docs/log/2026-11-21.md#1", "LOG.md", "[1]: log/2026-11-21.md#1"),
        (
            "[a](../codecs.md#accuracy) and [b](../../LOG.md)",
            "docs/log/2026-11-21.md",
            "[a](../codecs.md#accuracy) and [b](../log.md)",
        ),
        ("[a](https://x.org/b.md) and [b](#c)", "README.md", "[a](https://x.org/b.md) and [b](#c)"),
        # MkDocs is left to find it.
        ("[a](nothing.md)", "docs/faq.md", "[a](nothing.md)"),
    ],
)
def test_links_of_the_checkout_become_links_of_the_site(text: str, source: str, made: str) -> None:
    assert with_site_links(text, source) == made


def test_aligned_arguments_become_a_list_and_other_text_stays() -> None:
    docstring = """Do it.

    Plain text stays
    as it is.

    model          a model,
                   of any size
    transport, shared_memory
                   see `Settings`

    Raises ConfigError."""
    text = "\n".join(line.removeprefix("    ") for line in docstring.splitlines())
    assert with_lists(text) == (
        "Do it.\n\nPlain text stays\nas it is.\n\n- `model`: a model, of any size\n"
        "- `transport`, `shared_memory`: see `Settings`\n\nRaises ConfigError."
    )

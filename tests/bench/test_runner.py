"""The frame of every bench: its options, its table, its JSON and its picture."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from bench.shared.picture import Line, Plot, draw_panels
from bench.shared.runner import BenchRun, bench_command
from cgx_ray.report.result import Row

LONG_NAME = "_".join(["gpt2_at_100_mbit"] * 6)


@bench_command(quick="One round.", picture="pace.png")
@click.option("--rounds", default=3)
def pace(run: BenchRun, rounds: int) -> Iterable[Row]:
    """Measure a pace."""
    num_rounds = 1 if run.quick else rounds
    run.title += f", {num_rounds} rounds"
    run.print_text("about to measure")
    lines = [Line(label="ours", x=["a", "b"], y=[1.0, 2.0]), Line(label="theirs", x=["a", "b"], y=[2.0, 3.0])]
    run.panels.append(Plot(title="pace", x="", y="s", lines=lines, log="y"))
    yield Row(name="pace_of_all_ranks", value=1.25, unit="s", baseline=2.5, ratio=0.5, goal="<= 0.4")
    yield Row(name="rounds", value=num_rounds, unit="rounds")


@bench_command()
def bare(run: BenchRun) -> Iterable[Row]:
    """Measure nothing."""
    return [Row(name="nothing", value=None, unit="")]


@bench_command()
def long(run: BenchRun) -> Iterable[Row]:
    """Measure something with a long name."""
    return [Row(name=LONG_NAME, value=1.25, unit="s", baseline=2.5, ratio=0.5, goal="<= 0.4")]


def test_a_bench_is_its_options_and_its_rows_and_the_runner_does_the_rest(tmp_path: Path) -> None:
    out, plot = tmp_path / "pace.json", tmp_path / "pace.png"
    done = CliRunner().invoke(pace, ["--rounds", "7", "--json", str(out), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert "about to measure" in done.output
    assert "python -m bench pace, 7 rounds" in done.output
    (line,) = (line for line in done.output.splitlines() if "pace_of_all_ranks" in line)
    assert line.split() == ["pace_of_all_ranks", "1.25", "s", "2.5", "0.5", "<=", "0.4", "no"]
    written = json.loads(out.read_text())
    assert written["bench"] == "pace"
    assert [(row["name"], row["value"], row["met"]) for row in written["rows"]] == [
        ("pace_of_all_ranks", 1.25, False),
        ("rounds", 7, None),
    ]
    assert imread(plot).shape[2] == 4


def test_quick_and_json_on_standard_output_reach_the_bench(tmp_path: Path) -> None:
    done = CliRunner().invoke(pace, ["--quick", "--json", "-", "--plot", str(tmp_path / "pace.svg")])
    assert json.loads(done.stdout)["rows"][1]["value"] == 1
    assert "about to measure" in done.stderr


def test_a_bench_has_no_options_that_it_cannot_serve_and_no_empty_columns() -> None:
    names = {option for param in bare.params for option in param.opts}
    assert names == {"--json"}
    output = CliRunner().invoke(bare, []).output
    assert "nothing" in output
    assert "goal" not in output


def test_names_stay_whole_where_no_terminal_bounds_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert LONG_NAME in CliRunner().invoke(long, []).output


def test_panels_of_the_same_names_share_a_legend_and_others_do_not_lose_theirs(tmp_path: Path) -> None:
    one = Plot(title="1", x="x", y="y", lines=[Line(label="a", x=[1, 10], y=[1, 10])], log="xy")
    other = Plot(title="2", x="x", y="y", lines=[Line(label="b", x=[1, 2], y=[0, 1], style=":")])
    for name, panels in (("same", [one, one, one]), ("different", [one, other])):
        draw_panels(name, panels, tmp_path / f"{name}.png")
        assert imread(tmp_path / f"{name}.png").std() > 0.01

"""`cgx-ray bench collectives`: its numbers are all there and hang together. How fast is no test's business."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cgx_ray.bench import collectives
from cgx_ray.bench.collectives import CASES, GIGABIT, LOOPBACK, PEER, SLOW, CollectiveOptions, Timing, settings_of
from cgx_ray.bench.show_collectives import notes
from cgx_ray.cli import main
from cgx_ray.errors import ConfigError
from cgx_ray.lab.namespaces import Lab

NO_LAB = Lab.available()
CASE_OF = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """(JSON, output) of one small run with two ranks."""
    path = tmp_path_factory.mktemp("bench") / "collectives.json"
    done = CliRunner().invoke(main, ["bench", "collectives", "--quick", "--ranks", "2", "--json", str(path)])
    assert done.exit_code == 0, done.output
    return json.loads(path.read_text()), done.output


def test_every_case_has_its_row_at_every_setting(run):
    written, output = run
    assert written["bench"] == "collectives"
    names = [row["name"] for row in written["rows"]]
    places = ["loopback"] if NO_LAB else ["loopback", "1gbit"]
    wanted = {"ranks", *(f"{what}_{place}" for place in places for what in ("gradient", "rounds", *CASE_OF))}
    over_bound = {name for name in names if name.endswith("_over_bound")}
    assert set(names) - over_bound == wanted
    assert over_bound == (
        {f"{name}_1gbit_over_bound" for name in CASE_OF if name != PEER.name} if not NO_LAB else set()
    )
    assert len(names) == len(set(names))
    assert all(name in output for name in CASE_OF)


def test_the_numbers_hang_together_and_a_quick_run_judges_nothing(run):
    rows = {row["name"]: row for row in run[0]["rows"]}
    for row in rows.values():
        assert row["value"] > 0
        assert (row["goal"], row["met"]) == (None, None)
        if row["baseline"] is not None:
            assert row["ratio"] == pytest.approx(row["baseline"] / row["value"])
    place = "loopback" if NO_LAB else "1gbit"
    assert rows[f"sra_none_tcp_{place}"]["baseline"] == rows[f"{PEER.name}_{place}"]["value"]
    if not NO_LAB:
        # 2 ranks, 4 MB: each sends and receives 4 MB at 1 Gbit/s, and nothing can be faster but for tbf's burst.
        assert rows["sra_none_tcp_1gbit"]["limit"] == pytest.approx(4 * (1 << 20) * 8e-9)
        assert rows["sra_none_tcp_1gbit_over_bound"]["value"] > 0.9


def _rows(case: str, setting: collectives.Setting, seconds: float) -> list[tuple[str, str | None, bool | None]]:
    timing = Timing(case=CASE_OF[case], setting=setting, seconds=seconds, gloo_s=6.5, bound_s=0.9)
    return [(row.name, row.goal, row.met) for row in timing.rows(with_goals=True)]


def test_goals_are_those_of_the_issue():
    assert _rows("sra_qsgd_tcp", GIGABIT, 1.0) == [
        ("sra_qsgd_tcp_1gbit", ">= 6.5", True),
        ("sra_qsgd_tcp_1gbit_over_bound", "<= 1.25", True),
    ]
    assert [met for _, _, met in _rows("sra_qsgd_tcp", GIGABIT, 1.2)] == [False, False]
    for setting in (GIGABIT, SLOW):
        name = f"sra_none_tcp_{setting.name}"
        assert _rows("sra_none_tcp", setting, 1.0) == [(name, None, None), (f"{name}_over_bound", "<= 1.1", False)]
    assert [goal for _, goal, _ in _rows("sra_qsgd_gloo", GIGABIT, 1.0)] == [None, None]


def test_without_a_lab_only_loopback_is_measured_and_the_output_says_so():
    options = CollectiveOptions()
    assert settings_of(options, None) == (LOOPBACK, GIGABIT, SLOW)
    assert settings_of(options, "a lab needs root") == (LOOPBACK,)
    assert len(notes(None)) == 1
    assert "a lab needs root" in notes("a lab needs root")[-1]


def test_one_rank_has_nobody_to_send_to():
    with pytest.raises(ConfigError, match="ranks 1 is not allowed; give 2 to 16"):
        CollectiveOptions(num_ranks=1)


def test_a_rank_that_fails_is_named_with_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(
        collectives, "CASES", (PEER, collectives.Case(name="x", codec="lzma", scheme="sra", transport="tcp"))
    )
    done = CliRunner().invoke(main, ["bench", "collectives", "--quick", "--ranks", "2"])
    assert done.exit_code == 1
    assert "loopback: rank 0 ended with status 1" in done.output
    assert "unknown codec 'lzma'" in done.output

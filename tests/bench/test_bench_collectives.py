"""`python -m bench collectives`: its numbers are complete and consistent. Tests do not judge speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.__main__ import bench
from bench.collectives import cases as collective_cases
from bench.collectives.cases import (
    CASES,
    DIRECT,
    FAR,
    FARTHER,
    GIGABIT,
    GRID,
    LOOPBACK,
    PEER,
    QUICK,
    SETTINGS,
    SHARED,
    SLOW,
    UNCOMPRESSED,
    Case,
    CollectiveOptions,
    Setting,
    settings_of,
)
from bench.collectives.measure import Timing, notes
from cgx_ray.errors import ConfigError
from cgx_ray.lab.namespaces import Lab

NO_LAB = Lab.available()
NO_LATENCY = Lab.available(rates_only=False)
CASE_OF = {case.name: case for case in (*CASES, *SHARED, *UNCOMPRESSED)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """JSON and output of one small run with two ranks, on loopback and in the lab that emulates most here."""
    path = tmp_path_factory.mktemp("bench") / "collectives.json"
    loopback, gigabit, far = QUICK
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_cases, "QUICK", (loopback, gigabit if NO_LATENCY else far))
        done = CliRunner().invoke(bench, ["collectives", "--quick", "--ranks", "2", "--json", str(path)])
    assert done.exit_code == 0, done.output
    return json.loads(path.read_text()), done.output


@pytest.mark.slow
def test_every_case_has_its_row_at_every_setting(run):
    written, output = run
    assert written["bench"] == "collectives"
    names = [row["name"] for row in written["rows"]]
    settings = settings_of(CollectiveOptions(quick=True), NO_LAB, NO_LATENCY)
    settings = tuple(setting for setting in settings if f"rounds_{setting.name}" in names)
    assert len(settings) == (1 if NO_LAB else 2)
    wanted = {"ranks", *(f"{what}_{setting.name}" for setting in settings for what in ("gradient", "rounds"))}
    wanted |= {f"{case.name}_{setting.name}" for setting in settings for case in setting.cases}
    wanted |= {
        f"{case.name}_{setting.name}_error" for setting in settings for case in setting.cases if case.codec != "none"
    }
    over_bound = {name for name in names if name.endswith("_over_bound")}
    assert set(names) - over_bound == wanted
    assert over_bound == {
        f"{case.name}_{setting.name}_over_bound"
        for setting in settings
        for case in setting.cases
        if setting.rate_bit_per_s is not None and case != PEER
    }
    assert len(names) == len(set(names))
    assert all(case.name in output for setting in settings for case in setting.cases)


@pytest.mark.slow
def test_the_numbers_hang_together_and_a_quick_run_judges_nothing(run):
    rows = {row["name"]: row for row in run[0]["rows"]}
    for row in rows.values():
        assert row["value"] > 0
        assert (row["goal"], row["met"]) == (None, None)
        if row["baseline"] is not None:
            assert row["ratio"] == pytest.approx(row["baseline"] / row["value"])
    place = "loopback" if NO_LAB else "1gbit" if NO_LATENCY else FAR.name
    assert rows[f"sra_none_tcp_{place}"]["baseline"] == rows[f"{PEER.name}_{place}"]["value"]
    # 4 bits in buckets of 128 round once at each rank, and sra once more.
    assert 0.005 < rows["sra_qsgd_tcp_loopback_error"]["value"] < 0.05
    if place == "1gbit":
        # 2 ranks, 4 MB: each sends and receives 4 MB at 1 Gbit/s, and only the burst of tbf can make it faster.
        assert rows["sra_none_tcp_1gbit"]["limit"] == pytest.approx(4 * (1 << 20) * 8e-9)
        assert rows["sra_none_tcp_1gbit_over_bound"]["value"] > 0.9
    if not NO_LATENCY:
        # Each sends and receives 1 MB, in two rounds of 10 ms.
        assert rows["sra_none_tcp_1mb_10ms"]["limit"] == pytest.approx(1e6 * 8e-9 + 0.02)
        assert rows["sra_none_tcp_1mb_10ms_over_bound"]["value"] > 0.9


def _rows(case: str, setting: Setting, seconds: float) -> list[tuple[str, str | None, bool | None]]:
    timing = Timing(case=CASE_OF[case], setting=setting, seconds=seconds, error=0.01, gloo_s=6.5, bound_s=0.9)
    return [(row.name, row.goal, row.met) for row in timing.rows(with_goals=True)]


def test_goals_judge_the_speed_up_and_the_bound():
    assert _rows("sra_qsgd_tcp", GIGABIT, 1.0) == [
        ("sra_qsgd_tcp_1gbit", ">= 6.5", True),
        ("sra_qsgd_tcp_1gbit_error", None, None),
        ("sra_qsgd_tcp_1gbit_over_bound", "<= 1.25", True),
    ]
    assert [met for _, _, met in _rows("sra_qsgd_tcp", GIGABIT, 1.2)] == [False, None, False]
    for setting in (GIGABIT, SLOW):
        name = f"sra_none_tcp_{setting.name}"
        assert _rows("sra_none_tcp", setting, 1.0) == [(name, None, None), (f"{name}_over_bound", "<= 1.1", False)]
    assert [goal for _, goal, _ in _rows("sra_qsgd_gloo", GIGABIT, 1.0)] == [None, None, None]


def test_every_scheme_is_held_to_its_bound_and_direct_exchange_to_gloo_on_long_paths():
    for setting in GRID:
        assert setting.latency_s > 0
        for case in UNCOMPRESSED[1:]:
            name = f"{case.name}_{setting.name}"
            assert _rows(case.name, setting, 1.0) == [(name, None, None), (f"{name}_over_bound", "<= 1.1", False)]
    for setting, seconds, goal in ((FAR, 6.5 / 4, ">= 4"), (FARTHER, 6.5 / 2.2, ">= 2.2")):
        assert setting.cases == DIRECT
        assert _rows("sra_none_tcp", setting, 0.99 * seconds)[0][1:] == (goal, True)
        assert _rows("sra_none_tcp", setting, 1.01 * seconds)[0][1:] == (goal, False)


def test_what_this_machine_cannot_emulate_is_not_measured_and_the_output_says_so():
    options, no = CollectiveOptions(), "a lab needs root"
    assert settings_of(options, None, None) == SETTINGS
    assert settings_of(options, None, no) == (LOOPBACK, GIGABIT, SLOW)
    assert settings_of(options, no, no) == (LOOPBACK,)
    assert settings_of(CollectiveOptions(quick=True), None, None) == QUICK
    assert notes(None, None) == []
    assert [no in note for note in notes(no, no)] == [True, True]


def test_one_rank_has_nobody_to_send_to():
    with pytest.raises(ConfigError, match="ranks 1 is not allowed; give 2 to 16"):
        CollectiveOptions(num_ranks=1)


def test_a_rank_that_fails_is_named_with_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = Case(name="x", codec="lzma", scheme="sra", transport="tcp")
    monkeypatch.setattr(collective_cases, "QUICK", (replace(QUICK[0], cases=(PEER, broken)),))
    done = CliRunner().invoke(bench, ["collectives", "--quick", "--ranks", "2"])
    assert done.exit_code == 1
    assert "loopback: rank 0 ended with status 1" in done.output
    assert "unknown codec 'lzma'" in done.output

"""`python -m bench planner`, a quick run: its numbers are complete and right. Tests do not judge speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from bench.__main__ import bench
from bench.planner import measure as planner


@pytest.mark.slow
def test_quick_run_writes_rows_tables_and_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planner, "QUICK_CUPCAKE_NODES", 20)
    monkeypatch.setattr(planner, "JOINT_GBPS", (10.0,))
    out, plot = tmp_path / "out.json", tmp_path / "planner.png"
    result = CliRunner().invoke(
        bench, ["planner", "--quick", "--json", str(out), "--plot", str(plot)], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["bench"] == "planner"
    rows = {row["name"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"])
    assert {row["goal"] for row in rows.values()} == {None}
    value = {name: row["value"] for name, row in rows.items()}
    assert (value["table6_winners"], value["tree_paths"]) == (27, 4341)
    assert (value["fusion_equals_brute_force"], value["joint_equals_brute_force"]) == (20, 10)
    for name, ratio in value.items():
        if name.endswith(("_over_joint", "_over_best", "_over_fusion")):
            # The gap that a search may leave.
            assert ratio >= 1 - planner.MAX_GAP, (name, ratio)
    assert rows["fusion_314_ms"]["baseline"] > 0
    assert 0 < value["plan_1x8_efficiency"] <= 1
    assert rows["cupcake_314_over_fusion"]["unit"] == "x, cut at 20 groupings"
    assert value["cupcake_ends_up_to_1gbps"] == 20
    for text in ("table6_winners", "alexnet"):
        assert text in result.output, result.output
    assert imread(plot).shape[2] == 4

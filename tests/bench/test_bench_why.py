"""`python -m bench why`: all rows are there with their goals. No test judges how good the numbers are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.__main__ import bench


@pytest.mark.slow
def test_a_quick_run_observes_a_real_training(tmp_path: Path) -> None:
    path = tmp_path / "why.json"
    done = CliRunner().invoke(bench, ["why", "--quick", "--json", str(path)])
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert {name: row["goal"] for name, row in rows.items()} == {
        "observed_step": "<= 1.02",
        "bare_again_step": None,
        "observer_thread": "<= 0.01",
        "observer_memory": "<= 64",
    }
    assert rows["observed_step"]["baseline"] > 0

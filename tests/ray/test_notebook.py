"""examples/notebook.ipynb runs from its first cell to its last."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.doc_blocks import ROOT, Block

pytestmark = [
    # Ray's own, see test_train.py.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


@pytest.fixture
def cluster() -> Iterator[None]:
    one_thread = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=one_thread)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_notebook_decides_for_compression_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # of cgx-ray
    names: dict[str, Any] = {"__name__": "notebook"}
    for index, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        assert not cell.get("outputs"), "clear the outputs before you commit it"
        if cell["cell_type"] == "code":
            code = "".join(cell["source"])
            file = f"{NOTEBOOK.relative_to(ROOT)}, cell {index}"
            Block(file=file, line=1, language="python", code=code, mode="run", before="").run(names)
    said = capsys.readouterr().out
    assert "qsgd" in said
    assert "faster than dense" in said
    assert Path(names["folder"], "notebook", "report.html").exists()

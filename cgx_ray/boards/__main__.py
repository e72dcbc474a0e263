"""`python -m cgx_ray.boards` writes the boards of `dashboards/` and `docs/metrics.md`."""

from __future__ import annotations

from pathlib import Path

from cgx_ray.boards.files import made_files

root = Path(__file__).resolve().parents[2]
for path, text in made_files().items():
    (root / path).write_text(text)
    print(path)

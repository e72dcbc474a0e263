"""`python -m dashboards.making` writes the boards of `dashboards/` and `docs/metrics.md`."""

from __future__ import annotations

from dashboards.making.files import ROOT, made_files

for path, text in made_files().items():
    (ROOT / path).write_text(text)
    print(path)

"""The policy of docs/own-policy.md as an installed package: a module, and metadata with an entry point."""

from __future__ import annotations

from pathlib import Path

from support.doc_blocks import ROOT, blocks_of


def install(folder: Path, *, broken: bool = False) -> Path:
    """Put package thrifty into `folder`, which belongs on PYTHONPATH then. `broken`: also one that fails to import."""
    block = next(blocks_of(ROOT / "docs/own-policy.md"))
    _install(folder, "thrifty", "Thrifty", block.code)
    if broken:
        _install(folder, "broken", "Broken", "import no_such_module\n")
    return folder


def _install(folder: Path, name: str, cls: str, code: str) -> None:
    info = folder / f"{name}_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[cgx_ray.policies]\n{name} = {name}:{cls}\n")
    (folder / f"{name}.py").write_text(code)

"""A package as if it were installed: modules, and metadata with an entry point."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from support.doc_blocks import ROOT, blocks_of


def install_package(folder: Path, name: str, group: str, value: str, modules: Mapping[str, str]) -> None:
    """Put a package into `folder`, which belongs on PYTHONPATH then. `value`: what the entry point `name` names."""
    info = folder / f"{name}_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    for module, code in modules.items():
        (folder / f"{module}.py").write_text(code)


def install_policy(folder: Path, *, broken: bool = False) -> Path:
    """Install the policy of docs/own-policy.md in `folder`. `broken`: also a package that fails to import."""
    code = next(blocks_of(ROOT / "docs/own-policy.md")).code
    install_package(folder, "thrifty", "cgx_ray.policies", "thrifty:Thrifty", {"thrifty": code})
    if broken:
        modules = {"broken": "import no_such_module\n"}
        install_package(folder, "broken", "cgx_ray.policies", "broken:Broken", modules)
    return folder


def install_codecs(folder: Path) -> Path:
    """Install the codec of docs/own-codec.md in `folder`, and packages that bring no codec."""
    record, kernels, *_ = (block.code for block in blocks_of(ROOT / "docs/own-codec.md"))
    install_package(folder, "fp8", "cgx_ray.codecs", "fp8:RECORD", {"fp8": record, "fp8_kernels": kernels})
    for name, code in {
        "broken": "import no_such_module\n",
        "other": "import fp8\nRECORD = fp8.RECORD\n",
        "qsgd": "RECORD = 1\n",
    }.items():
        install_package(folder, name, "cgx_ray.codecs", f"{name}_codec:RECORD", {f"{name}_codec": code})
    return folder

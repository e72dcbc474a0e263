"""`make test-gpu` on a machine that has neither Ray, jsonschema nor iperf3: what it builds, runs and imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
# Packages of pyproject.toml that are not there, with Ray's, and those that only tests elsewhere use.
MISSING = ("ray", "jsonschema", "iperf3", "pymoo", "sklearn", "lightning", "kubernetes_validate")
_BLOCK = f"""
import sys
sys.modules |= dict.fromkeys({MISSING})
sys.path.append({str(ROOT)!r})
"""


def run_without_packages(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a Python where importing a package of `MISSING` raises ImportError."""
    argv = [sys.executable, "-P", "-c", _BLOCK + code]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


def _recipe() -> str:
    argv = ["make", "--dry-run", "test-gpu", "PYTHON=python3"]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _test_files() -> list[str]:
    return re.findall(r"\btests/\S+\.py\b", _recipe())


def _has_gpu_mark(path: str) -> bool:
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    marks = [
        node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
    ]
    return "gpu" in marks


def test_every_file_with_a_test_marked_gpu_is_run_except_those_of_ray() -> None:
    paths = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    marked = sorted(path for path in paths if _has_gpu_mark(path) and not path.startswith("tests/ray/"))
    assert len(marked) >= 7
    assert _test_files() == marked


def test_the_files_are_collected_without_the_packages_that_the_machine_lacks() -> None:
    argv = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", *_test_files()]
    done = run_without_packages(f"import pytest; sys.exit(pytest.main({argv}))")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert collected == set(_test_files())


def test_every_native_module_is_copied_to_the_package_that_is_tested() -> None:
    cmake = (ROOT / "CMakeLists.txt").read_text()
    folders = dict(re.findall(r"install\(TARGETS (\w+) LIBRARY DESTINATION (\S+)\)", cmake))
    assert folders.keys() == set(re.findall(r"nanobind_add_module\((\w+)", cmake))
    copied = dict(re.findall(r"cp build/gpu/native/(\w+)\*\.so build/gpu/(\S+)/$", _recipe(), re.MULTILINE))
    assert copied == folders


IMPORTS = """
import importlib
for name in ("cgx_ray.session.attach", "cgx_ray.session.local_control", "cgx_ray.session.calibrate", "bench.step.rank"):
    importlib.import_module(name)
from bench.__main__ import bench
for name in ("kernels", "step"):
    bench([name, "--help"], standalone_mode=False)
"""


def test_what_trains_calibrates_and_measures_imports_none_of_them() -> None:
    done = run_without_packages(IMPORTS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^Usage: .*(kernels|step) \[OPTIONS\]", done.stdout, re.MULTILINE)) == 2, done.stdout


def test_the_blocked_packages_are_not_found() -> None:
    for package in MISSING[:3]:
        assert f"import of {package} halted" in run_without_packages(f"import {package}").stderr

"""Claims about installing: missing system packages are named first, and a checkout finds every package.

tests/ray/test_wheel.py has those about the wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cgx_ray

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
# A module of each folder beside cgx_ray/ that is its subpackage.
WHERE = """
import sys
from importlib.util import find_spec
for name in ("cgx_ray.monitors.sample", "cgx_ray.runtime_ext.ops"):
    print(find_spec(name).origin)
"""


def run_python(*args: str, path: Path, cwd: Path) -> list[str]:
    """Return the output lines of a Python that sees `path` and the site-packages, but no editable install (-S)."""
    env = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{os.pathsep.join(sys.path)}"}
    done = subprocess.run([sys.executable, "-S", *args], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_names_what_the_system_lacks_in_one_line_before_it_installs_anything(tmp_path: Path, target: str) -> None:
    for name in ("Makefile", "missing-packages", "pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    tools, make = tmp_path / "tools", shutil.which("make")
    tools.mkdir()
    (tools / "sh").symlink_to("/bin/sh")
    # A Python without venv, headers and libiperf: it can only tell its version.
    (tools / "python3").write_text(
        f'#!/bin/sh\ncase "$2" in *version_info*) exec {sys.executable} "$@";; esac\nexit 1\n'
    )
    (tools / "python3").chmod(0o755)
    argv, env = [str(make), target, "PYTHON=python3"], {"PATH": str(tools)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    packages = "git g++ iproute2 python3-venv python3-dev libiperf0"
    packages += " prometheus chromium" if target == "test" else ""
    assert done.stdout.splitlines() == [f"system packages are missing; run: apt-get install {packages}"]
    assert not (tmp_path / ".venv").exists()


def test_nothing_is_missing_where_the_tests_run() -> None:
    done = subprocess.run([ROOT / "missing-packages"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_editable_install_finds_the_checkout(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WHERE], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = [Path(file) for file in done.stdout.splitlines()]
    assert [file.resolve() for file in found] == [ROOT / "monitors/sample.py", ROOT / "runtime_ext/ops.py"]


def test_a_plain_checkout_finds_every_package_and_its_command() -> None:
    found = run_python("-c", WHERE, path=ROOT, cwd=ROOT)
    assert [Path(file).parent for file in found] == [ROOT / "cgx_ray" / name for name in ("monitors", "runtime_ext")]
    assert run_python("-m", "cgx_ray", "--help", path=ROOT, cwd=ROOT)[0].startswith("Usage: ")
    assert set(cgx_ray.__all__) <= set(dir(cgx_ray))

"""The wheel in an environment without a compiler: what it holds, and that its commands run. `make bare` adds a demo."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.wheels import ROOT, bare_environment, build_sdist, install, make_environment, tracked_files

# A module of each folder beside cgx_ray/ that is its subpackage, and the two native modules.
MODULES = (
    "cgx_ray.monitors.sample",
    "cgx_ray.runtime_ext.ops",
    "cgx_ray.runtime_ext._native",
    "cgx_ray.planner._search",
)


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment where the wheel is installed."""
    python = make_environment(tmp_path_factory.mktemp("bare"))
    install(python, wheel)
    return python


def run(python: Path, *argv: str | Path, cwd: Path, allowed: tuple[int, ...] = (0,)) -> str:
    env = {**bare_environment(python), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode in allowed, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_wheel_holds_every_module_and_nothing_beside_its_two_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if not name.endswith("/")}
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        entry_points = packed.read(f"{info}/entry_points.txt").decode()
    assert {name.partition("/")[0] for name in names} == {"cgx_ray", "cgx_ray_autoload", info}
    assert {line.replace(" ", "") for line in entry_points.split("\n") if "=" in line} == {
        "cgx-ray=cgx_ray.cli:main",
        "cgx_ray=cgx_ray_autoload:register",
    }
    wanted = {
        str(Path(folder, file).relative_to(ROOT))
        for folder, _, files in os.walk(ROOT / "cgx_ray", followlinks=True)
        for file in files
        if file.endswith((".py", ".pyi", ".json", ".csv", ".txt")) or file == "py.typed"
    }
    assert {"cgx_ray/py.typed", "cgx_ray/report/journal.schema.json"} < wanted
    assert wanted <= names, sorted(wanted - names)
    # What is compiled on the user's machine goes along, what was compiled here does not.
    assert any(name.startswith("cgx_ray/runtime_ext/csrc/cuda/") for name in names)
    assert not any(name.endswith((".cpp", ".c", ".o")) for name in names)


def test_the_sdist_has_what_the_wheel_is_built_from(tmp_path: Path) -> None:
    """All files of these folders as they are here, so its wheel is this checkout's. `make bare` builds it."""
    with tarfile.open(build_sdist(tmp_path)) as packed:
        packed.extractall(tmp_path, filter="data")
    (made,) = tmp_path.glob("cgx_ray-*[!z]")
    sources = ["cgx_ray", "cgx_ray_autoload", "monitors", "runtime_ext"]
    names = tracked_files(*sources, "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")
    names = [name for name in names if (ROOT / name).is_file()]
    assert len(names) > 200
    differ = [name for name in names if not _is_same(made / name, ROOT / name)]
    assert differ == []
    # Symbolic links in the checkout: links or copies here.
    for name in ("monitors", "runtime_ext"):
        assert (made / "cgx_ray" / name / "__init__.py").exists()
    assert not (made / ".venv").exists()
    assert not (made / "build").exists()


def _is_same(one: Path, other: Path) -> bool:
    return one.is_file() and one.read_bytes() == other.read_bytes()


def test_the_wheel_finds_its_own_modules(python: Path, tmp_path: Path) -> None:
    where = "import sys, importlib; [print(importlib.import_module(name).__file__) for name in sys.argv[1:]]"
    found = run(python, python, "-c", where, *MODULES, cwd=tmp_path).split()
    assert len(found) == len(MODULES)
    assert all(Path(file).is_relative_to(python.parents[1]) for file in found), found


def test_importing_torch_knows_the_backend_of_the_wheel(python: Path, tmp_path: Path) -> None:
    say = "import sys, torch.distributed as d; print('cgx' in d.Backend.backend_list, 'cgx_ray' in sys.modules)"
    assert run(python, python, "-c", say, cwd=tmp_path).split() == ["True", "False"]


def test_the_commands_of_the_wheel_run(python: Path, tmp_path: Path) -> None:
    command = python.parent / "cgx-ray"
    for argv in ((command, "--version"), (python, "-m", "cgx_ray", "--version")):
        assert run(python, *argv, cwd=tmp_path).endswith(", version 0.1.0\n")
    # The sum of 4 if no GPU run can work.
    run(python, command, "doctor", "--json", "doctor.json", cwd=tmp_path, allowed=(0, 4))
    answer = json.loads((tmp_path / "doctor.json").read_text())
    assert (answer["works"]["demo"], answer["works"]["CPU run"]) == (True, True)

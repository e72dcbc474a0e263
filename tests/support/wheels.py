"""The wheel of this checkout, and virtual environments that have what it needs but not cgx_ray itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(folder: Path) -> Path:
    """Build the wheel, with the objects of an earlier build of this checkout if there are any."""
    argv = ["wheel", "-q", "--disable-pip-version-check", "--no-build-isolation", "--no-deps", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *argv, str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def tracked_files(*names: str) -> list[str]:
    """Return the files of this checkout that git tracks, all or those below `names`."""
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--", *names]
    listed = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def build_sdist(folder: Path) -> Path:
    """Build the sdist of what git tracks. In the checkout itself it would look at each file of .venv, for 10 s."""
    checkout = folder / "checkout"
    for name in [*tracked_files(), ".venv/pyvenv.cfg", "build/cmake.log"]:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, checkout / name, follow_symlinks=False)
        else:
            (checkout / name).touch()  # what an sdist must not have
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=checkout, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def make_environment(folder: Path) -> Path:
    """Make a virtual environment that sees every package of this one except cgx_ray, and return its `python`.

    Installing torch and Ray once more would take minutes; `make bare` does that. The packages are symbolic links, since
    with their folder the environment would have the finder of the editable install too.
    """
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for place in map(Path, sys.path):
        if not any(place.glob("*.dist-info")):
            continue
        for package in place.iterdir():
            is_ours = package.name.lstrip("_").startswith(("cgx", "editable__cgx"))
            if not (is_ours or package.suffix == ".pth" or (borrowed / package.name).exists()):
                (borrowed / package.name).symlink_to(package)
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    answer = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], check=True, capture_output=True, text=True
    )
    (Path(answer.stdout.strip()) / "borrowed.pth").write_text(f"{borrowed}\n")
    for shell in ("bash", "sh"):  # Ray starts its workers with them
        (python.parent / shell).symlink_to(f"/bin/{shell}")
    return python


def install(python: Path, wheel: Path) -> None:
    """Install `wheel`, whose requirements must be there, as a user without a compiler and without pip's cache."""
    argv = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", str(wheel)]
    subprocess.run(argv, env=bare_environment(python), check=True)


def bare_environment(python: Path) -> dict[str, str]:
    """Return environment variables with the programs of `python`'s virtual environment on PATH and no others."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env = {**kept, "PATH": str(python.parent), "HOME": str(python.parents[2]), "PIP_NO_CACHE_DIR": "1"}
    assert not any(shutil.which(compiler, path=env["PATH"]) for compiler in ("cc", "c++", "gcc", "g++", "clang"))
    return env

"""Temporary folders: one that a process leaves when it is killed is removed by another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cgx_ray.session import own_folder
from cgx_ray.session.own_folder import OwnFolder

# Fills a folder of its own, says where, and lives until it is killed.
_FILL = """
import sys, time
from cgx_ray.session.own_folder import OwnFolder
folder = OwnFolder()
(folder.path / "residuals").mkdir()
(folder.path / "residuals" / "state.pt").write_text("x")
print(folder.path, flush=True)
time.sleep(1e6)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(own_folder, "_ABANDONED_S", -1.0)
    return tmp_path


def test_what_a_killed_process_leaves_is_removed_by_the_next_but_not_while_it_lives(temporary: Path) -> None:
    env = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", _FILL], env=env, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        OwnFolder().remove()
        assert (path / "residuals" / "state.pt").exists()
        owner.kill()
    OwnFolder().remove()
    assert list(temporary.iterdir()) == []


def test_a_folder_is_removed_with_what_is_in_it_and_with_its_owner(temporary: Path) -> None:
    first, second = OwnFolder(), OwnFolder()
    (first.path / "state.pt").write_text("x")
    first.remove()
    first.remove()
    assert list(temporary.iterdir()) == [second.path]
    del second
    assert list(temporary.iterdir()) == []


def test_new_folders_of_other_processes_are_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_folder, "_ABANDONED_S", 60.0)
    other = temporary / "cgx_ray-own-new"
    other.mkdir()
    (other / "lock").touch()
    OwnFolder().remove()
    assert other.exists()

"""A torch or a Ray that is too old is one clear error. `cgx-ray doctor` names them too: test_doctor.py."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from packaging.requirements import Requirement

from cgx_ray.errors import ConfigError
from cgx_ray.torch_compat import collective
from cgx_ray.versions import NEWEST, OLDEST, check_version

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
OLD = {
    "torch": "torch 2.3.1 is older than the oldest that cgx_ray works with, {oldest}; "
    "run: pip install 'torch>={oldest}'",
    "ray": "ray 2.9.3 is older than the oldest that cgx_ray works with, {oldest}; "
    "run: pip install 'ray[default,train]>={oldest}'",
}


def test_the_oldest_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = {requirement.name: str(requirement.specifier) for requirement in map(Requirement, project["dependencies"])}
    assert {name: bounds[name] for name in OLDEST} == {name: f">={oldest}" for name, oldest in OLDEST.items()}


@pytest.mark.parametrize("version", ["3.0", "2.100.1", "2.99.0+cpu", "2.61.0.dev0"])
@pytest.mark.parametrize("package", OLDEST)
def test_newer_versions_are_accepted_with_a_warning(package: str, version: str) -> None:
    with pytest.warns(UserWarning, match=rf"^{package} {re.escape(version)} is newer than the newest that cgx_ray was"):
        check_version(package, version)


@pytest.mark.parametrize("package", OLDEST)
def test_the_oldest_version_is_accepted_and_the_one_before_is_not(package: str) -> None:
    major, minor = map(int, OLDEST[package].split("."))
    check_version(package, f"{major}.{minor}.0")
    with pytest.raises(ConfigError, match=f"{package} {major}.{minor - 1}.2 is older"):
        check_version(package, f"{major}.{minor - 1}.2")


@pytest.mark.parametrize(
    ("package", "old", "use"), [("torch", "2.3.1", "attach"), ("ray", "2.9.3", "CGXConfig")], ids=["torch", "ray"]
)
def test_an_old_version_is_one_error_that_names_the_remedy(package: str, old: str, use: str) -> None:
    """In a process of its own, with another number in the package that is installed."""
    code = f"import {package}, cgx_ray; {package}.__version__ = '{old}'; cgx_ray.{use}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = f"cgx_ray.errors.ConfigError: {OLD[package].format(oldest=OLDEST[package])}"
    assert done.stderr.strip().splitlines()[-1] == said


def test_the_old_ray_train_is_one_error_that_names_the_remedy() -> None:
    from cgx_ray.ray_train.compat import run_facts

    with pytest.raises(ConfigError, match=r"^cgx_ray needs Ray Train v2; leave out RAY_TRAIN_V2_ENABLED=0"):
        run_facts(SimpleNamespace())


@pytest.mark.parametrize(
    ("new", "old"),
    [("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor")],
)
def test_collectives_are_found_by_the_name_that_torch_has(new: str, old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert collective(dist, new) is getattr(dist, new)
    monkeypatch.delattr(dist, new)
    assert collective(dist, new) is getattr(dist, old)


def test_collectives_of_groups_are_found_by_the_name_that_torch_has() -> None:
    names = ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
    old = SimpleNamespace(**{name: getattr(dist.ProcessGroup, name) for name in names})
    new = ("all_gather_single_coalesced", "reduce_scatter_single_coalesced")
    assert [collective(old, name) for name in new] == list(vars(old).values())
    assert collective(dist.ProcessGroup, new[0]) is dist.ProcessGroup.all_gather_single_coalesced


def test_the_bounds_are_the_oldest_versions_that_were_run() -> None:
    """docs/versions.md, which `.ci/versions` writes, against pyproject.toml."""
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+)\S* \| ([\d.]+) \| \d+ passed \|", page, re.MULTILINE)
    assert rows
    without_row = re.findall(r"^(\w+) ([\d.]+) is allowed without a row, since", page, re.MULTILINE)
    for column, name in ((1, "torch"), (2, "ray")):
        known = [tuple(map(int, row[column].split(".")[:2])) for row in rows]
        oldest = min(known)
        assert ".".join(map(str, max(known))) == NEWEST[name], name
        said = [tuple(map(int, version.split("."))) for package, version in without_row if package == name]
        # Once there is a row, the sentence goes.
        assert all(version < oldest for version in said), name
        assert ".".join(map(str, min([oldest, *said]))) == OLDEST[name], name
    pythons = {row[0] for row in rows}
    bound = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert bound == f">={min(pythons, key=lambda version: tuple(map(int, version.split('.'))))}"

"""`cgx-ray doctor` on this machine, and on machines that lack something."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from cgx_ray.commands import doctor
from cgx_ray.commands.finding import Use


def run(*arguments: str) -> Result:
    return CliRunner().invoke(doctor.doctor, arguments)


def test_this_machine_can_run_what_these_tests_run(tmp_path: Path) -> None:
    result = run("--json", str(tmp_path / "out.json"))
    answer = json.loads((tmp_path / "out.json").read_text())
    assert answer["works"] == {"demo": True, "CPU run": True, "GPU run": torch.cuda.is_available()}
    assert result.exit_code == 0, "without a GPU nothing is broken"
    found = {finding["name"]: finding["found"] for finding in answer["findings"]}
    assert found["torch"] == torch.__version__
    assert found["ray"] == importlib.metadata.version("ray")


@pytest.mark.parametrize(
    ("versions", "problem", "remedy", "status"),
    [
        ({"torch": "1.13.0"}, "older than >=2.11 allows", "torch: pip install 'torch>=2.11'", 3),
        ({"torch": None}, "is not installed", "torch: pip install 'torch>=2.11'", 3),
        ({"matplotlib": None}, "is not installed", 'matplotlib: pip install "cgx-ray[plots]"', 1),
    ],
)
def test_a_package_that_is_old_or_missing_is_named_with_the_command_that_brings_it(
    versions: dict[str, str | None], problem: str, remedy: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = versions.get(name, "") if name in versions else real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = run()
    assert result.exit_code == status + (4 if doctor.has_gpu() and "torch" in versions else 0)
    assert problem in result.output
    assert remedy in result.output


def test_a_gpu_that_cannot_be_used_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "has_gpu", lambda: True)
    assert run().exit_code == 4


def test_without_rights_the_demo_still_works_because_it_simulates_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.Lab, "available", lambda **_: "this needs root")
    result = run()
    assert "this needs root" in result.output
    assert "--cap-add NET_ADMIN" in result.output
    assert "demo: can work" in result.output


def test_without_libiperf_the_command_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.iperf3_probe, "available", lambda: False)
    assert "libiperf: apt-get install libiperf0" in run().output


def test_small_limits_are_no_obstacle_but_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_usage(folder: Any) -> Any:
        return type("Usage", (), {"free": 1 << 20})

    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(doctor.shutil, "disk_usage", disk_usage)
    result = run()
    assert "open files: ulimit -n" in result.output
    assert "/dev/shm: mount -o remount" in result.output
    assert "CPU run: can work" in result.output


def test_the_exit_status_tells_which_uses_are_broken() -> None:
    assert doctor.exit_status(frozenset()) == 0
    assert doctor.exit_status(frozenset({Use.DEMO})) == 1
    assert doctor.exit_status(frozenset({Use.CPU, Use.GPU})) == 6

"""A policy that a separate package brings: given by name or object, obeyed, written down and made again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.control_runs import LAYERS, WORLD, FakeTraining, journal, registration
from support.installed_package import install_policy

from cgx_ray.cli import main
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.journal.recorded import read_policy
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.named_policies import as_policy
from cgx_ray.control.policies.policy import Decision, Policy, Situation, Static, options_from
from cgx_ray.errors import ConfigError
from cgx_ray.plan import make_plan
from cgx_ray.report.journal_schema import journal_problem
from cgx_ray.session.settings import Settings


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an installed package that offers policy "thrifty", and of one that cannot be imported."""
    folder = install_policy(tmp_path / "site", broken=True)
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("thrifty", None)


def train(folder: Path, policy: Policy, *, num_steps: int = 30, gbps: float = 0.1, **options: Any) -> FakeTraining:
    loop = ControlLoop(policy, Journal(folder / "decisions.jsonl"))
    loop.register(registration(first_plan=make_plan(LAYERS, version=0, world_size=WORLD, **options)))
    run = FakeTraining(loop, gbps=gbps)
    run.step = 1
    run.run(num_steps)
    loop.end(float(run.step))
    return run


@pytest.mark.usefixtures("package")
def test_a_name_of_an_installed_package_is_its_policy() -> None:
    found: Any = Settings(policy="thrifty").policy
    assert type(found).__module__ == "thrifty"
    assert Settings(policy=type(found)()) == Settings(policy="thrifty") != Settings(policy=type(found)(800.0))
    assert Settings(policy="thrifty", review_s=5.0).chosen_policy.review_s == 5.0
    codecs = [str(codec) for codec in Settings(policy="thrifty").timed_codecs()]
    assert codecs == ["none", "bf16", "qsgd:bits=4,bucket_size=128"]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"policy": "thrift"}, "static; of installed packages: broken, thrifty; install the package that offers it"),
        ({"policy": "broken"}, "policy 'broken' of package 'broken-package' cannot be imported from 'broken:Broken'"),
        ({"policy": "thrifty", "codec": "bf16"}, "not allowed with policy 'thrifty', which takes fast_mbps, review_s;"),
    ],
)
def test_a_name_that_leads_to_no_policy_is_one_clear_error(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**given)
    assert says in str(caught.value)


def test_an_object_that_cannot_reach_the_deciding_process_is_refused() -> None:
    class Local(Policy):
        def decide(self, situation: Situation) -> Decision | None:
            return None

    with pytest.raises(ConfigError, match=r"^policy Settings\(.{71}\.\.\. is not allowed; give a name"):
        as_policy(Settings(), {})
    with pytest.raises(ConfigError, match=r"cannot be sent to the process that decides .*give an object that can be p"):
        as_policy(Local(), {})
    Local.__module__ = "__main__"
    with pytest.raises(ConfigError, match="its class is defined in the script itself"):
        as_policy(Local(), {})


@pytest.mark.parametrize(("gbps", "codec"), [(0.1, "qsgd"), (1.0, "bf16")])
@pytest.mark.usefixtures("package")
def test_the_loop_does_what_the_policy_decides(tmp_path: Path, gbps: float, codec: str) -> None:
    run = train(tmp_path, Settings(policy="thrifty").chosen_policy, gbps=gbps)
    assert codec in {group.option.codec.name for group in run.loop.plans[-1].groups}
    lines = journal(tmp_path, "start", "decision", "outcome", "progress", "end")
    assert set(map(journal_problem, lines)) == {""}
    assert lines[0]["policy"] == {
        "kind": "own",
        "name": "thrifty:Thrifty",
        "given": {"fast_mbps": 500.0, "review_s": 30.0},
    }
    assert f"{gbps * 1e3:.0f} Mbit/s, so" in next(line for line in lines if line["event"] == "decision")["reason"]


@pytest.mark.usefixtures("package")
def test_a_slow_plan_of_an_own_policy_is_taken_back(tmp_path: Path) -> None:
    loop = ControlLoop(Settings(policy="thrifty").chosen_policy, Journal(tmp_path / "decisions.jsonl"))
    loop.register(registration())
    run = FakeTraining(loop, gbps=0.1, slowdown_of={"qsgd": 30.0})
    run.step = 1
    run.run(60)
    assert "disable" in [line["kind"] for line in journal(tmp_path, "decision")]


def test_report_and_replay_work_on_the_journal_and_replay_needs_the_package(package: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", Settings(policy="thrifty").chosen_policy)
    report = CliRunner().invoke(main, ["report", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")])
    assert report.exit_code == 0, report.output
    assert "with policy thrifty:Thrifty" in (tmp_path / "page.html").read_text()
    done = CliRunner().invoke(main, ["replay", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "(100%)" in done.output
    argv = [sys.executable, "-m", "cgx_ray.cli", "replay", str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    without = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert without.returncode == 2
    assert "policy 'thrifty:Thrifty' cannot be made again: no installed package offers it" in without.stderr
    what_if = CliRunner().invoke(main, ["replay", str(tmp_path / "run"), "--candidates", "bf16"])
    assert "decisions made again" in what_if.output
    (package / "thrifty.py").unlink()
    sys.modules.pop("thrifty")
    gone = CliRunner().invoke(main, ["replay", str(tmp_path / "run")])
    assert gone.exit_code == 2
    assert "policy 'thrifty' of package 'thrifty-package' cannot be imported" in gone.output


class _OldPlan(Policy):
    """Returns a plan whose version is that of the plan in force."""

    options = options_from(["bf16"])

    def decide(self, situation: Situation) -> Decision:
        best = situation.best(self.options)
        plan = best.plan(version=situation.plan.version, world_size=WORLD)
        return Decision(kind="replace", plan=plan, reason="", predicted=best, step_s=1.0, dense_s=1.0)


def test_a_plan_that_the_ranks_could_not_follow_is_not_put_in_force(tmp_path: Path) -> None:
    run = train(tmp_path, _OldPlan())
    assert len(run.loop.plans) == 1
    (line,) = journal(tmp_path, "policy_error")
    assert "PlanError: plan 0 of the policy does not follow plan 0" in line["text"]


def test_policies_of_journals_are_made_again_from_the_fields_that_journals_have_always_had() -> None:
    start = {"policy": {"kind": "adaptive", "options": ["dense", "bf16 over sra"], "min_gain": 0.7}}
    assert read_policy(start) == Adaptive(candidates=["dense", "bf16 over sra"], min_gain=0.7)
    for policy in (Adaptive(fidelity="balanced", min_gain=0.7), read_policy(start)):
        again = read_policy({"policy": json.loads(json.dumps(policy.recorded()))})
        assert again.options == policy.options
        assert again.recorded() == policy.recorded()
    # What a fidelity means may change, its options do not.
    other = {**Adaptive(fidelity="balanced").recorded(), "options": ["dense", "bf16 over sra"]}
    assert read_policy({"policy": other}).recorded() == other | {"fidelity": None}
    # Earlier ones have no periods.
    usual = {"periods": [1], "max_loss": None, "fidelity": None}
    assert start["policy"] | usual == read_policy(start).recorded()
    assert read_policy({"policy": {"kind": "static"}}) == Static()

"""CGX_POLICY: the policy of a run without a change of its script."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.branches import Branches, train
from support.ranks import run_cases
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.demo.run import DemoOptions
from cgx_ray.ray_train import config as ray_config
from cgx_ray.ray_train.compat import TorchBackend
from cgx_ray.session.attachment import process
from cgx_ray.session.settings import Off, Settings

OWN = {"static": cgx_ray.Static("bf16"), "adaptive": cgx_ray.Adaptive(fidelity="fast")}


@pytest.mark.parametrize("given", [*OWN.values(), cgx_ray.Cgx()])
def test_it_replaces_a_policy_of_another_kind(monkeypatch: pytest.MonkeyPatch, given: cgx_ray.policies.Policy) -> None:
    for name, usual in {"static": cgx_ray.Static(), "adaptive": cgx_ray.Adaptive()}.items():
        monkeypatch.setenv("CGX_POLICY", name)
        expected = given if given is OWN[name] else usual
        assert Settings(policy=given).policy == cgx_ray.CGXConfig(policy=given).policy == expected
    monkeypatch.setenv("CGX_POLICY", "off")
    config = cgx_ray.CGXConfig(policy=given)
    monkeypatch.delenv("CGX_POLICY")
    # Where the variable is not known, such as in workers of a cluster, it stays off.
    assert isinstance(config.settings().policy, Off)


def test_an_unknown_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGX_POLICY", "of")
    with pytest.raises(cgx_ray.ConfigError, match="CGX_POLICY 'of' is not allowed; give off, static, adaptive, or"):
        cgx_ray.CGXConfig()


def test_a_demo_without_decisions_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGX_POLICY", "off")
    with pytest.raises(cgx_ray.ConfigError, match=r"decides nothing; .* \(CGX_POLICY=off is set"):
        DemoOptions(out=Path("demo"))


def _train(rank: int, folder: Path) -> tuple[list[list[str]], list[str | None], list[Any]]:
    """Train without CGX_POLICY and with off, then attach with other values. Return hashes, plans and states."""
    os.chdir(folder)
    hashes, plans, states = [], [], []
    for name in ("", "off", "static", "adaptive"):
        os.environ["CGX_POLICY"] = name
        model = DistributedDataParallel(Branches(), find_unused_parameters=True)
        if name:
            plan = cgx_ray.make_plan(cgx_ray.layers_of(model), version=0, world_size=2, codec="bf16")
            attachment = cgx_ray.attach(model, plan=plan)
            plans.append(attachment.plan.describe() if attachment.plan is not None else None)
        if name in ("", "off"):
            hashes.append(train(model, rank, range(3)))
        if name == "off":
            attachment.hold(plan)
            attachment.observe(loss=1.0)
            attachment.end_round()
            assert attachment.metrics() == {}
            own = attachment.state_dict()
            kept = {**own, "step": 7, "residuals": {"first.weight": torch.ones(3)}}
            attachment.load_state_dict(kept)
            states += [own, attachment.state_dict()]
        if name:
            attachment.close()
    return hashes, plans, states


def _refused(rank: int) -> str:
    """Return the error where ranks have different values."""
    os.environ["CGX_POLICY"] = ("off", "adaptive")[rank]
    with pytest.raises(cgx_ray.ConfigError) as caught:
        cgx_ray.attach(DistributedDataParallel(Branches()))
    return str(caught.value)


def test_off_is_plain_ddp_and_its_calls_work_and_others_overrule_a_plan(tmp_path: Path) -> None:
    # In the same two processes: to start them takes longer than to train.
    trained, refused = run_cases(2, [partial(_train, folder=tmp_path), _refused])
    for rank, (hashes, plans, (own, kept)) in enumerate(trained):
        assert hashes[0] == hashes[1]
        assert plans == [None, "bf16 over sra", "dense"]
        assert (own["rank"], own["world_size"], own["residuals"]) == (rank, 2, {})
        assert kept["step"] == 7
        assert kept["residuals"]["first.weight"].tolist() == [1.0] * 3
    assert refused[0] == refused[1]
    assert "ranks were given different settings: rank 1 has policy=Adaptive(" in refused[0]
    assert "(a policy may come from the environment variable CGX_POLICY); give every rank the same" in refused[0]


def test_a_ray_run_that_is_off_has_no_controller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(TorchBackend, "on_start", lambda self, group, config: calls.append("torch"))
    monkeypatch.setattr(TorchBackend, "on_shutdown", lambda self, group, config: calls.append("end"))
    monkeypatch.setattr(ray_config, "run_facts", lambda group: SimpleNamespace(folder=tmp_path))
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setattr(process, "session", None)
    monkeypatch.setattr(process, "attachment", None)
    monkeypatch.setenv("CGX_POLICY", "off")
    backend, config = ray_config.CGXBackend(), cgx_ray.CGXConfig()
    group = SimpleNamespace(execute=lambda function, *arguments: function(*arguments))
    backend.on_start(group, config)
    assert process.session is not None
    monkeypatch.setattr(process.session, "_has_read", True)  # there is no checkpoint
    attachment = cgx_ray.attach(torch.nn.Linear(1, 1), codec="bf16")
    assert attachment.plan is None
    assert cgx_ray.add_state() is None
    backend.on_shutdown(group, config)
    assert calls == ["torch", "end"]

"""CGXConfig as a dataclass, and the policy that it asks for. Starts no Ray."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError
from ray.train.torch import TorchConfig
from support.control_runs import DENSITIES, start

import cgx_ray
from cgx_ray.control.worker_group import LINK_STEPS
from cgx_ray.planner.options import candidate_codecs, candidate_options
from cgx_ray.ray_train import config as ray_config
from cgx_ray.ray_train.config import make_policy
from cgx_ray.session.settings import Settings


def test_a_config_has_the_fields_of_torch_config_and_then_those_of_settings() -> None:
    names = [field.name for field in dataclasses.fields(cgx_ray.CGXConfig)]
    torch_names = [field.name for field in dataclasses.fields(TorchConfig)]
    own = [field.name for field in dataclasses.fields(Settings) if field.name not in torch_names]
    assert names == torch_names + own
    assert cgx_ray.CGXConfig().timeout_s == TorchConfig().timeout_s


def test_a_config_survives_pickling_and_replacing_and_gives_its_settings() -> None:
    config = cgx_ray.CGXConfig("gloo", timeout_s=60, policy="static", codec="qsgd:bits=2", seed=3)
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, seed=4).settings() == Settings(
        policy="static", codec="qsgd:bits=2", seed=4, timeout_s=60
    )
    assert "backend='gloo', init_method='env', timeout_s=60, policy='static', codec='qsgd:bits=2'" in repr(config)
    config.codec = "zip"
    with pytest.raises(cgx_ray.ConfigError, match="unknown codec 'zip'"):
        config.settings()


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), 1e10, "60", None])
def test_a_time_out_that_nobody_can_wait_for_is_refused(timeout_s: Any) -> None:
    for config in (Settings, cgx_ray.CGXConfig):
        with pytest.raises(cgx_ray.ConfigError, match=r"timeout_s .* give seconds above 0 .* such as 1800"):
            config(timeout_s=timeout_s)
    assert Settings(timeout_s=0.5).timeout_s == 0.5


def test_a_config_without_densities_gives_the_policy_no_sparse_codec() -> None:
    settings = cgx_ray.CGXConfig(densities=()).settings()
    assert [codec.name for codec in candidate_codecs(settings.densities)] == ["none", "bf16", "qsgd"]
    options = make_policy(settings)._options  # type: ignore[attr-defined]
    assert {option.codec.name for option in options} == {"none", "bf16", "qsgd"}
    assert all(option.codec.density is None and not option.scheme.is_artopk for option in options)


@pytest.mark.parametrize(("densities", "chosen"), [(DENSITIES, {"none", "topk"}), ((), {"none", "qsgd"})])
def test_top_k_is_chosen_on_a_very_slow_network_unless_there_are_no_densities(
    tmp_path: Path, densities: tuple[float, ...], chosen: set[str]
) -> None:
    run = start(tmp_path, min_gain=0.2, options=candidate_options(densities))
    run.gbps = 0.001
    run.run(LINK_STEPS)
    assert {group.option.codec.name for group in run.loop.plans[-1].groups} == chosen


class _Ending:
    """A stand-in for Ray, the worker group and the controller at the end of a worker group."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.killed: list[Any] = []
        self.history = self

    def execute_async(self, function: Any) -> list[str]:
        return self._or_fail("tell", ["call"])

    def remote(self) -> str:
        return self._or_fail("ask", "history")

    def wait(self, calls: list[str], **options: Any) -> None:
        pass

    def get(self, call: str, *, timeout: float) -> str:
        if self.fails == "time out":
            raise GetTimeoutError(f"not within {timeout} s")
        return call

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)
        self._or_fail("kill", None)

    def _or_fail(self, action: str, result: Any) -> Any:
        if action == self.fails:
            raise RuntimeError(f"cannot {action}")
        return result


@pytest.mark.parametrize(
    ("fails", "says", "history"),
    [
        ("", "", "history"),
        ("tell", "the workers may not have heard", "history"),
        ("ask", "cannot ask", "older"),
        ("time out", "GetTimeoutError", "older"),
        ("kill", "may not have ended", "history"),
    ],
)
def test_the_end_of_a_worker_group_kills_all_actors_whatever_fails(
    fails: str, says: str, history: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ending, ended = _Ending(fails), []
    for name in ("wait", "get", "kill"):
        monkeypatch.setattr(ray_config.ray, name, getattr(ending, name))
    monkeypatch.setattr(ray_config.TorchBackend, "on_shutdown", lambda *arguments: ended.append(arguments))
    # Ray's backends are singletons. A copy leaves the one that later trainings of this process get as it is.
    backend: Any = copy.copy(ray_config.CGXBackend())
    backend._controller, backend._agents, backend._history = ending, {"one": "agent", "other": "agent"}, "older"
    backend.on_shutdown(ending, cgx_ray.CGXConfig())
    assert ending.killed == [ending, "agent", "agent"]
    assert len(ended) == 1
    assert (backend._controller, backend._agents, backend._history) == (None, {}, history)
    assert says in caplog.text
    assert bool(caplog.text) == bool(fails)

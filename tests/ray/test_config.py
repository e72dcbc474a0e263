"""CGXConfig as a dataclass, and the policy that it asks for. Starts no Ray."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
from ray.train.torch import TorchConfig
from support.control_runs import DENSITIES, start

import cgx_ray
from cgx_ray.control.worker_group import LINK_STEPS
from cgx_ray.planner.options import candidate_codecs, candidate_options
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

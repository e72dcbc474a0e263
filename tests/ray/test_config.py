"""CGXConfig as a dataclass, and the policy that it asks for. Starts no Ray."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train
import torch
import torch.distributed as dist
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from ray.exceptions import GetTimeoutError
from ray.train import RunConfig
from ray.train.torch import TorchConfig
from support.control_runs import DENSITIES, start
from torch.testing._internal.distributed.fake_pg import FakeStore

import cgx_ray
from cgx_ray.control.network.estimate import FEW
from cgx_ray.plan import CodecSpec
from cgx_ray.planner.candidates import candidate_options
from cgx_ray.planner.fidelity import codecs_of, describe_costs
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.ray_train import config as ray_config
from cgx_ray.ray_train import worker
from cgx_ray.ray_train.agent_watch import AgentWatch
from cgx_ray.ray_train.compat import run_facts
from cgx_ray.ray_train.worker import RaySession, close_ray_session, open_ray_session
from cgx_ray.session.attachment import process
from cgx_ray.session.calibrate import measure_codecs
from cgx_ray.session.settings import Settings, make_policy


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
    assert "init_method='env', timeout_s=60, policy=Static(codec='qsgd:bits=2,bucket_size=128'," in repr(config)
    assert dataclasses.replace(config, policy="cgx").settings().policy == cgx_ray.Cgx()
    config.codec = "zip"
    with pytest.raises(cgx_ray.ConfigError, match="codec cannot be given beside policy Static"):
        config.settings()


def test_a_name_with_arguments_is_the_policy_that_they_make() -> None:
    short = {
        "adaptive": {"fidelity": "balanced", "min_gain": 0.7, "review_s": 5.0},
        "static": {"codec": "bf16", "scheme": "allreduce", "intra": "dense"},
        "cgx": {"method": "dp", "alpha": 1.5, "review_s": 9.0},
        "flexible": {"method": "knee", "densities": (0.1, 0.02)},
    }
    values = (cgx_ray.Adaptive, cgx_ray.Static, cgx_ray.Cgx, cgx_ray.Flexible)
    for (name, arguments), cls in zip(short.items(), values, strict=True):
        config = cgx_ray.CGXConfig(policy=name, **arguments)  # type: ignore[arg-type]
        assert config == cgx_ray.CGXConfig(policy=cls(**arguments))
        assert config.policy == cls(**arguments) != cls()
    assert cgx_ray.CGXConfig().policy == cgx_ray.Adaptive()
    for own in ({"codec": "bf16", "period": 4}, {"intra": "dense"}, {"scheme": "dense"}):
        assert cgx_ray.CGXConfig(**own).policy == cgx_ray.Static(**own), "as attach"


def test_a_static_policy_takes_the_scheme_that_fits_its_codec() -> None:
    chosen = {policy.codec: policy.scheme for policy in map(cgx_ray.Static, (None, "topk", "none", "bf16"))}
    assert chosen == {
        "qsgd:bits=4,bucket_size=128": "sra",
        "topk:density=0.01": "allgather",
        "none": "dense",
        "bf16": "sra",
    }
    assert cgx_ray.Static(scheme="dense") == cgx_ray.Static("none")


def test_each_run_gets_a_policy_of_its_own_that_remembers_nothing() -> None:
    settings = Settings(policy=cgx_ray.Flexible())
    one, other = make_policy(settings), make_policy(settings)
    assert one == other == settings.policy
    assert one is not other


@pytest.mark.parametrize(
    ("storage_path", "filesystem", "folder"),
    [
        ("/shared/runs", None, Path("/shared/runs")),
        ("file:///shared/runs", None, Path("/shared/runs")),
        ("~/runs", None, Path.home() / "runs"),
        ("/shared/runs", LocalFileSystem(), Path("/shared/runs")),
        ("s3://bucket/runs", None, Path.home() / "ray_results"),
        ("bucket/runs", SubTreeFileSystem("/elsewhere", LocalFileSystem()), Path.home() / "ray_results"),
    ],
)
def test_a_run_has_its_folder_on_this_machine_also_if_its_storage_is_elsewhere(
    storage_path: str, filesystem: Any, folder: Path
) -> None:
    config = RunConfig(name="run", storage_path=storage_path, storage_filesystem=filesystem)
    context = SimpleNamespace(run_config=config, run_id="1")
    facts = run_facts(SimpleNamespace(_train_run_context=context, get_workers=list))
    assert facts.folder == folder / "run"


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), 1e10, "60", None])
def test_a_time_out_that_nobody_can_wait_for_is_refused(timeout_s: Any) -> None:
    for config in (Settings, cgx_ray.CGXConfig):
        with pytest.raises(cgx_ray.ConfigError, match=r"timeout_s .* give seconds above 0 .* such as 1800"):
            config(timeout_s=timeout_s)
    assert Settings(timeout_s=0.5).timeout_s == 0.5


def _codecs(settings: Settings) -> set[str]:
    """Return the codecs that the policy of `settings` may choose."""
    options = make_policy(settings).options
    return {str(option.codec) for option in options}


def test_seconds_in_a_report_are_told_as_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def report(metrics: dict[str, float], *, fails: bool = False) -> dict[str, float]:
        time.sleep(0.01)
        if fails:
            raise ValueError("metrics")
        return metrics

    told: list[float] = []
    monkeypatch.setattr(ray.train, "report", report)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    for name in ("show_lines", "name_lines"):
        monkeypatch.setattr(worker, name, lambda: None)
    monkeypatch.setattr(process, "session", None)
    monkeypatch.setattr(process, "attachment", None)
    for _ in range(2):
        open_ray_session(Settings(), None, {}, tmp_path)
    assert ray.train.report({"loss": 1.0}) == {"loss": 1.0}
    monkeypatch.setattr(process, "attachment", SimpleNamespace(add_pause=told.append))
    ray.train.report({"loss": 1.0})
    with pytest.raises(ValueError, match="metrics"):
        ray.train.report({}, fails=True)
    assert len(told) == 2
    assert min(told) >= 0.01


def test_a_state_is_added_to_a_checkpoint_and_to_nothing_else() -> None:
    with pytest.raises(cgx_ray.ConfigError, match=r"add_state got '/tmp/model'; give a ray.train.Checkpoint"):
        cgx_ray.add_state("/tmp/model")


def test_the_default_chooses_among_codecs_that_keep_the_loss() -> None:
    settings = cgx_ray.CGXConfig().settings()
    assert _codecs(settings) == {str(codec) for codec in codecs_of("strict")}


def test_fast_adds_top_k_at_the_papers_densities() -> None:
    sparse = {f"topk:density={density:g}" for density in CANDIDATE_DENSITIES}
    assert sparse <= _codecs(Settings(fidelity="fast"))


def test_the_times_of_all_candidates_are_measured_before_a_run() -> None:
    settings = Settings(candidates=("qsgd:bits=2", "terngrad"))
    assert list(measure_codecs(settings, torch.device("cpu"))) == [
        "none",
        "qsgd:bits=2,bucket_size=128",
        "terngrad:bucket_size=128",
    ]


def test_candidates_take_the_place_of_a_fidelity() -> None:
    settings = cgx_ray.CGXConfig(candidates=["qsgd:bits=4", CodecSpec.parse("topk:density=0.1")]).settings()
    candidates = ("qsgd:bits=4,bucket_size=128", "topk:density=0.1")
    assert settings.policy == cgx_ray.Adaptive(candidates=candidates)
    assert _codecs(settings) == {"none", *candidates}
    assert settings == cgx_ray.CGXConfig(candidates=("qsgd", "topk:density=0.1")).settings()
    one_scheme = make_policy(Settings(candidates=(("topk:density=0.1", "allgather"), "bf16 over sra")))
    assert list(map(str, one_scheme.options)) == ["dense", "topk:density=0.1 over allgather", "bf16 over sra"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fidelity": "exact"}, "unknown fidelity 'exact'; known: strict, balanced, fast"),
        ({"densities": (0.1,)}, r"densities \(0.1,\) is not allowed with policy 'adaptive', .* give policy='flexible'"),
        ({"candidates": ()}, r"candidates \(\) is not allowed; give one codec or more"),
        ({"candidates": "qsgd"}, "candidates 'qsgd' is not allowed; give one codec or more"),
        ({"candidates": ("zip",)}, "unknown codec 'zip'"),
        ({"codec": "dense"}, "unknown codec 'dense'; give 'none'"),
        ({"candidates": (4,)}, "4 is not a codec and a scheme; give a codec such as"),
        ({"candidates": ("qsgd",), "fidelity": "fast"}, "fidelity 'fast' and candidates are both given"),
    ],
)
def test_a_choice_of_codecs_that_is_not_allowed_is_one_clear_error(given: dict[str, Any], says: str) -> None:
    for config in (Settings, cgx_ray.CGXConfig):
        with pytest.raises(cgx_ray.ConfigError, match=says):
            config(**given)


@pytest.mark.parametrize(("densities", "chosen"), [(DENSITIES, {"none", "topk"}), ((), {"none", "qsgd"})])
def test_top_k_is_chosen_on_a_very_slow_network_unless_there_are_no_densities(
    tmp_path: Path, densities: tuple[float, ...], chosen: set[str]
) -> None:
    run = start(tmp_path, min_gain=0.2, options=candidate_options(densities))
    run.gbps = 0.001
    # Top-k waits for a second measurement of its gain.
    run.run(2 * FEW)
    assert {group.option.codec.name for group in run.loop.plans[-1].groups} == chosen


def test_the_reason_names_the_loss_of_codecs_that_strict_does_not_allow(tmp_path: Path) -> None:
    run = start(tmp_path, min_gain=0.2, options=candidate_options(DENSITIES))
    run.gbps = 0.001
    *_, decision = run.run(2 * FEW)
    (sparse,) = {group.option.codec for group in run.loop.plans[-1].groups if group.option.codec.name == "topk"}
    assert decision.reason.endswith(describe_costs([sparse]))
    assert "above dense's loss" in decision.reason


class _Ending:
    """A stand-in for Ray, the worker group and the controller at the end of a worker group."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.killed: list[Any] = []
        self.end = self

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


@pytest.mark.fault("the end of a worker group fails somewhere", "all our actors are ended all the same")
@pytest.mark.parametrize(
    ("fails", "says", "history"),
    [
        ("", "", "history"),
        ("tell", "the workers may not know", "history"),
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
    backend._controller, backend._history = ending, "older"
    backend._watch = AgentWatch({"one": "agent", "other": "agent"}, ending, probes=False)
    backend.on_shutdown(ending, cgx_ray.CGXConfig())
    assert ending.killed == [ending, "agent", "agent"]
    assert len(ended) == 1
    assert (backend._controller, backend._watch, backend._history) == (None, None, history)
    assert says in caplog.text
    assert bool(caplog.text) == bool(fails)


@pytest.mark.parametrize(("rank", "num_lines"), [(0, 1), (1, 0)])
def test_the_first_of_the_ranks_says_that_no_model_was_attached(
    rank: int, num_lines: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = RaySession(Settings(), controller=None, agent=None, folder=Path())
    monkeypatch.setattr(process, "session", session)
    monkeypatch.setattr(process, "attachment", None)
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        close_ray_session()
    finally:
        dist.destroy_process_group()
    assert session.closing.is_set()
    assert [message[:21] for message in caplog.messages] == ["no model was attached"] * num_lines

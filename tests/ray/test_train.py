"""TorchTrainer runs on a real local Ray cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from support import plain_script, train_functions
from support.endings import living, loops_below, our_actors, wait_for, wait_for_nothing

import cgx_ray

pytestmark = [
    # Ray's own: it leaves sockets and files open until its processes end, and calls its own deprecated APIs.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    # Several claims wait for one training, on machines that may be busy.
    pytest.mark.timeout(600),
]

CODEC = "topk:density=0.05"
FLIP_AT = 12
# Longest wait for one event of a training, in seconds. On a busy machine workers take a minute to start.
WAIT_S = 150.0


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of workers and of Ray's train controller."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def cluster(temporary: Path) -> Iterator[Path]:
    """A Ray cluster, as the folder of its session."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    context = ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}},
    )
    yield Path(context.address_info["session_dir"])
    ray.shutdown()


def fit(tmp_path: Path, *, failures: int = 0, torch_config: Any = None, **config: Any) -> Any:
    (tmp_path / "log").mkdir(exist_ok=True)
    return TorchTrainer(
        train_functions.train,
        train_loop_config={
            "log": str(tmp_path / "log"),
            "checkpoints": str(tmp_path / "run" / "checkpoint_manager_snapshot.json"),
            **config,
        },
        torch_config=torch_config or cgx_ray.CGXConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=failures)
        ),
    ).fit()


def log_of(tmp_path: Path, rank: int, first: int = 0) -> list[dict[str, Any]]:
    lines = (tmp_path / "log" / f"rank{rank}-from{first}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def journal_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()]


@dataclass(slots=True, kw_only=True)
class AdaptiveRun:
    """A finished run whose controller and monitor were killed, and what two `cgx-ray top` show of it.

    once            `cgx-ray top --once`, which has ended
    whole           `cgx-ray top`, which ends some time after the run; `said` is its output
    killed          titles of the actors that were killed, and when
    loops           processes of the killed controller's loop
    temporary_left  temporary folders of ours that are new
    """

    folder: Path
    said: Path
    whole: subprocess.Popen[bytes]
    once: subprocess.CompletedProcess[str] | None = None
    killed: dict[str, float] = field(default_factory=dict)
    loops: list[int] = field(default_factory=list)
    temporary_left: set[Path] = field(default_factory=set)

    @property
    def decisions(self) -> list[dict[str, Any]]:
        return [line for line in journal_of(self.folder) if line["event"] == "decision"]


def has_seen_the_slow_link(entry: dict[str, Any]) -> bool:
    # Beside other tests the link looks up to twice as fast: a late rank finds part of the messages there already.
    return entry["inputs"]["bandwidth_gbps"] < 0.03


def control(run: AdaptiveRun, argv: list[str]) -> None:
    """Watch the run and kill its controller and its monitor. Let it end once the next ones have decided."""

    def has_decided_and_judged() -> bool:
        judged = any(line["event"] == "outcome" for line in journal_of(run.folder))
        return judged and any(map(has_seen_the_slow_link, run.decisions[1:]))

    def has_decided_again() -> bool:
        return run.decisions[-1]["time"] > max(run.killed.values())

    run.once = subprocess.run([*argv, "--once"], capture_output=True, text=True, check=False, timeout=200)
    wait_for(lambda: "run: step" in run.said.read_text(), WAIT_S, run.said.read_text)
    wait_for(has_decided_and_judged, WAIT_S, lambda: str(run.decisions))
    for title, pid in our_actors().items():
        run.loops += loops_below(pid)
        os.kill(pid, signal.SIGKILL)
        run.killed[title] = time.time()
    # Ray's next controller goes on with the same files, so no loop may be left. A busy machine is slower than 1 s.
    wait_for_nothing(lambda: living(*run.loops))
    wait_for(has_decided_again, WAIT_S, lambda: str(run.decisions))


@pytest.fixture(scope="module")
def adaptive(cluster: Path, temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdaptiveRun]:
    """A run on a link that becomes ten times slower after 60 steps, with a checkpoint every 20 until then."""
    folder, before = tmp_path_factory.mktemp("adaptive"), set(temporary.glob("cgx_ray-*"))
    link = cgx_ray.SimulatedLink(latency_s=1e-4, schedule=((0, 1e8), (60, 1e7)))
    config = cgx_ray.CGXConfig(simulated_link=link, trace_steps=(5, 8))
    options = {"pace": True, "report_at": (20, 40, 60), "stop": str(folder / "stop")}
    argv = [sys.executable, "-m", "cgx_ray.cli", "top", "--address", ray.get_runtime_context().gcs_address]
    with ThreadPoolExecutor(1) as threads:
        training = threads.submit(fit, folder, steps=20_000, torch_config=config, **options)
        while not (folder / "run" / "decisions.jsonl").exists():
            assert not training.done(), training.result()
            time.sleep(0.1)
        with (folder / "said").open("w") as said:
            env = {**os.environ, "PYTHONUNBUFFERED": "1"}
            whole = subprocess.Popen([*argv, "run"], env=env, stdout=said, stderr=said)
        run = AdaptiveRun(folder=folder, said=folder / "said", whole=whole)
        try:
            control(run, argv)
        finally:
            (folder / "stop").touch()
            training.result()
    run.temporary_left = set(temporary.glob("cgx_ray-*")) - before
    yield run
    whole.kill()
    whole.wait()


def test_an_adaptive_run_decides_switches_and_leaves_no_actor(adaptive: AdaptiveRun) -> None:
    first, second = log_of(adaptive.folder, 0)[1:], log_of(adaptive.folder, 1)[1:]
    assert [line["hash"] for line in first] == [line["hash"] for line in second]
    assert first[0]["plan_version"] == 0
    assert first[-1]["plan_version"] > 0
    # The last plan may be dense again, which is faster if processors are too busy to encode.
    assert min(line["wire_bytes"] for line in first) < first[0]["wire_bytes"]
    decisions = adaptive.decisions
    outcomes = [entry for entry in journal_of(adaptive.folder) if entry["event"] == "outcome"]
    assert decisions[0]["reason"].startswith("first measurements")
    assert decisions[0]["kind"] == "replace"
    assert decisions[0]["old"]["plan"] == "dense"
    # A busy machine can look like a changed link, so there may be other decisions. One must have seen the new rate.
    assert decisions[0]["inputs"]["bandwidth_gbps"] > 0.05
    assert any(map(has_seen_the_slow_link, decisions[1:])), decisions
    assert outcomes
    for rank in range(2):
        traced = json.loads((adaptive.folder / "run" / f"trace-rank{rank:05d}.json").read_text())["traceEvents"]
        steps = [event["name"] for event in traced if event.get("cat") == "step"]
        assert steps == ["step 5", "step 6", "step 7", "step 8"]
        assert {"ready", "exchange"} < {event.get("cat") for event in traced}
    assert outcomes[0]["version"] in {entry["new"]["version"] for entry in decisions}
    assert outcomes[0]["measured_step_s"] > 0
    wait_for_nothing(lambda: {*our_actors()})
    events = [entry["event"] for entry in journal_of(adaptive.folder)]
    assert (events[0], events[-1]) == ("start", "end")


def test_checkpoints_and_the_controllers_snapshot_leave_no_temporary_folder(adaptive: AdaptiveRun) -> None:
    states = [path.name for path in (adaptive.folder / "run").glob("checkpoint_*/cgx_ray-rank*.pt")]
    assert len(states) == 6, states
    assert adaptive.temporary_left == set()


@pytest.mark.fault("SIGKILL of controller and monitor", "training goes on; Ray starts them again, and decisions go on")
def test_decisions_go_on_after_controller_and_monitor_were_killed(cluster: Path, adaptive: AdaptiveRun) -> None:
    assert sorted(adaptive.killed) == ["ray::Controller", "ray::NodeAgent"]
    assert len(adaptive.loops) == 1
    first = log_of(adaptive.folder, 0)[1:]
    assert [line["step"] for line in first] == list(range(len(first)))
    # Agent and controller are new, so a later decision is theirs. It goes on from the plan before.
    killed_s = max(adaptive.killed.values())
    earlier = [line for line in adaptive.decisions if line["time"] <= killed_s]
    later = adaptive.decisions[len(earlier)]
    assert later["old"]["version"] >= earlier[0]["new"]["version"]
    assert set(later["inputs"]["gain"]) >= set(earlier[0]["inputs"]["gain"])
    versions = [line["new"]["version"] for line in adaptive.decisions]
    assert versions == sorted(versions)
    logs = [path.read_text() for path in (cluster / "logs").glob("worker-*.err")]
    # A worker asks the controller itself while its agent does not answer. It says at most once that it does not either.
    counts = [text.count("the controller does not answer: training goes on with plan") for text in logs]
    assert set(counts) <= {0, 1}, counts
    assert not any("is gone" in text for text in logs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRun:
    """A run with the user's codec.

    One of its workers died at step 8, after a checkpoint at step 5. Then the weights of rank 1 changed at step FLIP_AT,
    which ended the training with `error`.
    """

    folder: Path
    error: ray.train.WorkerGroupError


@pytest.fixture(scope="module")
def static(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> StaticRun:
    folder = tmp_path_factory.mktemp("static")
    config = cgx_ray.CGXConfig(policy="static", codec=CODEC, scheme="allgather", weight_check_steps=5)
    with pytest.raises(ray.train.WorkerGroupError) as caught:
        fit(folder, steps=30, die_at=8, report_at=(5,), failures=1, flip_at=FLIP_AT, torch_config=config)
    return StaticRun(folder=folder, error=caught.value)


def test_a_static_run_keeps_the_users_choice(static: StaticRun) -> None:
    first, second = (
        [line for line in log_of(static.folder, rank, first=5)[1:] if line["step"] < FLIP_AT] for rank in range(2)
    )
    assert {(line["plan"], line["plan_version"]) for line in first} == {("topk 5 % over allgather", 0)}
    assert [line["hash"] for line in first] == [line["hash"] for line in second]


@pytest.mark.fault("a worker dies, with `add_state` and `max_failures`", "the repeated steps have the same bits")
def test_residuals_come_back_after_a_worker_died(static: StaticRun) -> None:
    for rank in (0, 1):
        resumed = log_of(static.folder, rank, first=5)
        assert resumed[0]["engine_step"] == 5
        assert set(resumed[0]["residuals"]) == {"0.weight", "2.weight"}
        assert min(resumed[0]["residuals"].values()) > 0
        assert resumed[-1]["step"] >= 11
    # The restart repeats steps 5 to 7 with the same random numbers and residuals, so with the same weights.
    before = {line["step"]: line["hash"] for line in log_of(static.folder, 0)[1:]}
    after = {line["step"]: line["hash"] for line in log_of(static.folder, 0, first=5)[1:]}
    assert [after[step] for step in (5, 6, 7)] == [before[step] for step in (5, 6, 7)]


def test_ranks_with_different_weights_end_the_training_and_the_journal_says_why(static: StaticRun) -> None:
    # Ray's own message cuts long errors in the middle; those of the workers are whole, and so is the journal.
    for error in static.error.worker_failures.values():
        assert "with weight_check_steps=0 nothing is compared" in str(error)
    faults = [entry for entry in journal_of(static.folder) if entry["event"] == "fault"]
    faults = [fault for fault in faults if fault["kind"] == "weights_differ"]
    assert all("before step 15 the weights of rank 1 differ from those of rank 0" in one["text"] for one in faults)
    assert sorted((fault["rank"], fault["step"]) for fault in faults) == [(rank, 16) for rank in range(2)]


# In `make test`, ranks without Ray train alone and over the backend: test_backend_lifetime.py, test_fsdp_attach.py.
SHORT = pytest.mark.slow


def train_shortly(folder: Path, name: str, function: Any, config: dict[str, Any], torch_config: TorchConfig) -> None:
    """Train for a few steps on `config["workers"]` workers."""
    TorchTrainer(
        function,
        train_loop_config=config,
        torch_config=torch_config,
        scaling_config=ScalingConfig(num_workers=config["workers"], resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(name=name, storage_path=str(folder)),
    ).fit()


@pytest.fixture(scope="module")
def short_runs(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two trainings of a few steps, which run at the same time."""
    folder = tmp_path_factory.mktemp("short")
    alone = {"log": str(folder), "steps": 5, "report_at": (5,), "workers": 1}
    plain = {"log": str(folder), "workers": 2}
    runs: list[tuple[str, Any, dict[str, Any], TorchConfig]] = [
        ("alone", train_functions.train, alone, cgx_ray.CGXConfig()),
        ("plain", plain_script.train_then_attach, plain, TorchConfig(backend="cgx")),
    ]
    with ThreadPoolExecutor(len(runs)) as threads:
        for done in [threads.submit(train_shortly, folder, *run) for run in runs]:
            done.result()
    return folder


@SHORT
def test_world_size_one_trains_as_if_nothing_was_attached(short_runs: Path) -> None:
    assert len((short_runs / "rank0-from0.jsonl").read_text().splitlines()) == 6


@SHORT
def test_a_script_without_a_word_of_cgx_ray_trains_over_its_backend(short_runs: Path) -> None:
    first, second = (json.loads((short_runs / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["backend"] == "cgx"
    assert first["hash"] == second["hash"]
    for losses in (first["losses"], second["losses"]):
        assert losses[-1] < 0.9 * losses[0], losses
    # At most two roundings to a 15th of the range of a quantization bucket: 128 of 5,000 numbers.
    assert 0 < first["error"] <= 2 * 2 * (2 * 128 / 5000 + 2 * 2**-7) / 15, first["error"]


# Slow: tests/control/test_paper_policies.py has their decisions, and the other trainings here the road of a plan.
@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_policies_of_papers_decide_and_train(tmp_path: Path) -> None:
    """Two trainings at the same time, on links of 5 Mbit/s, each until a new plan has an outcome."""
    link = cgx_ray.SimulatedLink(latency_s=1e-4, schedule=((0, 5e6),))
    policies = {"cgx": cgx_ray.Cgx(), "flexible": cgx_ray.Flexible(densities=(0.1, 0.01))}

    def run(name: str) -> None:
        (tmp_path / name / "log").mkdir(parents=True)
        config = {"log": str(tmp_path / name / "log"), "steps": 2000, "workers": 2, "pace": True}
        config["stop"] = str(tmp_path / "stop")
        torch_config = cgx_ray.CGXConfig(policy=policies[name], simulated_link=link)
        train_shortly(tmp_path / name, "run", train_functions.train, config, torch_config)

    def new_plan(name: str) -> dict[str, Any] | None:
        lines = journal_of(tmp_path / name)
        judged = {line["version"] for line in lines if line["event"] == "outcome"}
        made = [line for line in lines if line["event"] == "decision" and line["kind"] == "replace"]
        return next((line for line in made if line["new"]["version"] in judged), None)

    def is_judged(name: str) -> bool:
        return (tmp_path / name / "run" / "decisions.jsonl").exists() and new_plan(name) is not None

    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(run, name) for name in policies]
        try:
            wait_for(lambda: all(map(is_judged, policies)), WAIT_S, lambda: str([*tmp_path.glob("*/run/*")]))
        finally:
            (tmp_path / "stop").touch()
            for done in runs:
                done.result()
    for name, codec in (("cgx", "qsgd"), ("flexible", "topk")):
        first, second = (log_of(tmp_path / name, rank)[1:] for rank in range(2))
        assert [line["hash"] for line in first] == [line["hash"] for line in second]
        decision = new_plan(name)
        assert decision is not None
        assert f": {name} (" in decision["reason"]
        assert codec in decision["new"]["plan"]
        assert first[-1]["wire_bytes"] < first[1]["wire_bytes"]


def said_by_workers(cluster: Path, text: str) -> int:
    return sum(path.read_text().count(text) for path in (cluster / "logs").glob("worker-*.err"))


@SHORT
@pytest.mark.usefixtures("short_runs")
def test_a_config_that_was_forgotten_is_named_once_in_the_log(cluster: Path) -> None:
    assert said_by_workers(cluster, "without CGXConfig") == 1


@pytest.mark.slow  # test_config.py asks two ranks without Ray
def test_an_attach_that_was_forgotten_is_named_once_in_the_log(cluster: Path, tmp_path: Path) -> None:
    train_shortly(tmp_path, "run", train_functions.train_without_attach, {"workers": 2}, cgx_ray.CGXConfig())
    assert said_by_workers(cluster, "no model was attached") == 1


def test_top_attaches_to_a_run_from_another_process_and_ends_with_it(adaptive: AdaptiveRun) -> None:
    # The last of the tests that wait: `top` waits for a restart before it ends.
    once = adaptive.once
    assert once is not None
    assert once.returncode == 0, once.stdout + once.stderr
    assert re.search(r"^run: step \d+ .*s per step \(compute ", once.stdout, re.MULTILINE), once.stdout
    status = adaptive.whole.wait(timeout=120)
    said = adaptive.said.read_text()
    assert status == 0, said
    assert re.search(r"^run has ended after step \d+$", said, re.MULTILINE), said
    # A late watcher sees the last decisions only.
    assert re.search(r"^run: decided at step \d+: .*(->|keep )", once.stdout + said, re.MULTILINE), once.stdout + said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"policy": "clever"},
            "unknown policy 'clever'; known: adaptive, bytecomp, cgx, cupcake, flexible, static; of installed",
        ),
        (
            {"codec": "topk", "fidelity": "fast"},
            "codec means policy 'static', which has no fidelity; leave one of them",
        ),
        ({"policy": "static", "codec": "zip"}, "unknown codec 'zip'; known: none, fp16, bf16, prefix, qsgd"),
        ({"codec": "qsgdd:bits=4"}, "unknown codec 'qsgdd'; did you mean 'qsgd'"),
        ({"policy": "static", "codec": "qsgd:bits=9"}, "bits 9 is not allowed; give a whole number from 1 to 8"),
        ({"policy": "static", "codec": "qsgd:bits=x"}, "bits 'x' is not allowed; give a whole number from 1 to 8"),
        ({"policy": "static", "codec": "topk:density=0"}, "density 0.0 is not allowed; give a share in (0, 1]"),
        ({"policy": "static", "codec": "topk", "scheme": "sra"}, "scheme sra cannot carry codec topk"),
        (
            {"policy": "static", "scheme": "mesh"},
            "unknown scheme 'mesh'; known: dense, allreduce, allgather, sra, ",
        ),
        (
            {"policy": "adaptive", "codec": "topk", "scheme": "allgather"},
            "codec 'topk' is not allowed with policy 'adaptive', which takes fidelity, candidates, min_gain, review_s, "
            "periods, max_loss; leave it out, or give policy='bytecomp' or 'cupcake' or 'static'",
        ),
        (
            {"policy": "static", "min_gain": 0.9},
            "which takes codec, scheme, intra, period; leave it out, or give policy='a",
        ),
        ({"policy": "flexible", "densities": (2.0,)}, "density 2.0 is not allowed; give a share in (0, 1]"),
        ({"policy": "flexible", "densities": 0.1}, "give a tuple such as"),
        (
            {"policy": cgx_ray.Static(), "codec": "bf16"},
            "codec cannot be given beside policy Static(codec=",
        ),
        (
            {"policy": cgx_ray.Adaptive},
            "is not allowed; give a name such as 'adaptive', or an object such as ",
        ),
        ({"policy": 4}, "policy 4 is not allowed; give a name such as 'adaptive', or an object"),
        ({"seed": "a"}, "seed 'a' is not allowed"),
        ({"min_gain": 2}, "min_gain 2 is not in [0, 1]"),
        ({"num_streams": 0}, "num_streams 0 is not allowed; give 1 or more"),
        ({"weight_check_steps": -1}, "weight_check_steps -1 is not allowed; give 0 or more"),
    ],
)
def test_a_wrong_config_fails_where_it_is_written(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(cgx_ray.ConfigError) as caught:
        cgx_ray.CGXConfig(**arguments)
    assert says in str(caught.value)

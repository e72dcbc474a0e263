"""TorchTrainer runs on a real local Ray cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from support import plain_script, train_functions
from support.endings import living, loops_below, our_actors, wait_for_nothing

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
        train_loop_config={"log": str(tmp_path / "log"), **config},
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveRun:
    """A finished run, and what two `cgx-ray top` showed of it: one once, one until its end.

    temporary_left  temporary folders of ours that are new
    """

    folder: Path
    once: subprocess.CompletedProcess[str]
    whole: subprocess.CompletedProcess[str]
    temporary_left: set[Path]


@pytest.fixture(scope="module")
def adaptive(cluster: Path, temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> AdaptiveRun:
    """A run of 400 steps, on a link that becomes ten times slower after 60, with a checkpoint every 20 at first."""
    folder, before = tmp_path_factory.mktemp("adaptive"), set(temporary.glob("cgx_ray-*"))
    link = cgx_ray.SimulatedLink(latency_s=1e-4, schedule=((0, 1e8), (60, 1e7)))
    config = cgx_ray.CGXConfig(simulated_link=link, trace_steps=(5, 8))
    argv = [sys.executable, "-m", "cgx_ray.cli", "top", "--address", ray.get_runtime_context().gcs_address]

    def top(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*argv, *arguments], capture_output=True, text=True, check=False, timeout=280)

    with ThreadPoolExecutor(3) as threads:
        # On a busy machine reports reach the controller seconds after the steps.
        run = threads.submit(fit, folder, steps=400, torch_config=config, pace=True, report_at=(20, 40, 60))
        while not (folder / "run" / "decisions.jsonl").exists():
            assert not run.done(), run.result()
            time.sleep(0.1)
        once, whole = threads.submit(top, "--once"), threads.submit(top, "run")
        run.result()
    return AdaptiveRun(
        folder=folder,
        once=once.result(),
        whole=whole.result(),
        temporary_left=set(temporary.glob("cgx_ray-*")) - before,
    )


def test_an_adaptive_run_decides_switches_and_leaves_no_actor(adaptive: AdaptiveRun) -> None:
    first, second = log_of(adaptive.folder, 0)[1:], log_of(adaptive.folder, 1)[1:]
    assert [line["hash"] for line in first] == [line["hash"] for line in second]
    assert first[0]["plan_version"] == 0
    assert first[-1]["plan_version"] > 0
    # The last plan may be dense again, which is faster if processors are too busy to encode.
    assert min(line["wire_bytes"] for line in first) < first[0]["wire_bytes"]
    decisions = [entry for entry in journal_of(adaptive.folder) if entry["event"] == "decision"]
    outcomes = [entry for entry in journal_of(adaptive.folder) if entry["event"] == "outcome"]
    assert decisions[0]["reason"].startswith("first measurements")
    assert decisions[0]["kind"] == "replace"
    assert decisions[0]["old"]["plan"] == "dense"
    # A busy machine can look like a changed link, so there may be other decisions. One must have seen the new rate.
    # Beside other tests the link looks up to twice as fast: a late rank finds part of the messages there already.
    rates = [entry["inputs"]["bandwidth_gbps"] for entry in decisions]
    assert rates[0] > 0.05
    assert min(rates[1:]) < 0.03
    assert outcomes
    for rank in range(2):
        traced = json.loads((adaptive.folder / "run" / f"trace-rank{rank:05d}.json").read_text())["traceEvents"]
        steps = [event["name"] for event in traced if event.get("cat") == "step"]
        assert steps == ["step 5", "step 6", "step 7", "step 8"]
        assert {"ready", "exchange"} < {event.get("cat") for event in traced}
    assert outcomes[0]["version"] == decisions[0]["new"]["version"]
    assert outcomes[0]["measured_step_s"] > 0
    wait_for_nothing(lambda: {*our_actors()}, 10.0)
    events = [entry["event"] for entry in journal_of(adaptive.folder)]
    assert (events[0], events[-1]) == ("start", "end")


def test_checkpoints_and_the_controllers_snapshot_leave_no_temporary_folder(adaptive: AdaptiveRun) -> None:
    states = [path.name for path in (adaptive.folder / "run").glob("checkpoint_*/cgx_ray-rank*.pt")]
    assert len(states) == 6, states
    assert adaptive.temporary_left == set()


def test_top_attaches_to_a_run_from_another_process_and_ends_with_it(adaptive: AdaptiveRun) -> None:
    once, whole = adaptive.once, adaptive.whole
    assert once.returncode == 0, once.stdout + once.stderr
    assert re.search(r"^run: step \d+ .* s/step \(compute ", once.stdout, re.MULTILINE), once.stdout
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert re.search(r"^run has ended after step \d+$", whole.stdout, re.MULTILINE), whole.stdout
    # A late watcher sees the last decisions only.
    said = once.stdout + whole.stdout
    assert re.search(r"^run: step \d+: .*(->|keep )", said, re.MULTILINE), said


@pytest.fixture(scope="module")
def static(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the user's codec, one of whose workers died at step 8, after a checkpoint at step 5."""
    folder = tmp_path_factory.mktemp("static")
    config = cgx_ray.CGXConfig(policy="static", codec="topk:density=0.05", scheme="allgather")
    expected = "topk:density=0.05 over allgather"
    fit(folder, steps=12, die_at=8, report_at=(5, 12), failures=1, torch_config=config, expect_plan=expected)
    return folder


def test_a_static_run_keeps_the_users_choice(static: Path) -> None:
    assert log_of(static, 0, first=5)[-1]["plan_version"] == 0
    assert log_of(static, 0, first=5)[-1]["hash"] == log_of(static, 1, first=5)[-1]["hash"]


@pytest.mark.fault("a worker dies, with `add_state` and `max_failures`", "the repeated steps have the same bits")
def test_residuals_come_back_after_a_worker_died(static: Path) -> None:
    for rank in (0, 1):
        resumed = log_of(static, rank, first=5)
        assert resumed[0]["engine_step"] == 5
        assert set(resumed[0]["residuals"]) == {"0.weight", "2.weight"}
        assert min(resumed[0]["residuals"].values()) > 0
        assert resumed[-1]["step"] == 11
    # The restart repeats steps 5 to 7 with the same random numbers and residuals, so with the same weights.
    before = {line["step"]: line["hash"] for line in log_of(static, 0)[1:]}
    after = {line["step"]: line["hash"] for line in log_of(static, 0, first=5)[1:]}
    assert [after[step] for step in (5, 6, 7)] == [before[step] for step in (5, 6, 7)]


@pytest.mark.usefixtures("cluster")
def test_ranks_with_different_weights_end_the_training_and_the_journal_says_why(tmp_path: Path) -> None:
    config = cgx_ray.CGXConfig(weight_check_steps=5)
    with pytest.raises(ray.train.WorkerGroupError) as caught:
        fit(tmp_path, steps=20, flip_at=7, torch_config=config)
    # Ray's own message cuts long errors in the middle; those of the workers are whole, and so is the journal.
    for error in caught.value.worker_failures.values():
        assert "with weight_check_steps=0 nothing is compared" in str(error)
    faults = [entry for entry in journal_of(tmp_path) if entry["event"] == "fault"]
    assert all("before step 10 the weights of rank 1 differ from those of rank 0" in one["text"] for one in faults)
    assert sorted((fault["rank"], fault["kind"], fault["step"]) for fault in faults) == [
        (rank, "weights_differ", 11) for rank in range(2)
    ]


@pytest.mark.fault("SIGKILL of controller and monitor", "training goes on; Ray starts them again, and decisions go on")
def test_decisions_go_on_after_controller_and_monitor_were_killed(cluster: Path, tmp_path: Path) -> None:
    killed: list[tuple[str, float]] = []
    loops, ended = list[int](), list[float]()

    def kill_when_judged() -> None:
        path = tmp_path / "run" / "decisions.jsonl"
        while not path.exists() or '"outcome"' not in path.read_text():
            time.sleep(0.2)
        for title, pid in our_actors().items():
            loops.extend(loops_below(pid))
            os.kill(pid, signal.SIGKILL)
            killed.append((title, time.time()))
        # Ray's next controller goes on with the same files, so no loop may be left. A busy machine is slower than 1 s.
        wait_for_nothing(lambda: living(*loops), 10.0)
        ended.append(time.time())

    thread = threading.Thread(target=kill_when_judged)
    thread.start()
    link = cgx_ray.SimulatedLink(latency_s=1e-4, schedule=((0, 2e7),))
    fit(tmp_path, steps=500, pace=True, torch_config=cgx_ray.CGXConfig(simulated_link=link))
    thread.join()
    assert sorted(name for name, _ in killed) == ["ray::Controller", "ray::NodeAgent"]
    assert len(loops) == len(ended) == 1
    first, second = log_of(tmp_path, 0)[1:], log_of(tmp_path, 1)[1:]
    assert len(first) == 500
    assert [line["hash"] for line in first] == [line["hash"] for line in second]
    decisions = [line for line in journal_of(tmp_path) if line["event"] == "decision"]
    # Agent and controller are new, so a later decision is theirs. It goes on from the plan before.
    later = [line for line in decisions if line["time"] > killed[-1][1]]
    assert later, decisions
    assert later[0]["old"]["version"] >= decisions[0]["new"]["version"]
    assert set(later[0]["inputs"]["gain"]) >= set(decisions[0]["inputs"]["gain"])
    versions = [line["new"]["version"] for line in decisions]
    assert versions == sorted(versions)
    logs = [path.read_text() for path in (cluster / "logs").glob("worker-*.err")]
    # A worker asks the controller itself while its agent does not answer. It says at most once that it does not either.
    counts = [text.count("the controller does not answer: training goes on with plan") for text in logs]
    assert set(counts) <= {0, 1}, counts
    assert not any("is gone" in text for text in logs)
    wait_for_nothing(lambda: {*our_actors()}, 10.0)


@pytest.fixture(scope="module")
def short_runs(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of trainings of a few steps, which run at the same time."""
    folder = tmp_path_factory.mktemp("short")

    def train(name: str, function: Any, config: dict[str, Any], torch_config: TorchConfig, num_workers: int) -> None:
        TorchTrainer(
            function,
            train_loop_config=config,
            torch_config=torch_config,
            scaling_config=ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(name=name, storage_path=str(folder)),
        ).fit()

    log, step = str(folder), train_functions.train_a_step
    runs: list[tuple[str, Any, dict[str, Any], TorchConfig, int]] = [
        ("alone", train_functions.train, {"log": log, "steps": 5, "report_at": (5,)}, cgx_ray.CGXConfig(), 1),
        ("plain", plain_script.train, {"log": log}, TorchConfig(backend="cgx"), 2),
        ("not attached", step, {"attaches": False}, cgx_ray.CGXConfig(), 2),
        ("not configured", step, {"attaches": True}, TorchConfig(), 2),
    ]
    with ThreadPoolExecutor(len(runs)) as threads:
        for done in [threads.submit(train, *run) for run in runs]:
            done.result()
    return folder


def test_world_size_one_trains_as_if_nothing_was_attached(short_runs: Path) -> None:
    assert len((short_runs / "rank0-from0.jsonl").read_text().splitlines()) == 6


def test_a_script_without_a_word_of_cgx_ray_trains_over_its_backend(short_runs: Path) -> None:
    first, second = (json.loads((short_runs / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["backend"] == "cgx"
    assert first["hash"] == second["hash"]
    for losses in (first["losses"], second["losses"]):
        assert losses[-1] < 0.9 * losses[0], losses
    # At most two roundings to a 15th of the range of a quantization bucket: 128 of 5,000 numbers.
    assert 0 < first["error"] <= 2 * 2 * (2 * 128 / 5000 + 2 * 2**-7) / 15, first["error"]


@pytest.mark.usefixtures("short_runs")
def test_a_forgotten_line_is_named_once_in_the_log(cluster: Path) -> None:
    text = "".join(path.read_text() for path in (cluster / "logs").glob("worker-*.err"))
    for said in ("no model was attached", "without CGXConfig"):
        assert text.count(said) == 1, said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"policy": "clever"},
            "unknown policy 'clever'; known: adaptive, cgx, flexible, static; of installed",
        ),
        ({"policy": "static", "codec": "zip"}, "unknown codec 'zip'; known: none, fp16, bf16, prefix, qsgd"),
        ({"policy": "static", "codec": "qsgd:bits=9"}, "bits 9 is not allowed; give a whole number from 1 to 8"),
        ({"policy": "static", "codec": "qsgd:bits=x"}, "bits 'x' is not allowed; give a whole number from 1 to 8"),
        ({"policy": "static", "codec": "topk:density=0"}, "density 0.0 is not allowed; give a share in (0, 1]"),
        ({"policy": "static", "codec": "topk", "scheme": "sra"}, "scheme sra cannot carry codec topk"),
        (
            {"policy": "static", "scheme": "mesh"},
            "unknown scheme 'mesh'; known: dense, allreduce, allgather, sra, ",
        ),
        (
            {"codec": "topk", "scheme": "allgather"},
            "codec 'topk' is not allowed with policy 'adaptive', which takes fidelity, candidates, min_gain, review_s; "
            "leave it out, or give policy='static'",
        ),
        (
            {"policy": "static", "min_gain": 0.9},
            "which takes codec, scheme, intra; leave it out, or give policy='a",
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

"""The demo's data and model, then the demo itself as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from support.emulated import needs_lab
from support.endings import actors_below

from cgx_ray.demo.cluster import Cluster, DemoError
from cgx_ray.demo.gpt import GPTConfig, StdlibBytes, build_gpt, split_files
from cgx_ray.demo.run import DemoOptions
from cgx_ray.errors import ConfigError
from cgx_ray.report.record import load_run

NEEDS_LAB = needs_lab()
CGX_RAY = [sys.executable, "-m", "cgx_ray.cli"]
# Processes started in the background by a shell ignore SIGINT, and their children inherit it.
INTERRUPTIBLE = ["env", "--default-signal=INT"]


def test_no_file_is_in_train_and_validation():
    data = StdlibBytes()
    assert set(data.train_files).isdisjoint(data.validation_files)
    share = len(data.validation_files) / (len(data.train_files) + len(data.validation_files))
    # The hash selects 10 % of some 800 files, with a standard deviation of 1.1 %.
    assert 0.05 < share < 0.15, share
    assert not any("test" in path.relative_to(data.root).parts for path in data.train_files)


def test_the_split_follows_the_relative_path_alone(tmp_path):
    for root in (tmp_path / "a", tmp_path / "b"):
        for index in range(50):
            (root / "package").mkdir(parents=True, exist_ok=True)
            (root / "package" / f"module{index}.py").write_text("x")
    sides = [[[path.name for path in side] for side in split_files(tmp_path / root)] for root in ("a", "b")]
    assert sides[0] == sides[1]
    assert all(sides[0])


def test_batches_depend_on_seed_step_and_rank_alone():
    wanted = {"seed": 1, "step": 7, "rank": 2, "batch_size": 3}
    first, target = StdlibBytes(context=32).train_batch(**wanted)
    data = StdlibBytes(context=32)
    data.train_batch(seed=1, step=6, rank=2, batch_size=3)
    again, _ = data.train_batch(**wanted)
    assert torch.equal(first, again)
    assert first.shape == (3, 32)
    assert torch.equal(first[:, 1:], target[:, :-1]), "the target is the next byte"
    for other in ({"seed": 2}, {"step": 8}, {"rank": 3}):
        assert not torch.equal(first, data.train_batch(**(wanted | other))[0])


def test_the_validation_set_is_fixed():
    first, again = (torch.cat([x for x, _ in StdlibBytes().validation_batches()]) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == (64, 128)


def test_a_folder_without_python_source_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="no Python source below"):
        StdlibBytes(tmp_path)


def test_the_model_has_about_five_million_parameters():
    assert 4.5e6 < build_gpt(0).num_parameters < 5.5e6


def test_weights_depend_on_the_seed_alone_and_the_global_random_state_is_kept():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, other = build_gpt(0, GPTConfig(num_layers=1)), build_gpt(1, GPTConfig(num_layers=1))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    again = build_gpt(0, GPTConfig(num_layers=1))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_no_byte_sees_the_future():
    model = build_gpt(0, GPTConfig(num_layers=2)).eval()
    seen = []
    model.head.register_forward_hook(lambda module, args, out: seen.append(out))
    text = torch.arange(40)[None]
    changed = text.clone()
    changed[0, 20:] = 255
    with torch.no_grad():
        model(text, text)
        model(changed, text)
    torch.testing.assert_close(seen[0][:, :20], seen[1][:, :20])
    assert not torch.allclose(seen[0][:, 20:], seen[1][:, 20:])


def test_the_model_learns():
    data, model = StdlibBytes(context=64), build_gpt(0, GPTConfig(context=64, width=64, num_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(20):
        loss = model(*data.train_batch(seed=0, step=step, rank=0, batch_size=8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # Guessing bytes gives ln 256 = 5.55.
    assert abs(losses[0] - 5.55) < 0.2
    assert losses[-1] < 4.5, losses


def test_options_that_make_no_sense_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="workers 0"):
        DemoOptions(out=tmp_path, workers=0)
    with pytest.raises(ConfigError, match="steps 1"):
        DemoOptions(out=tmp_path, steps=1)
    with pytest.raises(ConfigError, match="at least 1mbit"):
        DemoOptions(out=tmp_path, slow_rate=10)
    with pytest.raises(ConfigError, match="unknown fidelity 'exact'; known: strict, balanced, fast"):
        DemoOptions(out=tmp_path, fidelity="exact")
    with pytest.raises(ConfigError, match="policy 'static' decides nothing; give adaptive, cgx, flexible"):
        DemoOptions(out=tmp_path, policy="static")
    with pytest.raises(ConfigError, match="fidelity 'fast' is not allowed with policy 'flexible'"):
        DemoOptions(out=tmp_path, policy="flexible", fidelity="fast")
    (tmp_path / "x").write_text("")
    done = subprocess.run([*CGX_RAY, "demo", "--out", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert "is not empty; give another --out" in done.stderr


def test_a_training_that_fails_shows_its_last_lines(tmp_path):
    log = tmp_path / "driver.log"
    with log.open("w") as file, subprocess.Popen(["sh", "-c", "echo boom; exit 3"], stdout=file, text=True) as driver:
        driver.wait()
    with pytest.raises(DemoError, match=r"(?s)status 3:\nboom.*driver\.log"):
        Cluster(driver=driver, driver_log=log, set_rate=None).check()


@pytest.mark.slow  # CI runs `make demo` too
def test_the_demo_runs_to_its_end_and_its_json_is_well_formed(tmp_path):
    out = tmp_path / "out"
    argv = [*CGX_RAY, "demo", "--workers", "2", "--steps", "8", "--out", str(out), "--json", "-"]
    # `make demo` uses the lab, as the test of Ctrl-C does.
    argv += ["--slow-rate", "500mbit", "--bench-rounds", "1", "--simulated-link"]
    result = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "simulated link" in result.stderr
    assert "time to the same loss" in result.stderr
    assert (out / "demo.png").stat().st_size > 20_000
    for name in ("dense", "adaptive"):
        record = load_run(out / name)
        assert [line.step for line in record.steps] == list(range(8))
        assert [event.change["rate_bit_per_s"] for event in record.network] == [1e9, 500e6]
        assert record.changes[0].step >= 3
        assert len(record.end["weights_sha256"]) == 2
        assert record.end["weights_identical"], record.end
    written = json.loads(result.stdout)
    assert written["bench"] == "demo"
    rows = {row["name"]: row for row in written["rows"]}
    expected = "slow_phase_speedup fast_phase_ratio validation_loss_ratio decision_delay"
    assert set(expected.split()) < rows.keys()
    assert {"time_to_loss_ratio", "weights_identical", "engine_overhead_dense"} < rows.keys()
    assert rows["weights_identical"]["value"] == 1
    assert rows["fast_phase_step_s"]["baseline"] > 0


def is_training(out: Path, demo: subprocess.Popen[bytes]) -> bool:
    steps = out / "dense" / "steps.jsonl"
    return steps.exists() and bool(steps.read_text())


def has_workers(out: Path, demo: subprocess.Popen[bytes]) -> bool:
    return bool(actors_below(demo.pid))


@pytest.mark.parametrize(
    ("arguments", "is_time"),
    [
        pytest.param([], is_training, marks=[NEEDS_LAB, pytest.mark.slow], id="training in the lab"),
        pytest.param(["--simulated-link"], has_workers, marks=pytest.mark.slow, id="starting with a simulated link"),
    ],
)
def test_ctrl_c_leaves_no_process_and_no_namespace(tmp_path, arguments, is_time):
    out = tmp_path / "out"
    argv = [*INTERRUPTIBLE, *CGX_RAY, "demo", "--workers", "2", "--steps", "400", "--out", str(out), *arguments]
    with (tmp_path / "log").open("w") as log:
        demo = subprocess.Popen(argv, stdout=log, stderr=log)
    deadline = time.monotonic() + 120
    while not is_time(out, demo):
        assert demo.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.1)
    started = psutil.Process(demo.pid).children(recursive=True)
    assert len(started) > 3
    assert ("simulated link" in (tmp_path / "log").read_text()) == bool(arguments)
    demo.send_signal(signal.SIGINT)
    assert demo.wait(timeout=60) != 0
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
    if Path("/run/netns").exists():
        assert not [name for name in os.listdir("/run/netns") if name.startswith(f"cgx{demo.pid}-")]
    assert not Path(f"/run/cgx{demo.pid}-lab").exists()

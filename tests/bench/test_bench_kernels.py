"""`python -m bench kernels`: its numbers are complete and consistent. Tests do not judge speed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from matplotlib.image import imread

from bench.__main__ import bench
from bench.kernels import measure as kernels
from bench.kernels.codec_numbers import DISTRIBUTIONS, draw_samples, measure_quality
from bench.kernels.measure import SWEPT_CODECS, KernelOptions
from cgx_ray.errors import ConfigError
from cgx_ray.plan import BUILT_IN
from cgx_ray.session.calibrate import best_seconds

NUMEL = 1 << 14
LATENCIES = ("1KB", "4KB", "16KB", "64KB", "256KB", "1MB")
GOALS = {
    "qsgd_encode",
    "qsgd_over_reference",
    "qsgd_decode_add",
    "topk_over_torch_topk",
    "ef_signsgd_encode_residual",
    "bf16_over_tensor_to",
    *(f"{name}_call_overhead" for name in SWEPT_CODECS),
}
RUN = """
import sys
from bench.__main__ import bench
bench(sys.argv[1:], standalone_mode=False)
print("ray" in sys.modules, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """JSON of one small run, its standard error, and its picture."""
    plot = tmp_path_factory.mktemp("bench") / "kernels.png"
    argv = [sys.executable, "-c", RUN, "kernels", "--numel", str(NUMEL), "--json", "-", "--plot", str(plot)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr, plot


@pytest.fixture(scope="module")
def rows(run) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in run[0]["rows"]}


def test_it_writes_the_common_shape_and_each_row_once(run, rows):
    written = run[0]
    assert written["bench"] == "kernels"
    assert written.keys() == {"bench", "date", "commit", "machine", "rows"}
    assert len(rows) == len(written["rows"])
    assert (rows["numel"]["value"], rows["threads"]["value"]) == (NUMEL, 1)


def test_it_needs_no_ray(run):
    assert run[1].splitlines()[-1] == "False"


def test_everything_with_a_goal_has_a_row_and_a_small_run_is_not_judged(rows):
    assert rows.keys() >= GOALS
    assert {row["goal"] for row in rows.values()} == {None}


def test_a_run_of_the_size_of_the_goals_is_judged(monkeypatch):
    monkeypatch.setattr(kernels, "GOAL_NUMEL", NUMEL)
    numbers = kernels.measure_kernels(KernelOptions(numel=NUMEL), lambda what, share: None)
    assert {row.name for row in numbers.goals if row.goal is not None} == GOALS
    assert [row.name for row in numbers.goals if row.met is None] == []


def test_a_picture_of_an_unknown_kind_is_refused_before_anything_is_measured(tmp_path):
    done = CliRunner().invoke(bench, ["kernels", "--plot", str(tmp_path / "x.foo")])
    assert done.exit_code == 2
    assert "x.foo" in done.output
    assert ".png" in done.output


def test_every_codec_has_its_bits_errors_and_throughputs(rows):
    wanted = {"bits", "encode_gbps", "decode_add_gbps", *(f"error_{name}" for name in DISTRIBUTIONS)}
    missing = [f"{codec}_{what}" for codec in BUILT_IN for what in wanted if f"{codec}_{what}" not in rows]
    assert missing == []


def test_small_messages_have_latencies_beside_those_of_copy(rows):
    for name in SWEPT_CODECS:
        for size in LATENCIES:
            row = rows[f"{name}_encode_latency_{size}"]
            assert row["unit"] == "us"
            assert row["limit"] > 0


def test_numbers_are_finite_and_ratios_are_of_value_and_peer(rows):
    for name, row in rows.items():
        assert math.isfinite(row["value"]), name
        peer = row["limit"] if row["baseline"] is None else row["baseline"]
        if row["ratio"] is not None:
            assert row["ratio"] == pytest.approx(row["value"] / peer), name


def test_throughput_and_latency_of_a_message_are_one_measurement(rows):
    for name in SWEPT_CODECS:
        latency_us, gbps = (rows[f"{name}_encode_{what}_64KB"]["value"] for what in ("latency", "gbps"))
        assert latency_us * 1e-6 * gbps * 1e9 == pytest.approx(64 << 10), name


def test_tables_show_every_codec_and_the_picture_is_where_it_says(run):
    _, shown, plot = run
    assert [name for name in BUILT_IN if name not in shown] == []
    assert f"picture: {plot}" in shown
    assert imread(plot).std() > 0.05


def test_cuda_without_a_device_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(bench, ["kernels", "--device", "cuda"])
    assert done.exit_code == 2
    assert done.output == "Error: device cuda: PyTorch sees no CUDA device here; give --device cpu\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device 'tpu' is not allowed; give cpu or cuda"),
        ({"numel": 1023}, "numel 1023 is not allowed; give 1024 to 2"),
        ({"threads": 0}, "threads 0 is not allowed; give 1 or more"),
    ],
)
def test_wrong_options_say_what_is_allowed(options, message):
    with pytest.raises(ConfigError, match=message):
        KernelOptions(**options)


def test_samples_repeat_for_a_seed_and_have_the_tails_they_are_named_for():
    samples, again = (draw_samples(1 << 20, seed=3, device=torch.device("cpu")) for _ in range(2))
    assert all(torch.equal(samples[name], again[name]) for name in DISTRIBUTIONS)
    # P(|x| > 4); that of Student's t is known in closed form.
    t = 4 / math.sqrt(3)
    tails = {
        "gaussian": math.erfc(4 / math.sqrt(2)),
        "laplace": math.exp(-4),
        "student_t3": 1 - 2 / math.pi * (t / (1 + t * t) + math.atan(t)),
    }
    for name, tail in tails.items():
        expected = tail * (1 << 20)  # mean of a Poisson count; 5 standard deviations are allowed
        found = int((samples[name].abs() > 4).sum())
        assert abs(found - expected) < 5 * math.sqrt(expected), (name, found, expected)


def test_measured_errors_are_those_of_the_mathematics():
    samples = draw_samples(1 << 18, seed=0, device=torch.device("cpu"))
    # bfloat16 rounds off at most 2^-8 of an element; a sign and the mean magnitude keep 2/pi of a Gaussian's energy and
    # 1/2 of a Laplacian's.
    assert measure_quality("none", samples, key=1).errors == dict.fromkeys(DISTRIBUTIONS, 0.0)
    assert 0 < measure_quality("bf16", samples, key=1).errors["gaussian"] < 2**-8
    signs = measure_quality("ef_signsgd", samples, key=1)
    assert signs.errors["gaussian"] == pytest.approx(math.sqrt(1 - 2 / math.pi), rel=0.01)
    assert signs.errors["laplace"] == pytest.approx(math.sqrt(1 / 2), rel=0.01)
    assert 1 < signs.bits < 1.1


def test_contestants_take_turns_in_both_orders():
    order: list[str] = []
    calls = [lambda name=name: order.append(name) for name in "abc"]
    seconds = best_seconds(calls, torch.device("cpu"), num_rounds=3, turn_s=1e-9)  # one call per turn
    assert "".join(order) == "aabbcc" + "abc" + "cba" + "abc"
    assert all(0 < s < 1 for s in seconds), seconds

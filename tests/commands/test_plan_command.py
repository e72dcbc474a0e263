"""`cgx-ray plan`: numbers computed by hand, extreme networks, and one clear error for each wrong option."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cgx_ray.cli import main
from cgx_ray.commands.plan.plan import plan as plan_command
from cgx_ray.commands.plan.plan_picture import draw_answer
from cgx_ray.commands.plan.question import compute_time
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec, Option, Plan
from cgx_ray.planner.candidates import CodecCost, codec_cost_of
from cgx_ray.planner.cost import Link
from cgx_ray.planner.engine_cost import HOST_ENGINE
from cgx_ray.planner.fidelity import RESERVE, Fidelity
from cgx_ray.planner.models import load_model
from cgx_ray.planner.profile import Profile, load_profile, save_profile
from cgx_ray.planner.scenario import (
    TYPICAL_GAINS,
    TYPICAL_PROFILE,
    Price,
    Scenario,
    make_network,
    parse_sweep,
    typical_gains,
)

THREAD_S = HOST_ENGINE.thread_s
LAN = Link.from_rates(bandwidth_gbps=1, latency_ms=0.5)


def run(**changes: str | None) -> tuple[int, str]:
    """Run the command with a small model on a slow network, and `changes`; None leaves an option out."""
    compute = {} if {"step-time", "throughput"} & changes.keys() else {"gpu": "v100"}
    given = {"model": "resnet18", "workers": "4", "latency": "1ms", "bandwidth": "1gbps", **compute, **changes}
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]
    result = CliRunner().invoke(main, ["plan", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout if result.exit_code == 0 else result.output


def answer(**changes: str | None) -> dict[str, Any]:
    code, output = run(json="-", **changes)
    assert code == 0, output
    return json.loads(output)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_longer_period_is_chosen_where_it_is_asked_for_and_pays() -> None:
    slow = {"bandwidth": "100mbps", "step-time": "50ms"}
    every, eight, best = (answer(**slow, period=period) for period in ("1", "8", "auto"))
    assert "period" not in json.dumps(every["plan"]) or every["plan"]["period"] == 1
    assert (eight["plan"]["period"], best["plan"]["period"] > 1) == (8, True)
    assert every["planned_ms"] > eight["planned_ms"] > best["planned_ms"] * 0.99
    for period, hint in (("0", "period 0 is not allowed"), ("x", "'x'"), ("2000", "period 2000 is not allowed")):
        code, output = run(period=period)
        assert code == 2
        assert hint in output


def test_answer_is_a_plan_for_the_model_with_times_and_what_bounds_them() -> None:
    found = answer(workers="8", **{"ranks-per-node": "2", "step-time": "50ms"})
    plan = Plan.from_json(json.dumps(found["plan"]))
    plan.check(load_model("resnet18").layers, 8)
    assert [list(group.layers) for group in plan.groups] == [group["layers"] for group in found["groups"]]
    assert found["compute_ms"] == pytest.approx(50)
    assert found["compute_ms"] <= found["planned_ms"] < found["dense_ms"]
    assert found["speedup"] == pytest.approx(found["dense_ms"] / found["planned_ms"] * found["efficiency"])
    assert 0 <= found["gap"] <= 0.01
    assert found["dense_bound_by"] == "bandwidth"
    for name in ("dense", "planned"):
        assert sum(found[f"{name}_parts_ms"].values()) == pytest.approx(found[f"{name}_ms"])
    assert found["links"]["between"] == {"latency_ms": pytest.approx(1), "bandwidth_gbps": pytest.approx(1)}


def test_dense_step_of_one_layer_is_compute_and_the_ring(tmp_path: Path) -> None:
    model = write(tmp_path / "one.csv", "name,shape,forward_macs\nw,1000x1000,1\n")
    found = answer(model=model, workers="4", latency="2ms", bandwidth="100mbit", **{"step-time": "30ms"})
    ring_ms = 2 * 3 * 2 + 2 * 3 / 4 * 4e6 / 12.5e6 * 1e3
    assert found["dense_ms"] == pytest.approx(30 + 1e3 * THREAD_S + ring_ms)


def test_a_fast_network_is_answered_by_compute_bound() -> None:
    code, output = run(bandwidth="1tbps", latency="1us", **{"step-time": "2s"})
    assert code == 0, output
    assert output.startswith("Your training is compute-bound, compression will not help"), output
    found = answer(bandwidth="400gbps", latency="1us", **{"step-time": "1s"})
    assert {group["option"] for group in found["groups"]} == {"dense"}, found["options"]
    assert (found["planned_ms"], found["speedup"]) == (found["dense_ms"], 1)
    # A step cannot be shorter than its compute, which bounds the possible saving.
    assert 0 <= found["gap"] <= 1 - found["compute_ms"] / found["dense_ms"]


def test_one_worker_has_nothing_to_exchange() -> None:
    found = answer(workers="1", **{"ranks-per-node": "4", "step-time": "50ms"})
    assert found["verdict"].startswith("One worker exchanges no gradients")
    assert found["dense_ms"] == found["planned_ms"] == pytest.approx(50)


def test_sweep_has_a_row_a_value_and_more_bandwidth_is_never_slower(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    found = answer(model="alexnet", sweep="bandwidth=0.1..25gbps", plot=str(picture), **{"ranks-per-node": "2"})[
        "sweep"
    ]
    rows = found["rows"]
    assert [row["bandwidth"] for row in rows] == list(parse_sweep("bandwidth=100mbps..25gbps").values)
    for before, after in itertools.pairwise(rows):
        assert after["dense_ms"] <= before["dense_ms"] * 1.01, (before, after)
        score_before, score_after = (row["planned_ms"] / row["efficiency"] for row in (before, after))
        assert score_after <= score_before * 1.03, "except for the 3 % within which dense counts as compute-bound"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_picture_has_a_bar_for_all_work_and_the_swept_times() -> None:
    scenario = Scenario(
        model=load_model("resnet18"),
        network=make_network(8, 2, LAN, LAN),
        compute_s=0.05,
        codec_costs=load_profile(TYPICAL_PROFILE).codec_costs,
        gain=typical_gains(),
        min_gain=0.8,
    )
    sweep = parse_sweep("bandwidth=1..10gbps", num_points=3)
    answer, points = scenario.solve(), [scenario.swept(sweep, value).solve() for value in sweep.values]
    dense, planned, swept = draw_answer(answer, title="", sweep=sweep, points=points).axes
    for axes, step in ((dense, answer.dense), (planned, answer.best)):
        ends_ms = [path.vertices[:, 0].max() for bars in axes.collections for path in bars.get_paths()]
        works = [busy_s for span in step.timeline.spans for busy_s in span.stage.busy_s.values() if busy_s > 0]
        assert len(ends_ms) >= len(works)
        assert max(ends_ms) == pytest.approx(1e3 * step.step_s)
        assert f"{1e3 * step.step_s:.4g} ms" in axes.get_title(loc="left")
    drawn = {line.get_label(): list(line.get_ydata()) for line in swept.lines}
    assert drawn["planned"] == [1e3 * point.best.step_s for point in points]
    assert drawn["dense"] == [1e3 * point.dense.step_s for point in points]


def test_an_epoch_costs_its_steps_of_all_workers() -> None:
    price = Price(usd_per_hour=2, batch=10, samples=95)
    # 95 samples are 3 steps of 4 workers with 10 each.
    assert price.epoch(1200, 4) == (1, 8)
    found = answer(price="2", batch="10", **{"samples-per-epoch": "95", "step-time": "50ms"})
    assert found["price"]["usd_per_hour"] == 8
    assert found["price"]["epoch"]["dense"]["usd"] == pytest.approx(3 * found["dense_ms"] / 3.6e6 * 8)


def test_compute_time_is_as_given_or_by_throughput_or_by_the_gpu_and_says_so(tmp_path: Path) -> None:
    model = load_model("resnet50")
    assert compute_time(model, batch=1, step_s=0.2)[0] == 0.2
    assert compute_time(model, samples_per_s=400, batch=100)[0] == 0.25
    seconds, said = compute_time(model, gpu="A100", batch=8)
    assert seconds == pytest.approx(6 * sum(model.forward_macs) * 8 / (0.3 * 312e12))
    assert said == "8 samples per worker and step, a100 at 30% of 312 TFLOP/s"
    measured = load_model(write(tmp_path / "own.csv", "name,shape,ready_s\na,8x8,0.4\nb,8x8,0.1\n"))
    assert compute_time(measured, batch=1) == (0.4, "measured times of own")
    assert measured.step_s() == pytest.approx((0.1, 0.3))
    assert measured.step_s(0.2) == pytest.approx((0.05, 0.15))


def test_what_is_not_in_the_model_of_a_gpu_is_assumed_aloud() -> None:
    said = answer(gpu="a100")["assumptions"]
    assert "nothing was measured on a GPU: the speed of a100 is from its data sheet" in said
    copies = "no copies between a GPU and its host, and no NCCL: neither is in the model"
    assert copies in said
    said = answer(**{"step-time": "50ms"})["assumptions"]
    assert copies in said
    assert not any("data sheet" in line for line in said)
    # No GPU stands in for the user's.
    code, output = run(gpu=None)
    assert (code, "how long a step of resnet18 computes is unknown" in output) == (2, True), output


def test_a_profile_brings_codec_times_and_the_network(tmp_path: Path) -> None:
    slow = CodecCost(encode_a_s=1, encode_b_s_per_element=0, decode_a_s=1, decode_b_s_per_element=0)
    costs = dict.fromkeys(("bf16", "qsgd", "topk"), slow)
    path = tmp_path / "profile.json"
    save_profile(Profile(package_version="0", device="abacus", threads=2, codec_costs=costs, link=LAN), path)
    found = answer(profile=str(path), latency=None, bandwidth=None)
    assert found["links"]["between"] == {"latency_ms": pytest.approx(0.5), "bandwidth_gbps": pytest.approx(1)}
    assert not any(codec in found["options"] for codec in costs), "a codec that takes a second is not worth it"
    assert any("codec times of abacus, 2 threads" in line for line in found["assumptions"])


def test_typical_profile_has_a_time_for_all_codecs_with_typical_gains() -> None:
    costs = load_profile(TYPICAL_PROFILE).codec_costs
    for codec in TYPICAL_GAINS:
        # A core copies 9 GB/s, or 0.44 ns per element (docs/log/2026-11-21.md).
        assert 0.05e-9 < codec_cost_of(costs, CodecSpec.parse(codec)).encode_b_s_per_element < 2e-9, codec


def test_a_gain_adds_a_codec_or_changes_what_one_keeps() -> None:
    assert "qsgd 2-bit" in answer(gain="qsgd:bits=2=0.99")["options"]
    assert "expected loss 1.072" in json.dumps(answer(gain="qsgd=0.5"))
    found = answer(fidelity="fast", **{"min-gain": "0.9"})
    (line,) = (line for line in found["assumptions"] if "left out" in line)
    assert line.startswith("topk 10 %, "), line
    assert line.endswith("left out: they keep less than 0.9 (--min-gain)"), line


def test_candidates_and_least_gain_are_those_of_a_run() -> None:
    for fidelity in Fidelity:
        candidates = {str(option.codec) for option in Adaptive(fidelity=fidelity).options}
        assert typical_gains(fidelity).keys() == candidates - {"none", str(RESERVE)}
    usual = {option.name: option.default for option in plan_command.params}
    assert (usual["fidelity"], usual["min_gain"]) == (Adaptive().fidelity, Adaptive().min_gain)
    slow = {"bandwidth": "10mbps"}
    assert "qsgd 4-bit" in answer(**slow)["options"]
    assert "qsgd 3-bit" in answer(fidelity="balanced", **slow)["options"]


def test_codecs_without_room_for_the_largest_layer_are_named(tmp_path: Path) -> None:
    model = write(tmp_path / "large.csv", "name,shape,forward_macs\nhuge,65536x65536,1\nsmall,64x64,1\n")
    found = answer(model=model)
    line = next(line for line in found["assumptions"] if "huge has 4,294,967,296" in line)
    assert line.startswith("bf16 left out: "), line
    assert "qsgd" not in line, "4.25 bits an element are 2.3 GB"
    Plan.from_json(json.dumps(found["plan"])).check(load_model(model).layers, 4)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("bandwidth=0.1..10gbps", (0.1, 1, 10)),
        ("bandwidth=100mbit..10gbit", (0.1, 1, 10)),
        ("latency=10us..1ms", (0.01, 0.1, 1)),
        ("workers=4..64", (4, 16, 64)),
    ],
)
def test_sweeps_are_log_spaced_with_both_ends(text: str, values: tuple[float, ...]) -> None:
    assert parse_sweep(text, num_points=3).values == pytest.approx(values)


def test_swept_workers_fill_nodes() -> None:
    values = parse_sweep("workers=8..1000", ranks_per_node=8).values
    assert all(value % 8 == 0 for value in values), values
    assert values[0] == 8
    network = parse_sweep("workers=8..1000", 8).apply(make_network(16, 8, LAN, LAN), 64)
    assert (network.num_nodes, network.ranks_per_node) == (8, 8)


def test_a_sweep_from_part_of_a_node_fills_nodes_of_the_size_given() -> None:
    found = answer(workers="4", sweep="workers=8..16", **{"ranks-per-node": "8"})
    rows = {row["workers"]: row for row in found["sweep"]["rows"]}
    alone = answer(workers="16", **{"ranks-per-node": "8"})
    assert list(rows) == [8, 16]
    assert rows[16]["planned_ms"] == pytest.approx(alone["planned_ms"])
    assert any(line.startswith("nodes of 8, inside 16 Gbit/s") for line in found["assumptions"]), found["assumptions"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bandwidth": "0gbps"}, "bandwidth_gbps 0.0 is not allowed"),
        ({"bandwidth": "-1gbps"}, "bandwidth '-1gbps' is not allowed"),
        ({"latency": None}, "the network is unknown; give --latency"),
        ({"latency": "unknown"}, "latency 'unknown' is not allowed"),
        ({"workers": "0"}, "0 workers"),
        ({"ranks-per-node": "0"}, "0 per node"),
        ({"ranks-per-node": "3"}, "4 workers do not fill nodes of 3"),
        ({"inside-bandwidth": "fast"}, "bandwidth 'fast'"),
        ({"model": "resnet1001"}, "unknown model 'resnet1001'; did you mean 'resnet101'?"),
        ({"model": "{empty}"}, "has 0 layers"),
        ({"model": "{unready}"}, "line 2: ready_s -1.0"),
        ({"model": "{measured}", "gpu": "a100"}, "has measured times and no multiply-adds"),
        ({"step-time": "0ms"}, "step time 0.0 is not allowed"),
        ({"step-time": "20"}, "step time '20' is not allowed"),
        ({"step-time": "20ms", "gpu": "a100"}, "step time and GPU both say"),
        ({"throughput": "-1"}, "throughput -1.0 is not allowed"),
        ({"gpu": "abacus"}, "no GPU 'abacus'; known: a10"),
        ({"batch": "0"}, "batch 0 is not allowed"),
        ({"price": "-2"}, "price -2.0 is not allowed"),
        ({"samples-per-epoch": "100"}, "--samples-per-epoch is for the price of an epoch; give --price"),
        ({"price": "2", "samples-per-epoch": "0"}, "samples per epoch 0 is not allowed"),
        ({"gain": "qsgd"}, "--gain 'qsgd' is not allowed"),
        ({"gain": "qsgd=much"}, "--gain 'qsgd=much' is not allowed"),
        ({"gain": "zip=0.9"}, "unknown codec 'zip'"),
        ({"gain": "qsgd=0"}, "a share is more than 0 and at most 1"),
        ({"gain": "qsgd=1.5"}, "a share is more than 0 and at most 1"),
        ({"gain": "qsgd=nan"}, "a share is more than 0 and at most 1"),
        ({"min-gain": "2"}, "min_gain 2.0 is not allowed"),
        ({"profile": "{empty}"}, "is not JSON"),
        ({"sweep": "price=1..2"}, "sweep 'price=1..2' is not allowed"),
        ({"sweep": "bandwidth=25..1gbps"}, "does not rise from above 0"),
        ({"sweep": "workers=8..11", "workers": "8", "ranks-per-node": "8"}, "has one value that fills nodes of 8"),
        ({"sweep": "workers=2..many"}, "workers 'many' is not allowed; give a whole number"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_error(
    tmp_path: Path, changes: dict[str, str | None], message: str
) -> None:
    files = {
        "empty": write(tmp_path / "empty.csv", "name,shape,forward_macs\n"),
        "unready": write(tmp_path / "unready.csv", "name,shape,ready_s\nw,8x8,-1\n"),
        "measured": write(tmp_path / "measured.csv", "name,shape,ready_s\nw,8x8,1\n"),
    }
    code, output = run(**{name: value and value.format(**files) for name, value in changes.items()})
    assert code == 2, output
    assert message in " ".join(output.split()), output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "plan --model vgg16 --workers 4 --latency 1ms --bandwidth 1gbps --json {0}/none/x.json",
            "{0}/none is no folder",
        ),
        ("plan --model vgg16 --workers 4 --latency 1ms --bandwidth 1gbps --json {0}", "is a directory"),
        ("plan --model vgg16 --workers 4 --latency 1ms --bandwidth 1gbps --plot {0}/x.foo", "ends in .png, .pdf, .svg"),
        (
            "plan --model vgg16 --workers 4 --latency 1ms --bandwidth 1gbps --plot {0}/file/x/y.png",
            "{0}/file/x is no folder",
        ),
        ("profile --out {0}/none/p.json", "{0}/none is no folder"),
        ("profile-model train.py:build --out {0}/none/x.csv", "{0}/none is no folder"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_the_work(tmp_path: Path, command: str, message: str) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(main, command.format(tmp_path).split())
    assert result.exit_code == 2, (
        result.output,
        result.exception,
    )  # the status of click for a bad option, before the command runs
    output = "".join(result.output.split())
    assert "".join(message.format(tmp_path).split()) in output.replace("│", ""), result.output


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_a_file_that_cannot_be_written_in_the_end_is_one_clear_error() -> None:
    code, output = run(plot="/proc/none/x.png")
    assert code != 0
    assert "/proc" in output


def test_a_measured_model_without_times_is_refused_where_it_is_asked_for_them() -> None:
    with pytest.raises(ConfigError, match="has no measured times"):
        load_model("vgg16").step_s()


def test_tables_in_a_pipe_keep_all_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    # Options of nodes with several ranks have the longest names.
    asked = {"workers": "8", "ranks-per-node": "2", "step-time": "50ms"}
    monkeypatch.delenv("COLUMNS", raising=False)
    options = {Option.parse(group["option"]).describe() for group in answer(**asked)["groups"]}
    _, text = run(**asked)
    assert "…" not in text
    assert options == {option for option in options if any(option in line for line in text.splitlines())}
    monkeypatch.setenv("COLUMNS", "60")
    _, narrow = run(**asked)
    table = narrow[narrow.index("group ") :]
    assert max(map(len, table.splitlines())) <= 60

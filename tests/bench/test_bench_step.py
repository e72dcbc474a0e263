"""`python -m bench step`: its parts, and one small run. Tests do not judge speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner

from bench.__main__ import bench
from bench.step.cases import (
    GOAL_NETWORK,
    LOOPBACK,
    LOOPBACK_WAYS,
    SWEEP,
    WAYS,
    StepNetwork,
    StepOptions,
    networks_of,
    quick_options,
)
from bench.step.measure import StepRecord, StepTiming, rows_of, timings_of
from bench.step.plans import plan_of
from bench.step.sleeping_model import SHORTEST_SLEEP_S, BackwardClock, SleepingModel, fixed_gradients
from bench.step.workload import Workload, predicted_s
from cgx_ray.engine.chrome_trace import PhaseSpan, chrome_trace
from cgx_ray.errors import ConfigError
from cgx_ray.lab.namespaces import Lab
from cgx_ray.plan import Layer, make_plan
from cgx_ray.planner.candidates import FREE

NO_LAB = Lab.available(rates_only=False)
MB = 1 << 20
LINK = GOAL_NETWORK.link
assert LINK is not None


class FakeTime:
    """A clock that moves only when somebody sleeps or works."""

    def __init__(self, overshoot_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []
        self._overshoot_s = overshoot_s

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds + self._overshoot_s


def clock_of(backward_s: Sequence[float], time: FakeTime) -> BackwardClock:
    clock = BackwardClock(backward_s, time.now, time.sleep)
    clock.begin()
    return clock


def workload(*sizes_mb: float, backward_s: Sequence[float], num_ranks: int = 4) -> Workload:
    """Return layers "0", "1", ... in registration order; `backward_s` in that of backward."""
    numels = [round(size * MB) // 4 for size in sizes_mb]
    return Workload(
        layers=tuple(Layer(name=str(index), numel=numel, ndim=2) for index, numel in enumerate(numels)),
        shapes=tuple((numel // 1024, 1024) for numel in numels),
        backward_s=tuple(backward_s),
        num_ranks=num_ranks,
    )


def test_backward_ends_on_time_although_every_sleep_takes_too_long():
    time = FakeTime(overshoot_s=0.01)
    clock = clock_of([0.1] * 5, time)
    for index in range(5):
        clock.wait(index)
    assert time.now_s == pytest.approx(100 + 0.5 + 0.01)
    assert time.slept_s == pytest.approx([0.1, 0.09, 0.09, 0.09, 0.09])


def test_backward_does_not_sleep_for_less_than_a_sleep_costs():
    time = FakeTime()
    share_s = SHORTEST_SLEEP_S / 4
    clock = clock_of([share_s] * 10, time)
    for index in range(10):
        clock.wait(index)
    assert time.slept_s == pytest.approx([4 * share_s, 4 * share_s])


def test_work_between_layers_counts_as_their_backward():
    time = FakeTime()
    clock = clock_of([0.1, 0.1, 0.1], time)
    clock.wait(0)
    time.now_s += 0.15
    clock.wait(1)
    clock.wait(2)
    assert time.slept_s == pytest.approx([0.1, 0.05])


def test_backward_visits_layers_from_the_last_to_the_first_and_leaves_the_fixed_gradients_alone():
    time = FakeTime()
    gradients = fixed_gradients([(2, 3), (5,), (4, 1)], seed=1)
    before = [gradient.clone() for gradient in gradients]
    clock = BackwardClock([1.0, 2.0, 4.0], time.now, time.sleep)
    model = SleepingModel(["a", "b/weight", "c"], gradients, clock)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        clock.begin()
        model(torch.zeros(())).backward()
        assert time.slept_s == [1.0, 2.0, 4.0]
        time.slept_s.clear()
        for parameter, expected in zip(model.parameters(), before, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, expected)
    assert all(map(torch.equal, gradients, before))
    assert [name for name, _ in model.named_parameters()] == ["a", "b/weight", "c"]


def test_ranks_have_different_gradients_of_like_size():
    mine, other = (fixed_gradients([(1000,), (1000,)], seed=seed) for seed in (0, 1))
    for one, two in zip(mine, other, strict=True):
        assert not torch.equal(one, two)
        # The standard deviation of 1,000 normal values is within 10 %, some 4.5 standard errors, of the true one.
        assert float(one.std() / two.std()) == pytest.approx(1, abs=0.2)


def test_ddp_hands_layers_over_by_the_bucket():
    layers = workload(3, 20, 10, 0.5, 0.6, backward_s=[1, 2, 4, 8, 16])
    # Backward order: 0.6 and 0.5 fill the first bucket of 1 MB, 10 and 20 that of 25 MB, and 3 is left.
    assert layers.bucket_backward_s(None) == (3, 0, 12, 0, 16)
    # 0.6, 0.5 and 10 fill a bucket of 4 MB.
    assert layers.bucket_backward_s(4) == (7, 0, 0, 8, 16)
    assert layers.bucket_backward_s(WAYS["powersgd_hook"].bucket_cap_mb) == (31, 0, 0, 0, 0)


def test_the_first_group_is_ready_when_its_layers_are_whatever_the_buckets():
    layers = workload(3, 20, 10, 0.5, 0.6, backward_s=[1, 2, 4, 8, 16])
    assert layers.first_ready_s(None) == 3
    dense = make_plan(layers.layers, version=0, world_size=4)
    assert dense.groups[0].layers == ("4", "3")
    assert layers.first_ready_s(None, dense) == 3
    assert layers.first_ready_s(4, dense) == 3
    assert layers.first_ready_s(4) == 7


def test_bytes_on_a_link_are_those_of_the_ring_or_of_the_plan():
    layers = workload(8, 8, backward_s=[0.1, 0.1])
    dense, half, quarter = 2 * 3 / 4 * 16 * MB, 2 * 3 / 4 * 8 * MB, 2 * 3 / 4 * 2 * MB
    assert layers.link_bytes(WAYS["noop"]) == 0
    assert layers.link_bytes(WAYS["ddp"]) == dense
    assert layers.link_bytes(SWEEP["sum_of_1_4"]) == dense / 4
    assert layers.link_bytes(WAYS["fp16_hook"]) == layers.link_bytes(WAYS["bf16_hook"]) == half
    # Two matrices of 2048 x 1024 with rank 4.
    assert layers.link_bytes(WAYS["powersgd_hook"]) == 2 * 3 / 4 * 2 * 4 * (2048 + 1024) * 4
    plan = make_plan(layers.layers, version=0, world_size=4)
    assert layers.link_bytes(WAYS["engine_dense"], plan) == dense
    plan = make_plan(layers.layers, version=0, world_size=4, codec="qsgd:bits=4,bucket_size=128", scheme="sra")
    # 4 bits per element, and 2 x 16 bits per 128 elements.
    assert layers.link_bytes(WAYS["engine_qsgd"], plan) == pytest.approx(quarter * (1 + 1 / 16), rel=1e-3)


def test_the_limit_is_the_step_without_exchange_or_a_link_that_is_always_busy():
    layers = workload(8, 8, backward_s=[0.1, 0.1])
    wire_s = 2 * 3 / 4 * 16 * MB * 8e-9
    assert layers.limit_s(WAYS["ddp"], noop_s=0.21, link=LINK) == pytest.approx(0.1 + wire_s + 0.5e-3)
    assert layers.limit_s(WAYS["ddp"], noop_s=0.9, link=LINK) == 0.9
    assert layers.limit_s(WAYS["powersgd_hook"], noop_s=0.1, link=LINK) > 0.2


def test_the_planner_gets_the_time_without_exchange_and_plans_less_than_dense():
    layers = workload(8, 8, backward_s=[0.01, 0.01])
    costs = {codec: FREE for codec in ("bf16", "qsgd", "topk")}
    measured = layers.measured(link=LINK, codec_costs=costs, compute_s=0.03)
    assert measured.backward_s == pytest.approx((0.02, 0.01))
    plan = plan_of("joint", measured)
    dense = make_plan(layers.layers, version=0, world_size=4)
    assert predicted_s(measured, plan) < predicted_s(measured, dense)


@pytest.mark.parametrize("model", ["resnet50", "vgg16", "bert_base"])
def test_a_workload_has_the_layers_of_its_model(model: str):
    loaded = Workload.load(model, backward_s=0.25, num_ranks=4)
    assert sum(loaded.backward_s) == pytest.approx(0.25)
    assert all("." not in layer.name for layer in loaded.layers)
    assert [torch.Size(shape).numel() for shape in loaded.shapes] == [layer.numel for layer in loaded.layers]
    for cap_mb in (None, 4):
        assert sum(loaded.bucket_backward_s(cap_mb)) == pytest.approx(0.25)


def test_what_the_bench_cannot_run_is_said_before_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for wrong, message in (
        ({"num_ranks": 1}, "ranks 1 is not allowed; give 2 to 16"),
        ({"num_rounds": 0}, "rounds 0 is not allowed"),
        ({"backward_s": 0.0}, "backward 0 s is not allowed"),
        ({"ways": ("ddp", "gloo")}, "unknown way 'gloo'; known: noop, ddp"),
    ):
        with pytest.raises(ConfigError, match=message):
            StepOptions(**wrong)
    half = tmp_path / "half.csv"
    half.write_text("name,shape,forward_macs,dtype\nw,4x4,16,float16\n")
    with pytest.raises(ConfigError, match=r"layer 'w' of model .* is float16"):
        Workload.load(str(half), backward_s=1, num_ranks=2)
    free = type("Memory", (), {"available": 1 << 30})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(ConfigError, match=r"4 ranks need some 16\.5 GiB of memory, and 1\.0 GiB are free"):
        Workload.load("vgg16", backward_s=1, num_ranks=4).check_memory()


def test_loopback_belongs_to_a_whole_run_and_stands_in_for_a_missing_lab():
    whole = StepOptions()
    assert networks_of(whole, None) == (LOOPBACK, GOAL_NETWORK)
    assert networks_of(replace(whole, ways=("ddp",)), None) == (GOAL_NETWORK,)
    assert networks_of(quick_options(whole), None) == (GOAL_NETWORK,)
    slow = StepNetwork(rate_bit_per_s=1e8, latency_s=0.01)
    assert networks_of(replace(whole, network=slow), None) == (slow,)
    assert networks_of(whole, "a lab needs root") == (LOOPBACK,)
    assert whole.ways_on(LOOPBACK) == LOOPBACK_WAYS
    assert {way.name for way in LOOPBACK_WAYS} == {
        f"{name}{size}" for name in ("noop", "ddp", "engine_dense") for size in ("", "_4mb")
    }
    assert whole.ways_on(GOAL_NETWORK) == tuple(WAYS.values())
    assert replace(whole, ways=tuple(SWEEP)).ways_on(GOAL_NETWORK) == tuple(SWEEP.values())


def test_goals_are_for_one_model_on_one_network():
    assert StepOptions().has_goals
    for other in (
        {"model": "vgg16"},
        {"num_ranks": 2},
        {"backward_s": 0.5},
        {"network": StepNetwork(rate_bit_per_s=1e8, latency_s=0.5e-3)},
        {"quick": True},
    ):
        assert not StepOptions(**other).has_goals


def timings(**seconds: float) -> list[StepTiming]:
    """Return timings of ways from their medians."""
    layers = workload(8, 8, backward_s=[0.1, 0.1])
    ways = [WAYS[name] for name in seconds]
    plan = make_plan(layers.layers, version=0, world_size=4)
    record = StepRecord(
        seconds={name: [9.0, value, 0.0] for name, value in seconds.items()},
        plans={way.name: plan for way in ways if way.has_engine},
        codec_costs={},
        spans={},
    )
    return timings_of(record, ways, GOAL_NETWORK, layers)


def test_goals_judge_ratios_within_one_run():
    found = timings(noop=0.2, ddp=0.4, fp16_hook=0.3, engine_dense=0.41, engine_bf16=0.31, engine_topk=0.33, joint=0.3)
    rows = {row.name.replace("_1gbit_0.5ms", ""): row for row in rows_of(StepOptions(), found)}
    assert rows["ddp"].goal is None
    assert (rows["engine_dense"].ratio, rows["engine_dense"].met) == (pytest.approx(0.41 / 0.4), True)
    assert (rows["engine_bf16"].goal, rows["engine_bf16_over_fp16_hook"].met) == (None, False)
    limit_s = rows["engine_topk"].limit
    assert limit_s is not None
    assert rows["engine_topk_over_limit"].value == pytest.approx(0.33 / limit_s)
    assert rows["engine_topk_over_limit"].goal == "<= 1.25"
    prediction = rows["joint_prediction"]
    assert prediction.value is not None
    assert prediction.ratio == pytest.approx(abs(prediction.value / 0.3 - 1))
    assert prediction.goal == "<= 0.1"
    assert not [row for row in rows_of(StepOptions(quick=True), found) if row.goal is not None]


def test_a_way_is_compared_with_those_of_the_same_buckets():
    found = {timing.way.name: timing for timing in timings(noop=0.1, ddp=0.4, noop_4mb=0.9, ddp_4mb=0.5, joint_4mb=1)}
    assert found["joint_4mb"].ddp_s == 0.5
    assert found["joint_4mb"].limit_s == 0.9
    assert found["joint_4mb"].fastest_s is None
    assert found["ddp"].ddp_s == 0.4
    assert found["noop"].limit_s is None


def test_the_plan_is_compared_with_the_fastest_way_in_a_run_of_all_ways():
    seconds = {name: 0.1 if way.kind == "noop" else 0.3 for name, way in WAYS.items()}
    rows = {row.name: row for row in rows_of(StepOptions(), timings(**seconds | {"joint": 0.31}))}
    for name, ratio, met in (("joint", 0.31 / 0.3, False), ("joint_4mb", 1, True)):
        row = rows[f"{name}_1gbit_0.5ms_over_fastest"]
        assert (row.value, row.met) == (pytest.approx(ratio), met)


def test_without_a_link_nothing_is_limited_or_predicted():
    layers = workload(8, 8, backward_s=[0.1, 0.1])
    plan = make_plan(layers.layers, version=0, world_size=4)
    record = StepRecord(
        seconds={"noop": [0.2], "engine_dense": [0.3]}, plans={"engine_dense": plan}, codec_costs={}, spans={}
    )
    (_, engine) = timings_of(record, [WAYS["noop"], WAYS["engine_dense"]], LOOPBACK, layers)
    assert (engine.limit_s, engine.predicted_s, engine.ddp_s) == (None, None, None)
    assert [row.name for row in engine.rows(with_goals=True)] == ["engine_dense_loopback"]


def test_a_trace_has_a_process_per_rank_and_tracks_without_overlap():
    spans = [
        PhaseSpan(0, 0, "encode", 0.1, 0.2),
        PhaseSpan(0, 0, "exchange", 0.15, 0.4),
        PhaseSpan(0, 1, "exchange", 0.3, 0.5),
        PhaseSpan(0, 2, "exchange", 0.4, 0.6),
        PhaseSpan(1, 0, "encode", 0.1, 0.2),
    ]
    document = json.loads(json.dumps(chrome_trace({"engine_qsgd": spans, "joint": spans[:1]})))
    events = document["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {
        (0, 0): "encode", (0, 1): "exchange", (0, 2): "exchange", (1, 0): "encode", (2, 0): "encode"
    }  # fmt: skip
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["engine_qsgd, rank 0", "engine_qsgd, rank 1", "joint, rank 0"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 6
    first = complete[0]
    assert (first["name"], first["ts"], first["dur"]) == ("group 0", pytest.approx(1e5), pytest.approx(1e5))
    # Groups 0 and 2 follow each other on one track, group 1 overlaps both.
    by_track = [(event["tid"], event["name"]) for event in complete if (event["pid"], event["cat"]) == (0, "exchange")]
    assert by_track == [(1, "group 0"), (1, "group 2"), (2, "group 1")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], str]:
    """JSON, trace and output of one small run with two ranks."""
    folder = tmp_path_factory.mktemp("bench")
    files = ["--json", str(folder / "step.json"), "--trace", str(folder / "trace.json")]
    done = CliRunner().invoke(bench, ["step", "--quick", *files])
    assert done.exit_code == 0, done.output
    return (*(json.loads((folder / name).read_text()) for name in ("step.json", "trace.json")), done.output)


def test_every_way_has_its_rows_and_a_quick_run_judges_nothing(run):
    written, _, output = run
    options = quick_options(StepOptions())
    (network,) = networks_of(options, NO_LAB)
    rows = {row["name"]: row for row in written["rows"]}
    assert written["bench"] == "step"
    for way in options.ways_on(network):
        row = rows[f"{way.name}_{network.name}"]
        assert row["value"] > 0.05
        assert row["ratio"] == pytest.approx(row["value"] / row["baseline"])
        assert way.name in output
        if way.has_engine and network.link is not None:
            assert rows[f"{way.name}_{network.name}_prediction"]["value"] > 0.05
    assert {row["goal"] for row in rows.values()} == {None}
    if NO_LAB is not None:
        assert "Left out" in output


@pytest.mark.skipif(NO_LAB is not None, reason=str(NO_LAB))
def test_a_step_is_never_faster_than_the_network_and_the_trace_shows_all_groups(run):
    written, trace, _ = run
    rows = {row["name"]: row for row in written["rows"]}
    # 2 ranks, 47 MB: each sends and receives 47 MB at 1 Gbit/s.
    assert rows["ddp_1gbit_0.5ms"]["limit"] > 0.37
    assert rows["ddp_1gbit_0.5ms_over_limit"]["value"] > 0.95
    processes = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert processes == {f"{way}, rank {rank}" for way in ("engine_qsgd", "joint") for rank in (0, 1)}
    assert all(event["dur"] >= 0 for event in trace["traceEvents"] if event["ph"] == "X")

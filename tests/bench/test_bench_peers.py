"""`python -m bench peers`: cells, plans, what averages, judgement, and the file that keeps it. Tests judge no speed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from making import peers_table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.__main__ import bench
from bench.peers import measure
from bench.peers.cases import (
    ACCURACY_OF,
    ALL_CELLS,
    MAX_EXCHANGE_S,
    QUICK,
    USUAL_CELLS,
    WAYS,
    PeerCell,
    PeersOptions,
    ways_for,
)
from bench.peers.measure import measure_cell
from bench.peers.record import CellTimes, WayTime, judged, read_cells, write_cells
from bench.step.cases import StepWay
from bench.step.grace import Grace
from bench.step.plans import PLANNERS, plan_of, timed_codecs
from bench.step.workload import Workload
from cgx_ray.errors import ConfigError
from cgx_ray.lab.namespaces import Lab
from cgx_ray.planner.bits import WIDTHS, LayerErrors
from cgx_ray.planner.candidates import FREE
from cgx_ray.planner.cost import Link
from cgx_ray.planner.prediction import Measured

NO_LAB = Lab.available(rates_only=False)
SLOW = PeerCell.parse("vgg16/10mbit/1ms")


def test_a_usual_run_has_every_model_rate_and_latency() -> None:
    assert len(ALL_CELLS) == 64
    for names in (lambda cell: cell.model, lambda cell: cell.rate_bit_per_s, lambda cell: cell.latency_s):
        assert set(map(names, USUAL_CELLS)) == set(map(names, ALL_CELLS))
    assert {cell.name for cell in USUAL_CELLS + QUICK.cells} <= {cell.name for cell in ALL_CELLS}
    assert [PeerCell.parse(cell.name) for cell in ALL_CELLS] == list(ALL_CELLS)


@pytest.mark.parametrize("wrong", ["resnet50", "resnet50/1gbit", "lenet/1gbit/1ms"])
def test_another_cell_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"is not allowed; give MODEL/RATE/LATENCY, such as resnet50/100mbit/1ms"):
        PeerCell.parse(wrong)


@pytest.mark.parametrize("cell", [SLOW, PeerCell.parse("bert_base/1gbit/50ms"), PeerCell.parse("gpt2/2.5gbit/0.1ms")])
def test_a_divided_model_exchanges_its_gradients_in_time_and_is_like_the_model(cell: PeerCell) -> None:
    divisor = cell.divisor()
    options = cell.options(divisor, num_ranks=4, num_rounds=1)
    whole = Workload.load(cell.model, backward_s=0.25, num_ranks=4)
    divided = Workload.load(cell.model, backward_s=options.backward_s, num_ranks=4, divisor=divisor)
    assert divided.dense_bytes == pytest.approx(whole.dense_bytes / divisor, rel=0.02)
    assert [layer.name for layer in divided.layers] == [layer.name for layer in whole.layers]
    assert [layer.numel for layer in divided.layers] == [torch.Size(shape).numel() for shape in divided.shapes]
    link = options.network.link
    assert link is not None
    assert link.seconds(0, divided.link_bytes(WAYS["ddp"])) <= MAX_EXCHANGE_S * 1.02
    assert link.alpha_s >= min(cell.latency_s, 0.05e-3)
    assert link.alpha_s == pytest.approx(max(cell.latency_s / divisor, 0.05e-3))
    assert divided.bucket_cap_mb(WAYS["ddp"]) == (pytest.approx(25 / divisor) if divisor > 1 else None)


def test_powersgd_is_left_out_where_its_factors_would_not_shrink_with_the_model() -> None:
    names = ("noop", "ddp", "powersgd_4")
    assert ways_for(names, 4.0) == (tuple(WAYS[name] for name in names), {})
    ways, left_out = ways_for(names, 200.0)
    assert [way.name for way in ways] == ["noop", "ddp"]
    assert "root of 200" in left_out["powersgd_4"]


def test_torchft_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ddp", "torchft_diloco_16")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ways, left_out = ways_for(names, 1.0)
    assert ([way.name for way in ways], list(left_out)) == (["ddp"], ["torchft_diloco_16"])
    assert "pip install torchft" in left_out["torchft_diloco_16"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert ways_for(names, 1.0) == (tuple(WAYS[name] for name in names), {})


def test_bytes_of_ways_that_send_after_backward() -> None:
    work = Workload.load("resnet18", backward_s=0.1, num_ranks=4)
    link = Link(alpha_s=0.0, beta_s_per_byte=8e-9)
    dense = work.link_bytes(WAYS["ddp"])
    assert work.link_bytes(WAYS["local_sgd_4"]) == dense / 4
    # A half of a float32's eighth, from each of three others; beside grids and small layers.
    assert work.link_bytes(WAYS["grace_qsgd"]) == pytest.approx(3 * work.dense_bytes / 8, rel=0.1)
    for name in ("local_sgd_4", "grace_qsgd"):
        assert work.limit_s(WAYS[name], noop_s=0.2, link=link) == 0.2 + 8e-9 * work.link_bytes(WAYS[name])


@pytest.fixture(scope="module")
def measured() -> Measured:
    """A small model at 100 Mbit/s, with typical codecs and errors that only sizes tell apart."""
    work = Workload.load("resnet18", backward_s=0.1, num_ranks=4)
    errors = {
        layer.name: LayerErrors(
            numel=layer.numel,
            norm=layer.numel**0.5,
            top_norm=10.0,
            squared_errors={bits: layer.numel * 4.0**-bits for bits in WIDTHS},
        )
        for layer in work.layers
        if not layer.is_small
    }
    link = Link.from_rates(bandwidth_gbps=0.1, latency_ms=1)
    costs = dict.fromkeys((*timed_codecs(PLANNERS), "topk:density=0.01"), FREE)
    return replace(work.measured(link=link, codec_costs=costs, compute_s=0.1), layer_errors=errors)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_plan_holds_every_layer_once_and_compresses(planner: str, measured: Measured) -> None:
    plan = plan_of(planner, measured, divisor=2.0)
    plan.check(measured.layers, 4)
    codecs = {group.option.codec.name for group in plan.groups}
    assert codecs - {"none"}
    if planner in {way.planner for way in WAYS.values() if ACCURACY_OF.get(way.name) == "strict"}:
        assert codecs <= {"none", "bf16", "qsgd"}


def _grace_averages(rank: int) -> list[torch.Tensor]:
    """Return the sum of a weight's averages over two steps, with a codec without loss and with one that feeds back."""
    found = []
    for codec in ("none", "topk:density=0.5"):
        model = DistributedDataParallel(nn.Linear(2, 2))
        grace, total = Grace(model, StepWay(name="grace", kind="grace", codec=codec)), torch.zeros(2, 2)
        for _ in range(2):
            model.zero_grad()
            # Its gradient is 1, 2, 3, 4 on rank 0, and twice that on rank 1.
            (GIVEN * (rank + 1) * model.module.weight + 0 * model(torch.zeros(2))).sum().backward()
            grace.end_step()
            total += model.module.weight.grad
        found.append(total)
    dist.barrier()
    return found


GIVEN = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def test_grace_averages_every_tensor_over_the_ranks_and_feeds_back_what_it_dropped() -> None:
    (exact, sparse), (other, other_sparse) = run_ranks(2, _grace_averages)
    assert torch.equal(exact, 2 * 1.5 * GIVEN)
    assert torch.equal(other, exact)
    assert torch.equal(other_sparse, sparse)
    # Half of four elements a step: 3 and 4, and then 4 and 2 + 2, which the first step has dropped.
    assert torch.equal(sparse, 1.5 * torch.tensor([[0.0, 4.0], [3.0, 8.0]]))


@pytest.mark.skipif(NO_LAB is not None, reason=str(NO_LAB))
@pytest.mark.slow
def test_every_kind_of_way_is_timed_in_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.cases.MAX_EXCHANGE_S", 0.05)
    names = ("noop", "ddp", "local_sgd_4", "grace_topk", "cgx", "joint")
    options = PeersOptions(ways=names, num_ranks=2, num_rounds=1)
    cell = measure_cell(PeerCell.parse("resnet50/1gbit/10ms"), options, lambda part, share: None)
    assert cell.divisor > 10
    assert list(cell.ways) == [name for name in WAYS if name in names]
    for name, way in cell.ways.items():
        low_s, high_s = way.quartiles_s
        assert 0 < low_s <= way.median_s <= high_s
        assert (way.limit_s is None) == (name == "noop")
        assert (way.plan is None) == (not WAYS[name].has_engine)
    assert cell.answers(options, cell.divisor)
    assert not cell.answers(options, 2 * cell.divisor)
    assert not cell.answers(replace(options, num_rounds=2), cell.divisor)
    assert not cell.answers(replace(options, ways=(*names, "grace_dgc")), cell.divisor)


def times(cell: str, divisor: float = 1.0, **seconds: float) -> CellTimes:
    """Return a cell whose ways take so many seconds; all bounds are 0.5 s."""
    ways = {
        name: WayTime(median_s=one, quartiles_s=(one, one), limit_s=None if name == "noop" else 0.5, plan=None)
        for name, one in seconds.items()
    }
    return CellTimes(
        cell=cell,
        divisor=divisor,
        num_ranks=4,
        num_rounds=5,
        date="2026-11-27",
        commit="0" * 40,
        machine={"cpu": "made up", "cores": 2},
        ways=ways,
        left_out={},
    )


CELLS = [
    times("a", noop=0.4, ddp=2.0, bf16_hook=1.2, cupcake=0.55, grace_topk=0.1, local_sgd_4=0.3, joint=0.56),
    times("b", noop=0.4, ddp=0.5, bf16_hook=0.6, joint=0.52),
    times("c", noop=0.2, ddp=2.0, bf16_hook=1.0, joint=0.8),
]


def test_the_plan_is_judged_beside_ways_that_are_no_less_accurate() -> None:
    rows = {row.name: row for row in judged(CELLS)}
    assert (rows["a joint"].ratio, rows["a joint"].met) == (0.28, True)
    # Faster ones are less accurate.
    assert (rows["a joint over cupcake"].value, rows["a joint over cupcake"].met) == (pytest.approx(0.56 / 0.55), True)
    assert (rows["b joint"].ratio, rows["b joint"].met) == (1.04, False)
    assert rows["b joint over ddp"].met is False
    assert (rows["median joint over limit"].value, rows["median joint over limit"].met) == (1.12, True)
    assert (rows["worst joint over limit"].value, rows["worst joint over limit"].met) == (1.6, False)
    # In a and c, where DDP exchanges for more than half of its step.
    assert rows["median ddp over joint"].value == pytest.approx((2 / 0.56 + 2 / 0.8) / 2)
    assert rows["median best_peer over joint"].value == pytest.approx((1.2 / 0.56 + 1 / 0.8) / 2)
    assert "median ddp over joint" not in {row.name for row in judged(CELLS[1:2])}


def test_cells_of_a_file_are_not_measured_again_unless_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "peers.json", []

    def fake(cell: PeerCell, options: PeersOptions, on_part: object) -> CellTimes:
        asked.append(cell.name)
        return times(cell.name, cell.divisor(), **dict.fromkeys(options.ways, 1.0))

    monkeypatch.setattr(measure, "measure_cell", fake)
    first, second = (cell.name for cell in QUICK.cells)
    write_cells(path, {first: times(first, QUICK.cells[0].divisor(), **dict.fromkeys(QUICK.ways, 2.0))})
    for argv, measured_again in (
        (["--quick"], [second]),
        (["--quick"], []),
        (["--cells", first], [first]),
    ):
        asked.clear()
        done = CliRunner().invoke(bench, ["peers", *argv, "--save", str(path)])
        assert done.exit_code == 0, done.output
        assert asked == measured_again
    assert {name: cell.ways["ddp"].median_s for name, cell in read_cells(path).items()} == {first: 1.0, second: 1.0}
    done = CliRunner().invoke(bench, ["peers", "--all", "--cells", first])
    assert (done.exit_code, "give one of them" in done.output) == (2, True)


def test_ways_measured_again_are_compared_with_ddp_of_their_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path = QUICK.cells[0].name, tmp_path / "peers.json"
    divisor = QUICK.cells[0].divisor()
    runs = iter(
        [
            times(name, divisor, noop=0.1, ddp=2.0, cupcake=1.0, joint=1.5),
            times(name, divisor, noop=0.1, ddp=1.0, joint=0.4),
            times(name, divisor, noop=0.1, ddp=4.0, joint=1.0),
            times(name, 2 * divisor, noop=0.1, ddp=1.0, joint=0.4),
        ]
    )
    asked = []

    def fake(cell: PeerCell, options: PeersOptions, on_part: object) -> CellTimes:
        asked.append({*options.ways})
        return next(runs)

    monkeypatch.setattr(measure, "measure_cell", fake)

    def run_again(*ways: str) -> CellTimes:
        done = CliRunner().invoke(bench, ["peers", "--cells", name, *ways, "--save", str(path)])
        assert done.exit_code == 0, done.output
        return read_cells(path)[name]

    run_again()
    cell = run_again("--ways", "joint")
    assert {way: cell.ratio(way) for way in cell.names} == {"noop": 0.1, "ddp": 1.0, "joint": 0.4, "cupcake": 0.5}
    assert (cell.best(with_engine=True), len(cell.runs)) == ("cupcake", 2)
    rows = {row.name: row for row in cell.rows()}
    assert (rows[f"{name} cupcake"].baseline, rows[f"{name} joint over cupcake"].value) == (2.0, 0.8)
    # The run between has no way of its own left.
    cell = run_again("--ways", "joint")
    assert ([run.ways["ddp"].median_s for run in cell.runs], cell.ratio("joint")) == ([4.0, 2.0], 0.25)
    # Times of a model that is divided by another number are no longer of this cell.
    assert run_again("--ways", "cupcake").names == ["noop", "ddp", "joint"]
    # All are compared with the first three.
    compared = {"noop", "ddp", "joint"}
    assert asked == [{*WAYS}, compared, compared, {*compared, "cupcake"}]

    done = CliRunner().invoke(bench, ["peers", "--ways", "joint,cupcakes"])
    assert (done.exit_code, "way 'cupcakes' is not allowed" in done.output) == (2, True)


def test_tables_and_picture_are_made_from_the_file() -> None:
    assert peers_table.PAGE.read_text() == peers_table.page(), "run: .venv/bin/python -m docs.making.peers_table"
    canvas = FigureCanvasAgg(peers_table.draw(peers_table.usual()))
    canvas.draw()
    drawn, kept = np.asarray(canvas.buffer_rgba()) / 255, imread(peers_table.PICTURE)
    assert drawn.shape == kept.shape
    assert float(np.abs(drawn - kept).mean()) < 1e-3, "run: .venv/bin/python -m docs.making.peers_table"

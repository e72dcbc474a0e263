"""`python -m bench accuracy`: a run of seconds end to end, its numbers, and bad input."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from bench.__main__ import bench
from bench.accuracy.cases import (
    ASKED_WORKLOADS,
    CODECS,
    POLICIES,
    TORCH_PEERS,
    WORKLOADS,
    AccuracyOptions,
    quick_options,
    read_option,
)
from bench.accuracy.measure import (
    CodecAccuracy,
    TrainingRun,
    accuracies_of,
    panels_of,
    rows_of,
)
from bench.accuracy.workloads import load_task
from cgx_ray.errors import ConfigError, LabError
from cgx_ray.lab.namespaces import Lab
from cgx_ray.plan import DENSE, Scheme


def _bench(*arguments: str) -> Any:
    return CliRunner().invoke(bench, ["accuracy", *arguments], env={"COLUMNS": "200"})


def _run(option: str, *losses: float, seed: int = 0, has_diverged: bool = False) -> TrainingRun:
    return TrainingRun(
        workload="digits",
        option=option,
        seed=seed,
        points=tuple((10 * (i + 1), 1.0 * (i + 1), loss) for i, loss in enumerate(losses)),
        has_diverged=has_diverged,
        wire_bytes=1000.0 if option == "dense" else 100.0,
        relative_error=0.0,
    )


@pytest.mark.slow  # the run of bench step starts ranks in the same way
def test_a_small_run_trains_with_codecs_and_policies_and_writes_rows_table_and_picture(tmp_path: Path) -> None:
    out, plot = tmp_path / "accuracy.json", tmp_path / "accuracy.png"
    codecs = "bf16; qsgd:bits=2; cgx dp; torch fp16; torch local_sgd 4; torch powersgd 4"
    done = _bench(
        *("--workloads", "digits", "--codecs", codecs, "--seeds", "1", "--steps", "20", "--ranks", "2"),
        *("--json", str(out), "--plot", str(plot)),
    )
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    assert written["bench"] == "accuracy"
    rows = {row["name"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"])
    given = [text.strip() for text in codecs.split(";")]
    names = [text if text in {*POLICIES, *TORCH_PEERS} else str(read_option(text)) for text in ("dense", *given)]
    losses = {name: rows[f"digits {name}: loss"] for name in names}
    assert {row["baseline"] for row in losses.values()} == {losses["dense"]["value"]}
    assert losses["dense"]["ratio"] == 1
    for half in ("bf16 over sra", "torch fp16"):
        assert losses[half]["ratio"] == pytest.approx(1, rel=0.01)
    assert 0 < losses["dense"]["value"] < math.log(10), "the loss of guessing is log 10"
    wire = {name: rows[f"digits {name}: wire"]["ratio"] for name in names if name not in TORCH_PEERS}
    assert wire["qsgd:bits=2,bucket_size=128 over sra"] < 0.2 < wire["bf16 over sra"] < 0.6
    error = {name: rows[f"digits {name}: relative error"]["value"] for name in names}
    assert error["dense"] == 0 < error["bf16 over sra"] < 1e-4 < error["qsgd:bits=2,bucket_size=128 over sra"] < 1
    assert "qsgd:bits=2,bucket_size=128" in done.output
    assert imread(plot).shape[2] == 4


def test_a_training_that_diverges_is_a_row_and_not_a_crash() -> None:
    runs = [_run("dense", 2.0, 1.0), _run("topk over allgather", 2.0, has_diverged=True)]
    options = AccuracyOptions(workloads=("digits",), codecs=(), num_seeds=1)
    accuracies = accuracies_of(runs)
    rows = {row.name: row for row in rows_of(options, accuracies)}
    assert rows["digits topk over allgather: loss"].value is None
    assert rows["digits topk over allgather: diverged"].value == 1
    assert accuracies[1].ratio == math.inf


def test_losses_are_compared_with_dense_seed_by_seed() -> None:
    runs = [
        _run("dense", 1.0, seed=0),
        _run("dense", 2.0, seed=1),
        _run("bf16", 1.1, seed=0),
        _run("bf16", 2.0, seed=1),
    ]
    found = accuracies_of(runs)[1]
    assert found.ratios == pytest.approx([1.1, 1.0])
    assert found.ratio == pytest.approx(1.05)
    assert found.wire_share == 0.1


def test_the_time_to_a_loss_is_read_off_between_two_points() -> None:
    run = _run("dense", 3.0, 2.0, 1.0)
    assert run.seconds_to(1.5) == 2.5
    assert run.seconds_to(3.5) == 1.0
    assert run.seconds_to(0.5) is None
    fast = CodecAccuracy(runs=(_run("bf16", 1.0),), dense=(run,))
    assert fast.speedup == pytest.approx((3 - 0.01) / 1)


def test_where_links_have_a_rate_times_are_compared_and_drawn() -> None:
    options = AccuracyOptions(workloads=("digits",), codecs=(), num_seeds=1, rate_bit_per_s=1e8)
    accuracies = accuracies_of([_run("dense", 3.0, 2.0, 1.0), _run("bf16 over sra", 1.0)])
    rows = {row.name: row for row in rows_of(options, accuracies)}
    assert rows["digits bf16 over sra: time to dense's loss, faster by"].value == accuracies[1].speedup
    assert [panel.x for panel in panels_of(options, accuracies)] == ["step", "seconds of training", ""]
    plain = AccuracyOptions(workloads=("digits",), codecs=(), num_seeds=1)
    assert [panel.x for panel in panels_of(plain, accuracies)] == ["step", ""]


def test_a_schedule_is_played_to_each_training_over_its_steps() -> None:
    options = AccuracyOptions(workloads=("digits",), codecs=("bf16",), num_seeds=1, num_steps=100, schedule="c1")
    one, both = options.schedule_of_a_training, options.schedule_of_all
    assert one is not None
    assert both is not None
    assert [event.at for event in one.events] == [0, 24, 48, 72]
    assert [event.at for event in both.events] == [0, 24, 48, 72, 100, 124, 148, 172]
    assert [event.change.get("rate_bit_per_s") for event in one.events] == [1e9, 4e7, None, 1e9]
    assert [event.change for event in both.events[4:]] == [event.change for event in one.events]
    with pytest.raises(ConfigError, match="rate and schedule both"):
        replace(options, rate_bit_per_s=1e8)
    with pytest.raises(LabError, match="neither a file nor one of c1, c2"):
        replace(options, schedule="c3")


def test_the_plan_of_most_steps_of_each_network_is_a_row() -> None:
    dense, first = _run("dense", 1.0), ((0, "dense", 1, 4), (1, "qsgd 4-bit over sra, every 8 steps", 8, 6))
    second = (*first[:1], (1, "dense", 1, 8), (1, "qsgd 4-bit over sra, every 8 steps", 8, 4))
    runs = [replace(_run("adaptive fast", 1.0), plans=plans, expected_loss=1.03) for plans in (first, second)]
    found = CodecAccuracy(runs=tuple(runs), dense=(dense, dense))
    rows = {row.name.removeprefix("digits adaptive fast: "): row.value for row in found.rows(is_timed=True)}
    assert rows["network 1, most steps dense"] == 1
    assert rows["network 2, most steps qsgd 4-bit over sra, every 8 steps"] == pytest.approx(10 / 18)
    assert rows["steps with a period of 8 or more"] == pytest.approx((6 / 10 + 4 / 16) / 2)
    assert rows["expected loss over dense"] == 1.03


def test_policies_are_compared_with_4_bits_everywhere() -> None:
    four = replace(_run("qsgd:bits=4,bucket_size=128 over sra", 3.0, 2.0), bytes_over_static=1.0, error_over_static=1.0)
    four, chosen = replace(four, step_s=0.1), replace(_run("cgx dp", 3.0, 2.1), step_s=0.08)
    chosen = replace(chosen, bytes_over_static=0.65, error_over_static=2.5)
    accuracies = accuracies_of([_run("dense", 3.0, 2.0), four, chosen])
    options = AccuracyOptions(workloads=("digits",), codecs=(), num_seeds=1, rate_bit_per_s=1e8)
    rows = {row.name: row for row in rows_of(options, accuracies)}
    found = {what: rows[f"digits cgx dp: {what} over 4 bits"] for what in ("wire", "error", "loss", "seconds", "step")}
    assert [row.value for row in found.values()] == pytest.approx([0.65, 2.5, 1.05, 1.0, 0.8])
    assert [row.met for row in found.values()] == [True, False, False, True, True]
    assert "digits dense: wire over 4 bits" not in rows


def test_a_rate_needs_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lab, "available", lambda: "no namespaces here")
    done = _bench("--rate", "100mbit", "--quick")
    assert done.exit_code != 0
    assert "--rate needs a lab; no namespaces here; leave it out" in done.output


def test_batches_depend_on_seed_step_and_rank_alone() -> None:
    for name in (*WORKLOADS, *ASKED_WORKLOADS):
        first, again = load_task(name), load_task(name)
        given = (1, 2, 3)
        assert all(a.equal(b) for a, b in zip(first.batch(*given), again.batch(*given), strict=True))
        assert not first.batch(1, 2, 0)[0].equal(first.batch(1, 2, 1)[0])
        assert all(a[0].equal(b[0]) for a, b in zip(first.validation, again.validation, strict=True))
        weights = [list(task.build(5).parameters()) for task in (first, again)]
        assert all(a.equal(b) for a, b in zip(*weights, strict=True))


def test_quick_keeps_the_codecs_that_were_given() -> None:
    given = AccuracyOptions(codecs=("bf16",))
    assert (quick_options(given).codecs, quick_options(given).num_seeds) == (("bf16",), 1)
    assert 0 < len(quick_options(AccuracyOptions()).codecs) < len(CODECS)


def test_an_option_is_read_with_its_scheme_or_the_usual_one() -> None:
    assert read_option("dense") == DENSE
    assert read_option(" qsgd:bits=3 ").scheme is Scheme.SRA
    assert read_option("topk:density=0.01 over artopk_ring").scheme is Scheme.ARTOPK_RING
    assert all(read_option(str(read_option(text))) == read_option(text) for text in CODECS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workloads", "imagenet"], "unknown workload 'imagenet'; known: gpt_adamw, gpt_sgd, digits, gpt_demo"),
        (["--codecs", "zip"], "unknown codec 'zip'"),
        (["--codecs", "qsgd over gossip"], "unknown scheme 'gossip'"),
        (["--codecs", "topk over sra"], "scheme sra cannot carry codec topk"),
        (["--seeds", "0"], "seeds 0 is not allowed; give 1 or more"),
        (["--steps", "3"], "steps 3 is not allowed; give 20 or more"),
        (["--ranks", "1"], "ranks 1 is not allowed; give 2 to 16"),
        (["--rate", "fast"], "fast"),
    ],
)
def test_a_value_that_is_not_allowed_is_one_clear_error(arguments: list[str], says: str) -> None:
    done = _bench(*arguments)
    assert done.exit_code != 0
    assert says in done.output, done.output


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r'digits needs scikit-learn; pip install "cgx-ray\[bench\]"'):
        load_task("digits")

"""`cgx-ray collective` against the measured tables of Flexible Communication, from the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from click.testing import CliRunner

from bench.planner.cases import read_table
from cgx_ray.cli import main
from cgx_ray.commands.collective import compare_schemes, parse_link
from cgx_ray.errors import ConfigError


def run_collective(row: dict[str, str], density: str) -> dict[str, Any]:
    arguments = [
        *("collective", "--numel", row["params"], "--density", density, "--workers", row["workers"]),
        *("--latency", f"{row['latency_ms']}ms", "--bandwidth", f"{row['bandwidth_gbps']}gbps", "--json", "-"),
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_command_names_the_measured_winner_and_its_time_in_all_rows_of_table_6() -> None:
    measured_as = {"allgather": "ag_ms", "artopk_ring": "art_ring_ms", "artopk_tree": "art_tree_ms"}
    errors = []
    for row in read_table("flexible_table6"):
        found = run_collective(row, row["cr"])
        winner = min(measured_as, key=lambda scheme: float(row[measured_as[scheme]]))
        assert found["scheme"] == winner, (row, found)
        errors += [
            abs(math.log(found["costs_ms"][scheme] / float(row[column]))) for scheme, column in measured_as.items()
        ]
    assert len(errors) == 27 * 3
    assert mean(errors) <= 0.03, f"mean |log error| {mean(errors):.4f}"


def test_command_is_within_5_percent_of_the_dense_ring_of_table_2() -> None:
    for row in read_table("flexible_table2"):
        found = run_collective(row, "0.1")["costs_ms"]["dense"]
        assert found == pytest.approx(float(row["dense_ring_ms"]), rel=0.05), row


def test_json_goes_to_a_file_and_the_table_to_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = "collective --numel 1000000 --density 0.01 --workers 8 --latency 50us --bandwidth 100mbit --json"
    result = CliRunner().invoke(main, [*arguments.split(), str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert f"fastest: {found['scheme']}" in result.stdout
    assert found["costs_ms"].keys() == found["ours_ms"].keys() == {"dense", "allgather", "artopk_ring", "artopk_tree"}


def test_packed_indices_and_all_pairs_at_once_are_cheaper_than_the_literature() -> None:
    found = compare_schemes(numel=10**8, density=0.001, num_workers=8, link=parse_link("1ms", "1gbps"))
    for scheme in ("allgather", "artopk_ring", "artopk_tree"):
        assert found.ours_ms[scheme] < found.costs_ms[scheme], scheme


def test_one_worker_exchanges_nothing() -> None:
    found = compare_schemes(numel=100, density=0.1, num_workers=1, link=parse_link("1ms", "1gbps"))
    assert (found.scheme, set(found.costs_ms.values())) == ("dense", {0})


@pytest.mark.parametrize(
    ("latency", "bandwidth", "alpha_s", "gbps"),
    [
        ("4ms", "10gbps", 4e-3, 10),
        ("50 us", "100mbit", 5e-5, 0.1),
        (".5s", "2.5Gbit/s", 0.5, 2.5),
        ("0ms", "1tbps", 0, 1000),
    ],
)
def test_links_are_read_as_people_write_them(latency: str, bandwidth: str, alpha_s: float, gbps: float) -> None:
    link = parse_link(latency, bandwidth)
    assert (link.alpha_s, link.bandwidth_gbps) == (pytest.approx(alpha_s), pytest.approx(gbps))


def test_sizes_and_shares_are_read_as_people_write_them() -> None:
    link = ("--workers", "4", "--latency", "1ms", "--bandwidth", "1gbps", "--json", "-")
    said = [
        CliRunner().invoke(main, ["collective", "--numel", numel, "--density", density, *link]).stdout
        for numel, density in (("25M", "1%"), ("25000000", "0.01"))
    ]
    assert said[0] == said[1]
    assert "costs_ms" in said[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--latency": "4"}, "latency '4'"),
        ({"--latency": "-4ms"}, "latency '-4ms'"),
        ({"--bandwidth": "10"}, "bandwidth '10'"),
        ({"--bandwidth": "0gbps"}, "bandwidth_gbps 0.0"),
        ({"--bandwidth": "10gb"}, "bandwidth '10gb'"),
        ({"--density": "0"}, "density 0.0"),
        ({"--numel": "0"}, "numel 0"),
        ({"--workers": "0"}, "num_workers 0"),
    ],
)
def test_what_cannot_be_is_one_clear_error(changes: dict[str, str], message: str) -> None:
    given = {"--numel": "1000", "--density": "0.1", "--workers": "4", "--latency": "1ms", "--bandwidth": "1gbps"}
    arguments = [word for pair in {**given, **changes}.items() for word in pair]
    result = CliRunner().invoke(main, ["collective", *arguments])
    assert result.exit_code == 2
    assert message in result.output, result.output
    assert "Traceback" not in result.output


def test_a_link_without_units_is_refused() -> None:
    with pytest.raises(ConfigError, match="such as 4ms"):
        parse_link("fast", "1gbps")

"""`python -m bench network`: all rows are there and have the right goals. No test judges how good the numbers are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.__main__ import bench
from bench.network import link as network_link
from bench.network import measure as network
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.result import Row

NO_LAB = Lab.available(rates_only=False)


@pytest.mark.slow
@pytest.mark.skipif(NO_LAB is not None, reason=NO_LAB or "")
def test_a_quick_run_watches_a_real_job_on_one_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_link, "SETTLE_S", 0.5)
    monkeypatch.setattr(network_link, "DRAIN_S", 0.5)
    monkeypatch.setattr(network_link, "MIN_STEPS", 4)
    # Each host starts a rank, which imports torch.
    monkeypatch.setattr(network, "_NUM_HOSTS", 2)
    path = tmp_path / "network.json"
    done = CliRunner().invoke(bench, ["network", "--quick", "--json", str(path)])
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    link = "100mbit_1ms"
    assert rows.keys() == {
        f"{how}_{what}_{link}" for how in ("active", "known") for what in ("bandwidth", "latency")
    } | {f"was_probed_{link}", f"late_p99_{link}"}
    assert rows[f"active_bandwidth_{link}"]["limit"] == pytest.approx(99.42, abs=0.01)
    # Even on a busy machine no latency is much shorter than that of the link; a late switch can hide a little of it.
    for name in (f"active_latency_{link}", f"known_latency_{link}"):
        assert rows[name]["value"] > 0.9, rows[name]


def test_errors_are_those_that_the_issue_allows() -> None:
    bandwidth, latency = network_link.error_rows("known", 1e9, 0.01, 0.9 * 1e9 * network_link.PAYLOAD, 0.012, "<= 0.1")
    assert bandwidth.ratio == pytest.approx(0.1)
    assert latency.ratio == pytest.approx(1.0), "20 %"
    _, latency = network_link.error_rows("known", 1e9, 1e-4, 1e9, 2.9e-4, "<= 0.1")
    assert latency.met, "0.2 ms, where that is more"
    unknown, _ = network_link.error_rows("known", 1e9, 1e-4, None, None, "<= 0.1")
    assert unknown.met is False


def test_bandwidth_has_no_goal_where_the_lab_itself_does_not_deliver_the_rate() -> None:
    for ratio, goal in ((0.94, None), (0.96, "<= 0.2")):
        delivered = Row(name="lab_delivers_2gbit", value=ratio * 1988, unit="Mbit/s", limit=1988, ratio=ratio)
        assert network_link.estimate_goal(delivered) == goal
    assert network_link.estimate_goal(None) == "<= 0.2"


@pytest.mark.skipif(NO_LAB is not None, reason=NO_LAB or "")
def test_a_slow_link_is_delivered_between_all_hosts_at_once() -> None:
    with Lab(2, rate_bit_per_s=1e9, latency_s=1e-3) as lab:
        row = network_link.delivered_row(lab, 2e7)
    assert (row.name, row.goal) == ("lab_delivers_20mbit", None)
    # Busy processors can only make it slower.
    assert 10 * network_link.PAYLOAD < row.value < 1.1 * 20 * network_link.PAYLOAD

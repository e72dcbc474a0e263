"""Twelve networks and trainings in a lab, and what `cgx-ray why` says of each: its exit status, the bound, and who.

On few processors compute sleeps, and rates are low: ratios of times are those of a real cluster.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.emulated import needs_lab
from support.why.lab import add_cards, ask_why

from cgx_ray.lab.namespaces import Lab

RATE = 2e8
FLOOD = """
import socket, sys
with socket.create_server(("", 7000)) if sys.argv[1] == "in" else socket.create_connection((sys.argv[1], 7000)) as here:
    if sys.argv[1] == "in":
        print("ready", flush=True)
        there = here.accept()[0]
        while there.recv(1 << 16):
            pass
    while True:
        here.sendall(bytes(1 << 16))
"""


def top(found: dict[str, Any]) -> str:
    """Return who costs most."""
    return str(found["costs"][0]["who"])


@pytest.mark.slow
@needs_lab()
def test_a_healthy_training_is_told_that_it_is(tmp_path: Path) -> None:
    with Lab(2, rate_bit_per_s=1e9) as lab:
        found = ask_why(lab, tmp_path, "--megabytes", "1", "--compute-s", "0.4", num_steps=12)
    assert (found["exit_status"], found["bound"]) == (0, "nothing"), found["sentence"]
    assert "Nothing large to mend there, and nothing to compress." in found["sentence"]
    assert found["compression"]["plan"] == ""


@needs_lab()
def test_one_slow_uplink_is_named(tmp_path: Path) -> None:
    with Lab(3, rate_bit_per_s=RATE) as lab:
        lab.set(host=2, direction="up", rate_bit_per_s=RATE / 5)
        found = ask_why(lab, tmp_path, "--megabytes", "1", num_steps=12)
    assert found["exit_status"] == 3, found["sentence"]
    assert top(found) == "from cgx-host-2 to cgx-host-1"
    assert "the uplink of cgx-host-2, or the downlink of cgx-host-1" in found["costs"][0]["evidence"]


@pytest.mark.slow
@needs_lab()
def test_a_rank_whose_processor_is_taken_is_named(tmp_path: Path) -> None:
    with Lab(2, rate_bit_per_s=1e9) as lab:
        words = ("--megabytes", "1", "--compute-s", "0.05", "--work-s", "0.06", "--crowded-rank", "1")
        found = ask_why(lab, tmp_path, *words, num_steps=10)
    assert found["exit_status"] == 4, found["sentence"]
    assert top(found) == "rank 1 on cgx-host-1"
    assert "for a processor" in found["costs"][0]["evidence"]


@pytest.mark.slow
@needs_lab()
def test_links_that_are_all_slow(tmp_path: Path) -> None:
    with Lab(4, rate_bit_per_s=RATE / 4) as lab:
        found = ask_why(lab, tmp_path, "--megabytes", "2")
    assert found["exit_status"] == 3, found["sentence"]
    assert top(found) == "all paths"
    assert "waiting for links of 4" in found["sentence"], "of 50 Mbit/s"
    assert found["compression"]["saves_s"] > 0


@pytest.mark.slow
@needs_lab()
@pytest.mark.parametrize("direction", ["up", "down"])
def test_probes_tell_a_slow_uplink_from_a_slow_downlink(tmp_path: Path, direction: str) -> None:
    with Lab(4, rate_bit_per_s=RATE) as lab:
        lab.set(host=2, direction=direction, rate_bit_per_s=RATE / 5)
        found = ask_why(lab, tmp_path, "--megabytes", "2", options=("--probe",))
    assert found["exit_status"] == 3, found["sentence"]
    assert top(found) == f"the {direction}link of cgx-host-2"


@pytest.mark.slow
@needs_lab(rates_only=False)
def test_long_round_trips_with_small_buckets(tmp_path: Path) -> None:
    with Lab(4, rate_bit_per_s=RATE, latency_s=0.01) as lab:
        found = ask_why(lab, tmp_path, "--megabytes", "1", "--bucket-mb", "0.12")
    assert found["exit_status"] == 3, found["sentence"]
    assert "round trips of 20" in found["sentence"]
    assert "bucket_cap_mb" in found["costs"][0]["remedy"]


@pytest.mark.slow
@needs_lab()
def test_the_slow_one_of_two_cards(tmp_path: Path) -> None:
    with Lab(4, rate_bit_per_s=RATE / 4) as lab:
        add_cards(lab)
        found = ask_why(lab, tmp_path, "--megabytes", "2", options=("--probe",), GLOO_SOCKET_IFNAME="eth0")
    assert found["exit_status"] == 3, found["sentence"]
    assert top(found) == "card eth0 of all nodes"
    assert "GLOO_SOCKET_IFNAME=eth1" in found["costs"][0]["remedy"]


@pytest.mark.slow
@needs_lab(rates_only=False)
def test_a_path_that_loses_large_packets(tmp_path: Path) -> None:
    # Host 3 sends nothing large before the first step: DDP broadcasts the parameters in a tree. A busy machine takes
    # half a minute until then.
    with Lab(4, rate_bit_per_s=RATE, latency_s=1e-4) as lab:
        lab.set(host=3, direction="up", mtu_bytes=1500)
        found = ask_why(lab, tmp_path, "--megabytes", "1", interrupt_s=90)
    assert found["exit_status"] == 3, found["sentence"]
    assert top(found) == "from cgx-host-3 to cgx-host-2"
    assert "mtu" in found["costs"][0]["remedy"]


@pytest.mark.slow
@needs_lab(rates_only=False)
def test_a_path_that_loses_one_packet_of_a_hundred(tmp_path: Path) -> None:
    with Lab(4, rate_bit_per_s=RATE, latency_s=5e-3) as lab:
        # Of one link; `loss` is that of two in a row.
        lab.set(host=1, direction="up", loss=0.02)
        found = ask_why(lab, tmp_path, "--megabytes", "4", "--bucket-mb", "1")
    assert found["exit_status"] == 3, found["sentence"]
    assert top(found) == "from cgx-host-1 to cgx-host-0"
    assert "sent again" in found["costs"][0]["evidence"]


@pytest.mark.slow
@needs_lab()
def test_input_that_all_ranks_wait_for(tmp_path: Path) -> None:
    with Lab(2, rate_bit_per_s=1e9) as lab:
        found = ask_why(lab, tmp_path, "--megabytes", "1", "--input-s", "0.2")
    assert (found["exit_status"], found["bound"]) == (5, "input"), found["sentence"]
    assert top(found) == "all ranks"
    assert "less work between two steps" in found["costs"][0]["remedy"]


@pytest.mark.slow
@needs_lab()
def test_compute_that_hides_slow_links(tmp_path: Path) -> None:
    with Lab(4, rate_bit_per_s=1e8) as lab:
        found = ask_why(lab, tmp_path, "--megabytes", "1", "--bucket-mb", "0.12", "--compute-s", "0.8")
    assert (found["exit_status"], found["bound"]) == (0, "nothing"), found["sentence"]
    assert "computes" in found["sentence"]
    assert found["compression"]["sentence"] == "none: the network does not bound your steps"


@pytest.mark.slow
@needs_lab()
def test_another_job_on_a_card(tmp_path: Path) -> None:
    with Lab(4, rate_bit_per_s=RATE) as lab:
        sink = lab.popen(0, [sys.executable, "-c", FLOOD, "in"], stdout=subprocess.PIPE)
        assert sink.stdout is not None
        with sink.stdout:
            sink.stdout.readline()
            lab.popen(2, [sys.executable, "-c", FLOOD, lab.hosts[0].address])
            found = ask_why(lab, tmp_path, "--megabytes", "2")
    assert found["exit_status"] == 3, found["sentence"]
    assert top(found) in ("card eth0 of cgx-host-2", "card eth0 of cgx-host-0"), "it sends from 2 to 0"
    assert "not this training's" in found["costs"][0]["evidence"]

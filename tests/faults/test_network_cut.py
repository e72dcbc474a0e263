"""A host of an emulated network is cut off while its rank trains: for ever, and for a while."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import lab_rank
from support.emulated import needs_lab
from support.failing_ranks import WITHIN_S

from cgx_ray.lab.namespaces import Lab

NUM_RANKS = 3
CUT = 2
SILENT_S = 5.0
WAYS = [
    pytest.param("qsgd", "sra", id="sra"),
    pytest.param("none", "dense", id="dense", marks=pytest.mark.slow),
    pytest.param("topk:density=0.05", "allgather", id="allgather", marks=pytest.mark.slow),
    pytest.param("powersgd", "allreduce", id="allreduce", marks=pytest.mark.slow),
]


class LabRanks:
    """A rank in each host of a lab, which all train the same model."""

    def __init__(self, lab: Lab, folder: Path, codec: str, scheme: str, silent_s: float, num_steps: int) -> None:
        words = [str(NUM_RANKS), str(folder / "store"), codec, scheme, str(silent_s), str(num_steps)]
        argv = [sys.executable, "-m", lab_rank.__name__]
        paths = {"PYTHONPATH": str(Path(lab_rank.__file__).parents[1])}
        self._ranks = [
            lab.popen(host, [*argv, str(host), *words], env=paths, stdout=subprocess.PIPE, text=True)
            for host in range(NUM_RANKS)
        ]

    def await_step(self, step: int) -> None:
        """Wait until each rank has finished `step`."""
        for rank in self._ranks:
            while json.loads(rank.stdout.readline()) != {"step": step}:
                pass

    def ends(self) -> list[dict[str, Any]]:
        """Wait for the end of all ranks, and return what each wrote last."""
        return [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in self._ranks]


@needs_lab()
@pytest.mark.fault("a host is cut off for ever, during sra, dense and others", "named after `silent_s`, on all ranks")
@pytest.mark.parametrize(("codec", "scheme"), WAYS)
def test_a_host_that_is_cut_off_is_named_by_all_others(codec: str, scheme: str, tmp_path: Path) -> None:
    with Lab(NUM_RANKS, rate_bit_per_s=1e9) as lab:
        ranks = LabRanks(lab, tmp_path, codec, scheme, SILENT_S, 100_000)
        ranks.await_step(5)
        lab.cut(CUT)
        cut_s = time.monotonic()
        ends = ranks.ends()
    for rank, end in enumerate(ends):
        assert end["at_s"] - cut_s < WITHIN_S, end
        # The rank that is cut off hears of neither of the others.
        silent = "[01]" if rank == CUT else str(CUT)
        assert re.search(rf"rank {silent} has been silent for 5 s", end["said"]), ends


@needs_lab()
@pytest.mark.slow
@pytest.mark.fault("a host is cut off for 10 s and then back", "training goes on, with the same weights on all ranks")
@pytest.mark.parametrize(("codec", "scheme"), WAYS[:2])
def test_a_host_that_is_back_after_10_s_goes_on(codec: str, scheme: str, tmp_path: Path) -> None:
    with Lab(NUM_RANKS, rate_bit_per_s=1e9) as lab:
        ranks = LabRanks(lab, tmp_path, codec, scheme, 60.0, 200)
        ranks.await_step(5)
        lab.cut(CUT)
        time.sleep(10)
        lab.reconnect(CUT)
        ends = ranks.ends()
    assert [set(end) for end in ends] == [{"hash"}] * NUM_RANKS, ends
    assert len({end["hash"] for end in ends}) == 1

"""`python -m bench gpu`: what it makes of its measurements, and what it says where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from bench.__main__ import bench
from bench.gpu.measure import rows_of
from bench.gpu.rank import GpuRecord


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(bench, ["gpu"])
    assert result.exit_code == 2
    assert "bench gpu: PyTorch sees no CUDA device here" in result.output


def test_rows_compare_with_ddp_and_with_the_longer_of_backward_and_wire() -> None:
    record = GpuRecord(
        lags_s=[0.001] * 8 + [0.0021, 0.03],
        calls={"cuLaunchKernel": 24, "cudaLaunchKernel": 6, "cudaEventSynchronize": 40, "cudaStreamSynchronize": 5},
        num_groups=10,
        step_s={"noop": 0.2, "ddp": 0.5, "dense": 0.51, "qsgd": 0.36},
        thread_s={"dense": 0.01, "qsgd": 0.02},
        num_groups_large=37,
        wire_s=0.3,
        device_bytes={"noop": 100 << 20, "qsgd": 300 << 20},
        pinned_bytes={"noop": 0, "qsgd": 300 << 20},
    )
    rows = {row.name: row for row in rows_of(record)}
    assert (rows["prompt_groups"].value, rows["prompt_groups"].met) == (8, False)
    assert rows["longest_lag"].value == 30
    assert (rows["launches_a_group"].value, rows["launches_a_group"].met) == (3, True)
    assert (rows["waits_a_group"].value, rows["waits_a_group"].met) == (0.5, False)
    assert rows["watches_a_group"].value == 4
    assert rows["copies_in_a_group"].value == 0
    assert rows["dense_over_ddp"].value == pytest.approx(1.02)
    assert rows["qsgd_over_limit"].value == pytest.approx(1.2)
    assert rows["qsgd_over_limit"].met is False
    assert (rows["device_memory_added"].value, rows["device_memory_added"].met) == (200, True)
    assert (rows["pinned_memory_added"].value, rows["pinned_memory_added"].met) == (300, False)

"""Ranks whose weights differ are found and named, on real processes; errors that end the training have a kind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, train
from support.ranks import free_port, log_lines, run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.engine import weight_check
from cgx_ray.engine.agreement import odd_ranks
from cgx_ray.engine.telemetry import Telemetry
from cgx_ray.engine.weight_check import (
    AVERAGED_NUMEL,
    NO_HASH,
    Drift,
    WeightCheck,
    WeightHash,
    hash_of,
    hash_on_device,
)
from cgx_ray.errors import CGXError, DamagedMessageError, PeerTimeoutError, TransportError
from cgx_ray.monitors.sample import Fault

EVERY_STEPS = 2
# Of the mantissa of float32: it changes a number by a quarter or more.
LARGEST_BIT = 22
WEIGHTS = {
    "matrix": torch.arange(1000, dtype=torch.float32).reshape(10, 100),
    "strided": torch.arange(12, dtype=torch.float64).reshape(3, 4).T,
    "half": torch.arange(7, dtype=torch.float16),
    "scalar": torch.tensor(3.0, dtype=torch.bfloat16),
    "empty": torch.empty(0),
}


HASHES: list[Callable[[Mapping[str, torch.Tensor]], int]] = [
    hash_of,
    lambda weights: WeightHash(hash_on_device(weights)).read(),
]


@pytest.mark.parametrize("hash_of", HASHES, ids=["on the host", "on a device"])
@pytest.mark.parametrize("name", ["matrix", "strided", "half", "scalar"])
def test_a_single_bit_of_a_layer_changes_the_hash(
    name: str, hash_of: Callable[[Mapping[str, torch.Tensor]], int]
) -> None:
    changed = {other: weight.clone() for other, weight in WEIGHTS.items()}
    assert hash_of(changed) == hash_of(WEIGHTS)
    bits_N = changed[name].contiguous().reshape(-1).view(torch.uint8)
    bits_N[-1] ^= 1
    changed[name] = bits_N.view(WEIGHTS[name].dtype).reshape(WEIGHTS[name].shape)
    assert hash_of(changed) != hash_of(WEIGHTS)
    assert 1 <= hash_of(changed) < 2**63


@pytest.mark.parametrize("hash_of", HASHES, ids=["on the host", "on a device"])
def test_weights_in_another_order_have_another_hash(
    hash_of: Callable[[Mapping[str, torch.Tensor]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In pieces of a few elements, each of which counts from the layer's first element.
    monkeypatch.setattr(weight_check, "HASHED_NUMEL", 7)
    within = {**WEIGHTS, "matrix": WEIGHTS["matrix"].flip(0)}
    layers = {name: WEIGHTS[name] for name in reversed(WEIGHTS)}
    assert len({hash_of(weights) for weights in (WEIGHTS, within, layers)}) == 3


def test_the_hash_of_a_device_does_not_depend_on_how_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = hash_on_device(WEIGHTS)
    monkeypatch.setattr(weight_check, "HASHED_NUMEL", 7)
    assert torch.equal(hash_on_device(WEIGHTS), expected)


def test_weights_on_a_device_are_hashed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that the CPU is not the host.
    monkeypatch.setattr(weight_check, "HOST", torch.device("meta"))
    found = WeightCheck(WEIGHTS, 3).hash_at(0)
    assert found.read() == int(hash_on_device(WEIGHTS)) != hash_of(WEIGHTS)


def test_weights_are_hashed_once_in_each_step_with_a_check() -> None:
    check = WeightCheck(WEIGHTS, 3)
    found = [check.hash_at(step).read() != NO_HASH for step in (0, 0, 1, 2, 3, 3, 4, 5, 6)]
    assert found == [True, False, False, False, True, False, False, False, True]
    assert WeightCheck(WEIGHTS, 0).hash_at(0).read() == NO_HASH
    resumed = WeightCheck(WEIGHTS, 3)
    assert [resumed.hash_at(step).read() != NO_HASH for step in (5, 5, 6)] == [True, False, True]


@pytest.mark.parametrize(
    ("hashes", "odd", "others"),
    [([5, 5, 9, 5], [2], [0, 1, 3]), ([5, 9], [1], [0]), ([9, 5, 5], [0], [1, 2]), ([1, 2, 3], [1, 2], [0])],
)
def test_the_ranks_that_differ_from_the_most_are_named(hashes: list[int], odd: list[int], others: list[int]) -> None:
    assert odd_ranks(hashes) == (odd, others)


def _train(
    rank: int, transport: str, every_steps: int, breaks_after: int, bit: int = LARGEST_BIT
) -> tuple[str, dict[int, float], Fault | None, list[str]]:
    """Train; rank 1 changes one bit of a weight. Return the error, drift by step with a check, the fault, the log."""
    lines = log_lines()
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd", transport=transport, weight_check_steps=every_steps)
    said = ""
    try:
        for step in range(8):
            train(model, rank, range(step, step + 1), accumulate=1 + step % 2)
            if rank == 1 and step == breaks_after:
                model.module.left.bias.data.view(torch.int32)[0] ^= 1 << bit
    except RuntimeError as error:
        # DDP gives the error of a future in words alone.
        said = str(error)
    samples = attachment.take_samples()
    drifts = {sample.step: sample.weight_drift for sample in samples if sample.weight_drift is not None}
    fault = attachment.fault
    attachment.close()
    return said, drifts, fault, lines


@pytest.mark.fault("a high bit of a weight flips on one rank", "rank, step and layer are named at the next check")
@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_all_ranks_stop_with_one_error_that_names_the_rank_whose_weights_differ_and_the_step(transport: str) -> None:
    for rank, (said, drifts, fault, _) in enumerate(run_ranks(3, _train, transport, EVERY_STEPS, 4)):
        # Its weights differ from step 5 on. The next check is in step 6, and the result is read in step 7.
        pattern = rf"rank {rank}: before step 6 the weights of rank 1 differ from those of ranks 0, 2; they were the "
        assert re.search(pattern + r"same before step 4. They differ most in layer left.bias, by 0.\d+ of its", said), (
            said
        )
        assert drifts == {1: 0, 3: 0, 5: 0}
        assert fault is not None
        assert (fault.rank, fault.step, fault.kind) == (rank, 7, "weights_differ")
        assert fault.text in said


@pytest.mark.fault("the lowest bit of a weight flips on one rank", "a warning: it may be rounding; training goes on")
@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_a_difference_that_may_be_rounding_is_a_warning_of_one_rank_and_training_goes_on(transport: str) -> None:
    for rank, (said, drifts, fault, lines) in enumerate(run_ranks(3, _train, transport, EVERY_STEPS, 4, 0)):
        assert (said, fault) == ("", None)
        # 2^-24 to 2^-23 of a weight, among 33 weights of about the same size.
        assert 1e-9 < drifts.pop(7) < 1e-7
        assert drifts == {1: 0, 3: 0, 5: 0}
        assert [line.partition(";")[0] for line in lines] == (
            ["rank 0: before step 6 the weights of rank 1 differ from those of ranks 0, 2"] if rank == 0 else []
        )


def test_the_first_check_and_no_check() -> None:
    for said, drifts, *_ in run_ranks(2, _train, "tcp", 4, 0):
        assert "before step 4 the weights of rank 1 differ from those of rank 0; they were the same before" in said
        assert drifts == {1: 0}
    assert run_ranks(2, _train, "tcp", 0, 0) == [("", {}, None, [])] * 2


def _drift_apart(rank: int, average_weights: bool, dtype: torch.dtype) -> tuple[list[str], list[float], list[str]]:
    """Train; in the first steps rank 1 rounds each weight up. Return hashes, what checks found, and the log."""
    lines = log_lines()
    model = DistributedDataParallel(Branches().to(dtype), bucket_cap_mb=0.001)
    checks = {"weight_check_steps": EVERY_STEPS, "average_weights": average_weights}
    attachment = cgx_ray.attach(model, codec="qsgd", **checks)
    hashes = []
    for step in range(12):
        # Weights may change before the first forward pass of a step only.
        hashes += train(model, rank, range(step, step + 1), accumulate=1 + step % 2)
        if rank == 1 and step < 6:
            for weight in model.parameters():
                weight.data.copy_(torch.nextafter(weight.data, torch.tensor(torch.inf, dtype=dtype)))
    found = [sample.weight_drift for sample in attachment.take_samples() if sample.weight_drift is not None]
    attachment.close()
    return hashes, found, lines


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.float32, 1e-9, 1e-6), (torch.bfloat16, 1e-4, 0.08)])
def test_ranks_that_round_differently_train_on_and_are_the_same_again_after_an_average(
    dtype: torch.dtype, least: float, most: float
) -> None:
    first, second = run_ranks(2, _drift_apart, False, dtype)
    assert first[0][-1] != second[0][-1]
    assert first[1] == second[1]
    assert first[1][0] == 0
    assert all(least < drift < most for drift in first[1][1:]), first[1]
    assert "average_weights=True makes the weights the same again" in first[2][0]
    first, second = run_ranks(2, _drift_apart, True, dtype)
    # The last check that finds a difference is in step 6, so step 8 begins with an average.
    assert first[0][8:] == second[0][8:]
    assert first[1] == second[1]
    assert first[1][0] == first[1][-1] == 0
    assert max(first[1]) > least


def _average(rank: int) -> list[bool]:
    """Average weights that are the same, then others. Return for each type whether both have the right bits."""
    right = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        # One is not contiguous, and one is larger than what is averaged at a time.
        shapes = [(3, 5), (), (0,), (AVERAGED_NUMEL // 1000 + 1, 1000)]
        weights = {
            str(shape): torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype) for shape in shapes
        }
        weights["(3, 5)"] = weights["(3, 5)"].T
        before = {name: weight.clone() for name, weight in weights.items()}
        check = WeightCheck(weights, 1)
        check.average(dist.group.WORLD)
        right.append(dtype == torch.float64 or all(torch.equal(weights[name], before[name]) for name in weights))
        for weight in weights.values():
            weight.add_(rank)
        check.average(dist.group.WORLD)
        hashes: list[int] = [0] * 3
        dist.all_gather_object(hashes, hash_of(weights))
        right.append(len(set(hashes)) == 1)
        right.append(torch.allclose(weights["(3, 5)"], before["(3, 5)"] + 1, rtol=0.01, atol=0.01))
    return right


@pytest.mark.parametrize("backend", ["gloo", "cgx"])
def test_an_average_keeps_what_is_the_same_and_gives_all_ranks_the_same_bits(backend: str) -> None:
    """Backend cgx must not compress it."""
    assert run_ranks(3, _average, backend=backend) == [[True] * 12] * 3


def _found(*ranks: dict[str, torch.Tensor]) -> Drift:
    """Return what ranks with these weights find; all find the same."""
    checks = [WeightCheck(weights, 1) for weights in ranks]
    minima = torch.stack([check.bounds() for check in checks]).amin(0)
    (drift,) = {check.drift(minima) for check in checks}
    return drift


def _changes() -> dict[str, torch.Tensor]:
    """Return differences of kinds that are easy to misjudge."""
    random = torch.Generator().manual_seed(2)
    rows, columns = (torch.randn(shape, generator=random) for shape in ((700, 1), (1, 500)))
    one = torch.zeros(700, 500)
    one[311, 17] = 1
    return {
        "noise": torch.randn(700, 500, generator=random),
        "bias": torch.ones(700, 500),
        "rank 1": rows * columns,
        "one": one,
    }


@pytest.mark.parametrize("kind", ["noise", "bias", "rank 1", "one"])
@pytest.mark.parametrize("size", [1e-6, 1e-2])
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_the_size_of_a_difference_is_known_whatever_its_shape(kind: str, size: float, num_ranks: int) -> None:
    """16 projections: an estimate off by 2x would be five standard deviations of noise."""
    weights = {"other": torch.randn(300), "matrix": torch.randn(700, 500, dtype=torch.float64), "empty": torch.empty(0)}
    change = _changes()[kind].double()
    change *= size * weights["matrix"].norm() / change.norm()
    layer, ratio, limit = _found(*[weights] * (num_ranks - 1), weights | {"matrix": weights["matrix"] + change})
    assert layer == "matrix"
    assert size / 2 < ratio < 2 * size
    assert (ratio > limit) == (size > 1e-3)


@pytest.mark.parametrize(
    ("name", "changed", "is_fault"),
    [
        ("matrix", torch.randn_like, True),
        ("bias", lambda weight: weight + 1e-3, True),
        ("bias", lambda weight: weight * torch.nan, True),
        ("matrix", lambda weight: weight * (1 + 1e-6), False),
        # Rounding of numbers as large as other weights has left a small one.
        ("small", lambda weight: weight + 1e-7, False),
        ("half", lambda weight: weight.view(torch.int16).bitwise_xor(1).view(weight.dtype), False),
        ("half", lambda weight: weight * 1.5, True),
    ],
    ids=["loaded", "moved bias", "NaN", "rounded", "near zero", "rounded bfloat16", "scaled bfloat16"],
)
def test_rounding_is_told_from_faults(
    name: str, changed: Callable[[torch.Tensor], torch.Tensor], is_fault: bool
) -> None:
    random = torch.Generator().manual_seed(3)
    weights = {
        "matrix": torch.randn(512, 512, generator=random) / 20,
        "bias": torch.zeros(512),
        "small": torch.tensor([1e-9]),
        "half": torch.randn(64, 64, generator=random).to(torch.bfloat16) / 20,
    }
    layer, ratio, limit = _found(weights, weights | {name: changed(weights[name])})
    assert layer == name
    assert (ratio > limit) == is_fault, ratio


_MIXED = """
import os, torch, cgx_ray
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
model = DistributedDataParallel(module)
attachment = cgx_ray.attach(model, codec="qsgd:bits=4", weight_check_steps=5)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(16, 128)).square().mean().backward()
    optimizer.step()
drifts = [sample.weight_drift for sample in attachment.take_samples() if sample.weight_drift is not None]
attachment.close()
print(len(drifts), max(drifts) < 1e-5)
"""


@pytest.mark.slow  # in `make test` ranks round differently by what they compute, above
def test_ranks_on_processors_of_different_kinds_train_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_MIXED)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ | common | {"RANK": str(rank), "ATEN_CPU_CAPABILITY": kind},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, kind in enumerate(("avx2", "default"))
    ]
    assert [rank.communicate(timeout=60)[0].split() for rank in ranks] == [["4", "True"]] * 2


def _wait_for_a_rank_that_sleeps(rank: int) -> Fault | None:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd", timeout_s=1.0, shared_memory=False)
    train(model, rank, range(2))
    if rank == 1:
        time.sleep(3)
    with pytest.raises(RuntimeError, match="did not get through"):
        train(model, rank, range(2, 3))
    fault = attachment.fault
    attachment.close()
    return fault


def test_a_rank_that_does_not_answer_in_time_is_another_fault_than_one_that_is_gone() -> None:
    waited, late = run_ranks(2, _wait_for_a_rank_that_sleeps)
    assert waited is not None
    assert late is not None
    assert (waited.kind, waited.rank, waited.step) == ("time_out", 0, 2)
    assert "rank 1 did not answer within" in waited.text
    assert (late.kind, late.rank) == ("connection", 1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PeerTimeoutError("late"), "time_out"),
        (TransportError("gone"), "connection"),
        (DamagedMessageError("CRC"), "damaged"),
        (cgx_ray.WireError("another plan"), "other"),
        (cgx_ray.ReplicaError("differs"), "weights_differ"),
        (CGXError("anything"), "other"),
    ],
)
def test_every_error_has_a_kind_and_is_reported_even_if_the_report_fails(error: CGXError, kind: str) -> None:
    telemetry = Telemetry(3)
    assert telemetry.fault is None
    reported: list[Fault] = []

    def fail(fault: Fault) -> None:
        reported.append(fault)
        raise OSError("no controller")

    telemetry.on_fault = fail
    telemetry.note_fault(error, 7)
    fault = telemetry.fault
    assert fault is not None
    assert reported == [fault]
    assert (fault.rank, fault.step, fault.kind, fault.text) == (3, 7, kind, str(error))

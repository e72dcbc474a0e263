"""Ranks whose weights differ are found and named, on real processes; errors that end the training have a kind."""

from __future__ import annotations

import re
import time

import pytest
import torch
from support.branches import Branches, train
from support.ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.engine.agreement import odd_ranks
from cgx_ray.engine.telemetry import Telemetry
from cgx_ray.engine.weight_check import NO_HASH, WeightCheck, hash_of
from cgx_ray.errors import CGXError, DamagedMessageError, PeerTimeoutError, TransportError
from cgx_ray.monitors.sample import Fault

EVERY_STEPS = 2
WEIGHTS = {
    "matrix": torch.arange(1000, dtype=torch.float32).reshape(10, 100),
    "strided": torch.arange(12, dtype=torch.float64).reshape(3, 4).T,
    "half": torch.arange(7, dtype=torch.float16),
    "scalar": torch.tensor(3.0, dtype=torch.bfloat16),
    "empty": torch.empty(0),
}


@pytest.mark.parametrize("name", ["matrix", "strided", "half", "scalar"])
def test_a_single_bit_of_a_layer_changes_the_hash(name: str) -> None:
    changed = {other: weight.clone() for other, weight in WEIGHTS.items()}
    assert hash_of(changed) == hash_of(WEIGHTS)
    bits_N = changed[name].contiguous().reshape(-1).view(torch.uint8)
    bits_N[-1] ^= 1
    changed[name] = bits_N.view(WEIGHTS[name].dtype).reshape(WEIGHTS[name].shape)
    assert hash_of(changed) != hash_of(WEIGHTS)
    assert 1 <= hash_of(changed) < 2**63


def test_weights_are_hashed_once_in_each_step_with_a_check() -> None:
    check = WeightCheck(WEIGHTS, 3)
    found = [check.hash_at(step) != NO_HASH for step in (0, 0, 1, 2, 3, 3, 4, 5, 6)]
    assert found == [True, False, False, False, True, False, False, False, True]
    assert WeightCheck(WEIGHTS, 0).hash_at(0) == NO_HASH
    resumed = WeightCheck(WEIGHTS, 3)
    assert [resumed.hash_at(step) != NO_HASH for step in (5, 5, 6)] == [True, False, True]


@pytest.mark.parametrize(
    ("hashes", "odd", "others"),
    [([5, 5, 9, 5], [2], [0, 1, 3]), ([5, 9], [1], [0]), ([9, 5, 5], [0], [1, 2]), ([1, 2, 3], [1, 2], [0])],
)
def test_the_ranks_that_differ_from_the_most_are_named(hashes: list[int], odd: list[int], others: list[int]) -> None:
    assert odd_ranks(hashes) == (odd, others)


def _train(rank: int, transport: str, every_steps: int, breaks_after: int) -> tuple[str, list[int], Fault | None]:
    """Train; rank 1 changes one bit of a weight. Return the error, the steps with a check, and the fault."""
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd", transport=transport, weight_check_steps=every_steps)
    said = ""
    try:
        for step in range(8):
            train(model, rank, range(step, step + 1), accumulate=1 + step % 2)
            if rank == 1 and step == breaks_after:
                model.module.left.bias.data.view(torch.int32)[0] ^= 1
    except RuntimeError as error:
        # DDP gives the error of a future in words alone.
        said = str(error)
    checked = [sample.step for sample in attachment.take_samples() if sample.checked_weights]
    fault = attachment.fault
    attachment.close()
    return said, checked, fault


@pytest.mark.fault("a bit of a weight flips on one rank", "rank and step are named at the next check")
@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_all_ranks_stop_with_one_error_that_names_the_rank_whose_weights_differ_and_the_step(transport: str) -> None:
    for rank, (said, checked, fault) in enumerate(run_ranks(3, _train, transport, EVERY_STEPS, 4)):
        # Its weights differ from step 5 on. The next check is in step 6, and the result is read in step 7.
        pattern = rf"rank {rank}: before step 6 the weights of rank 1 differ from those of ranks 0, 2; they were the "
        assert re.search(pattern + "same before step 4", said), said
        assert checked == [1, 3, 5]
        assert fault is not None
        assert (fault.rank, fault.step, fault.kind) == (rank, 7, "weights_differ")
        assert fault.text in said


def test_the_first_check_and_no_check() -> None:
    for said, checked, _ in run_ranks(2, _train, "tcp", 4, 0):
        assert "before step 4 the weights of rank 1 differ from those of rank 0; they were the same before" in said
        assert checked == [1]
    assert run_ranks(2, _train, "tcp", 0, 0) == [("", [], None)] * 2


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
def test_every_error_has_a_kind_and_is_told_even_if_who_is_told_fails(error: CGXError, kind: str) -> None:
    telemetry = Telemetry(3)
    assert telemetry.fault is None
    told: list[Fault] = []

    def fail(fault: Fault) -> None:
        told.append(fault)
        raise OSError("no controller")

    telemetry.tell_fault = fail
    telemetry.note_fault(error, 7)
    fault = telemetry.fault
    assert fault is not None
    assert told == [fault]
    assert (fault.rank, fault.step, fault.kind, fault.text) == (3, 7, kind, str(error))

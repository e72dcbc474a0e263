"""A rank is killed in the middle of a step: the others say where they were, and which rank was lost first."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
import torch
from support.branches import Branches, train
from support.device.marks import GivenMark
from support.failing_ranks import die, said_by_survivors
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives import Transport
from cgx_ray.collectives.transport import tcp
from cgx_ray.engine.step import StepRun, _UnderWay
from cgx_ray.plan import STEPS_TOGETHER, CodecSpec, GroupPlan, Intra, Option, Plan, Scheme
from cgx_ray.runtime_ext.shm import LocalGroup

VICTIM = 1
STEP = 2
CODECS = {Scheme.DENSE: "none", Scheme.ALLREDUCE: "fp16", Scheme.ALLGATHER: "topk:density=0.05"} | dict.fromkeys(
    (Scheme.SRA, Scheme.RING, Scheme.TREE, Scheme.BROADCAST), "qsgd"
)
# Nodes of the ranks, by name of a way in which they work together.
WAYS: dict[str, tuple[Intra, tuple[int, ...]]] = {
    "flat over TCP": (Intra.FLAT, (0, 1, 2)),
    "flat in one node": (Intra.FLAT, (0, 0, 0)),
    "dense inside nodes": (Intra.DENSE, (0, 0, 1, 1)),
    "compressed inside nodes": (Intra.COMPRESSED, (0, 0, 1, 1)),
}
# Share of the turns of the step that the victim has taken.
PLACES = {"first turn": 0.0, "middle": 0.5, "last turn": 1.0}
QUICK = [
    (Scheme.SRA, "flat over TCP", "middle"),
    (Scheme.DENSE, "flat over TCP", "first turn"),
    (Scheme.DENSE, "flat in one node", "first turn"),
    (Scheme.ARTOPK_RING, "dense inside nodes", "middle"),
    (Scheme.SRA, "compressed inside nodes", "last turn"),
]
CASES = [
    pytest.param(scheme, way, place, marks=[] if (scheme, way, place) in QUICK else pytest.mark.slow)
    for scheme in Scheme
    for way, (intra, _) in WAYS.items()
    for place in PLACES
    # A node may sum what sra and the like send, and casts; not selected elements.
    if intra is not Intra.COMPRESSED or CODECS.get(scheme) in ("qsgd", "fp16")
]


def _plan(model: DistributedDataParallel, scheme: Scheme, intra: Intra, world_size: int) -> Plan:
    """Return a plan with one group, so that all turns of a step are those of `scheme`."""
    codec = CodecSpec.parse(CODECS.get(scheme, "topk:density=0.05"))
    layers = tuple(layer.name for layer in cgx_ray.layers_of(model))
    group = GroupPlan(layers=layers, option=Option(codec=codec, scheme=scheme, intra=intra))
    return Plan(version=0, world_size=world_size, groups=(group,))


def _die_in_turn(share: float, folder: Path) -> None:
    """Kill this rank in STEP, after `share` of the turns that the step before took."""
    go_on, num_turns = StepRun._go_on, dict.fromkeys((STEP - 1, STEP), 0)

    def counted(step: StepRun, one: _UnderWay) -> None:
        go_on(step, one)
        if step.number in num_turns:
            num_turns[step.number] += 1
        # In the last call a group ends; then others may have all they need for this step.
        if step.number == STEP and num_turns[STEP] == 1 + round(share * (num_turns[STEP - 1] - 2)):
            die(folder)

    StepRun._go_on = counted  # type: ignore[method-assign]


def _killed_in_a_turn(rank: int, folder: Path, scheme: Scheme, way: str, place: str) -> None:
    intra, nodes = WAYS[way]
    tcp.host_key = lambda: f"node {nodes[rank]}"
    model = DistributedDataParallel(Branches())
    cgx_ray.attach(model, plan=_plan(model, scheme, intra, len(nodes)))
    if rank == VICTIM:
        _die_in_turn(PLACES[place], folder)
    train(model, rank, range(STEP + 5))


@pytest.mark.fault("SIGKILL in each phase of each scheme, flat and hierarchical", "named, with step and group")
@pytest.mark.parametrize(("scheme", "way", "place"), CASES)
def test_a_rank_killed_in_any_phase_of_any_scheme_is_named_with_step_and_group(
    scheme: Scheme, way: str, place: str, tmp_path: Path
) -> None:
    said = said_by_survivors(len(WAYS[way][1]), VICTIM, tmp_path, _killed_in_a_turn, scheme, way, place)
    for rank, text in said.items():
        # A rank that has all it needs for this step finds out in the next one.
        assert re.search(rf"rank {rank}, step [{STEP}{STEP + 1}], group \d+: .* did not get through", text), text
        assert f"rank {VICTIM} hung up" in text, said


def _killed_in_a_sum(rank: int, folder: Path) -> None:
    """Rank 0 and the victim wait for rank 2 within the sum when the victim is killed."""
    model = DistributedDataParallel(Branches())
    cgx_ray.attach(model, codec="none", scheme="dense")
    train(model, rank, range(STEP))
    all_reduce = LocalGroup.all_reduce

    def sum_later(group: LocalGroup, values_N: torch.Tensor) -> None:
        if rank == VICTIM:
            threading.Timer(0.3, die, (folder,)).start()
        elif rank == 2:
            while not (folder / "killed").exists():
                time.sleep(0.01)
        all_reduce(group, values_N)

    LocalGroup.all_reduce = sum_later  # type: ignore[method-assign]
    train(model, rank, range(STEP, STEP + 5))


@pytest.mark.fault("SIGKILL inside a shared-memory sum", "named, usually within a second")
def test_a_rank_killed_inside_a_sum_in_shared_memory_is_named(tmp_path: Path) -> None:
    for rank, text in said_by_survivors(3, VICTIM, tmp_path, _killed_in_a_sum).items():
        # Rank 2 may be so late that the victim's part of the sum is there.
        assert re.search(rf"rank {rank}, step [{STEP}{STEP + 1}], group 0: an all-reduce did not get through", text), (
            text
        )
        assert f"rank {VICTIM} hung up" in text


def _killed_in_a_sum_of_a_device(rank: int, folder: Path) -> None:
    """The victim is killed while all wait for a sum that does not end without it, as NCCL's do not."""
    model = DistributedDataParallel(Branches())
    cgx_ray.attach(model, codec="none", scheme="dense")
    train(model, rank, range(STEP))
    marks, abort = [GivenMark()], Transport.abort

    def start_sum(transport: Transport, values_N: torch.Tensor) -> GivenMark:
        if rank == VICTIM:
            threading.Timer(0.3, die, (folder,)).start()
        return marks[0]

    def abort_sum(transport: Transport) -> None:
        abort(transport)
        marks[0].set()

    Transport._start_sum, Transport.abort = start_sum, abort_sum  # type: ignore[assignment, method-assign]
    train(model, rank, range(STEP, STEP + 5))


@pytest.mark.fault("SIGKILL inside a sum of NCCL", "named, within 6 seconds")
def test_a_rank_killed_inside_a_sum_of_a_device_is_named(tmp_path: Path) -> None:
    for rank, text in said_by_survivors(4, VICTIM, tmp_path, _killed_in_a_sum_of_a_device).items():
        assert re.search(rf"rank {rank}, step {STEP}, group 0: .* did not get through", text), text
        assert f"rank {VICTIM} hung up" in text


def _killed_in_a_round(rank: int, folder: Path) -> None:
    model = DistributedDataParallel(Branches())
    cgx_ray.attach(model, codec="none", scheme="sra", period=1000)
    train(model, rank, range(STEPS_TOGETHER + 1))
    if rank == VICTIM:
        die(folder)
    for step in range(STEPS_TOGETHER + 1, STEPS_TOGETHER + 900):
        train(model, rank, range(step, step + 1))
        time.sleep(0.02)


@pytest.mark.fault("SIGKILL within a round of 1,000 steps", "named in the next step of a rank beside it, then on all")
def test_a_rank_killed_within_a_round_is_missed_long_before_its_end(tmp_path: Path) -> None:
    for text in said_by_survivors(4, VICTIM, tmp_path, _killed_in_a_round).values():
        assert f"rank {VICTIM} hung up" in text

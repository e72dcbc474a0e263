"""Engines on a device that does its calls late and in any legal order: every access is ordered, the bits are the CPU's.

`support.device.traced_device` is the device.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.device.traced_device import DEVICE, RaceError, TracedDevice
from support.device.traced_training import TracedTraining
from support.ranks import run_cases, run_ranks
from torch import Tensor

import cgx_ray
from cgx_ray.codecs import make_codec
from cgx_ray.codecs.wire import Room
from cgx_ray.collectives import Transport
from cgx_ray.collectives.direct import DirectLane
from cgx_ray.collectives.parcel import Parcel
from cgx_ray.collectives.transport.tcp import connect_mesh
from cgx_ray.plan import CodecSpec, Layer

TIMEOUT_S = 30.0
LAYERS = [Layer(name=f"layer{numel}", numel=numel, ndim=2, num_rows=10) for numel in (1200, 1300, 2000, 1100)]
STEPS = 3
CASES = [
    ("qsgd", "sra", "auto"),
    ("onebit", "sra", "auto"),
    ("fp16", "sra", "auto"),
    ("none", "sra", "auto"),
    ("qsgd", "allgather", "auto"),
    ("topk:density=0.05", "allgather", "auto"),
    ("dgc:density=0.05", "allgather", "auto"),
    ("terngrad", "ring", "auto"),
    ("bf16", "tree", "auto"),
    ("ef_signsgd", "broadcast", "auto"),
    # The vendor sums on the device.
    ("none", "dense", "auto"),
    ("fp16", "allreduce", "auto"),
    # The host encodes, so gradients are copied there and back.
    ("qsgd", "sra", "cpu"),
    ("topk:density=0.05", "allgather", "cpu"),
]


class Outcome(NamedTuple):
    """Averages and memory at the end, or the error.

    counts  what a traced device has counted per group
    sites   where what was waited for had its mark made
    """

    tensors: list[Tensor]
    error: str | None
    counts: dict[str, float]
    sites: set[str]


def _training(
    rank: int,
    case: tuple[str, str, str],
    device: TracedDevice | None,
    vendor: dist.ProcessGroup | None,
    by_layer: Sequence[CodecSpec] = (),
) -> TracedTraining:
    codec, scheme, where = case
    group = dist.group.WORLD
    assert group is not None
    plan = cgx_ray.make_plan(
        LAYERS,
        version=0,
        world_size=dist.get_world_size(),
        codec=codec,
        scheme=scheme,
        group_bytes=4 * 2400,
        device=where,
    )
    assert len(plan.groups) > 1
    # Not in shared memory, since the vendor may add in another order.
    mesh = connect_mesh(group, TIMEOUT_S, shared_memory=False)
    transport = Transport(group, mesh=mesh, timeout_s=TIMEOUT_S, cuda_group=vendor)
    return TracedTraining(rank, LAYERS, plan, transport, device, by_layer)


def _train(
    rank: int, case: tuple[str, str, str], seed: int | None, removed: str | None = None, residual: float = 0.0
) -> Outcome:
    """Train on the CPU if `seed` is None, else on a traced device with that chance. `residual`: see `remember`.

    If there is one, the loss scale is 2, and that of the residuals is 1.
    """
    device = TracedDevice(seed, removed) if seed is not None else None
    vendor = dist.new_group() if case[1] in ("dense", "allreduce") else None
    if device is not None:
        device.install(vendor)
    run = _training(rank, case, device, vendor)
    scales: tuple[Tensor, ...] = ()
    if residual:
        run.remember(residual)
        scales = (torch.tensor(2.0),)
    if device is not None:
        device.sites.clear()
    try:
        averages = [run.step(scales) for _ in range(STEPS)]
    except (cgx_ray.CGXError, RaceError) as error:
        run.engine.close(1.0)
        return Outcome([], str(error), {}, set())
    state = run.engine.state()
    memory = [value for kind in ("residuals", "momentum") for value in state[kind].values()]
    run.engine.close()
    if device is None:
        return Outcome([*averages, *memory], None, {}, set())
    counts = {what: count / STEPS / run.num_groups for what, count in device.counts.items()}
    return Outcome([*averages, *memory], None, counts, device.sites)


def _assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.error is None, found.error
    assert len(found.tensors) == len(expected.tensors) > STEPS - 1
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        assert torch.equal(one, other), f"{(one != other).sum()} of {one.numel()} elements differ"


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_calls_that_are_done_late_in_any_legal_order_change_no_bit(case: tuple[str, str, str], world_size: int) -> None:
    expected = _trained_on_cpu(world_size)[case]
    for seed in range(2):
        for found, wanted in zip(run_ranks(world_size, _train, case, seed), expected, strict=True):
            _assert_same(found, wanted)


@cache
def _trained_on_cpu(world_size: int) -> dict[tuple[str, str, str], list[Outcome]]:
    """Return the outcomes by case and rank, all of the same processes."""
    return dict(
        zip(CASES, run_cases(world_size, [partial(_train, case=case, seed=None) for case in CASES]), strict=True)
    )


def test_residuals_that_a_dense_plan_sends_are_added_before_the_device_sums() -> None:
    case = ("none", "dense", "auto")
    plain = run_ranks(2, _train, case, 0)[0].tensors[0]
    for found in run_ranks(2, _train, case, 0, None, 0.5):
        assert found.error is None, found.error
        # Two times 0.5, for the loss scale.
        torch.testing.assert_close(found.tensors[0], plain + 1)


@pytest.mark.parametrize(
    ("case", "residual"),
    [
        (("qsgd", "sra", "auto"), 0.0),
        (("dgc:density=0.05", "allgather", "auto"), 0.0),
        (("qsgd", "sra", "cpu"), 0.0),
        (("none", "dense", "auto"), 0.5),
        (("fp16", "allreduce", "auto"), 0.0),
    ],
)
def test_without_any_one_wait_a_race_is_found(case: tuple[str, str, str], residual: float) -> None:
    sites = set[str]().union(*(outcome.sites for outcome in run_ranks(2, _train, case, 0, None, residual)))
    assert len(sites) >= 2, sites
    for site in sorted(sites):
        errors = [outcome.error for outcome in run_ranks(2, _train, case, 0, site, residual)]
        assert any(error is not None and "are not ordered" in error for error in errors), (site, errors)


CANDIDATES = [CodecSpec.parse(text) for text in ("none", "bf16", "qsgd", "terngrad", "topk:density=0.05")]


def _metered(rank: int, codec: str, scheme: str, seed: int | None) -> tuple[Any, list[int]]:
    """Return what a step measures of gains, and the host's waits in steps without measuring, and with."""
    device = TracedDevice(seed) if seed is not None else None
    if device is not None:
        device.install(None)
    run = _training(rank, (codec, scheme, "auto"), device, None, [CodecSpec(name="qsgd")])
    waits = []
    with run.engine.metered(CANDIDATES, 2):
        for _ in range(2):
            run.step()
            (sample,) = run.engine.take_samples()
            waits.append(device.counts["waits"] if device is not None else 0)
    run.engine.close()
    measured = (sample.gain, sample.kept, sample.gain_curve, sample.norm, sample.residual_norm, sample.layer_errors)
    return measured, [waits[0], waits[1] - waits[0]]


@pytest.mark.parametrize(
    ("codec", "scheme"), [("qsgd", "sra"), pytest.param("topk:density=0.05", "allgather", marks=pytest.mark.slow)]
)
def test_a_step_that_measures_gains_waits_once_for_the_device_and_measures_what_a_cpu_does(
    codec: str, scheme: str
) -> None:
    expected = [measured for measured, _ in run_ranks(2, _metered, codec, scheme, None)]
    for seed in range(3):
        for (found, waits), wanted in zip(run_ranks(2, _metered, codec, scheme, seed), expected, strict=True):
            assert found == wanted
            gain, kept, curve, _, _, layer_errors = found
            assert len(gain) >= len(CANDIDATES)
            assert len(layer_errors) == len(LAYERS)
            assert curve
            assert bool(kept) == (scheme == "allgather")
            assert waits[1] == waits[0] + 1, waits


def _kept_rooms(rank: int, scheme: str) -> list[int]:
    """Return how many messages of an engine have memory after a step: on a device, then on the CPU."""
    found = []
    for device in (TracedDevice(0), None):
        if device is not None:
            device.install(None)
        run = _training(rank, ("qsgd", scheme, "auto"), device, None)
        run.step()
        run.engine.state()  # waits for the end of the step
        rooms = [one for one in gc.get_objects() if isinstance(one, Room) and one.device == run.engine.device]
        found.append(sum("host" in vars(room) or "elsewhere" in vars(room) for room in rooms))
        run.engine.close()
    return found


@pytest.mark.parametrize("scheme", ["sra", "allgather"])
def test_messages_give_back_the_memory_of_a_device_after_each_step(scheme: str) -> None:
    for on_device, on_cpu in run_ranks(2, _kept_rooms, scheme):
        assert on_device == 0
        assert on_cpu >= 4


def _without_seals(rank: int, scheme: str) -> tuple[list[bool], str]:
    """Return whether each message was sealed by the mesh, where only rank 0 lets it, and the error of a step."""
    device, post, sealed = TracedDevice(0), Transport._post, []
    device.install()

    def posted(transport: Transport, sends: Any, receives: Any, channel: int, *, is_sealed: bool) -> Any:
        sealed.append(is_sealed)
        return post(transport, sends, receives, channel, is_sealed=is_sealed and rank == 0)

    Transport._post = posted  # type: ignore[method-assign]
    run = _training(rank, ("qsgd", scheme, "auto"), device, None)
    error = ""
    try:
        run.step()
    except cgx_ray.CGXError as raised:
        error = str(raised)
    run.engine.close(1.0)
    return sealed, error


@pytest.mark.parametrize("scheme", ["sra", "allgather"])
def test_messages_that_a_device_has_encoded_are_sealed_by_the_mesh_and_damaged_ones_refused(scheme: str) -> None:
    (sealed, error), (others, _) = run_ranks(2, _without_seals, scheme)
    assert sealed
    assert all(sealed + others)
    assert re.search(r"step 0, group \d: message of rank 1 was damaged \(CRC-32C\)", error), error


def _message_bytes(rank: int, codec: str, scheme: str) -> list[int]:
    vendor = dist.new_group()
    device = TracedDevice(0)
    device.install(vendor)
    run = _training(rank, (codec, scheme, "auto"), device, vendor)
    run.step()
    found = [group.message_bytes for group in run.engine._banks.gradients.groups]
    run.engine.close()
    return found


def test_sums_of_a_device_hold_back_no_group_that_sends_messages() -> None:
    for dense in run_ranks(2, _message_bytes, "none", "dense"):
        assert set(dense) == {0}
    for coded in run_ranks(2, _message_bytes, "qsgd", "sra"):
        assert min(coded) > 0


def test_a_lane_gives_its_memory_back_after_the_last_message_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Parcel] = []

    def release(parcel: Parcel) -> None:
        released.append(parcel)

    monkeypatch.setattr(Parcel, "release", release)
    transport: Any = SimpleNamespace(rank=0, peers=[1, 2], world_size=3, seals=False, start=None)
    codec = make_codec(CodecSpec.parse("qsgd"), device=DEVICE)
    lane = DirectLane([(0, 128), (128, 256), (256, 384)], [0, 1, 2], codec, transport)
    lane._going = {(1,): [3], (2,): [4]}
    left = lane.finish_sends()
    assert (next(left), next(left)) == ([3], [4])
    assert released == []
    assert list(left) == []
    assert len(released) == 3


def test_a_dense_group_costs_one_launch_and_one_sum_and_no_wait() -> None:
    """As DDP: a division and a sum, which the device does after the gradient."""
    for outcome in run_ranks(2, _train, ("none", "dense", "auto"), 0):
        assert outcome.counts == {"launches": 1, "sums": 1, "waits": 0}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("codec", ["qsgd", "fp16"])
def test_waits_copies_and_launches_of_a_group(codec: str, num_ranks: int) -> None:
    """Per group of N ranks 2N-2 messages come in, each by one copy. Those that go out take two, and nothing waits."""
    for outcome in run_ranks(num_ranks, _train, (codec, "sra", "auto"), 0):
        assert outcome.counts["copies in"] == 2 * num_ranks - 2
        assert outcome.counts["copies out"] == 2
        assert outcome.counts["waits"] == 0
        # The others' chunks are encoded; their parts are added, and the average encoded; all chunks are decoded. Casts
        # have no kernel for the second: N-1 additions, a division and a conversion.
        assert outcome.counts["launches"] == (3 if codec == "qsgd" else num_ranks + 3)

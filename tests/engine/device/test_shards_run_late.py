"""The engine of FSDP2 models on a traced device: every access is ordered, and the bits are the CPU's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.device import traced_device
from support.device.traced_calls import Clock
from support.device.traced_device import DEVICE, RaceError, TracedDevice
from support.ranks import run_ranks
from torch import Tensor

import cgx_ray
from cgx_ray.collectives import Transport
from cgx_ray.collectives.transport.tcp import connect_mesh
from cgx_ray.engine.sharded import sharded_engine
from cgx_ray.engine.sharded.sharded_engine import Call, ShardedEngine
from cgx_ray.engine.sharded.shards import ShardedLayer, Unit
from cgx_ray.plan import CodecSpec, Layer, make_plan

TIMEOUT_S = 30.0
STEPS = 3
CODECS = ("none", "qsgd:bits=4", "ef_signsgd", "bf16")
# Rows and columns of the layers of two modules. Some are small, so they go uncompressed beside large ones.
SHAPES = [((12, 300), (6, 10), (18, 130)), ((24, 70), (6, 500))]
PARAMETERS = CodecSpec.parse("qsgd:bits=8,rounding=nearest")


def _units(num_ranks: int, device: torch.device) -> list[Unit]:
    units = []
    for index, shapes in enumerate(SHAPES):
        layers = [
            ShardedLayer(
                layer=Layer(name=f"{index}.{place}", numel=rows * columns, ndim=2, num_rows=rows),
                shape=(rows, columns),
                shard_shape=(rows // num_ranks, columns),
                dim=0,
            )
            for place, (rows, columns) in enumerate(shapes)
        ]
        units.append(Unit(index, f"module{index}", layers, num_ranks, PARAMETERS, device))
    return units


def _traced_call(device: TracedDevice) -> type[Call]:
    """Return a class whose `result` lets the caller know what the thread that has set it had seen done."""

    class TracedCall(Call):
        after: Clock

        def set_result(self, result: Any) -> None:
            self.after = device.known_to(threading.get_ident())
            super().set_result(result)

        def result(self, timeout: float | None = None) -> Any:
            found = super().result(timeout)
            device._learn(self.after)
            return found

    return TracedCall


class _Training:
    """An engine of sharded models, and gradients and parameters that are calls of a device, or the CPU's."""

    def __init__(self, rank: int, codec: str, device: TracedDevice | None) -> None:
        group = dist.group.WORLD
        assert group is not None
        transport = Transport(group, mesh=connect_mesh(group, TIMEOUT_S, shared_memory=False), timeout_s=TIMEOUT_S)
        self.units = _units(transport.world_size, torch.device("cpu") if device is None else DEVICE)
        layers = [layer for unit in self.units for layer in unit.layers]
        # The replicas are the same ranks once more.
        plan = make_plan(layers, version=0, world_size=transport.world_size, codec=codec, scheme="sra")
        self.engine = ShardedEngine(self.units, plan, rank, transport, self._replicas())
        self._num_ranks = transport.world_size
        self._device = device
        self._random = torch.Generator().manual_seed(rank)
        for part in (part for unit in self.units for part in (*unit.gradients, *unit.parameters)):
            if device is not None and part.memory is not None:
                for value in (*part.memory.now.values(), *part.memory.next.values()):
                    device.own(value)

    @staticmethod
    def _replicas() -> Transport:
        """Return a transport to replicas: here the same ranks once more."""
        group = dist.new_group()
        mesh = connect_mesh(group, TIMEOUT_S, shared_memory=False)
        return Transport(group, mesh=mesh, timeout_s=TIMEOUT_S)

    def step(self) -> list[Tensor]:
        """Return the gathered parameters and the reduced gradients of both modules."""
        found, futures = [], []
        for unit in self.units:
            rows_RT = self._computed(self._num_ranks, unit.parameter_width)
            self.engine.wait(self.engine.all_gather(unit, rows_RT))
            self._read([rows_RT])
            found.append(rows_RT)
        for unit in reversed(self.units):
            rows_RT, out_T = (
                self._computed(self._num_ranks, unit.gradient_width),
                self._computed(1, unit.gradient_width),
            )
            futures.append(self.engine.reduce_scatter(unit, rows_RT, out_T[0], is_average=True))
            futures.append(self.engine.all_reduce(unit, out_T[0], is_average=True))
            found.append(out_T)
        for future in (*futures, self.engine.end_step()):
            self.engine.wait(future)
        self._read(found)
        return [one.clone() for one in found]

    def _read(self, tensors: Sequence[Tensor]) -> None:
        if self._device is not None:
            self._device.touch(tensors, [], "the training")

    def _computed(self, *shape: int) -> Tensor:
        """Return what the device, or the CPU, computes next."""
        value, room = torch.randn(shape, generator=self._random), torch.zeros(shape)
        if self._device is None:
            return room.copy_(value)
        self._device.own(room)
        self._device.launch(lambda: room.copy_(value), [], [room])
        return room


def _train(rank: int, codec: str, seed: int | None, removed: str | None = None) -> tuple[list[Tensor], str, set[str]]:
    """Return results and residuals, or the error, and the sites of what was waited for. `seed` None: on the CPU."""
    device = TracedDevice(seed, removed) if seed is not None else None
    if device is not None:
        device.install()
        # Nothing has asked before.
        traced_device._CURIOUS.discard("_wait_for_mark")
        sharded_engine.Call = _traced_call(device)  # type: ignore[misc]
    run = _Training(rank, codec, device)
    if device is not None:
        device.sites.clear()
    try:
        found = [one for _ in range(STEPS) for one in run.step()]
        state = run.engine.state()
    except (cgx_ray.CGXError, RaceError) as error:
        run.engine.close(1.0)
        return [], str(error), set()
    run.engine.close()
    return [*found, *state["residuals"].values()], "", device.sites if device is not None else set()


@pytest.mark.parametrize("num_ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("codec", CODECS)
def test_calls_that_are_done_late_in_any_legal_order_change_no_bit(codec: str, num_ranks: int) -> None:
    expected = run_ranks(num_ranks, _train, codec, None)
    for seed in range(2):
        for found, wanted in zip(run_ranks(num_ranks, _train, codec, seed), expected, strict=True):
            _assert_same(found[0], wanted[0], found[1])


def _assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], error: str) -> None:
    assert not error, error
    assert len(found) == len(expected) > STEPS
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("codec", ["qsgd:bits=4", "ef_signsgd"])
def test_without_any_one_wait_a_race_is_found(codec: str) -> None:
    sites = set[str]().union(*(found for _, _, found in run_ranks(2, _train, codec, 0)))
    assert len(sites) >= 3, sites
    for site in sorted(sites):
        errors = [error for _, error, _ in run_ranks(2, _train, codec, 0, site)]
        assert any("are not ordered" in error for error in errors), (site, errors)

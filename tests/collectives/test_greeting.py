"""Greetings: which ranks send them, and the latencies they show."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from support.meshes import TIMEOUT_S
from support.ranks import run_ranks
from support.shared_memory import connect

import cgx_ray
from cgx_ray.collectives import Transport
from cgx_ray.collectives.transport.greeting import MAX_DIRECT, greeted


@pytest.mark.parametrize("world_size", [1, 2, 17, 18, 28, 40, 256, 1024])
def test_ranks_greet_those_that_greet_them_all_of_few_and_some_of_many(world_size: int) -> None:
    others = [greeted(rank, world_size) for rank in range(world_size)]
    for rank, found in enumerate(others):
        assert len(set(found)) == len(found)
        assert rank not in found
        assert all(rank in others[other] for other in found), f"rank {rank} greets ranks that do not greet it"
        if world_size <= 1 + MAX_DIRECT:
            assert len(found) == world_size - 1
        else:
            assert len(found) <= 4
            distances = [min((other - rank) % world_size, (rank - other) % world_size) for other in found]
            assert min(distances) == world_size // 3


def _greet(rank: int, link: cgx_ray.SimulatedLink | None = None) -> list[dict[int, float]]:
    """Greet three times; rank 1 comes 50 ms late. Return the lags of each greeting."""
    assert dist.group.WORLD is not None
    transport = Transport(dist.group.WORLD, link, connect(shared_memory=False), TIMEOUT_S)
    found = []
    for _ in range(3):
        dist.barrier()
        time.sleep(0.05 * rank)
        transport.greet(lambda: True)
        transport.receive_greetings()
        found.append(dict(transport.lag_s))
    dist.barrier()
    transport.close()
    return found


def test_the_lags_of_two_ranks_to_each_other_add_up_to_a_round_trip_whichever_was_late() -> None:
    for early, late in zip(*run_ranks(2, _greet), strict=True):
        assert late[0] < 0 < early[1]
        assert 0 < early[1] + late[0] < 0.05


def test_greetings_over_a_simulated_link_show_its_latency() -> None:
    link = cgx_ray.SimulatedLink(latency_s=0.5, schedule=((0, 1e9),))
    for early, late in zip(*run_ranks(2, _greet, link), strict=True):
        assert 1.0 < early[1] + late[0] < 1.05


def _bursts_by_step(rank: int, rates: Sequence[float]) -> list[list[tuple[int, int, float]]]:
    link = cgx_ray.SimulatedLink(latency_s=0.0, schedule=tuple(enumerate(rates)))
    assert dist.group.WORLD is not None
    transport = Transport(dist.group.WORLD, link, connect(shared_memory=False), TIMEOUT_S)
    found = []
    for transport.step in range(len(rates)):
        sent, received = (
            torch.zeros(1000 * (1 + rank), dtype=torch.uint8),
            torch.empty(2000 - 1000 * rank, dtype=torch.uint8),
        )
        transport.finish(transport.start({1 - rank: sent}, {1 - rank: received}))
        found.append(transport.take_bursts())
    transport.close()
    return found


def test_bursts_over_a_simulated_link_are_what_was_sent_at_its_rate() -> None:
    for rank, found in enumerate(run_ranks(2, _bursts_by_step, (1e6, 4e6))):
        sent_bytes = 1000 * (1 + rank)
        assert found == [[(-1, sent_bytes, 8 * sent_bytes / rate)] for rate in (1e6, 4e6)]


def _greet_one_who_has_left(rank: int) -> bool:
    """Greet three times after rank 1 has ended training. Return whether the lags of before are kept."""
    assert dist.group.WORLD is not None
    transport = Transport(dist.group.WORLD, mesh=connect(shared_memory=False), timeout_s=TIMEOUT_S)
    transport.greet(lambda: True)
    transport.receive_greetings()
    before = dict(transport.lag_s)
    if rank == 1:
        transport.close()
    dist.barrier()
    for _ in range(3 if rank == 0 else 0):
        transport.greet(lambda: True)
        time.sleep(0.1)
        transport.receive_greetings()
    dist.barrier()
    transport.close()
    return transport.lag_s.keys() == before.keys() == {1 - rank}


def test_a_rank_that_has_ended_training_fails_no_greeting() -> None:
    assert run_ranks(2, _greet_one_who_has_left) == [True, True]

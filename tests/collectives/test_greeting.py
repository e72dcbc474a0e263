"""The ranks that greet each other."""

from __future__ import annotations

import pytest

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

"""The ranks that each rank meets in an element-wise minimum over all ranks, see `Mesh.post_minimum`."""

from __future__ import annotations

# Most other ranks that each rank sends to directly, in one round: as many messages as eight rounds have.
MAX_DIRECT = 16


def partners(rank: int, world_size: int) -> list[list[int]]:
    """Return, by round, the ranks that `rank` sends to and receives from.

    Up to MAX_DIRECT others in one round. Beyond that r meets r - 3^k and r + 3^k in round k = 0, 1, 2, ...: before it,
    r knows the minimum of the 3^k nearest ranks, itself among them. So all know that of N after ceil(log3 N) rounds.
    """
    if world_size <= 1 + MAX_DIRECT:
        return [[(rank + distance) % world_size for distance in range(1, world_size)]]
    rounds, distance = [], 1
    while distance < world_size:
        # Both may be the same rank.
        rounds.append(list(dict.fromkeys([(rank + distance) % world_size, (rank - distance) % world_size])))
        distance *= 3
    return rounds

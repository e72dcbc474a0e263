"""An element-wise minimum over all ranks of a mesh, in rounds that no rank waits for.

N ranks, K values
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from cgx_ray.runtime_ext.mesh import Mesh

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


class MeshMinimum:
    """Minimum over ranks that is under way.

    values_K  that of the ranks heard so far; a new tensor after each round
    """

    def __init__(self, mesh: Mesh, rank: int, world_size: int, values_K: Tensor, channel: int) -> None:
        """Begin the first round. One minimum at a time may use `channel`. `values_K` must stay as it is."""
        self.values_K = values_K
        self._mesh = mesh
        self._channel = channel
        self._left = partners(rank, world_size)
        self._received: dict[int, Tensor] = {}
        self._ticket: int | None = None
        self._post()

    def _post(self) -> None:
        self._received = {peer: torch.empty_like(self.values_K) for peer in self._left.pop(0)}
        sends = dict.fromkeys(self._received, self.values_K)
        self._ticket = self._mesh.post(sends, self._received, channel=self._channel)

    def pass_on(self) -> int | None:
        """Begin the next rounds, as far as that needs no wait.

        Returns the ticket of the round after which others wait for this rank; None if nobody does, or if the round has
        failed, which is left to `finish`: ranks that have ended training hang up in the middle of a minimum.
        """
        while self._ticket is not None and self._left:
            if not self._mesh.is_over(self._ticket):
                return self._ticket
            if self._mesh.has_failed(self._ticket):
                return None
            self._end_round(0.0)
        return None

    def finish(self, timeout_s: float) -> Tensor:
        """Wait for all rounds and return the minimum. Raises RuntimeError as `Mesh.wait`, then the mesh is closed."""
        while self._ticket is not None:
            self._end_round(timeout_s)
        return self.values_K

    def _end_round(self, timeout_s: float) -> None:
        assert self._ticket is not None
        self._mesh.wait(self._ticket, timeout_s)
        self.values_K = reduce(torch.minimum, self._received.values(), self.values_K)
        self._ticket = None
        if self._left:
            self._post()

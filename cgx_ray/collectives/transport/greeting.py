"""Greetings: one byte to some other ranks between two steps, which measures latencies without any probe.

No gradients are in front of it then, so it shows an idle link; messages of the agreement queue behind gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch

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


def greeted(rank: int, world_size: int) -> list[int]:
    """Return the ranks that `rank` greets, which are those that greet it.

    All of up to MAX_DIRECT others. Of more ranks, those that are a third and a half of all ranks away: most are on
    other nodes, and a latency is a quantile over all ranks, so more pairs would add nothing.
    """
    if world_size <= 1 + MAX_DIRECT:
        return [(rank + distance) % world_size for distance in range(1, world_size)]
    distances = [sign * (world_size // part) for part in (3, 2) for sign in (1, -1)]
    return list(dict.fromkeys((rank + distance) % world_size for distance in distances))


class Greetings:
    """Greetings of one rank, each of which is received after the step that follows it, so hardly any rank waits.

    lag_s  by greeted rank, of the last greeting received: seconds from greeting it until its own greeting came. It may
           be negative. The lags of two ranks to each other add up to one round trip, whichever rank was late
    """

    def __init__(self, mesh: Mesh, rank: int, world_size: int, channel: int) -> None:
        """`channel`: used by nothing else."""
        self.lag_s: Mapping[int, float] = {}
        self._mesh = mesh
        self._channel = channel
        # By other rank, room for its greeting, and what it is sent.
        self._received = {peer: torch.empty(1, dtype=torch.uint8, device="cpu") for peer in greeted(rank, world_size)}
        self._sent = dict.fromkeys(self._received, torch.zeros(1, dtype=torch.uint8, device="cpu"))
        self._ticket: int | None = None

    def greet(self) -> None:
        """Send a byte to each of the others. `receive` the last greeting before, else this does nothing.

        A rank that has hung up ends the greetings and nothing else: it may have ended training, and if it has failed,
        the next exchange says so.
        """
        if self._ticket is not None:
            return
        # Connections that were closed meanwhile raise it.
        with suppress(RuntimeError):
            self._ticket = self._mesh.post(self._sent, self._received, channel=self._channel)

    def receive(self, timeout_s: float) -> None:
        """Note in `lag_s` when the greetings came, if all have: each was sent before its rank began the last step.

        Raises RuntimeError as `Mesh.wait`.
        """
        if self._ticket is None or self._mesh.has_failed(self._ticket):
            return
        arrived_s = self._mesh.wait(self._ticket, timeout_s)
        self.lag_s = {peer: arrived_s[peer] for peer in self._received}
        self._ticket = None

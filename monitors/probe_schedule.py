"""When a running job may probe which way, and how much a probe may send. Pure: no clock, no sockets."""

from __future__ import annotations

from collections.abc import Collection

# A probe costs at most this share of a link over this long.
BUDGET_SHARE = 0.01
BUDGET_S = 60.0
# What a link is taken for before anyone has measured it: 100 Mbit/s.
FIRST_GUESS_BYTES_PER_S = 12.5e6


def budget_bytes(bytes_per_s: float | None) -> int:
    """What a probe may send, once a minute, over a link of that rate; None if it is unknown."""
    return int(BUDGET_SHARE * BUDGET_S * (bytes_per_s or FIRST_GUESS_BYTES_PER_S))


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Every ordered pair of nodes once, in rounds in which no node takes part twice (the circle method).

    Whoever has sent receives next: both directions of a link are seen soon.
    """
    seats: list[int | None] = [*range(num_nodes), *[None] * (num_nodes % 2)]
    schedule = []
    for _ in range(len(seats) - 1):
        met = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        pairs = [(a, b) for a, b in met if a is not None and b is not None]
        schedule += [pairs, [(b, a) for a, b in pairs]]
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return schedule


class ProbeSchedule:
    """Gives each way between two nodes its turn, in `rounds`. A node takes part in one probe a minute, at either end.

    So no link sends or receives more than one budget a minute, and no node is ever probed twice at once: a probe is
    over long before that. The first minute belongs to the job's own messages.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._last_s: float | None = None
        # Of this round, whom each source has yet to probe.
        self._left: dict[str, str] = {}

    def grant(self, source: str, nodes: Collection[str], now_s: float) -> str | None:
        """The node that `source` is to probe now; None if it is not its turn.

        nodes  all that take part. Each of them must ask every now and then
        now_s  by one clock for all
        """
        if source not in nodes:
            return None
        if self._last_s is None:
            self._last_s = now_s
        if now_s - self._last_s >= BUDGET_S:
            names, turns = sorted(nodes), rounds(len(nodes))
            self._left = {names[at]: names[to] for at, to in turns[self._turn % len(turns)]}
            self._turn += 1
            self._last_s = now_s
        target = self._left.pop(source, None)
        if target is None or target not in nodes:
            return None
        self._last_s = now_s
        return target

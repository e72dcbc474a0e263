"""The schedule of bandwidth probes in a training, and the bytes a probe may send. Pure: no clock, no sockets."""

from __future__ import annotations

from collections.abc import Collection

# Largest fraction of a link's bytes that a node spends on a probe in each budget period: training needs the rest.
BUDGET_SHARE = 0.01
# Seconds of a budget period: one probe per node and minute.
BUDGET_S = 60.0
# Assumed bytes per second of a link before any measurement: 100 Mbit/s.
FIRST_GUESS_BYTES_PER_S = 12.5e6


def budget_bytes(bytes_per_s: float | None) -> int:
    """Return the bytes that a probe may send once per minute over a link of this rate; None if it is unknown."""
    return int(BUDGET_SHARE * BUDGET_S * (bytes_per_s or FIRST_GUESS_BYTES_PER_S))


def round_of(turn: int, num_nodes: int) -> list[tuple[int, int]]:
    """Return the ordered pairs of round `turn`: no node twice, and each pair once in all rounds (circle method).

    Each round is followed by its reverse, so that both directions of a link are soon measured. After `rounds` they
    begin again.
    """
    others: list[int | None] = [*range(1, num_nodes), *[None] * (num_nodes % 2)]
    shift = turn // 2 % len(others)
    seats: list[int | None] = [0, *others[len(others) - shift :], *others[: len(others) - shift]]
    met = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
    pairs = [(a, b) for a, b in met if a is not None and b is not None]
    return pairs if turn % 2 == 0 else [(b, a) for a, b in pairs]


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return all rounds in which ordered pairs of `num_nodes` nodes meet, see `round_of`."""
    return [round_of(turn, num_nodes) for turn in range(2 * (num_nodes - 1 + num_nodes % 2))]


class ProbeSchedule:
    """Gives each ordered pair of nodes its turn, by `round_of`. A node takes part in one probe per minute, at one end.

    So no link sends or receives more than one budget per minute. No node is probed twice at the same time, since a
    probe is over long before the next one. The first minute belongs to the training's own messages.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._last_s: float | None = None
        # By source, the target that it has not probed yet in this round.
        self._left: dict[str, str] = {}

    def grant(self, source: str, nodes: Collection[str], now_s: float) -> str | None:
        """Return the node that `source` shall probe now, or None if it is not its turn.

        nodes  all nodes that take part; each of them must ask regularly
        now_s  by one clock for all nodes
        """
        if source not in nodes:
            return None
        if self._last_s is None:
            self._last_s = now_s
        if now_s - self._last_s >= BUDGET_S:
            names = sorted(nodes)
            self._left = {names[at]: names[to] for at, to in round_of(self._turn, len(names))}
            self._turn += 1
            self._last_s = now_s
        target = self._left.pop(source, None)
        if target is None or target not in nodes:
            return None
        self._last_s = now_s
        return target

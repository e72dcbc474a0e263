"""The newest probed latency of each node, and their median."""

from __future__ import annotations

import bisect


class NodeLatencies:
    """Latencies by node, kept in order: every report asks for the median of all, and to sort them takes far longer."""

    def __init__(self) -> None:
        # By node, the time of its report and the latency in it.
        self._newest: dict[str, tuple[float, float]] = {}
        self._ordered: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._newest)

    @property
    def median_s(self) -> float:
        """Median of all, of which there must be one."""
        middle, is_odd = divmod(len(self._ordered), 2)
        return self._ordered[middle] if is_odd else (self._ordered[middle - 1] + self._ordered[middle]) / 2

    def add(self, node_id: str, now_s: float, latency_s: float) -> None:
        """Replace what the node has reported before."""
        self.remove(node_id)
        self._newest[node_id] = now_s, latency_s
        bisect.insort(self._ordered, latency_s)

    def remove(self, node_id: str) -> None:
        """Forget what the node has reported, if it has."""
        if node_id in self._newest:
            _, latency_s = self._newest.pop(node_id)
            del self._ordered[bisect.bisect_left(self._ordered, latency_s)]

    def forget_before(self, since_s: float) -> None:
        """Forget what was reported before `since_s`."""
        for node_id in [node_id for node_id, (found_s, _) in self._newest.items() if found_s < since_s]:
            self.remove(node_id)

    def clear(self) -> None:
        """Forget all."""
        self._newest.clear()
        self._ordered.clear()

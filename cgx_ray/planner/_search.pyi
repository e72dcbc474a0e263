# runtime_ext/csrc/planner: its own module, so that the planner imports no torch. Nothing here checks its arguments.
from collections.abc import Sequence

# Numbers of resources with seconds of work on them, latency_s, overlaps.
Stage = tuple[Sequence[tuple[int, float]], float, bool]

def search(
    backward_s: Sequence[float],
    numel: Sequence[float],
    costs: Sequence[tuple[float, ...]],
    tolls: Sequence[Sequence[float]],
    after_s: float,
    max_gap: float,
    max_labels: int,
) -> tuple[float, float, list[tuple[int, int]], int]: ...

# Returns finish_s, parts_s in the order of `StepPart`, `Timeline.started` and `Timeline.path`.
def simulate(
    backward_s: Sequence[float], stages: Sequence[Sequence[Stage]]
) -> tuple[float, list[float], list[tuple[int, int, float, float]], list[int]]: ...

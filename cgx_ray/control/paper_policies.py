"""The papers' policies behind the `Policy` protocol, as published: what they choose is put in force.

The loop asks them for the same reasons as `AdaptivePolicy`, and every `review_s`. They neither compare with dense nor
take back what was slower: the user has asked for them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cgx_ray.control.policy import REVIEW_S, Decision, Situation
from cgx_ray.plan import CodecSpec, Option
from cgx_ray.planner.bits import ALPHA
from cgx_ray.planner.papers.cgx import cgx_groups
from cgx_ray.planner.papers.flexible import FlexibleLoop
from cgx_ray.planner.prediction import Measured, PlannedGroup, groups_of, predict

# Seconds between two looks at the triggers of Flexible Communication.
TRIGGER_S = 20.0

Groups = tuple[PlannedGroup, ...]


class PaperPolicy:
    """Puts the groups in force that `groups` returns for the measurements; None keeps the plan."""

    options: Sequence[Option] = ()
    is_guarded = False
    max_error: float | None = None

    def __init__(self, name: str, groups: Callable[[Measured], Groups | None], *, review_s: float = REVIEW_S) -> None:
        self.review_s = review_s
        self._name = name
        self._groups = groups

    def decide(self, situation: Situation) -> Decision:
        outlook = situation.outlook
        dense = outlook.dense()
        current = predict(outlook.now, groups_of(situation.plan, outlook.now.layers))
        chosen = self._groups(outlook.now)
        predicted = current if chosen is None or chosen == current.groups else predict(outlook.now, chosen)
        step_s, dense_s = map(outlook.errors.step_s, (predicted, dense))
        what = f"{self._name} keeps" if predicted is current else f"{self._name} chooses"
        reason = f"{situation.cause}: {what} {predicted.describe_options()}; predicted {step_s:.3f} s per step"
        is_kept, now = predicted is current, situation.plan
        return Decision(
            kind="keep" if is_kept else "replace",
            plan=now if is_kept else predicted.plan(version=now.version + 1, world_size=now.world_size),
            reason=reason,
            predicted=predicted,
            step_s=step_s,
            dense_s=dense_s,
        )

    def codec_to_time(self, situation: Situation, kept: Decision) -> CodecSpec | None:
        return None

    def recorded(self) -> dict[str, Any]:
        return {"kind": "paper", "name": self._name}


class CgxPolicy(PaperPolicy):
    """CGX, section 5: bits by layer, chosen anew every `review_s`."""

    max_error = ALPHA

    def __init__(self, method: str, *, review_s: float = REVIEW_S) -> None:
        self._method = method
        super().__init__(f"cgx ({method})", self._choose, review_s=review_s)

    def _choose(self, measured: Measured) -> Groups | None:
        return cgx_groups(measured, self._method)


class FlexiblePolicy(PaperPolicy):
    """Flexible Communication, section 3: density and collective, chosen anew when a trigger fires."""

    def __init__(self, method: str) -> None:
        super().__init__(f"flexible ({method})", FlexibleLoop(method).groups, review_s=TRIGGER_S)

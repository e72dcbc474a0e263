"""Changes that neither the network nor the gains explain: another compute time, or steps longer than predicted."""

from __future__ import annotations

from cgx_ray.control.changes import ALARM, ChangeDetector

# Ratio of compute from which a change is a reason to decide anew.
OTHER_COMPUTE = 1.2
# Evidence (`changes.ALARM`) for steps that take another time than predicted: three times that for another network,
# which is the usual cause, so that the network is noticed first.
RATIO_ALARM = 3 * ALARM


class Innovations:
    """CUSUM tests of compute, and of measured over predicted seconds for that compute and network."""

    def __init__(self) -> None:
        self._compute = ChangeDetector()
        self._ratio = _ratio_detector()
        self._has_other_compute = False
        self._other_ratio: float | None = None

    def add(self, compute_s: float, ratio: float, seconds: float) -> None:
        """Add a step under the plan in force. `ratio`: its seconds over the prediction for its compute and network."""
        self._has_other_compute |= self._compute.add(compute_s, seconds) is not None
        if self._ratio.add(ratio, seconds) is not None:
            self._other_ratio = ratio

    def cause(self, decided_compute_s: float, compute_s: float) -> str | None:
        """Return in words what has changed since `acknowledge`, or None."""
        shorter_s, longer_s = sorted((decided_compute_s, compute_s))
        if self._has_other_compute and longer_s >= OTHER_COMPUTE * shorter_s:
            verb = "rose" if compute_s > decided_compute_s else "fell"
            return f"compute {verb} from {decided_compute_s:.3f} to {compute_s:.3f} s"
        if self._other_ratio is not None:
            return f"steps take {self._other_ratio:.2f} times what is predicted for their compute and network"
        return None

    def acknowledge(self) -> None:
        """Forget the changes until now, because a decision has taken them into account."""
        self._has_other_compute, self._other_ratio = False, None

    def restart_ratio(self) -> None:
        """Learn the ratio anew, because predictions are made in another way or for another plan from now on."""
        self._ratio = _ratio_detector()


def _ratio_detector() -> ChangeDetector:
    return ChangeDetector(alarm=RATIO_ALARM, relief_alarm=RATIO_ALARM)

"""Policies that fail or wait, in a module without Ray that the control loop's process can import."""

from __future__ import annotations

import time
from pathlib import Path

from cgx_ray.control.policy import AdaptivePolicy, Decision, Situation
from cgx_ray.planner.options import candidate_options
from support.control_runs import DENSITIES


class RaisingPolicy(AdaptivePolicy):
    """Raises at every decision."""

    def __init__(self) -> None:
        super().__init__(candidate_options(DENSITIES), min_gain=0.8)

    def decide(self, situation: Situation) -> Decision:
        raise ZeroDivisionError("no plan can be found")


class SlowPolicy(AdaptivePolicy):
    """Makes file `begun` in its folder when it is asked, and decides once there is file `go_on`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(candidate_options(DENSITIES), min_gain=0.8)
        self.begun, self.go_on = folder / "begun", folder / "go_on"

    def decide(self, situation: Situation) -> Decision:
        self.begun.touch()
        end_s = time.monotonic() + 60
        while not self.go_on.exists():
            assert time.monotonic() < end_s, "nobody let the policy go on"
            time.sleep(0.01)
        return super().decide(situation)

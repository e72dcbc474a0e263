"""Policies that fail or wait, in a module without Ray that the control loop's process can import."""

from __future__ import annotations

import time
from pathlib import Path

from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.policy import Decision, Policy, Situation
from cgx_ray.planner.candidates import candidate_options
from support.control_runs import DENSITIES

ADAPTIVE = Adaptive(candidates=candidate_options(DENSITIES))


class RaisingPolicy(Policy):
    """Raises at every decision."""

    options = ADAPTIVE.options

    def decide(self, situation: Situation) -> Decision:
        raise ZeroDivisionError("no plan can be found")


class SlowPolicy(Policy):
    """Makes file `begun` in its folder when it is asked, and decides once there is file `go_on`."""

    options = ADAPTIVE.options

    def __init__(self, folder: Path) -> None:
        self.begun, self.go_on = folder / "begun", folder / "go_on"

    def decide(self, situation: Situation) -> Decision:
        self.begun.touch()
        end_s = time.monotonic() + 60
        while not self.go_on.exists():
            assert time.monotonic() < end_s, "nobody let the policy go on"
            time.sleep(0.01)
        return ADAPTIVE.decide(situation)

"""Plans on their way from the controller to the ranks of a node: one long poll per node instead of one per rank."""

from __future__ import annotations

import threading
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from cgx_ray.plan import Plan

# The controller answers a long poll without a new plan after this time.
POLL_TIMEOUT_S = 10.0
# Longest wait within `poll`, so that its thread ends soon after it is told to.
TURN_S = 0.5
# Newest plans that are kept for ranks that ask late, as many as the controller keeps for its own next one.
KEPT_PLANS = 8


class PlanRelay:
    """Takes plans from the controller by long poll, once a rank has asked for one, and keeps them for the ranks."""

    def __init__(self) -> None:
        self._controller: Any = None
        self._request: Any = None
        self._plans: list[Plan] = []
        self._is_asked = False
        # False before the agent was told of a controller.
        self._has_answer = False
        self._changed = threading.Condition()

    def follow(self, controller: Any) -> None:
        """Go on with another controller. None: ranks have to ask it themselves."""
        with self._changed:
            self._controller, self._request, self._plans = controller, None, []
            self._has_answer = controller is not None
            self._changed.notify_all()

    def after(self, version: int, timeout_s: float) -> list[Plan] | None:
        """Return the plans newer than `version`, oldest first; wait up to `timeout_s` for one, then return none.

        Returns None if the controller does not answer this node: then ask it, it may answer others.
        """
        with self._changed:
            self._is_asked = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._newer(version)) or not self._has_answer, timeout_s)
            return self._newer(version) if self._has_answer else None

    def _newer(self, version: int) -> list[Plan]:
        return [plan for plan in self._plans if plan.version > version]

    def poll(self) -> None:
        """Go on with the long poll for at most TURN_S. Only one thread may call it."""
        with self._changed:
            if self._controller is None or not self._is_asked:
                self._changed.wait(TURN_S)
                return
            if self._request is None:
                # A new agent asks for all: a rank may lack a plan that others have, and it must hold each.
                newest = self._plans[-1].version if self._plans else -1
                self._request = self._controller.plans_after.remote(newest, POLL_TIMEOUT_S)
            request = self._request
        if not ray.wait([request], timeout=TURN_S)[0]:
            return
        try:
            found = ray.get(request)
        except RayError as error:
            # Ranks that ask the controller themselves meet the error too, and say so.
            is_gone = isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)
            self._note(request, None, is_gone=is_gone)
        else:
            self._note(request, found, is_gone=False)

    def _note(self, request: Any, found: list[Plan] | None, *, is_gone: bool) -> None:
        """Keep the plans of an answer. None: there was an error; `is_gone`: the controller will never answer."""
        with self._changed:
            if request is not self._request:
                # There is another controller since then.
                return
            self._request, self._has_answer = None, found is not None
            self._plans = [*self._plans, *(found or [])][-KEPT_PLANS:]
            if is_gone:
                self._controller = None
            self._changed.notify_all()
            if not self._has_answer:
                # Ray starts it again.
                self._changed.wait(TURN_S)

"""Ray's side of one training worker: carry samples out and plans in, and restore state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from cgx_ray.errors import PlanError
from cgx_ray.monitors.plan_relay import POLL_TIMEOUT_S
from cgx_ray.plan import Layer, Plan
from cgx_ray.planner.legs import EncodesOn
from cgx_ray.session.attachment import Attachment, process
from cgx_ray.session.calibrate import measure_codecs
from cgx_ray.session.settings import Settings

logger = logging.getLogger(__name__)

STATE_FILES = "cgx_ray-rank*.pt"
# Seconds between two reports to the agent. Between them the thread waits for a plan.
CARRY_INTERVAL_S = 0.5


def state_file(rank: int, world_size: int) -> str:
    return f"cgx_ray-rank{rank:05d}-of-{world_size:05d}.pt"


class RaySession:
    """The `Session` of a Ray Train worker."""

    def __init__(self, settings: Settings, controller: Any, agent: Any, folder: Path) -> None:
        """`folder`: of the run's files."""
        self.settings = settings
        self._folder = folder
        self._controller = controller
        self._agent = agent
        # Set before controller and agents are ended on purpose: then their end is no reason for a warning.
        self.closing = threading.Event()
        self._states: list[dict[str, Any]] | None = None

    def first_plan(self, layers: Sequence[Layer], world_size: int, bucket_bytes: int) -> Plan:
        """Return the controller's newest plan, or a fresh one if it has none yet or does not answer."""
        device = ray.train.torch.get_device()
        fresh = self.settings.first_plan(layers, world_size, bucket_bytes)
        costs = measure_codecs(self.settings, device) if self.settings.decides else {}
        # On a GPU codecs have a stream of their own. On a CPU they take the cores that backward runs on.
        encodes_on: EncodesOn = "backward" if device.type == "cpu" else "thread"
        while True:
            try:
                call = self._controller.register.remote(layers, fresh, costs, encodes_on, self._restored_step())
                plan: Plan = ray.get(call)
                return plan
            except ActorUnavailableError:
                # Its process has died, and Ray starts it again.
                time.sleep(CARRY_INTERVAL_S)
            except RayActorError as error:
                logger.warning("no controller (%s): training starts with %s and keeps it", error, fresh.describe())
                return fresh

    def start(self, attachment: Attachment) -> None:
        """Restore the state in a checkpoint, if there is one, then start to carry plans and samples."""
        states, self._states = self._checkpoint_states(), None
        if states:
            attachment.load_state_dict(states[0] if len(states) == 1 else states)
        if attachment.plan is None:
            return
        if self.settings.trace_steps is not None:
            first, last = self.settings.trace_steps
            rank = torch.distributed.get_rank()
            attachment.trace(self._folder / f"trace-rank{rank:05d}.json", first_step=first, last_step=last)
        threading.Thread(target=self._carry, args=(attachment,), name="cgx-ray-carrier", daemon=True).start()

    def _restored_step(self) -> int:
        states = self._checkpoint_states()
        return max((state.get("step", 0) for state in states), default=0)

    def _checkpoint_states(self) -> list[dict[str, Any]]:
        """Return the states in the checkpoint that Ray Train resumes from, which is read once.

        It is this rank's own state, or those of all ranks if the world size has changed.
        """
        if self._states is None:
            self._states = read_states()
        return self._states

    def _carry(self, attachment: Attachment) -> None:
        plans = _Plans(self._controller, self._agent, attachment, self.closing)
        samples = _Samples(self._agent, attachment, self.closing)
        while (plans.is_alive or samples.is_alive) and not self.closing.is_set():
            plans.wait(CARRY_INTERVAL_S)
            samples.send()
            fault = attachment.take_fault()
            if fault is not None:
                # At once: the train controller ends all actors of this run when it hears of the error.
                self._controller.report_fault.remote(fault)


class _Plans:
    """Takes plans by long poll: one request is always under way, and training never waits.

    The agent of the node is asked. If it does not answer, or does not hear from the controller, the controller itself
    is asked once, or from then on if the agent is gone: all ranks wait for a plan until each of them holds it.
    """

    def __init__(self, controller: Any, agent: Any, attachment: Attachment, closing: threading.Event) -> None:
        assert attachment.plan is not None
        self._controller = controller
        self._agent = agent
        self._attachment = attachment
        self._closing = closing
        self._version = attachment.plan.version
        self.is_alive = True
        self._has_warned = False
        self._asks_agent = True
        self._ask()

    def _ask(self) -> None:
        actor = self._agent if self._asks_agent else self._controller
        self._request = actor.plans_after.remote(self._version, POLL_TIMEOUT_S)

    def wait(self, timeout_s: float) -> None:
        """Hold the plans that arrive within `timeout_s`. If the controller is dead, warn once and ask no more."""
        if self._asks_agent:
            self._take_from_agent(timeout_s)
        else:
            self._take_from_controller(timeout_s)

    def _take_from_agent(self, timeout_s: float) -> None:
        if not ray.wait([self._request], timeout=timeout_s)[0]:
            return
        plans: list[Plan] | None = None
        try:
            plans = ray.get(self._request)
        except ActorUnavailableError:
            pass  # Ray starts it again, and `_Samples` has the line about one that is gone.
        except RayError:
            self._agent = None
        if plans is not None:
            self._hold(plans)
        self._asks_agent = plans is not None
        self._ask()

    def _hold(self, plans: Sequence[Plan]) -> None:
        try:
            for plan in plans:
                self._version = plan.version
                self._attachment.hold(plan)
        except PlanError as error:
            logger.error("a plan of the controller was rejected; the plan in force stays: %s", error)

    def _take_from_controller(self, timeout_s: float) -> None:
        if not self.is_alive:
            time.sleep(timeout_s)
            return
        if not ray.wait([self._request], timeout=timeout_s)[0]:
            return
        try:
            self._hold(ray.get(self._request))
        except ActorUnavailableError as error:
            # Its process has died, and Ray starts it again.
            self._warn_once(f"the controller does not answer: training goes on with {self._in_force}", error)
            time.sleep(timeout_s)
        except RayError as error:
            self.is_alive = False
            if self._closing.is_set():
                return
            logger.warning("the controller is gone: training goes on with %s (%s)", self._in_force, _first_line(error))
            return
        self._asks_agent = self._agent is not None
        self._ask()

    @property
    def _in_force(self) -> str:
        assert self._attachment.plan is not None
        return f"plan {self._attachment.plan.version}, {self._attachment.plan.describe()}"

    def _warn_once(self, message: str, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s, until it is back (%s)", message, _first_line(error))


class _Samples:
    """Sends samples to this node's agent, one report at a time."""

    def __init__(self, agent: Any, attachment: Attachment, closing: threading.Event) -> None:
        self._agent = agent
        self._closing = closing
        self._attachment = attachment
        self._report: Any = None
        self.is_alive = True

    def send(self) -> None:
        """Report new samples, unless the last report is still under way. If the agent is dead, warn once."""
        if not self.is_alive or (self._report is not None and not ray.wait([self._report], timeout=0)[0]):
            return
        try:
            if self._report is not None:
                ray.get(self._report)
        except ActorUnavailableError:
            pass  # This report is lost; the next one may arrive.
        except RayError as error:
            self.is_alive = False
            if not self._closing.is_set():
                logger.warning("this node's monitor is gone: training goes on unwatched (%s)", _first_line(error))
            return
        samples = self._attachment.take_samples()
        self._report = self._agent.report.remote(samples) if samples else None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def open_ray_session(settings: Settings, controller: Any, agents: Mapping[str, Any], folder: Path) -> None:
    """Give `attach` a session. The backend calls it in every worker, with the agents by node and the run's folder."""
    agent = agents[ray.get_runtime_context().get_node_id()]
    process.session = RaySession(settings, controller, agent, folder)


def close_ray_session() -> None:
    """Announce the end of controller and agents. The backend calls it in every worker before it ends them."""
    if isinstance(process.session, RaySession):
        process.session.closing.set()


def read_states() -> list[dict[str, Any]]:
    """Return the states in the checkpoint that Ray Train resumes from: this rank's own, or those of all ranks."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return []
    context = ray.train.get_context()
    with checkpoint.as_directory() as folder:
        files = sorted(Path(folder).glob(STATE_FILES))
        own = Path(folder) / state_file(context.get_world_rank(), context.get_world_size())
        return [torch.load(file, weights_only=True) for file in ([own] if own in files else files)]

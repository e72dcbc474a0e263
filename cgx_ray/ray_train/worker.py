"""Ray's side of one training worker: carry samples out and plans in, and restore state."""

from __future__ import annotations

import functools
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
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from cgx_ray.errors import PlanError
from cgx_ray.logs import name_lines, show_lines
from cgx_ray.monitors.plan_relay import POLL_TIMEOUT_S
from cgx_ray.monitors.sample import Fault
from cgx_ray.plan import Layer, Plan
from cgx_ray.planner.candidates import CodecCosts
from cgx_ray.session.attachment import Attachment, process
from cgx_ray.session.calibrate import calibrate
from cgx_ray.session.settings import Settings
from cgx_ray.session.state_files import read_state

logger = logging.getLogger(__name__)

# Shortest time between two reports to the agent, in seconds, and longest one between two looks for the end.
CARRY_INTERVAL_S = 0.5
# Longest wait for the controller's first plan, in seconds. It takes milliseconds, and some seconds after a resize.
REGISTER_S = 60.0
# Longest time for which an error is held back so that the controller can write it down, in seconds.
FAULT_S = 5.0


class RaySession:
    """The `Session` of a Ray Train worker."""

    def __init__(self, settings: Settings, controller: Any, agent: Any, folder: Path) -> None:
        """`folder`: of the run's files."""
        self.settings = settings
        self._folder = folder
        self.journal = folder / "decisions.jsonl"
        self._controller = controller
        self._agent = agent
        # Set before controller and agents are ended on purpose: then their end is no reason for a warning.
        self.closing = threading.Event()
        # What the checkpoint holds for this rank, once it was read.
        self._state: dict[str, Any] | None = None
        self._has_read = False

    def first_plan(self, layers: Sequence[Layer], world_size: int, bucket_bytes: int, costs: CodecCosts | None) -> Plan:
        """Return the controller's newest plan, or a fresh one if it has none yet or does not answer."""
        fresh = self.settings.first_plan(layers, world_size, bucket_bytes)
        device = ray.train.torch.get_device()
        registration = calibrate(self.settings, layers, fresh, device, costs, step=self._restored_step())
        while True:
            try:
                plan: Plan = ray.get(self._controller.register.remote(registration), timeout=REGISTER_S)
                return plan
            except ActorUnavailableError:
                # Its process has died, and Ray starts it again.
                time.sleep(CARRY_INTERVAL_S)
            except (RayActorError, GetTimeoutError) as error:
                logger.warning("no controller (%s): training starts with %s and keeps it", error, fresh.describe())
                return fresh

    def start(self, attachment: Attachment) -> None:
        """Restore the state in a checkpoint, if there is one, then start to carry plans and samples."""
        state = self._checkpoint_state()
        self._state, self._has_read = None, False
        if state is not None:
            attachment.load_state_dict(state)
        if attachment.plan is None:
            return
        if self.settings.trace_steps is not None:
            first, last = self.settings.trace_steps
            rank = torch.distributed.get_rank()
            attachment.trace(self._folder / f"trace-rank{rank:05d}.json", first_step=first, last_step=last)
        attachment.call_on_fault(self._report_fault)
        for work, name in ((self._carry_plans, "cgx-ray-carrier"), (self._carry_samples, "cgx-ray-reporter")):
            threading.Thread(target=work, args=(attachment,), name=name, daemon=True).start()

    def _restored_step(self) -> int:
        state = self._checkpoint_state()
        return int(state.get("step", 0)) if state is not None else 0

    def _checkpoint_state(self) -> dict[str, Any] | None:
        """Return what the checkpoint that Ray Train resumes from holds for this rank. It is read once per attach."""
        if not self._has_read:
            self._state, self._has_read = _read_checkpoint(), True
        return self._state

    def _carry_plans(self, attachment: Attachment) -> None:
        plans = _Plans(self._controller, self._agent, attachment, self.closing)
        while plans.is_alive and not (self.closing.is_set() or attachment.is_closed):
            plans.wait(CARRY_INTERVAL_S)

    def _carry_samples(self, attachment: Attachment) -> None:
        samples = _Samples(self._agent, attachment, self.closing)
        has_ended = threading.Event()
        attachment.call_on_sample(has_ended.set)
        while samples.is_alive and not (self.closing.is_set() or attachment.is_closed):
            has_ended.wait(CARRY_INTERVAL_S)
            has_ended.clear()
            samples.send()
            self.closing.wait(CARRY_INTERVAL_S)

    def _report_fault(self, fault: Fault) -> None:
        """Wait until the controller has the error: once it is raised, Ray Train ends all actors of this run."""
        try:
            ray.get(self._controller.report_fault.remote(fault), timeout=FAULT_S)
        except RayError as error:
            logger.warning("the error is not in the journal, as the controller does not answer: %s", error)


class _Plans:
    """Takes plans by long poll: one request is always under way, and training never waits.

    The agent of the node is asked. If it does not answer, or gets nothing from the controller, the controller itself
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
        self._ask(asks_agent=True)

    def _ask(self, *, asks_agent: bool) -> None:
        self._asks_agent = asks_agent and self._agent is not None
        if self._asks_agent:
            self._request = self._agent.plans_after.remote(self._version, POLL_TIMEOUT_S)
        else:
            self._request = self._controller.plans_after.remote(self._version)

    def wait(self, timeout_s: float) -> None:
        """Hold the plans that arrive within `timeout_s`. If the controller is dead, warn once and ask no more."""
        if ray.wait([self._request], timeout=timeout_s)[0]:
            if self._asks_agent:
                self._take_from_agent()
            else:
                self._take_from_controller()
                # It answers at once.
                time.sleep(timeout_s)

    def _take_from_agent(self) -> None:
        plans: list[Plan] | None = None
        try:
            plans = ray.get(self._request)
        except ActorUnavailableError:
            pass  # Ray starts it again, and `_Samples` has the line about one that is gone.
        except RayError:
            self._agent = None
        if plans is not None:
            self._hold(plans)
        self._ask(asks_agent=plans is not None)

    def _hold(self, plans: Sequence[Plan]) -> None:
        try:
            for plan in plans:
                self._version = plan.version
                self._attachment.take(plan)
        except PlanError as error:
            logger.error("a plan of the controller was rejected; the plan in force stays: %s", error)

    def _take_from_controller(self) -> None:
        try:
            self._hold(ray.get(self._request))
        except ActorUnavailableError as error:
            # Its process has died, and Ray starts it again.
            self._warn_once(f"the controller does not answer: training goes on with {self._in_force}", error)
        except RayError as error:
            self.is_alive = False
            if not self._closing.is_set():
                logger.warning(
                    "the controller is gone: training goes on with %s (%s)", self._in_force, _first_line(error)
                )
            return
        self._ask(asks_agent=True)

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
    show_lines()
    name_lines()
    _time_reports()
    agent = agents.get(ray.get_runtime_context().get_node_id())
    process.session = RaySession(settings, controller, agent, folder)


def _time_reports() -> None:
    """Have `ray.train.report` tell attachments how long it took.

    Ray's controller takes one report every two seconds, and the next one waits for that. In each step, such a wait
    cannot be told from compute by the times of the step.
    """
    report = ray.train.report
    if hasattr(report, "is_timed"):
        return

    @functools.wraps(report)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return report(*args, **kwargs)
        finally:
            if process.attachment is not None:
                process.attachment.add_pause(time.perf_counter() - began_s)

    timed.is_timed = True  # type: ignore[attr-defined]
    ray.train.report = timed


def close_ray_session() -> None:
    """Announce the end of controller and agents. The backend calls it in every worker before it ends them.

    Checkpoints have been uploaded by now, so what `add_state` has made is removed: Ray kills the worker next.
    """
    if isinstance(process.session, RaySession):
        process.session.closing.set()
        is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if process.attachment is None and is_first:
            logger.warning(
                "no model was attached, so CGXConfig changed nothing; call cgx_ray.attach(model) in the training "
                "function, after ray.train.torch.prepare_model"
            )
    if process.state_folder is not None:
        process.state_folder.remove()
        process.state_folder = None


def _read_checkpoint() -> dict[str, Any] | None:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    context = ray.train.get_context()
    with checkpoint.as_directory() as folder:
        return read_state(Path(folder), context.get_world_rank(), context.get_world_size())

"""An engine at work behind a model, and the process it works in. Imports no Ray."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch.distributed as dist
from torch import nn

from cgx_ray.codecs.codec import KINDS
from cgx_ray.collectives.transport.lifeline import Lifeline
from cgx_ray.collectives.transport.tcp import node_address
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.period.rounds import Rounds
from cgx_ray.engine.sharded.sharded_engine import ShardedEngine
from cgx_ray.engine.step_sample import Span
from cgx_ray.engine.step_trace import StepTrace
from cgx_ray.engine.thread import CLOSE_S
from cgx_ray.errors import ConfigError, PlanError, names_arguments
from cgx_ray.monitors.endpoint import Endpoint
from cgx_ray.monitors.sample import Fault, StepSample
from cgx_ray.plan import CodecSpec, Plan, Scheme, as_plan
from cgx_ray.session.explore import CANDIDATES, Exploration, Stateful, explore
from cgx_ray.session.own_folder import OwnFolder
from cgx_ray.session.protocol import Session
from cgx_ray.session.served_metrics import ServedMetrics
from cgx_ray.session.states import CHANGES, ROUND, STATE_FORMAT, check_own, named_as, no_memory, own_place, state_of
from cgx_ray.torch_compat import destroy_group

if TYPE_CHECKING:
    from cgx_ray.session.local_control import LocalControl

logger = logging.getLogger(__name__)

# Key of the number of ranks that have added their state to a checkpoint, in the store of a process group.
_NUM_ADDING = "cgx_ray/num_adding"
# Seconds from the end of a model to that of its connections. Other ranks may be in their last step of it, and what they
# send meanwhile must find a reader: else TCP drops what this rank has sent and they have not received.
LINGER_S = 5.0


class Attachment:
    """An engine at work behind a model.

    is_closed  True once `close` was called, or the model is gone
    control    decides in a run without Ray; None in others, and if one codec or plan is kept

    At world size 1, and with CGX_POLICY=off, it exchanges nothing. The state that it loads is kept for the next
    checkpoint, so that residuals are not lost if there are more workers again, or cgx_ray is on again.
    """

    def __init__(
        self,
        engine: Engine | ShardedEngine | None,
        groups: Sequence[dist.ProcessGroup] = (),
        detach: Callable[[], None] | None = None,
        lifeline: Lifeline | None = None,
        model: nn.Module | None = None,
        control: LocalControl | None = None,
        is_decided: bool = False,
    ) -> None:
        """
        groups      the engine's own process groups, which `close` destroys
        detach      removes the model's hooks
        lifeline    watches the ranks of the engine
        model       has the hooks. Its end closes this, so neither this nor `detach` may keep it alive
        is_decided  a policy decides about the plans
        """
        self._engine = engine
        self._groups = groups
        self._detach = detach
        self._lifeline = lifeline
        self.control = control
        self._is_decided = is_decided
        self.is_closed = False
        self._closing = threading.RLock()
        self._end_of_model = weakref.finalize(model, self._begin_to_close) if model is not None else None
        if self._end_of_model is not None:
            # Python's end closes all that must be closed then.
            self._end_of_model.atexit = False
            process.attachments.add(self)
        self._served: ServedMetrics | Endpoint | None = None
        self._kept: dict[str, Any] | None = None
        self._num_added = 0
        self._at_end: Callable[[], None] | None = None

    def __repr__(self) -> str:
        doing = self.plan.describe() if self.plan is not None else "nothing is exchanged"
        return f"<Attachment: {'closed' if self.is_closed else doing}>"

    @property
    def has_state(self) -> bool:
        """True if a checkpoint should have the state of this rank."""
        return self._engine is not None or self._kept is not None

    @property
    def plan(self) -> Plan | None:
        """Plan in force; None if nothing is exchanged."""
        return self._engine.plan if self._engine is not None else None

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """Gloo group of all ranks, for values in host memory, between steps; None if there is one rank."""
        return self._groups[0] if self._groups else None

    @property
    def last_step(self) -> StepSample | None:
        """Times and bytes of the newest finished exchange."""
        return self._engine.last_step if self._engine is not None else None

    def metrics(self) -> dict[str, float]:
        """Return numbers by name, for TensorBoard, W&B, MLflow; empty where there is no step.

        cgx_ray/step_s, cgx_ray/compute_s    seconds of a step, and of the part that exchanges do not lengthen
        cgx_ray/wire_mb, cgx_ray/dense_mb    what this rank has sent per step, and the size of its gradients without
                                             compression: among N ranks, dense DDP sends 2 (N-1) / N times as much, and
                                             FSDP2 half of that
        cgx_ray/period, cgx_ray/plan         of the last step: steps per exchange, and the version of the plan

        The first four are means over the steps since the last call; without a new step all are those of that call.
        Waits for the measurement of the last step, so log every few steps.
        """
        # It waits.
        return self._engine.telemetry.take_means() if self._engine is not None and self.last_step is not None else {}

    @property
    def last_spans(self) -> list[Span]:
        """Times of each group's phases in the last finished step of a DDP model; empty before the first step."""
        return list(self._engine.last_spans) if isinstance(self._engine, Engine) else []

    def trace(self, path: str | Path, *, first_step: int, last_step: int) -> None:
        """Write what this rank's groups do in these steps to `path`, for https://ui.perfetto.dev.

        Raises ConfigError for an FSDP2 model. At world size 1 nothing is written.
        """
        if self._engine is None:
            return
        if not isinstance(self._engine, Engine):
            raise ConfigError("steps of an FSDP2 model cannot be traced; leave trace_steps out")
        self._engine.trace = StepTrace(Path(path), dist.get_rank(), first_step, last_step)

    def hold(self, plan: Plan) -> None:
        """Offer a newer plan, as `Engine.hold` does. It takes effect once every rank has been offered it.

        Does nothing if nothing is exchanged. The journal of a run with a folder has no plans that are held. Raises
        ConfigError if the run has a policy that decides.
        """
        if self._is_decided:
            raise ConfigError(
                "the policy of this run decides about its plans, so it takes none by hand; give policy 'static' to "
                "hold plans, or limit what is decided, as by Adaptive(periods=(1,)) or Adaptive(candidates=...)"
            )
        self.take(as_plan(plan))

    def take(self, plan: Plan) -> None:
        """Offer a plan that the run's policy has decided on."""
        if self._engine is not None:
            self._engine.hold(plan)

    @names_arguments
    def observe(self, *, loss: SupportsFloat | None = None, lr: SupportsFloat | None = None) -> None:
        """Report the loss and the learning rate of this rank's step, once per step, to an adaptive run. Optional.

        The controller takes the mean loss over ranks (`control.gains.loss_trend`). A plan under which it gets worse is
        left for one that keeps more. After the learning rate has changed by 2x within 120 steps, only options that keep
        95 % are taken up for a while.

        loss, lr  real numbers, NumPy's as well, or tensors or arrays with one element; a tensor on a GPU is copied
                  without waiting for it

        Numbers that are not finite, and learning rates that are not positive, count as not reported. With several calls
        per step the last one counts. Codecs of FSDP2 models are chosen by time alone; there the journal has the loss.
        Raises ConfigError for what is no single number.
        """
        if self._engine is not None:
            self._engine.observed.add_report(loss=loss, lr=lr)

    def add_pause(self, seconds: float) -> None:
        """Tell of seconds between two steps in which the training waited for something else: they are in no step."""
        if self._engine is not None:
            self._engine.observed.add_pause(seconds)

    def explore(
        self,
        stateful: Sequence[Stateful],
        step: Callable[[int], object],
        *,
        candidates: Sequence[CodecSpec | str] = CANDIDATES,
        scheme: Scheme | str | None = None,
        iterations: int = 10,
        group_bytes: int | None = None,
        since: Exploration | None = None,
    ) -> Exploration:
        """Train a few steps with each candidate, undo them, and go on with the codec at the knee of time and gain.

        Flexible Communication, section 3-E, with checkpoints in memory. Call it on all ranks, between steps, with the
        same arguments. Afterwards `stateful`, torch's random numbers, codecs' memory and the step are as before, bit
        for bit. Gradients are those of the last `step`. If `step` raises, the plan that was tried stays in force.

        stateful    the model, the optimizer and all else that `step` changes: a schedule, a GradScaler
        step        one training step: forward, one synchronised backward, optimizer. It is called with 0, 1, ... for
                    each candidate. It should train on the same batch for the same number, and must not use up data
                    that the training needs
        candidates  default: top-k with the paper's densities
        scheme      of all candidates; default: `preferred_scheme`
        iterations  steps per candidate; every other one measures the gain instead of times. Two or three more steps
                    bring its plan in force
        group_bytes as in `make_plan`
        since       the last exploration: it is returned again, after a trial of its knee alone, while its plan is in
                    force, its gain is within 10 % and its exchange time within 25 % of what they were

        Raises ConfigError for an FSDP2 model; if a controller chooses the plans; and, before the first step, if a
        scheme cannot carry a candidate. Raises PlanError if nothing is exchanged, and CGXError on all ranks if no rank
        had gradients.
        """
        if self._engine is None:
            raise PlanError("one worker, or CGX_POLICY=off, exchanges nothing; explore with more workers, cgx_ray on")
        if not isinstance(self._engine, Engine):
            raise ConfigError("an FSDP2 model cannot explore; explore with a DistributedDataParallel model")
        session = self.control or process.session
        if session is not None and session.settings.decides:
            raise ConfigError(f"policy {session.settings.policy!r} chooses plans itself; explore with policy='static'")
        return explore(
            self._engine,
            self._groups[0],
            stateful,
            step,
            candidates=candidates,
            scheme=scheme,
            iterations=iterations,
            group_bytes=group_bytes,
            since=since,
        )

    def take_samples(self) -> list[StepSample]:
        """Return the samples since the last call; see `Engine.take_samples`."""
        return self._engine.take_samples() if self._engine is not None else []

    @property
    def fault(self) -> Fault | None:
        """The error that has stopped the exchange of gradients; None if there is none."""
        return self._engine.telemetry.fault if self._engine is not None else None

    def call_at_end(self, at_end: Callable[[], None]) -> None:
        """Call `at_end` once, at the end of `close` or of Python."""
        self._at_end = at_end
        atexit.register(at_end)

    def call_on_fault(self, on_fault: Callable[[Fault], None]) -> None:
        """Call `on_fault`, in the engine's thread, with the error that stops the exchange, before it is raised."""
        if self._engine is not None:
            self._engine.telemetry.on_fault = on_fault

    def call_on_sample(self, on_sample: Callable[[], None]) -> None:
        """Call `on_sample`, in the engine's thread, when `take_samples` has something new. It must not wait."""
        if self._engine is not None:
            self._engine.telemetry.on_sample = on_sample

    def serve_metrics(self, run_name: str, *, host: str | None = None, port: int = 0) -> tuple[str, int] | None:
        """Serve this rank's metrics for Prometheus until `close`; return host and port. For runs without Ray.

        run_name  value of the label ray_train_run_name, by which the boards choose a run
        host      address to listen on; default: the address of this node that the other ranks use
        port      default: any free one. Each rank needs a port of its own: give 9400 + local rank, for instance

        From then on `take_samples` returns nothing. Returns None at world size 1, where there is nothing to serve.
        Raises ConfigError in a Ray Train worker, whose metrics Ray serves, and if they are served already. Raises
        OSError if the port is in use.
        """
        if process.session is not None:
            raise ConfigError("Ray serves the metrics of a Ray Train run; leave serve_metrics out")
        if self._served is not None:
            raise ConfigError(f"the metrics are served already, at {self._served.address}; call serve_metrics once")
        if self._engine is None:
            return None
        if self.control is not None:
            # It takes the samples.
            self._served = endpoint = Endpoint(host or node_address(), port)
            self.control.export_to(endpoint, run_name)
        else:
            self._served = ServedMetrics(self._engine.take_samples, run_name, host or node_address(), port)
        return self._served.address

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's codec memory, loss scale and step for a checkpoint: tensors, numbers and strings only."""
        if self._kept is not None:
            return dict(self._kept)
        rank, world_size = own_place()
        return {
            "format": STATE_FORMAT,
            "rank": rank,
            "world_size": world_size,
            **no_memory(),
            **(self._engine.state() if self._engine is not None else {"step": 0, "loss_scale": 1.0}),
            **({ROUND: rounds.state()} if (rounds := self._rounds) is not None else {}),
        }

    def load_state_dict(self, states: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> None:
        """Load this rank's `state_dict`, or those of all ranks in any order: a list, or an iterator that loads them.

        Call it on every rank before training goes on. From those of all, each rank takes its own state, or the mean of
        all if the world size has changed. An iterator is asked for one state at a time, and no other is in memory then.
        The loss scale may have changed since, and so may names that wrappers of torch give, such as torch.compile.

        Raises StateError, and changes nothing, if a state is of another format, model, rank or world size, or not
        finite, or if the states are not those of all ranks of one run at one step.
        """
        rank, world_size = own_place()
        state = dict(states) if isinstance(states, Mapping) else state_of(rank, world_size, states)
        check_own(state, rank, world_size)
        if self._engine is None:
            # From now on it is the state of this rank.
            self._kept = state
            return
        names = [name for group in self._engine.plan.groups for name in group.layers]
        memories = {kind: named_as(state[kind], names) for kind in KINDS}
        if not isinstance(self._engine, Engine):
            self._engine.load_state(state["step"], memories, loss_scale=state["loss_scale"])
            return
        if self._rounds is not None:
            self._rounds.load_state({**state[ROUND], "anchor": named_as(state[ROUND]["anchor"], names)})
        changes = {kind: named_as(state[CHANGES][kind], names) for kind in KINDS}
        self._engine.load_state(state["step"], memories, changes=changes, loss_scale=state["loss_scale"])

    def end_round(self) -> None:
        """Average the parameters now, if ranks have trained alone since they last did (a period of more than 1).

        Call it on all ranks, between steps, before what should see the ranks' common parameters: validation, saving the
        model, the end of the training. The next round begins then. Else it does nothing.
        """
        if self._rounds is not None:
            self._rounds.end_round()

    @property
    def _rounds(self) -> Rounds | None:
        return self._engine.rounds if isinstance(self._engine, Engine) else None

    def note_added(self) -> None:
        """Note that a checkpoint gets the state of this rank. Warn once if only some ranks do this.

        Ranks report their checkpoints together. So when this rank adds its second state, all have reported the first.
        """
        if not self._groups:
            return
        store, world_size = self._groups[0].get_group_store(), dist.get_world_size()
        self._num_added += 1
        num_adding = store.add(_NUM_ADDING, 1 if self._num_added == 1 else 0)
        if self._num_added == 2 and num_adding < world_size:
            logger.warning(
                "rank %d: only %d of %d ranks add their state to checkpoints; call add_state on every rank, else a "
                "restart begins with the mean of theirs",
                dist.get_rank(),
                num_adding,
                world_size,
            )

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Stop the engine's thread and destroy its process groups.

        timeout_s  seconds for the step under way to end. Then this rank disconnects from the others, which get an error
                   if they are still in the step

        Afterwards a DDP model cannot be trained; an FSDP2 model trains uncompressed. A new model can be attached.

        The end of a model closes its attachment too, some seconds later, or when the next model is attached.
        """
        self.is_closed = True
        with self._closing:
            if self._end_of_model is not None:
                self._end_of_model.detach()
            if self._detach is not None:
                self._detach()
                self._detach = None
            if self._engine is not None:
                self._engine.close(timeout_s)
            # The last step is known now.
            if self._at_end is not None:
                atexit.unregister(self._at_end)
                self._at_end()
                self._at_end = None
            if self.control is not None:
                self.control.close()
            if self._served is not None:
                self._served.close()
                self._served = None
            if self._lifeline is not None:
                self._lifeline.close()
            groups, self._groups = self._groups, ()
            for group in groups:
                destroy_group(group)

    def _begin_to_close(self) -> None:
        """Leave the rest to another thread: Python collects on any thread, whatever locks that holds."""
        self.is_closed = True
        if self._lifeline is not None:
            self._lifeline.call_later(LINGER_S, self._close_unless_closing)

    def _close_unless_closing(self) -> None:
        # `close` waits for the thread of the lifeline, which calls this.
        if self._closing.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._closing.release()


class ProcessState:
    """Objects of which a process has one. A Ray Train worker is a process, and so is a rank under torchrun.

    session       set by a Ray Train worker before the training function runs; None elsewhere
    attachment    the newest result of `attach`
    attachments   those of models that may be collected
    state_folder  holds the checkpoints that `add_state` makes; removed at the end of the worker group
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.attachment: Attachment | None = None
        self.attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()
        self.state_folder: OwnFolder | None = None

    def check_first_model(self) -> None:
        """Raise ConfigError if this is a Ray Train worker with an attached model."""
        if self.session is not None and self.attachment is not None and not self.attachment.is_closed:
            raise ConfigError(
                "this worker has attached a model already; `close` its attachment before you attach another model"
            )

    def close_old(self) -> None:
        """Close the attachments of models that are gone. Call it when all ranks have come to their next `attach`."""
        for attachment in list(self.attachments):
            if attachment.is_closed:
                attachment.close()


process = ProcessState()

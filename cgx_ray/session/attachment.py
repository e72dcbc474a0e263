"""`Attachment`: an engine at work behind a model, and its state in checkpoints. Imports no Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from cgx_ray.codecs.codec import KINDS
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.sharded import ShardedEngine
from cgx_ray.errors import ConfigError, PlanError, StateError
from cgx_ray.monitors.sample import StepSample
from cgx_ray.plan import DEFAULT_GROUP_BYTES, CodecSpec, Layer, Plan, Scheme
from cgx_ray.session.explore import CANDIDATES, Exploration, Stateful, explore
from cgx_ray.session.settings import Settings
from cgx_ray.torch_compat import is_registered

STATE_FORMAT = 2


class Session(Protocol):
    """What a Ray Train worker adds to an engine. Set by `open_session` before the training function runs."""

    settings: Settings

    def first_plan(self, layers: Sequence[Layer], world_size: int) -> Plan:
        """The plan to start with. Asked on rank 0 only."""

    def start(self, attachment: Attachment) -> None:
        """Restore state from a checkpoint, then carry plans in and samples out until the process ends."""


_session: Session | None = None


def open_session(session: Session | None) -> None:
    """Make `attach` use `session` from now on in this process."""
    global _session  # noqa: PLW0603 - one training session a process, as in Ray Train
    _session = session


def current_session() -> Session | None:
    """What `open_session` set."""
    return _session


class Attachment:
    """An engine at work behind a model. Does nothing at world size 1."""

    def __init__(
        self,
        engine: Engine | ShardedEngine | None,
        groups: Sequence[dist.ProcessGroup] = (),
        detach: Callable[[], None] | None = None,
    ) -> None:
        """`groups`: made for the engine alone, and destroyed with it. `detach` takes the hooks out of the model."""
        self._engine = engine
        self._groups = groups
        self._detach = detach

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None at world size 1."""
        return self._engine.plan if self._engine is not None else None

    @property
    def last_step(self) -> StepSample | None:
        """Times and bytes of the newest finished exchange."""
        return self._engine.last_step if self._engine is not None else None

    def hold(self, plan: Plan) -> None:
        """Offer a newer plan; see `Engine.hold`. Every rank must be offered it sooner or later."""
        if self._engine is None:
            raise PlanError("a run of world size 1 exchanges nothing; start it with more workers to use a plan")
        self._engine.hold(plan)

    def explore(
        self,
        stateful: Sequence[Stateful],
        step: Callable[[int], object],
        *,
        candidates: Sequence[CodecSpec | str] = CANDIDATES,
        scheme: Scheme | str | None = None,
        iterations: int = 10,
        group_bytes: int = DEFAULT_GROUP_BYTES,
    ) -> Exploration:
        """Train a few steps with each of some codecs, undo them, and go on with the one at the knee of time and gain.

        Flexible Communication, section 3-E, checkpoints in memory. Call it on all ranks, between steps, with the same
        arguments. What `stateful` holds, torch's random numbers, residuals and the step are afterwards as before, bit
        for bit; gradients are what the last `step` left. So too if `step` raises, but for the plan, which is then the
        one tried.

        stateful    the model, the optimizer and whatever else `step` changes: a schedule, a GradScaler
        step        one training step: forward, one synchronised backward, optimizer. It is called with 0, 1, ... for
                    each candidate anew, should train on the same batch for the same number, and must not use up data
                    that the training wants
        candidates  left out, top-k with the paper's densities
        scheme      of all candidates; left out, `preferred_scheme`
        iterations  of each candidate; every other one measures the gain instead of the times. Two or three more bring
                    its plan in force
        group_bytes as in `make_plan`

        Raises ConfigError for an FSDP2 model, where a controller chooses the plans, and, before the first step, if a
        scheme cannot carry a candidate; PlanError at world size 1; CGXError on all ranks if none had gradients.
        """
        if self._engine is None:
            raise PlanError("a run of world size 1 exchanges nothing; start it with more workers to explore")
        if not isinstance(self._engine, Engine):
            raise ConfigError("the codec of an FSDP2 model is fixed; explore with a DistributedDataParallel model")
        if _session is not None and _session.settings.policy == "adaptive":
            raise ConfigError("with policy 'adaptive' the controller chooses plans; explore with policy='static'")
        return explore(
            self._engine,
            self._groups[0],
            stateful,
            step,
            candidates=candidates,
            scheme=scheme,
            iterations=iterations,
            group_bytes=group_bytes,
        )

    def take_samples(self) -> list[StepSample]:
        """Samples since the last call; see `Engine.take_samples`."""
        return self._engine.take_samples() if self._engine is not None else []

    def state_dict(self) -> dict[str, Any]:
        """What this rank's codecs remember, and the step, for a checkpoint; tensors, numbers and strings only."""
        if self._engine is None:
            nothing = {"step": 0, "loss_scale": 1.0, **{kind: {} for kind in KINDS}}
            return {"format": STATE_FORMAT, "rank": 0, "world_size": 1, **nothing}
        return {
            "format": STATE_FORMAT,
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            **self._engine.state(),
        }

    def load_state_dict(self, states: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> None:
        """Go on from this rank's `state_dict`, or from those of all ranks in any order.

        Call it on every rank before training goes on. Of all ranks' states a rank takes its own; if the world size has
        changed, every rank takes their mean. The loss scale may be another one than the states'. Raises StateError if a
        state is of another format or model, or if their loss scales differ.
        """
        given = [states] if isinstance(states, Mapping) else check_complete(list(states))
        for state in given:
            if state.get("format") != STATE_FORMAT:
                raise StateError(f"state has format {state.get('format')!r}, this version reads {STATE_FORMAT}")
        if self._engine is None:
            return
        if len(given) == dist.get_world_size():
            given = [state for state in given if state["rank"] == dist.get_rank()]
        # States that say no loss scale come from before there was one in them.
        scales = {state.get("loss_scale", 1.0) for state in given}
        if len(scales) > 1:
            raise StateError(f"the states have loss scales {sorted(scales)}; give states of one run at one step")
        self._engine.load_state(*merge_states(given), loss_scale=scales.pop())

    def close(self) -> None:
        """Stop the communication thread and let its process group go.

        A DDP model cannot be trained further, an FSDP2 model goes on uncompressed.
        """
        if self._detach is not None:
            self._detach()
        if self._engine is not None:
            self._engine.close()
        groups, self._groups = self._groups, ()
        _destroy(groups)


_attached: Attachment | None = None


def attached() -> Attachment | None:
    """Return what the last `attach` of this process returned."""
    return _attached


def set_attached(attachment: Attachment) -> None:
    """Let `attached` return `attachment` from now on."""
    global _attached  # noqa: PLW0603 - add_state finds the engine of this process by it
    _attached = attachment


def _destroy(groups: Sequence[dist.ProcessGroup]) -> None:
    for group in groups:
        # Torch may have destroyed it already, with all others.
        if is_registered(group):
            dist.destroy_process_group(group)


@contextmanager
def own_groups() -> Iterator[list[dist.ProcessGroup]]:
    """Takes process groups as they are made; they are destroyed if what makes them fails."""
    groups: list[dist.ProcessGroup] = []
    try:
        yield groups
    except BaseException:
        _destroy(groups)
        raise


def check_complete(states: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Raise StateError unless these are the states of all ranks of one run at one step."""
    runs = {(state.get("world_size"), state.get("step")) for state in states}
    ranks = sorted(state.get("rank", -1) for state in states)
    if len(runs) != 1 or ranks != list(range(states[0].get("world_size", 0))):
        raise StateError(
            f"got states of ranks {ranks}, of (world size, step) {sorted(runs, key=str)}; give those of all ranks of "
            "one run at one step, or this rank's own"
        )
    return states


def merge_states(states: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, dict[str, torch.Tensor]]]:
    """Step and memories, by kind and layer, for each rank of a new group: the mean of the old ones.

    Averaging keeps what is owed: (1/N) sum of residuals is the same before and after, whatever the world sizes.
    Momentum is a sum of gradients as well. Q of PowerSGD is the same on all ranks but after an allgather, where any
    start will do.
    """
    merged: dict[str, dict[str, torch.Tensor]] = {}
    for kind in KINDS:
        names = [set(state[kind]) for state in states]
        if any(other != names[0] for other in names):
            odd = sorted(set.union(*names) - set.intersection(*names))
            raise StateError(f"not every rank's state has {kind} of {odd[0]!r}; give states of one run at one step")
        merged[kind] = {name: torch.stack([state[kind][name] for state in states]).mean(0) for name in sorted(names[0])}
    return max(state["step"] for state in states), merged

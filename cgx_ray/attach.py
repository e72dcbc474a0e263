"""`attach`: puts the engine behind a DDP model, with Ray or without it. Imports no Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.codecs.codec import HOST, KINDS
from cgx_ray.collectives.tcp import connect_mesh
from cgx_ray.collectives.transport import Transport
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.hook import DdpBuckets, cgx_hook
from cgx_ray.engine.sharded import ShardedEngine
from cgx_ray.errors import CGXError, ConfigError, PlanError, StateError
from cgx_ray.explore import CANDIDATES, Exploration, Stateful, explore
from cgx_ray.monitors.sample import StepSample
from cgx_ray.plan import DEFAULT_GROUP_BYTES, CodecSpec, Layer, Plan, Scheme, preferred_scheme
from cgx_ray.planner.options import candidate_codecs
from cgx_ray.settings import Settings

STATE_FORMAT = 2
DEVICE_TYPES = ("cpu", "cuda")
GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Session(Protocol):
    """What a Ray Train worker adds to an engine. Set by `open_session` before the training function runs."""

    settings: Settings

    def first_plan(self, layers: Sequence[Layer], world_size: int) -> Plan:
        """The plan to start with. Asked on rank 0 only."""

    def start(self, attachment: Attachment) -> None:
        """Restore state from a checkpoint, then carry plans in and samples out until the process ends."""


_session: Session | None = None
_attached: Attachment | None = None


def open_session(session: Session | None) -> None:
    """Make `attach` use `session` from now on in this process."""
    global _session  # noqa: PLW0603 - one training session a process, as in Ray Train
    _session = session


def current_session() -> Session | None:
    """What `open_session` set."""
    return _session


def attached() -> Attachment | None:
    """What the last `attach` of this process returned."""
    return _attached


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
            return {"format": STATE_FORMAT, "rank": 0, "world_size": 1, "step": 0, **{kind: {} for kind in KINDS}}
        return {
            "format": STATE_FORMAT,
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            **self._engine.state(),
        }

    def load_state_dict(self, states: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> None:
        """Go on from this rank's `state_dict`, or from those of all ranks in any order.

        Call it on every rank before training goes on. Of all ranks' states a rank takes its own; if the world size has
        changed, every rank takes their mean. Raises StateError if a state is of another format or model.
        """
        given = [states] if isinstance(states, Mapping) else check_complete(list(states))
        for state in given:
            if state.get("format") != STATE_FORMAT:
                raise StateError(f"state has format {state.get('format')!r}, this version reads {STATE_FORMAT}")
        if self._engine is None:
            return
        if len(given) == dist.get_world_size():
            given = [state for state in given if state["rank"] == dist.get_rank()]
        self._engine.load_state(*merge_states(given))

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


def _destroy(groups: Sequence[dist.ProcessGroup]) -> None:
    for group in groups:
        # Torch may have destroyed it already, with all others.
        if group in dist.distributed_c10d._world.pg_map:
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


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a model whose gradients are averaged, in registration order.

    Raises ConfigError for gradients this version cannot carry.
    """
    parameters = _averaged_parameters(model)
    devices = {str(parameter.device): name for name, parameter in parameters.items()}
    if len(devices) > 1 or any(torch.device(device).type not in DEVICE_TYPES for device in devices):
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ConfigError(f"the model has {places}; this version takes models on one device, the CPU or a CUDA device")
    for name, parameter in parameters.items():
        if parameter.dtype not in GRADIENT_DTYPES:
            known = ", ".join(str(dtype) for dtype in GRADIENT_DTYPES)
            raise ConfigError(f"{name} is {parameter.dtype}; gradients must be one of {known}")
    return [
        Layer(
            name=n,
            numel=p.numel(),
            ndim=p.ndim,
            dtype=str(p.dtype).removeprefix("torch."),
            num_rows=p.shape[0] if p.ndim > 1 and p.numel() > 0 else None,
        )
        for n, p in parameters.items()
    ]


def _averaged_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    ignored = getattr(model, "parameters_to_ignore", ())
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return {n: p for n, p in module.named_parameters() if p.requires_grad and n not in ignored}


def attach(
    model: nn.Module,
    *,
    plan: Plan | None = None,
    codec: CodecSpec | str | None = None,
    scheme: str | None = None,
    intra: str | None = None,
    transport: str | None = None,
    shared_memory: bool | None = None,
    timeout_s: float | None = None,
    parameters: CodecSpec | str | None = None,
) -> Attachment:
    """Average the gradients of `model` through cgx_ray from the next backward pass on.

    model          a DistributedDataParallel, or what `fully_shard` (FSDP2) made of a whole model, whose codec is fixed
                   and goes over sra; call it on every rank. Anything at world size 1: nothing happens
    plan           fixed plan for the whole run, until `Attachment.hold` offers another one
    codec, scheme  the same for all layers and fixed, as in `CodecSpec.parse`; left out, CGXConfig decides in a Ray
                   Train worker, and elsewhere it is qsgd 4/128 over sra
    intra          "flat", or "dense" or "compressed" sums inside nodes first, see `Settings`; left out, CGXConfig's,
                   and elsewhere "flat"
    transport, shared_memory, timeout_s
                   see `Settings`; left out, CGXConfig's, and elsewhere "tcp", True and half an hour
    parameters     FSDP2 only: codec that large parameters are gathered with, such as "qsgd:bits=8,rounding=nearest".
                   All ranks compute with what it leaves of them, and update their own shards, which stay as they are

    Raises ConfigError or PlanError, on all ranks, before training starts.
    """
    global _attached  # noqa: PLW0603 - add_state finds the engine of this process by it
    given = {"transport": transport, "shared_memory": shared_memory, "timeout_s": timeout_s}
    settings = _settings(
        plan, codec, scheme, intra, {name: value for name, value in given.items() if value is not None}
    )
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        attachment = Attachment(None)
    # Importing FSDP2 to ask for its class would cost 0.7 s.
    elif hasattr(model, "set_custom_reduce_scatter"):
        attachment = _attach_sharded(model, plan, settings, parameters)
    else:
        is_chosen = any(choice is not None for choice in (plan, codec, scheme, intra))
        attachment = _attach(model, plan, settings, parameters, asks_controller=not is_chosen)
    _attached = attachment
    return attachment


def _settings(
    plan: Plan | None,
    codec: CodecSpec | str | None,
    scheme: str | None,
    intra: str | None,
    others: Mapping[str, Any],
) -> Settings:
    """The session's settings, or static ones; arguments of `attach` win."""
    settings = _session.settings if _session is not None else Settings(policy="static")
    settings = replace(settings, **others)
    is_chosen = any(choice is not None for choice in (codec, scheme, intra))
    if plan is not None and is_chosen:
        raise ConfigError(
            "attach got a plan and a codec, scheme or intra; the plan already says all three, give one of them"
        )
    if plan is not None or is_chosen:
        codec = codec or ("none" if scheme == Scheme.DENSE else settings.codec)
        spec = codec if isinstance(codec, CodecSpec) else CodecSpec.parse(codec)
        scheme, intra = scheme or preferred_scheme(spec), intra or settings.intra
        settings = replace(settings, policy="static", codec=str(spec), scheme=scheme, intra=intra)
    return settings


def _attach(
    model: nn.Module,
    plan: Plan | None,
    settings: Settings,
    parameters: CodecSpec | str | None,
    *,
    asks_controller: bool,
) -> Attachment:
    with own_groups() as groups:
        return _start(Attachment(_make_engine(model, plan, settings, parameters, groups, asks_controller), groups))


def _make_engine(
    model: nn.Module,
    plan: Plan | None,
    settings: Settings,
    parameters: CodecSpec | str | None,
    groups: list[dist.ProcessGroup],
    asks_controller: bool,
) -> Engine:
    """An engine at work behind `model`; the process groups that it takes go into `groups`."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.timeout_s))
    groups.append(group)
    try:
        if parameters is not None:
            raise ConfigError("DDP gathers no parameters; leave `parameters` out, or shard the model with fully_shard")
        layers = _check_model(model)
        if plan is None and dist.get_rank() == 0:
            asked = _session if asks_controller else None
            world_size = dist.get_world_size()
            plan = asked.first_plan(layers, world_size) if asked else settings.static_plan(layers, world_size)
        offer: str | CGXError | None = plan.to_json() if plan is not None else None
    except Exception as error:  # noqa: BLE001 - raised again by `agree`, on all ranks
        layers, offer = [], as_own(error)
    plan = agree(layers, offer, group)
    device = next((parameter.device for parameter in _averaged_parameters(model).values()), HOST)
    cuda_group = _make_cuda_group(device, group, settings)
    if cuda_group is not None:
        groups.append(cuda_group)
    candidates = [codec for codec in candidate_codecs(settings.densities) if codec.name != "none"]
    engine = Engine(
        layers,
        plan,
        connect(group, settings, cuda_group),
        seed=settings.seed,
        candidates=candidates if settings.policy == "adaptive" else (),
        device=device,
    )
    assert isinstance(model, DistributedDataParallel)
    try:
        model.register_comm_hook(DdpBuckets(model, engine), cgx_hook)
    except RuntimeError as error:
        engine.close()
        raise ConfigError(f"this model already has a communication hook ({error}); attach once a model") from error
    return engine


def _make_cuda_group(device: torch.device, group: dist.ProcessGroup, settings: Settings) -> dist.ProcessGroup | None:
    """NCCL between all ranks if each has a GPU of its own: it refuses two ranks on one.

    Raises ConfigError, on all ranks, if some are on the CPU and others are not.
    """
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
    places = [own] * dist.get_world_size(group)
    dist.all_gather_object(places, own, group=group)
    if set(places) == {"cpu"}:
        return None
    if "cpu" in places:
        ranks = ", ".join(str(rank) for rank, place in enumerate(places) if place == "cpu")
        raise ConfigError(f"the model is on the CPU on ranks {ranks} and on a GPU on the others; put all on one kind")
    if len(set(places)) < len(places) or not dist.is_nccl_available():
        return None
    nccl: dist.ProcessGroup = dist.new_group(backend="nccl", timeout=timedelta(seconds=settings.timeout_s))
    return nccl


def connect(group: dist.ProcessGroup, settings: Settings, cuda_group: dist.ProcessGroup | None = None) -> Transport:
    """A transport between the ranks of `group`; call it on all of them. `cuda_group` as in `Transport`."""
    mesh = None
    if settings.transport == "tcp":
        mesh = connect_mesh(group, settings.timeout_s, settings.num_streams, shared_memory=settings.shared_memory)
    return Transport(group, settings.simulated_link, mesh, settings.timeout_s, cuda_group)


def _start(attachment: Attachment) -> Attachment:
    if _session is not None:
        _session.start(attachment)
    return attachment


def _attach_sharded(
    model: nn.Module, plan: Plan | None, settings: Settings, parameters: CodecSpec | str | None
) -> Attachment:
    from cgx_ray.fsdp import make_engine  # noqa: PLC0415 - see `attach`

    with own_groups() as groups:
        engine, detach = make_engine(model, plan, settings, parameters, groups)
        return _start(Attachment(engine, groups, detach))


def _check_model(model: nn.Module) -> list[Layer]:
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"attach got a {type(model).__name__}; wrap it first, with ray.train.torch.prepare_model, "
            "torch.nn.parallel.DistributedDataParallel or torch.distributed.fsdp.fully_shard"
        )
    if dist.get_world_size(model.process_group) != dist.get_world_size():
        raise ConfigError(
            f"the model is averaged over {dist.get_world_size(model.process_group)} of {dist.get_world_size()} ranks; "
            "this version averages over all of them"
        )
    if _session is not None and attached() is not None:
        raise ConfigError("this worker has attached a model already; a Ray Train run carries one")
    return layers_of(model)


def as_own(error: Exception) -> CGXError:
    """`error` as one that all ranks can be told of."""
    if isinstance(error, CGXError):
        return error
    own = CGXError(f"rank {dist.get_rank()} cannot attach: {error!r}")
    own.__cause__ = error
    return own


def agree(
    layers: Sequence[Layer], offer: str | CGXError | None, group: dist.ProcessGroup, parameters: str = ""
) -> Plan:
    """The plan of rank 0 if all ranks have the same layers and no error, else the same error on all ranks.

    offer       a plan as JSON, or what is wrong on this rank; None to take that of rank 0
    parameters  must be the same as well
    """
    offers: list[tuple[Sequence[Layer], str | CGXError | None, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(offers, (layers, offer, parameters), group=group)
    # This rank's own error has its cause, which does not travel.
    offers[dist.get_rank(group)] = layers, offer, parameters
    known = [entry for entry in offers if entry is not None]
    for _, other, _ in known:
        if isinstance(other, CGXError):
            raise other
    if len({entry[2] for entry in known}) > 1:
        raise PlanError("ranks were given different `parameters`; give every rank the same")
    if any(entry[0] != known[0][0] for entry in known):
        rank = next(rank for rank, entry in enumerate(known) if entry[0] != known[0][0])
        raise PlanError(f"rank {rank} has other layers than rank 0; every rank must build the same model")
    text = known[0][1]
    assert isinstance(text, str)
    if any(entry[1] not in (None, text) for entry in known):
        raise PlanError("ranks were given different plans; give every rank the same one")
    plan = Plan.from_json(text)
    plan.check(known[0][0], len(known))
    return plan

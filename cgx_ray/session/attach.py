"""Put the engine behind a model, with Ray or without it. Imports no Ray."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.collectives.transport.gathered import Gatherer, as_own, unreachable
from cgx_ray.collectives.transport.gloo_sockets import noted_listeners
from cgx_ray.collectives.transport.transport import DEFAULT_TIMEOUT_S
from cgx_ray.control.policies.policy import Policy, Static
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.loss_scale import Scaler
from cgx_ray.engine.sharded.sharded_engine import ShardedEngine
from cgx_ray.errors import CGXError, ConfigError, names_arguments, unknown
from cgx_ray.logs import show_lines
from cgx_ray.plan import CodecSpec, Plan, Scheme
from cgx_ray.session import ddp
from cgx_ray.session.agree import GatheredGroup, agree_on_settings, own_groups, watch
from cgx_ray.session.attachment import Attachment, process
from cgx_ray.session.lines import end_line, start_line
from cgx_ray.session.local_control import LocalControl
from cgx_ray.session.settings import (
    MAX_TIMEOUT_S,
    POLICY_ARGUMENTS,
    VARIABLE,
    Off,
    Settings,
    means_static,
    policy_variable,
)
from cgx_ray.torch_compat import longest_timeout_s, uncompiled

logger = logging.getLogger(__name__)

# `Attachment.trace` does what `trace_steps` does.
_SETTINGS = {field.name for field in fields(Settings)} - {"trace_steps"}
# Settings that make plans. Those of a Ray Train worker come from the controller.
_OF_PLANS = ("overrides", "exclude", "group_bytes")

# Returns an engine at work behind a model, and a function that removes its hooks.
EngineMaker = Callable[..., tuple[Engine | ShardedEngine, Callable[[], None]]]


@names_arguments
def attach(
    model: nn.Module,
    *,
    policy: Policy | str | None = None,
    folder: str | os.PathLike[str] | None = None,
    plan: Plan | None = None,
    codec: CodecSpec | str | None = None,
    scheme: str | None = None,
    intra: str | None = None,
    period: int | None = None,
    transport: str | None = None,
    shared_memory: bool | None = None,
    timeout_s: float | None = None,
    weight_check_steps: int | None = None,
    average_weights: bool | None = None,
    silent_s: float | None = None,
    parameters: CodecSpec | str | None = None,
    scaler: Scaler | None = None,
    **more: Any,
) -> Attachment:
    """Average the gradients of `model` through cgx_ray from the next backward pass on. Call it on every rank.

    model          a DistributedDataParallel, or a whole model after `fully_shard` (FSDP2), all of whose layers go over
                   sra; compiled or not. At world size 1 any model is accepted and nothing happens
    policy         a `Static`, for all layers and the whole run; without Ray also a policy that decides during training,
                   such as "adaptive" (`session.local_control`). Default: CGXConfig's; elsewhere qsgd 4/128 over sra.
                   The environment's CGX_POLICY replaces it, and a `plan`: "off", "static" or "adaptive"
    folder         without Ray: where rank 0 writes the journal. Default: `cgx-ray-runs/<time>` if the policy decides
    plan           in force until `Attachment.hold` offers a newer one
    codec, scheme, intra, period
                   make a `Static` in short. What is left out is that of CGXConfig's `Static`, if it has one
    transport, shared_memory, timeout_s, silent_s, weight_check_steps, average_weights
                   see `Settings`. Default: CGXConfig's; elsewhere "tcp", True, that of the process group, a minute,
                   500 and False. As codec, scheme, intra and period, the same on all ranks
    parameters     FSDP2 only: codec that large parameters are gathered with, such as "qsgd:bits=8,rounding=nearest".
                   All ranks compute with the decoded parameters. Each rank updates its own shard, which stays exact
    scaler         a GradScaler, or an object whose `get_scale()` returns the same on all ranks, asked during backward;
                   needed only if something other than a GradScaler scales the losses
    more           all else that CGXConfig takes, by the same names, such as `exclude`; with a policy by name also its
                   arguments, such as `fidelity`

    Codecs' memory follows the loss scale. If the scale cannot be known, backward with a codec that has memory (topk,
    powersgd, ef_signsgd, ...) raises CGXError: losses of one backward pass have several scales; a scale is 0, Inf or
    NaN; or a GradScaler is updated although no loss that its `scale()` returned went through backward.

    An error that one rank meets is raised on all ranks, before training starts, and nothing of the attachment is left,
    except that DDP keeps the hook if the error comes late (build DDP again then): ConfigError, PlanError,
    TransportError if ranks cannot connect, StateError if a rank cannot restore its state from Ray Train's checkpoint,
    LimitError if a rank may open no more files or start no more threads, CGXError for what no one expected.
    """
    more |= {"transport": transport, "shared_memory": shared_memory, "timeout_s": timeout_s, "silent_s": silent_s}
    more |= {"weight_check_steps": weight_check_steps, "average_weights": average_weights}
    more |= {"codec": codec, "scheme": scheme, "intra": intra, "period": period}
    choice = {name: more.pop(name) for name in POLICY_ARGUMENTS if name in more}
    if policy_variable() == "adaptive":
        policy, plan, choice = _as_adaptive(policy, choice)
    make_settings = partial(_settings, policy, folder, plan, choice, more)
    asks, model = all(one is None for one in (policy, plan, *choice.values())), uncompiled(model)
    process.attachment = _attach(model, plan, make_settings, folder, parameters, scaler, asks_controller=asks)
    return process.attachment


def attach_with(
    model: nn.Module, settings: Settings, *, folder: str | os.PathLike[str] | None = None, **options: Any
) -> Attachment:
    """Attach as `attach` does without Ray, with all of `settings` and with `options` of `LocalControl`."""
    make_control = partial(LocalControl, **options)
    process.attachment = _attach(
        uncompiled(model), None, lambda: settings, folder, None, None, make_control, asks_controller=True
    )
    return process.attachment


def _as_adaptive(
    policy: Policy | str | None, choice: dict[str, Any]
) -> tuple[Policy | str | None, None, dict[str, Any]]:
    """Return policy, plan and policy arguments where CGX_POLICY is "adaptive"; `Settings` replaces other policies."""
    # In a Ray Train worker only the policy of CGXConfig can decide.
    return (policy, None, choice) if process.session is None else (None, None, {})


def _settings(
    policy: Policy | str | None,
    folder: str | os.PathLike[str] | None,
    plan: Plan | None,
    choice: Mapping[str, Any],
    others: Mapping[str, Any],
) -> Settings:
    """Return the settings of the Ray Train run, or static ones, changed by the arguments of `attach`."""
    session = process.session
    given = {name: value for name, value in choice.items() if value is not None}
    others = {name: value for name, value in others.items() if value is not None}
    _check_given(policy, folder, plan, given, others)
    settings = session.settings if session is not None else Settings(policy="static", timeout_s=_usual_timeout_s())
    settings = replace(settings, **others)
    if isinstance(settings.policy, Off):
        return settings
    if policy is not None:
        settings = replace(settings, policy=policy, **given)
        if settings.decides and session is not None:
            raise ConfigError(
                f"attach got policy {policy!r} in a Ray Train worker; it takes a Static there, give others to CGXConfig"
            )
    elif plan is not None or given:
        usual = settings.policy
        if isinstance(usual, Static):
            given = {"intra": usual.intra, "period": usual.period} | given
            if given.get("scheme") != Scheme.DENSE:
                given = {"codec": usual.codec} | given
        settings = replace(settings, policy=Static(**given))
    return settings


def _check_given(
    policy: Policy | str | None,
    folder: str | os.PathLike[str] | None,
    plan: Plan | None,
    given: Mapping[str, Any],
    others: Mapping[str, Any],
) -> None:
    """Raise ConfigError if arguments of `attach` do not go together, or one would change nothing."""
    in_ray = process.session is not None
    if others.keys() - _SETTINGS:
        name = min(others.keys() - _SETTINGS)
        own = inspect.signature(attach).parameters.keys() - {"model", "more"}
        raise ConfigError(f"attach got {unknown('setting', name, sorted({*_SETTINGS, *POLICY_ARGUMENTS, *own}))}")
    if policy is None and not means_static(given) and (lost := sorted(given)):
        wanted = "it to CGXConfig, which decides in Ray Train" if in_ray else "policy='adaptive', or another one"
        raise ConfigError(f"attach got {lost[0]} without a policy that has it; give {wanted}")
    if not isinstance(plan, Plan | None):
        raise ConfigError(f"plan {plan!r} is not allowed; give a Plan, such as one of make_plan, or a codec as codec=")
    if plan is not None and (given or policy is not None):
        raise ConfigError(
            "attach got a plan and a policy, codec, scheme, intra or period, which the plan already sets; give one of "
            "them"
        )
    rules = [name for name in _OF_PLANS if name in others]
    if rules and (plan is not None or (in_ray and policy is None and not given)):
        where = "make_plan" if plan is not None else "CGXConfig, whose controller makes the plans"
        raise ConfigError(f"attach got {rules[0]}, which changes no plan here; give it to {where}")
    if not isinstance(folder, str | os.PathLike | None):
        raise ConfigError(f"folder {folder!r} is not allowed; give a path")
    if folder is not None and (plan is not None or in_ray):
        why = "a plan, which nothing replaces" if plan is not None else "a Ray Train worker, where CGXConfig decides"
        raise ConfigError(f"attach got a folder for decisions and {why}; leave the folder out")


def _usual_timeout_s() -> float:
    """Return the time-out of torch.distributed's default group."""
    group = dist.group.WORLD if dist.is_available() else None
    timeout_s = longest_timeout_s(group) if group is not None else None
    # Gloo takes 0 for no time-out.
    return DEFAULT_TIMEOUT_S if timeout_s is None else min(timeout_s or MAX_TIMEOUT_S, MAX_TIMEOUT_S)


def _attach(
    model: nn.Module,
    plan: Plan | None,
    make_settings: Callable[[], Settings],
    folder: str | os.PathLike[str] | None,
    parameters: CodecSpec | str | None,
    scaler: Scaler | None,
    make_control: Callable[..., LocalControl] = LocalControl,
    *,
    asks_controller: bool,
) -> Attachment:
    show_lines()
    has_group = dist.is_available() and dist.is_initialized()
    # torchrun and mpirun tell it before the process group is made.
    if not has_group and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"attach was called before init_process_group in a job of {os.environ['WORLD_SIZE']} processes; "
            "initialise torch.distributed first, build DDP, then attach"
        )
    if not has_group or dist.get_world_size() == 1:
        make_settings()
        return _unattached(model)
    # The engine's thread could not write to memory that is made in inference mode.
    with torch.inference_mode(mode=False), own_groups() as groups, ExitStack() as undo:
        settings, world = _agreed_settings(make_settings, folder, groups)
        process.close_old()
        with world.gather.sharing_errors():
            if isinstance(settings.policy, Off):
                return _unattached(model, groups, world.gather)
            lifeline = watch(world, settings.silent_s, settings.timeout_s)
            undo.callback(lifeline.close)
            control = None
            if process.session is None and plan is None and (settings.decides or folder is not None):
                control = make_control(settings, folder, model, world.gather)
                undo.callback(control.close)
            session = control or (process.session if asks_controller else None)
            make_engine = _engine_maker(model, session.first_plan if session is not None else None)
            engine, detach = make_engine(model, plan, settings, parameters, scaler, world, lifeline, groups)
            is_decided = session is not None and settings.decides
            attachment = Attachment(engine, groups, detach, lifeline, model, control, is_decided)
            undo.callback(attachment.close)
            if process.session is not None:
                # The state of a checkpoint may not fit the model. The engine's thread must not outlive the error.
                process.session.start(attachment)
            if control is not None:
                control.start(attachment, world.gather)
            world.gather(None)
        undo.pop_all()
    if dist.get_rank() == 0:
        journal = getattr(session, "journal", None)
        _log_start(attachment, engine, settings if plan is None else None, journal)
        if asks_controller and process.session is None and _is_ray_train_worker():
            logger.warning(
                "attach got no codec in a Ray Train run without CGXConfig: %s for the whole run, and nothing adapts; "
                "give TorchTrainer torch_config=cgx_ray.CGXConfig(), or give attach a codec",
                settings.policy.option.describe() if isinstance(settings.policy, Static) else settings.policy,
            )
    return attachment


def _log_start(
    attachment: Attachment, engine: Engine | ShardedEngine, settings: Settings | None, journal: Path | None
) -> None:
    """Log what begins, and at the end what it has taken if no control loop does that. Arguments as in `start_line`."""
    takes_folder = settings is not None and process.session is None and isinstance(engine, Engine)
    if problem := attachment.control.journal_problem if attachment.control is not None else "":
        logger.warning(
            "%s cannot be written (%s): training goes on, but `cgx-ray top`, report and replay have nothing to read; "
            "give attach a folder= that rank 0 may write to",
            journal,
            problem,
        )
        journal = None
    logger.info("%s", start_line(engine, settings, journal, takes_folder=takes_folder and not problem))
    if attachment.control is None and process.session is None:
        attachment.call_at_end(lambda: logger.info("%s", end_line(engine, takes_folder=takes_folder)))


def _unattached(
    model: nn.Module, groups: Sequence[dist.ProcessGroup] = (), gather: Gatherer | None = None
) -> Attachment:
    """Return the attachment of a model whose gradients do not go through cgx_ray. `gather`: None at world size 1."""
    attachment = Attachment(None, groups)
    if process.session is not None:
        process.session.start(attachment)
    if gather is None:
        needs = "; with more, attach needs a DistributedDataParallel or an FSDP2 model, and this is a "
        is_ready = isinstance(model, DistributedDataParallel) or _is_fsdp2(model)
        said = "" if is_ready else f"{needs}{type(model).__name__}"
        logger.info("one process: no gradients to exchange, nothing is compressed%s", said)
    else:
        gather(None)
        if dist.get_rank() == 0:
            missing = "over no simulated link, with no journal"
            logger.info("%s=off: torch averages the gradients, as without cgx_ray: %s", VARIABLE, missing)
    return attachment


def _is_ray_train_worker() -> bool:
    """Return True in a worker of Ray Train, which has imported it: sessions import no Ray."""
    train = sys.modules.get("ray.train")
    try:
        return train is not None and train.get_context() is not None
    except RuntimeError:
        return False


def _is_fsdp2(model: nn.Module) -> bool:
    # Found by a method of FSDP2's class: importing the class takes 0.7 s.
    return hasattr(model, "set_custom_reduce_scatter")


def _engine_maker(model: nn.Module, first_plan: Callable[..., Plan] | None) -> EngineMaker:
    """Return the `make_engine` for the kind of `model`."""
    if _is_fsdp2(model):
        from cgx_ray.session import fsdp  # noqa: PLC0415 - it imports FSDP2

        return partial(fsdp.make_engine, first_plan=first_plan)
    return partial(ddp.make_engine, first_plan=first_plan)


def _agreed_settings(
    make_settings: Callable[[], Settings], folder: str | os.PathLike[str] | None, groups: list[dist.ProcessGroup]
) -> tuple[Settings, GatheredGroup]:
    """Return the settings, the same on all ranks, and a group of all ranks with their time-out, which `groups` gets.

    Raises one ConfigError on all ranks if an argument of one rank is not allowed, or if the ranks' settings differ;
    TransportError if a rank has ended.
    """
    settings: Settings | CGXError
    try:
        settings = make_settings()
    except Exception as error:  # noqa: BLE001 - raised again by `agree_on_settings`, on all ranks
        settings = as_own(error)
    # Ranks need a group to exchange an error, so also without a valid time-out.
    timeout_s = settings.timeout_s if isinstance(settings, Settings) else DEFAULT_TIMEOUT_S
    with noted_listeners() as listeners:
        try:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise unreachable(error) from error
    groups.append(group)
    gather = Gatherer(group)
    return agree_on_settings(settings, folder, gather), GatheredGroup(group=group, gather=gather, listeners=listeners)

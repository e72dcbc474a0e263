"""`attach`: puts the engine behind a DDP model, with Ray or without it. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.codecs.codec import HOST
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.hook import DdpBuckets, cgx_hook
from cgx_ray.engine.layers import averaged_parameters, layers_of, sparse_modules
from cgx_ray.engine.loss_scale import LossScale, Scaler
from cgx_ray.errors import CGXError, ConfigError, listed
from cgx_ray.plan import CodecSpec, Layer, Plan, Scheme, preferred_scheme
from cgx_ray.planner.options import candidate_codecs
from cgx_ray.session.agree import agree, as_own, connect
from cgx_ray.session.attachment import Attachment, attached, current_session, own_groups, set_attached
from cgx_ray.session.settings import Settings
from cgx_ray.torch_compat import bucket_parameters


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
    scaler: Scaler | None = None,
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
    scaler         a GradScaler, or anything with a method `get_scale()` that returns the same on all ranks, that scales
                   this model's losses. Left out, the GradScaler that scaled the loss of each backward pass is noticed,
                   whenever it was made; needed for a scale that no GradScaler applies. It is asked during backward

    What codecs remember follows the loss scale. Where it cannot be known, a codec with memory (topk, powersgd,
    ef_signsgd, ...) makes backward raise CGXError: if losses of one backward pass have several scales, if a scale is 0,
    Inf or NaN, or if a GradScaler is updated though no loss that its `scale()` has scaled went through backward.

    Raises ConfigError or PlanError, on all ranks, before training starts.
    """
    given = {"transport": transport, "shared_memory": shared_memory, "timeout_s": timeout_s}
    settings = _settings(
        plan, codec, scheme, intra, {name: value for name, value in given.items() if value is not None}
    )
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        attachment = Attachment(None)
    # Importing FSDP2 to ask for its class would cost 0.7 s.
    elif hasattr(model, "set_custom_reduce_scatter"):
        attachment = _attach_sharded(model, plan, settings, parameters, scaler)
    else:
        is_chosen = any(choice is not None for choice in (plan, codec, scheme, intra))
        attachment = _attach(model, plan, settings, parameters, scaler, asks_controller=not is_chosen)
    set_attached(attachment)
    return attachment


def _settings(
    plan: Plan | None,
    codec: CodecSpec | str | None,
    scheme: str | None,
    intra: str | None,
    others: Mapping[str, Any],
) -> Settings:
    """The session's settings, or static ones; arguments of `attach` win."""
    session = current_session()
    settings = session.settings if session is not None else Settings(policy="static")
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
    scaler: Scaler | None,
    *,
    asks_controller: bool,
) -> Attachment:
    with own_groups() as groups:
        engine = _make_engine(model, plan, settings, parameters, scaler, groups, asks_controller)
        return _start(Attachment(engine, groups))


def _make_engine(
    model: nn.Module,
    plan: Plan | None,
    settings: Settings,
    parameters: CodecSpec | str | None,
    scaler: Scaler | None,
    groups: list[dist.ProcessGroup],
    asks_controller: bool,
) -> Engine:
    """An engine at work behind `model`; the process groups that it takes go into `groups`."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.timeout_s))
    groups.append(group)
    try:
        if parameters is not None:
            raise ConfigError("DDP gathers no parameters; leave `parameters` out, or shard the model with fully_shard")
        layers, loss_scale = _check_model(model), LossScale(scaler)
        if plan is None and dist.get_rank() == 0:
            asked = current_session() if asks_controller else None
            world_size = dist.get_world_size()
            plan = asked.first_plan(layers, world_size) if asked else settings.static_plan(layers, world_size)
        offer: str | CGXError | None = plan.to_json() if plan is not None else None
    except Exception as error:  # noqa: BLE001 - raised again by `agree`, on all ranks
        layers, offer = [], as_own(error)
    plan = agree(layers, offer, group)
    device = next((parameter.device for parameter in averaged_parameters(model).values()), HOST)
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
        model.register_comm_hook(DdpBuckets(model, engine, loss_scale), cgx_hook)
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


def _start(attachment: Attachment) -> Attachment:
    session = current_session()
    if session is not None:
        session.start(attachment)
    return attachment


def _attach_sharded(
    model: nn.Module,
    plan: Plan | None,
    settings: Settings,
    parameters: CodecSpec | str | None,
    scaler: Scaler | None,
) -> Attachment:
    from cgx_ray.session.fsdp import make_engine  # noqa: PLC0415 - see `attach`

    with own_groups() as groups:
        engine, detach = make_engine(model, plan, settings, parameters, scaler, groups)
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
    if current_session() is not None and attached() is not None:
        raise ConfigError("this worker has attached a model already; a Ray Train run carries one")
    layers = layers_of(model)
    _check_buckets(model)
    return layers


def _check_buckets(model: DistributedDataParallel) -> None:
    """Raise ConfigError unless DDP averages what is trained now: backward would wait for the rest for ever."""
    if sparse := sparse_modules(model.module):
        raise ConfigError(
            f"the model has sparse gradients, of {', '.join(sparse)}, which this version cannot carry; use sparse=False"
        )
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    trained = {id(parameter) for parameter in averaged_parameters(model).values()}
    averaged = [id(parameter) for bucket in bucket_parameters(model) for parameter in bucket]
    if late := [name for key, name in names.items() if key in trained.difference(averaged)]:
        said = f"does not average {listed(late)}, which it found frozen, or did not find, when it was built"
    elif gone := [names.get(key, "a replaced parameter") for key in averaged if key not in trained]:
        said = f"waits for gradients of {listed(gone)}, which have been frozen, or replaced, since it was built"
    else:
        return
    raise ConfigError(
        f"rank {dist.get_rank()}: DDP {said}; choose what is trained (requires_grad) before you build "
        "DistributedDataParallel, build it anew after a change, and attach then"
    )

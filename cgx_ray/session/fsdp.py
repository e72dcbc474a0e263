"""Make the engine behind a model after `fully_shard` (FSDP2). Imported only when there is such a model."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from cgx_ray.collectives import Transport
from cgx_ray.collectives.transport.gathered import Gatherer
from cgx_ray.collectives.transport.gloo_sockets import noted_listeners
from cgx_ray.collectives.transport.lifeline import Lifeline
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.policy import Policy
from cgx_ray.control.trial.tried_codecs import codecs_to_try
from cgx_ray.engine.loss_scale import LossScale, Scaler, holds
from cgx_ray.engine.sharded import fsdp_hook, fsdp_layout
from cgx_ray.engine.sharded.sharded_engine import ShardedEngine
from cgx_ray.errors import ConfigError
from cgx_ray.plan import BUILT_IN, DEFAULT_GROUP_BYTES, DENSE, CodecSpec, Plan, Scheme
from cgx_ray.session.agree import GatheredGroup, agree, connect
from cgx_ray.session.attachment import process
from cgx_ray.session.protocol import FirstPlan
from cgx_ray.session.settings import Settings
from cgx_ray.torch_compat import FSDPParamGroup, is_nccl_group
from cgx_ray.units import format_count

logger = logging.getLogger(__name__)

PARAMETER_CODECS = tuple(name for name, record in BUILT_IN.items() if record.for_parameters)


def make_engine(
    model: nn.Module,
    plan: Plan | None,
    settings: Settings,
    parameters: CodecSpec | str | None,
    scaler: Scaler | None,
    world: GatheredGroup,
    lifeline: Lifeline,
    groups: list[dist.ProcessGroup],
    first_plan: FirstPlan | None,
) -> tuple[ShardedEngine, Callable[[], None]]:
    """Return an engine at work behind `model`, and a function that removes its hooks.

    world       of all ranks, whose `gather.sharing_errors` this is called in
    lifeline    watches all ranks
    groups      gets the groups made here, which go with the attachment
    first_plan  as in `ddp.make_engine`. The other arguments are those of `attach`

    Raises ConfigError or PlanError.
    """
    parameter_codec = _check(plan, settings, parameters)
    loss_scale = LossScale(dict(model.named_parameters()), scaler)
    param_groups = fsdp_layout.param_groups(model)
    shard_ranks, replica_ranks = fsdp_layout.ranks_of_mesh(next(iter(param_groups.values())))
    shards = _connect(shard_ranks, world, settings, lifeline, groups)
    replicas = _connect(replica_ranks, world, settings, lifeline, groups) if len(replica_ranks) > 1 else None
    try:
        sums_inside = _sums_inside(next(iter(param_groups.values())), shards, replicas, world)
        if sums_inside and parameter_codec is not None:
            raise ConfigError(
                "the ranks that share the parameters are on one node, where NCCL gathers them; leave `parameters` out"
            )
        units = fsdp_layout.make_units(model, param_groups, parameter_codec, shards.rank if sums_inside else None)
        _warn_of_old_optimizers(model)
        layers = [layer for unit in units for layer in unit.layers]
        if plan is None and dist.get_rank() == 0:
            args = layers, dist.get_world_size(), DEFAULT_GROUP_BYTES
            plan = settings.first_plan(*args) if first_plan is None else first_plan(*args, None)
        plan = agree(layers, plan.to_json() if plan is not None else None, world.gather, str(parameters))
        engine = ShardedEngine(
            units,
            plan,
            dist.get_rank(),
            shards,
            replicas,
            seed=settings.seed,
            judged_together=loss_scale.judged_together,
            sums_inside=sums_inside,
        )
    except BaseException:
        for transport in (shards, replicas):
            if transport is not None:
                transport.close()
        raise
    try:
        hands_over = _hands_over(param_groups.values(), settings, parameter_codec, world)
        return engine, fsdp_hook.install(model, engine, param_groups, units, loss_scale, hands_over=hands_over)
    except BaseException:
        engine.close()
        raise


def _warn_of_old_optimizers(model: nn.Module) -> None:
    """Warn of an optimizer that was made before `fully_shard`, which has replaced the parameters: it trains none."""
    sharded = {id(parameter) for parameter in model.parameters()}
    # Those of the whole parameters.
    shapes = Counter(tuple(parameter.shape) for parameter in model.parameters())
    # By type, since `isinstance` may run code of any object.
    for optimizer in (one for one in gc.get_objects() if issubclass(type(one), Optimizer)):
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # An optimizer of another sharded model was made after its `fully_shard`.
        is_old = held and not any(isinstance(parameter, DTensor) for parameter in held)
        if is_old and not holds(optimizer, sharded) and Counter(tuple(one.shape) for one in held) <= shapes:
            logger.warning(
                "rank %d: an optimizer (%s) holds no parameter of this FSDP2 model, but %s of their shapes: if it was "
                "made before fully_shard, which replaces the parameters, it trains nothing; make the optimizer after "
                "fully_shard",
                dist.get_rank(),
                type(optimizer).__name__,
                format_count(len(held), "parameter"),
            )


def _sums_inside(group: FSDPParamGroup, shards: Transport, replicas: Transport | None, world: GatheredGroup) -> bool:
    """Return True, on all ranks, if FSDP2 may reduce-scatter by itself: only replicas then need messages."""
    is_inside: bool = all(world.gather(replicas is not None and nodes_sum(group, shards)))
    if replicas is not None and group.device.type == "cuda" and dist.get_rank() == 0:
        how = "by NCCL inside nodes" if is_inside else "in messages, as not all of them are on one node, with NCCL"
        logger.info("gradients of the ranks that share the parameters are reduced %s", how)
    return is_inside


def nodes_sum(group: FSDPParamGroup, shards: Transport) -> bool:
    """Return True if the ranks that share the parameters are on one node, and NCCL reduce-scatters between them."""
    return len(set(shards.nodes)) == 1 and is_nccl_group(group._reduce_scatter_process_group, group.device)


def vendor_reduces(groups: Iterable[FSDPParamGroup]) -> bool:
    """Return True if NCCL connects all ranks by which FSDP2 reduces gradients."""
    return all(is_nccl_group(by, group.device) for group in groups for by in fsdp_layout.reducing_groups(group))


def _hands_over(
    groups: Iterable[FSDPParamGroup], settings: Settings, parameter_codec: CodecSpec | None, world: GatheredGroup
) -> bool:
    """Return whether FSDP2 itself reduces the gradients of plans without a codec. The same on all ranks."""
    # With parameters, the first gradients of a step would wait for those under way.
    may = settings.simulated_link is None and parameter_codec is None
    return may and all(world.gather(vendor_reduces(groups)))


def _connect(
    ranks: Sequence[int],
    world: GatheredGroup,
    settings: Settings,
    lifeline: Lifeline,
    groups: list[dist.ProcessGroup],
) -> Transport:
    """Return a transport between `ranks`, of which this one is one. Call it on all ranks; `groups` gets a new group."""
    if len(ranks) == dist.get_world_size():
        return connect(world, settings, lifeline)
    timeout = timedelta(seconds=settings.timeout_s)
    # Every rank makes the groups of all: torch names those that only members make by how many groups there are. After
    # some were destroyed it would give another one an old name, by which it would find old addresses in the store.
    for members in sorted({tuple(others) for others in world.gather(tuple(ranks))}):
        with noted_listeners() as new_listeners:
            made = dist.new_group(list(members), timeout, "gloo")
        if members == tuple(ranks):
            group, listeners = made, new_listeners
    groups.append(group)
    gather = Gatherer(group)
    with gather.sharing_errors():
        return connect(GatheredGroup(group=group, gather=gather, listeners=listeners), settings, lifeline)


def _check_policy(policy: Policy) -> None:
    """Raise ConfigError unless `policy` can decide for a sharded model, whose codecs are tried one after the other."""
    if not isinstance(policy, Adaptive):
        raise ConfigError(
            f"attach got an FSDP2 model and policy {policy!r}, which plans for gradients of whole layers; give "
            "policy='adaptive', or a codec"
        )
    if policy.candidates is None:
        return
    known = codecs_to_try(policy)
    for option in policy.options:
        why = "scheme sra does not carry it" if not option.codec.record.is_reencoded else "it has error feedback"
        if option.codec in known:
            # A codec by itself stands for all schemes that carry it.
            why = "all goes over sra there"
            if replace(DENSE, codec=option.codec, scheme=Scheme.SRA) in policy.options or option == DENSE:
                continue
        raise ConfigError(
            f"candidate {option} cannot be tried with an FSDP2 model, as {why}; give candidates such as "
            "('bf16', 'qsgd:bits=4')"
        )


def _check(plan: Plan | None, settings: Settings, parameters: CodecSpec | str | None) -> CodecSpec | None:
    """Return the codec of parameters, None if they are not compressed."""
    if plan is None and settings.decides:
        _check_policy(settings.chosen_policy)
    if settings.average_weights:
        raise ConfigError("weights of an FSDP2 model are not compared, so leave average_weights out")
    parameter_codec = CodecSpec.parse(parameters) if isinstance(parameters, str) else parameters
    if parameter_codec is not None and not parameter_codec.record.for_parameters:
        raise ConfigError(
            f"parameters cannot be gathered with {parameter_codec}; allowed: {', '.join(PARAMETER_CODECS)}, such as "
            "'qsgd:bits=8,rounding=nearest'"
        )
    process.check_first_model()
    return parameter_codec

"""Make the engine behind a DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.codecs.codec import HOST
from cgx_ray.collectives import Transport
from cgx_ray.collectives.transport.gathered import Gatherer
from cgx_ray.collectives.transport.lifeline import Lifeline
from cgx_ray.collectives.transport.vendor_group import VendorGroup
from cgx_ray.engine.counted import MAX_MEASURING
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.hook import DdpBuckets, cgx_hook
from cgx_ray.engine.layers import averaged_parameters, layers_of, sparse_modules
from cgx_ray.engine.loss_scale import LossScale, Scaler
from cgx_ray.errors import ConfigError, listed
from cgx_ray.plan import CodecSpec, Layer, Plan
from cgx_ray.runtime_ext.streams import streams_of
from cgx_ray.session.agree import GatheredGroup, agree, connect
from cgx_ray.session.attachment import process
from cgx_ray.session.calibrate import measure_codecs, slowest
from cgx_ray.session.inside import measure_inside
from cgx_ray.session.nccl import inside_group, nccl_group
from cgx_ray.session.protocol import FirstPlan
from cgx_ray.session.settings import Settings
from cgx_ray.torch_compat import bucket_parameters, register_hook


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
) -> tuple[Engine, Callable[[], None]]:
    """Return an engine at work behind `model`, and a function that removes the hooks from its parameters.

    The arguments that are not listed are those of `attach`.

    world       of all ranks, whose `gather.sharing_errors` this is called in
    lifeline    watches all ranks
    groups      gets the group made here, which goes with the attachment
    first_plan  as in `Session`, makes the plan if `plan` is None; without it the settings do

    Raises ConfigError or PlanError.
    """
    if parameters is not None:
        raise ConfigError("DDP gathers no parameters; leave `parameters` out, or shard the model with fully_shard")
    layers, loss_scale = _check_model(model), LossScale(averaged_parameters(model), scaler)
    assert isinstance(model, DistributedDataParallel)
    device = next((parameter.device for parameter in averaged_parameters(model).values()), HOST)
    costs = world.gather(measure_codecs(settings, device) if plan is None and first_plan is not None else {})
    if plan is None and dist.get_rank() == 0:
        args = layers, dist.get_world_size(), model.bucket_bytes_cap
        plan = settings.first_plan(*args) if first_plan is None else first_plan(*args, slowest(costs))
    plan = agree(layers, plan.to_json() if plan is not None else None, world.gather)
    cuda_group = nccl_group(model, device, world.gather, settings.timeout_s)
    if cuda_group is not None:
        groups.append(cuda_group)
    transport = connect(world, settings, lifeline, cuda_group)
    is_used = settings.decides or plan.has_inside
    if is_used and transport.enqueues_sums and len(set(transport.nodes)) < transport.world_size:
        _sum_on_device_inside(transport, device, world.gather, groups)
    engine = _start_engine(layers, plan, transport, settings, device, loss_scale)
    try:
        buckets = DdpBuckets(
            model,
            engine,
            loss_scale,
            weight_check_steps=settings.weight_check_steps,
            average_weights=settings.average_weights,
            # DDP's sums would not be those of a simulated link.
            hands_over=device.type == "cuda" and cuda_group is None and settings.simulated_link is None,
        )
        return engine, _hook_up(model, buckets, world.gather)
    except BaseException:
        engine.close()
        raise


def _sum_on_device_inside(
    transport: Transport, device: torch.device, gather: Gatherer, groups: list[dist.ProcessGroup]
) -> None:
    """Give `transport` a group of the ranks of each node, if all ranks get one. `groups` gets it too."""
    try:
        group = inside_group(transport.nodes, device, gather, transport.timeout_s)
    except BaseException:
        transport.close()
        raise
    if group is not None:
        groups.append(group)
        transport.inside = VendorGroup(group, streams_of(device))
        transport.training_sums.use_node_group(group)


def _start_engine(
    layers: Sequence[Layer],
    plan: Plan,
    transport: Transport,
    settings: Settings,
    device: torch.device,
    loss_scale: LossScale,
) -> Engine:
    local = transport.inside or transport.local
    is_planned_with = settings.decides and 1 < transport.num_local < transport.world_size
    try:
        return Engine(
            layers,
            plan,
            transport,
            seed=settings.seed,
            candidates=settings.chosen_policy.gain_codecs,
            by_layer=settings.codecs_by_layer() if transport.rank < MAX_MEASURING else (),
            sums_layers=settings.chosen_policy.max_error is not None,
            device=device,
            inside=measure_inside(local, device) if local is not None and is_planned_with else None,
            judged_together=loss_scale.judged_together,
        )
    except BaseException:
        transport.close()
        raise


def _hook_up(model: DistributedDataParallel, buckets: DdpBuckets, gather: Gatherer) -> Callable[[], None]:
    """Give `model` the hook of `buckets`, and return a function that removes the parameters' hooks."""
    try:
        # DDP cannot forget a hook, so it gets one only if no rank has failed. Then the model can be attached again.
        gather(None)
        try:
            register_hook(model, buckets, cgx_hook)
        except RuntimeError as error:
            raise ConfigError(
                f"this model already has a communication hook ({error}); attach once per model, and remove your own"
            ) from error
    except BaseException:
        buckets.close()
        raise
    return buckets.close


def _check_model(model: nn.Module) -> list[Layer]:
    """Return the layers of `model`. Raises ConfigError if it is no model that this version can average."""
    if not isinstance(model, DistributedDataParallel):
        hint = ""
        if "transformers" in sys.modules:
            hint = "; a callback of Hugging Face's Trainer is given the bare model: attach trainer.model_wrapped there"
        raise ConfigError(
            f"attach got a {type(model).__name__}; wrap it first, with ray.train.torch.prepare_model, "
            f"torch.nn.parallel.DistributedDataParallel or torch.distributed.fsdp.fully_shard{hint}"
        )
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        raise ConfigError(
            "this model's optimizers step in backward, for which DDP needs the hook that cgx_ray needs too; "
            "step an optimizer after backward instead"
        )
    if dist.get_world_size(model.process_group) != dist.get_world_size():
        raise ConfigError(
            f"the model is averaged over {dist.get_world_size(model.process_group)} of {dist.get_world_size()} ranks; "
            "this version averages over all of them"
        )
    process.check_first_model()
    layers = layers_of(model)
    _check_buckets(model)
    return layers


def _check_buckets(model: DistributedDataParallel) -> None:
    """Raise ConfigError unless DDP averages exactly the trained parameters: backward would wait for others for ever."""
    if sparse := sparse_modules(model):
        raise ConfigError(
            f"the model has sparse gradients, of {', '.join(sparse)}, which this version cannot carry; use sparse=False"
        )
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    trained = {id(parameter) for parameter in averaged_parameters(model).values()}
    averaged = [id(parameter) for bucket in bucket_parameters(model) for parameter in bucket]
    if late := [name for key, name in names.items() if key in trained.difference(averaged)]:
        problem = f"does not average {listed(late)}, which were frozen or missing when it was built"
    elif gone := [names.get(key, "a replaced parameter") for key in averaged if key not in trained]:
        problem = f"waits for gradients of {listed(gone)}, which were frozen or replaced after it was built"
    else:
        return
    raise ConfigError(
        f"rank {dist.get_rank()}: DDP {problem}; choose what is trained (requires_grad) before you build "
        "DistributedDataParallel, build it again after a change, then attach"
    )

"""Reads how FSDP2 has sharded a model: its groups of parameters, their ranks, and the shards.

Only this module, `fsdp_hook` and `torch_compat` read torch's private FSDP names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from cgx_ray.engine.layers import as_layer
from cgx_ray.engine.sharded.shards import MAX_UNITS, ShardedLayer, Unit
from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec
from cgx_ray.torch_compat import (
    DefaultAllGather,
    DefaultReduceScatter,
    FSDPMeshInfo,
    FSDPParamGroup,
    HSDPMeshInfo,
    fsdp_param_groups,
)

DEVICES = ("cpu", "cuda")
GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Name of the outermost module in messages, since it has none.
ROOT = "(root)"


def param_groups(model: nn.Module) -> dict[str, FSDPParamGroup]:
    """Return the parameters that FSDP2 communicates together, by the name of their module.

    Raises ConfigError for layouts that this version does not support.
    """
    groups: dict[str, FSDPParamGroup] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        found = fsdp_param_groups(module)
        if len(found) > 1:
            raise ConfigError(f"module {name!r} shards over several meshes; this version takes one mesh")
        # Modules given to one call of `fully_shard` share a group.
        if found and not any(group is found[0] for group in groups.values()):
            _check(name or ROOT, found[0])
            groups[name] = found[0]
    meshes = {ranks_of_mesh(group) for group in groups.values()}
    if len(meshes) != 1:
        raise ConfigError(f"the modules shard over {len(meshes)} meshes; this version takes one for the whole model")
    shards, replicas = meshes.pop()
    if len(shards) * len(replicas) != dist.get_world_size() or len(shards) == 1:
        raise ConfigError(
            f"the model is sharded over {len(shards)} ranks and replicated over {len(replicas)}, of "
            f"{dist.get_world_size()}; this version shards over two or more and averages over all"
        )
    return groups


def _check(name: str, group: FSDPParamGroup) -> None:
    if group.device.type not in DEVICES:
        raise ConfigError(
            f"module {name!r} is on {group.device}; shard over a mesh of {' or '.join(DEVICES)}, or leave "
            "cgx_ray.attach out"
        )
    if not isinstance(group.mesh_info, FSDPMeshInfo) or any(p.is_dtensor for p in group.fsdp_params):
        raise ConfigError(f"module {name!r} is not only sharded by FSDP2; this version takes no other parallelism")
    for parameter in group.fsdp_params:
        if parameter.sharded_param.dtype not in GRADIENT_DTYPES:
            known = ", ".join(str(dtype) for dtype in GRADIENT_DTYPES)
            raise ConfigError(f"a parameter of {name!r} is {parameter.sharded_param.dtype}; allowed: {known}")
    comms = group._reduce_scatter_comm, group._all_gather_comm
    if not (isinstance(comms[0], DefaultReduceScatter) and isinstance(comms[1], DefaultAllGather)):
        odd = ", ".join(type(comm).__name__ for comm in comms)
        raise ConfigError(f"module {name!r} already has a communication hook ({odd}); attach once per model")


def ranks_of_mesh(group: FSDPParamGroup) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that share this rank's parameters, and the ranks that hold the same shard."""
    mesh = group.mesh_info
    assert isinstance(mesh, FSDPMeshInfo)
    replicas = [dist.get_rank()]
    if isinstance(mesh, HSDPMeshInfo):
        replicas = dist.get_process_group_ranks(mesh.replicate_process_group)
    return tuple(dist.get_process_group_ranks(mesh.shard_process_group)), tuple(replicas)


def reducing_groups(group: FSDPParamGroup) -> list[dist.ProcessGroup]:
    """Return the process groups over which FSDP2 by itself reduces gradients: of shards, and of replicas if any."""
    mesh = group.mesh_info
    replicas = [mesh.replicate_process_group] if isinstance(mesh, HSDPMeshInfo) else []
    return [group._reduce_scatter_process_group, *replicas]


def make_units(
    model: nn.Module,
    groups: Mapping[str, FSDPParamGroup],
    parameter_codec: CodecSpec | None,
    own_row: int | None,
) -> list[Unit]:
    """Return one unit per group, in order, whose gradients have no codecs yet. `own_row`: as of a `Unit`.

    Raises ConfigError if there are too many, and if parameters are to be encoded and FSDP2 gathers some after forward
    over other ranks.
    """
    if len(groups) > MAX_UNITS:
        raise ConfigError(f"`fully_shard` was called for {len(groups)} modules; give it at most {MAX_UNITS}")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    units = []
    for index, (module, group) in enumerate(groups.items()):
        if parameter_codec is not None and group._use_post_forward_mesh:
            raise ConfigError(
                f"module {module!r} is resharded to fewer ranks after forward; with `parameters` give "
                "reshard_after_forward as True or False"
            )
        layers = [
            ShardedLayer(
                layer=as_layer(names[id(parameter.sharded_param)], parameter.sharded_param),
                shape=tuple(parameter._orig_size),
                shard_shape=tuple(parameter.padded_sharded_param_size),
                dim=parameter.fsdp_placement.dim,
                is_trained=parameter.sharded_param.requires_grad,
            )
            for parameter in group.fsdp_params
        ]
        num_ranks = len(ranks_of_mesh(group)[0])
        units.append(Unit(index, module or ROOT, layers, num_ranks, parameter_codec, group.device, own_row))
    return units

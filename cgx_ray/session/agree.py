"""Let all ranks agree on layers, plan and errors before training starts, and connect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from cgx_ray.collectives.tcp import connect_mesh
from cgx_ray.collectives.transport import Transport
from cgx_ray.errors import CGXError, ConfigError, PlanError
from cgx_ray.plan import Layer, Plan
from cgx_ray.session.settings import Settings


def connect(group: dist.ProcessGroup, settings: Settings, cuda_group: dist.ProcessGroup | None = None) -> Transport:
    """Return a transport between the ranks of `group`; call it on all of them. `cuda_group` as in `Transport`."""
    mesh = None
    if settings.transport == "tcp":
        mesh = connect_mesh(group, settings.timeout_s, settings.num_streams, shared_memory=settings.shared_memory)
    return Transport(group, settings.simulated_link, mesh, settings.timeout_s, cuda_group)


def as_own(error: Exception) -> CGXError:
    """Return `error`, or a CGXError caused by it, which can be sent to all ranks."""
    if isinstance(error, CGXError):
        return error
    own = CGXError(f"rank {dist.get_rank()} cannot attach: {error!r}")
    own.__cause__ = error
    return own


def agree_on_settings(settings: Settings | CGXError, group: dist.ProcessGroup) -> Settings:
    """Return `settings` if they are the same on all ranks and no error; else raise one error on all ranks.

    settings  or the error that this rank met in making them
    """
    own = settings.texts() if isinstance(settings, Settings) else settings
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, own, group=group)
    # The cause of this rank's own error does not travel, so keep the original.
    everyones[dist.get_rank(group)] = own
    for other in everyones:
        if isinstance(other, CGXError):
            raise other
    for rank, other in enumerate(everyones):
        for name, value in everyones[0].items():
            if other[name] != value:
                raise ConfigError(
                    f"ranks were given different settings: rank {rank} has {name}={other[name]}, rank 0 {value}; give "
                    "every rank the same"
                )
    assert isinstance(settings, Settings)
    return settings


def agree(
    layers: Sequence[Layer], offer: str | CGXError | None, group: dist.ProcessGroup, parameters: str = ""
) -> Plan:
    """Return the plan of rank 0 if all ranks have the same layers and no error; else raise one error on all ranks.

    offer       a plan as JSON, or the error of this rank; None accepts rank 0's plan
    parameters  must be the same on all ranks
    """
    offers: list[tuple[Sequence[Layer], str | CGXError | None, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(offers, (layers, offer, parameters), group=group)
    # The cause of this rank's own error does not travel, so keep the original.
    offers[dist.get_rank(group)] = layers, offer, parameters
    known = [entry for entry in offers if entry is not None]
    for _, other, _ in known:
        if isinstance(other, CGXError):
            raise other
    if len({entry[2] for entry in known}) > 1:
        raise PlanError("ranks were given different `parameters`; give every rank the same")
    if any(entry[0] != known[0][0] for entry in known):
        rank = next(rank for rank, entry in enumerate(known) if entry[0] != known[0][0])
        raise PlanError(f"rank {rank} has other layers than rank 0; build the same model on every rank")
    text = known[0][1]
    assert isinstance(text, str)
    if any(entry[1] not in (None, text) for entry in known):
        raise PlanError("ranks were given different plans; give every rank the same one")
    plan = Plan.from_json(text)
    plan.check(known[0][0], len(known))
    return plan

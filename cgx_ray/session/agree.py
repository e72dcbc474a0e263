"""Let all ranks agree on layers, plan and errors before training starts, and connect them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from cgx_ray.collectives.transport.gathered import Gatherer
from cgx_ray.collectives.transport.gloo_sockets import GlooSockets
from cgx_ray.collectives.transport.lifeline import TOKEN_BYTES, Lifeline
from cgx_ray.collectives.transport.tcp import connect_mesh, connect_s, node_address
from cgx_ray.collectives.transport.transport import Transport
from cgx_ray.errors import CGXError, ConfigError, PlanError
from cgx_ray.plan import Layer, Plan
from cgx_ray.session.settings import VARIABLE, Settings
from cgx_ray.torch_compat import destroy_group


@dataclass(slots=True, kw_only=True)
class GatheredGroup:
    """A Gloo group of an engine, what its ranks exchange over it while they attach, and its connections.

    listeners  where the group may listen on this rank, see `noted_listeners`
    sockets    its connections; None before the listeners of all ranks are known
    """

    group: dist.ProcessGroup
    gather: Gatherer
    listeners: Sequence[tuple[str, int]]
    sockets: GlooSockets | None = None


def watch(world: GatheredGroup, silent_s: float, timeout_s: float) -> Lifeline:
    """Connect all ranks for signs of life and last words; call it on all of them.

    From then on a rank that falls silent ends what `world` gathers.
    """
    rank, world_size = dist.get_rank(world.group), dist.get_world_size(world.group)
    lifeline = Lifeline(rank, world_size, node_address(), silent_s)
    try:
        token = secrets.token_bytes(TOKEN_BYTES) if rank == 0 else b""
        addresses, listeners, tokens = zip(*world.gather((lifeline.address, list(world.listeners), token)), strict=True)
        lifeline.connect(addresses, tokens[0], connect_s(timeout_s))
        world.sockets = GlooSockets(listeners, rank)
        world.gather.lifeline = lifeline
        lifeline.call_on_verdict(world.sockets.shut_down)
    except BaseException:
        lifeline.close()
        raise
    return lifeline


def connect(
    by: GatheredGroup, settings: Settings, lifeline: Lifeline, cuda_group: dist.ProcessGroup | None = None
) -> Transport:
    """Return a transport between the ranks of a group; call it on all of them. `cuda_group` as in `Transport`."""
    sockets = by.sockets or GlooSockets(by.gather(list(by.listeners)), dist.get_rank(by.group))
    mesh = None
    if settings.transport == "tcp":
        mesh = connect_mesh(
            by.group,
            settings.timeout_s,
            settings.num_streams,
            shared_memory=settings.shared_memory,
            gather=by.gather,
        )
    link, timeout_s = settings.simulated_link, settings.timeout_s
    return Transport(by.group, link, mesh, timeout_s, cuda_group, lifeline=lifeline, sockets=sockets)


# What else than arguments of the script sets a setting.
_SET_BY = {
    "timeout_s": ", which init_process_group sets if attach does not",
    "policy": f" (a policy may come from the environment variable {VARIABLE})",
}


def agree_on_settings(
    settings: Settings | CGXError, folder: str | os.PathLike[str] | None, gather: Gatherer
) -> Settings:
    """Return `settings` if they and `folder` are the same on all ranks and no error; else raise one error on all ranks.

    settings  or the error that this rank met in making them
    """
    texts = {**settings.texts(), "folder": str(folder)} if isinstance(settings, Settings) else settings
    everyones = gather(texts)
    for rank, other in enumerate(everyones):
        for name, value in everyones[0].items():
            if other[name] != value:
                hint = _SET_BY.get(name, "")
                raise ConfigError(
                    f"ranks were given different settings: rank {rank} has {name}={other[name]}, rank 0 {value}{hint}; "
                    "give every rank the same"
                )
    assert isinstance(settings, Settings)
    return settings


def agree(layers: Sequence[Layer], offer: str | None, gather: Gatherer, parameters: str = "") -> Plan:
    """Return the plan of rank 0 if all ranks have the same layers; else raise one PlanError on all ranks.

    offer       a plan as JSON; None accepts rank 0's plan
    parameters  must be the same on all ranks
    """
    known = gather((layers, offer, parameters))
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


@contextmanager
def own_groups() -> Iterator[list[dist.ProcessGroup]]:
    """Give a list for new process groups. They are destroyed if an error leaves the block."""
    groups: list[dist.ProcessGroup] = []
    try:
        yield groups
    except BaseException:
        for group in groups:
            destroy_group(group)
        raise

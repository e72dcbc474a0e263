"""NCCL groups of all ranks, for dense gradients, and of a node: whether ranks may have them, and their connections."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.collectives.transport.gathered import Gatherer
from cgx_ray.collectives.transport.tcp import connect_s
from cgx_ray.collectives.transport.transport_like import ranks_of_nodes
from cgx_ray.collectives.transport.vendor_group import gpu_address
from cgx_ray.errors import ConfigError
from cgx_ray.runtime_ext.streams import streams_of
from cgx_ray.torch_compat import destroy_group, skip_group_names

logger = logging.getLogger(__name__)

# From this version on NCCL takes ranks on MIG slices of one GPU, and with the variable also ranks on the same one.
SHARES_GPUS = (2, 30)
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
_INSTEAD = (
    "a plan that is dense as a whole uses DDP's own all-reduce, dense groups of other plans go uncompressed over sra"
)


class _Gpu(NamedTuple):
    """A rank's GPU as the other ranks must know it, or that it has none.

    bus      names its PCI bus on one machine, whatever the container; None on the CPU
    version  of NCCL
    problem  why this rank must not use NCCL beside DDP
    uuid     tells MIG slices apart
    shares   True if NCCL is told to take several ranks on one GPU
    """

    bus: str | None
    version: tuple[int, ...] = ()
    problem: str | None = None
    uuid: str = ""
    shares: bool = False


def nccl_group(
    model: DistributedDataParallel, device: torch.device, gather: Gatherer, timeout_s: float
) -> dist.ProcessGroup | None:
    """Return an NCCL group of all ranks, connected, or None on all of them.

    device     of the gradients
    timeout_s  of the group's sums

    It is made beside DDP's own group, because the engine's thread sums while the thread of backward runs. Logs why
    there is none, once. Raises ConfigError, on all ranks, if some are on the CPU and others are not.
    """
    places: list[_Gpu] = gather(_place_of(model, device) if device.type == "cuda" else _Gpu(None))
    on_cpu = [str(rank) for rank, place in enumerate(places) if place.bus is None]
    if len(on_cpu) == len(places):
        return None
    if on_cpu:
        ranks = ", ".join(on_cpu)
        raise ConfigError(f"the model is on the CPU on ranks {ranks} and on a GPU on the others; put all on one kind")
    if (problem := _problem(places)) is not None:
        if dist.get_rank() == 0:
            logger.info("cgx_ray does not sum by NCCL: %s; %s", problem, _INSTEAD)
        return None
    attempt = _Attempt(device, timeout_s)
    problem = attempt.problem_of_any(gather)
    if problem is not None and dist.get_rank() == 0:
        logger.warning(
            "NCCL does not connect all ranks within %g s (%s): cgx_ray does not use it; %s. On nodes with several "
            "networks set NCCL_SOCKET_IFNAME, on every node, to the interface that reaches the other nodes",
            connect_s(timeout_s),
            problem,
            _INSTEAD,
        )
    return attempt.group if problem is None else None


def inside_group(
    nodes: Sequence[int], device: torch.device, gather: Gatherer, timeout_s: float
) -> dist.ProcessGroup | None:
    """Return an NCCL group of the ranks of this node, connected, on all ranks, or None on all of them.

    nodes  by rank, the index of its node
    device, timeout_s  as of `nccl_group`

    Only for ranks that have got that group: what forbids one forbids both. Logs why there is none, once.
    """
    attempt = _Attempt(device, timeout_s, ranks_of_nodes(nodes))
    problem = attempt.problem_of_any(gather)
    if problem is not None and dist.get_rank() == 0:
        logger.warning(
            "NCCL does not connect the ranks of each node within %g s (%s): hierarchical groups are summed by the host",
            connect_s(timeout_s),
            problem,
        )
    return attempt.group if problem is None else None


def _place_of(model: DistributedDataParallel, device: torch.device) -> _Gpu:
    bus = gpu_address(device)
    if not dist.is_nccl_available():
        return _Gpu(bus, problem="this torch was built without it")
    shares = os.environ.get(SHARING) == "1"
    # Torch's stub lacks it.
    properties: Any = torch.cuda.get_device_properties(device)
    return _Gpu(bus, torch.cuda.nccl.version(), _conflict_of(model), str(properties.uuid), shares)


def _conflict_of(model: DistributedDataParallel) -> str | None:
    """Return why collectives of two communicators could start in different orders on two ranks, which may deadlock."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return "CUDA_DEVICE_MAX_CONNECTIONS=1 puts its sums and those of the training into one queue"
    if model.find_unused_parameters and not model.static_graph:
        return "with find_unused_parameters DDP sums during backward as well"
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm sums during backward as well"
    return None


def _problem(places: Sequence[_Gpu]) -> str | None:
    """Return why these ranks must not use NCCL; None if they may."""
    for rank, place in enumerate(places):
        if place.problem is not None:
            return f"{place.problem} (rank {rank})"
    version = min(place.version for place in places)
    found, needed = (".".join(map(str, one)) for one in (version, SHARES_GPUS))
    if version[:2] < SHARES_GPUS and (ranks := _together([place.bus for place in places])):
        return f"ranks {ranks} are on one GPU, which needs NCCL {needed}, and this is {found}"
    # As it is told on all ranks of the GPU.
    deaf = {f"{place.bus} {place.uuid}" for place in places if not place.shares}
    alone = [where if (where := f"{place.bus} {place.uuid}") in deaf else None for place in places]
    if ranks := _together(alone):
        return f"ranks {ranks} are on one GPU, which NCCL takes with {SHARING}=1 only"
    return None


def _together(places: Sequence[str | None]) -> str:
    """Return the ranks that share the most common place, listed; empty if each has its own. None is no place."""
    counts = Counter(place for place in places if place is not None).most_common(1)
    if not counts or counts[0][1] == 1:
        return ""
    return ", ".join(str(rank) for rank, place in enumerate(places) if place == counts[0][0])


class _Attempt:
    """Connects an NCCL group on a thread of its own: NCCL waits for ever for a rank that it cannot reach.

    group  None until it is there
    """

    def __init__(
        self, device: torch.device, timeout_s: float, subsets: Sequence[Sequence[int] | None] = (None,)
    ) -> None:
        """`subsets`: the ranks of all groups that are made at once, each rank in one of them; None stands for all."""
        self.group: dist.ProcessGroup | None = None
        self._device, self._timeout_s, self._subsets = device, timeout_s, subsets
        self._num_named = 0
        self._error: str | None = None
        self._lock = threading.Lock()
        self._is_given_up = False
        # A daemon, since nothing ends the wait.
        self._thread = threading.Thread(target=self._connect, name="cgx-ray-nccl", daemon=True)
        self._thread.start()

    def problem_of_any(self, gather: Gatherer) -> str | None:
        """Wait until ranks are connected, at most as long as connections take. Return what went wrong on one of them.

        Then the group ends, also one that comes later.
        """
        limit_s = connect_s(self._timeout_s)
        self._thread.join(limit_s)
        error = f"no connection after {limit_s:g} s" if self._thread.is_alive() else self._error
        errors: list[str | None] = gather(error)
        problem = next((f"rank {rank}: {one}" for rank, one in enumerate(errors) if one is not None), None)
        if problem is not None:
            with self._lock:
                self._is_given_up = True
            skip_group_names(len(self._subsets) - self._num_named)
            self._end()
        return problem

    def _connect(self) -> None:
        try:
            streams = streams_of(self._device)
            streams.enter()
            self._make()
            if self._is_given_up:
                self._end()
            elif self._error is None:
                # Connections between pairs of ranks are made by the first sum.
                dist.all_reduce(torch.ones(1, dtype=torch.float32, device=self._device), group=self.group)
                streams.mark().wait()
        except Exception as error:  # noqa: BLE001 - any error means the same: this rank has no NCCL
            self._error = f"{error!r}"

    def _make(self) -> None:
        """Make the groups of all subsets: torch numbers them, so all ranks make all, also after an error."""
        for ranks in self._subsets:
            with self._lock:
                if self._is_given_up:
                    return
                self._num_named += 1
            try:
                # With `device_id` it connects at once, not in the first sum.
                timeout = timedelta(seconds=self._timeout_s)
                group = dist.new_group(ranks, backend="nccl", timeout=timeout, device_id=self._device)
                if ranks is None or dist.get_rank() in ranks:
                    with self._lock:
                        self.group = group
            except Exception as error:  # noqa: BLE001 - see `_connect`
                self._error = f"{error!r}"

    def _end(self) -> None:
        with self._lock:
            group, self.group = self.group, None
        if group is not None:
            group.abort()
            destroy_group(group)

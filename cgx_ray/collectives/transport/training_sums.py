"""Sums by torch.distributed that the training thread makes itself, while the engine's thread has nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from cgx_ray.collectives.transport.transport_like import ranks_of_nodes
from cgx_ray.torch_compat import destroy_group

# Seconds after which a rank that waits for a sum looks whether all others are still there.
LOOK_S = 0.2


class TrainingSums:
    """Sums over all ranks, or over those of a node. All ranks must begin them in the same order.

    A sum on a CUDA device is waited for by the current stream. On the host the thread waits. No function of Python is
    called at the end of a sum: Gloo's threads outlive those of Python where a process ends early.

    num_nodes  nodes that the ranks are on
    """

    def __init__(
        self,
        nodes: Sequence[int],
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        timeout_s: float,
        has_lost_ranks: Callable[[], bool],
        broken: Callable[[str, RuntimeError], Exception],
    ) -> None:
        """
        nodes           by rank, the index of its node
        groups          all ranks, for tensors on the host and on a CUDA device
        has_lost_ranks  whether a sum will not end any more
        broken          makes the error of a sum, from what it was and torch's error
        """
        self._nodes, self._groups, self._timeout_s = nodes, groups, timeout_s
        self._has_lost_ranks, self._broken = has_lost_ranks, broken
        self.num_nodes = len(set(nodes))
        self._node_group: dist.ProcessGroup | None = None

    def node_group(self) -> dist.ProcessGroup | None:
        """Return a group of Gloo of this rank's node; None if nodes have one rank each. Call it on all ranks alike.

        The first call makes it, and those of all other nodes.
        """
        if self.num_nodes == len(self._nodes) or self._node_group is not None:
            return self._node_group
        own_rank = dist.get_rank(self._groups[0])
        for ranks in ranks_of_nodes(self._nodes):
            group = dist.new_group(ranks, timedelta(seconds=self._timeout_s), backend="gloo")
            if own_rank in ranks:
                self._node_group = group
        return self._node_group

    def begin(self, what: str, values: Tensor, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
        """Begin to sum `values` in place, over all ranks by default. Return a function that waits for it.

        what  for the error, TransportError, which it raises if a rank is gone
        """
        work = dist.all_reduce(values, group=group or self._groups[values.is_cuda], async_op=True)
        assert work is not None
        return lambda: self._wait(what, work, is_enqueued=values.is_cuda)

    def use_node_group(self, group: dist.ProcessGroup) -> None:
        """Use a group of this node that there is, on all ranks alike."""
        self._node_group = group

    def close(self) -> None:
        """Let the group of this node go. For the training thread."""
        group, self._node_group = self._node_group, None
        if group is not None:
            destroy_group(group)

    def _wait(self, what: str, work: dist.Work, *, is_enqueued: bool) -> None:
        while True:
            # One that ends just after a look has timed out has not failed.
            is_last = is_enqueued or work.is_completed()
            try:
                if is_last:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError as error:
                if is_last or self._has_lost_ranks():
                    raise self._broken(what, error) from error

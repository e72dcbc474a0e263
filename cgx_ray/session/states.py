"""Turn the states of all ranks in a checkpoint into the state of one rank, for any world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cgx_ray.codecs.codec import KINDS
from cgx_ray.errors import StateError


def check_complete(states: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return `states`. Raises StateError unless they are those of all ranks of one run at one step."""
    runs = {(state.get("world_size"), state.get("step")) for state in states}
    ranks = sorted(state.get("rank", -1) for state in states)
    if len(runs) != 1 or ranks != list(range(states[0].get("world_size", 0))):
        raise StateError(
            f"got states of ranks {ranks} with (world size, step) {sorted(runs, key=str)}; give the states of all "
            "ranks of one run at one step, or only this rank's own"
        )
    return states


def merge_states(states: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, dict[str, torch.Tensor]]]:
    """Return step and memories, by kind and layer, for every rank of a new group: the mean of the old ones.

    The mean keeps the gradient that is still owed: (1/N) times the sum of residuals is the same before and after, for
    any two world sizes. Momentum is a sum of gradients too. PowerSGD's Q is the same on all ranks, except over
    allgather, where every start will do.
    """
    merged: dict[str, dict[str, torch.Tensor]] = {}
    for kind in KINDS:
        names = [set(state[kind]) for state in states]
        if any(other != names[0] for other in names):
            odd = sorted(set.union(*names) - set.intersection(*names))
            raise StateError(f"not every rank's state has {kind} of {odd[0]!r}; give the states of one run at one step")
        merged[kind] = {name: torch.stack([state[kind][name] for state in states]).mean(0) for name in sorted(names[0])}
    return max(state["step"] for state in states), merged

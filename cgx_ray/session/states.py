"""Turn the states of all ranks in a checkpoint into the state of one rank, for any world size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from cgx_ray.codecs.codec import KINDS
from cgx_ray.errors import StateError

STATE_FORMAT = 3


def check_format(state: Mapping[str, Any]) -> None:
    """Raise StateError if `state` has another format than this version reads."""
    if state.get("format") != STATE_FORMAT:
        raise StateError(f"state has format {state.get('format')!r}, this version reads {STATE_FORMAT}")


def state_of(rank: int, world_size: int, states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state that `rank` of a new group of `world_size` ranks begins with.

    states  of all ranks of one run at one step, in any order. Each is let go before the next is taken, so where
            `states` is an iterator that loads them, no more than two states are in memory, for any number of ranks

    It is the rank's own state if the old group had as many ranks, else the mean of all. The mean keeps the gradient
    that is still owed: (1/N) times the sum of residuals is the same before and after, for any two world sizes.
    Momentum is a sum of gradients too. PowerSGD's Q is the same on all ranks, except over allgather, where every start
    will do.

    Raises StateError unless the states are complete and belong together.
    """
    total: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    runs: set[tuple[Any, Any, Any]] = set()
    ranks: list[int] = []
    for state in states:
        check_format(state)
        ranks.append(state["rank"])
        runs.add((state["world_size"], state["step"], state["loss_scale"]))
        is_own = state["world_size"] == world_size and state["rank"] == rank
        if is_own or (state["world_size"] != world_size and len(runs) == 1):
            _add(state, total, is_first=is_own or len(ranks) == 1)
        del state  # else it would stay in memory while the next one is loaded
    _check_complete(ranks, runs)
    old_size, step, loss_scale = runs.pop()
    if old_size != world_size:
        for memory in total.values():
            for value in memory.values():
                value.div_(old_size)
    own = {"rank": rank, "world_size": world_size, "step": step, "loss_scale": loss_scale}
    return {"format": STATE_FORMAT, **own, **total}


def _add(state: Mapping[str, Any], total: Mapping[str, dict[str, Tensor]], *, is_first: bool) -> None:
    """Add the memories of `state` to `total`, which has none yet if the state `is_first`."""
    for kind in KINDS:
        values: Mapping[str, Tensor] = state[kind]
        if is_first:
            # Copies, since the others are added to them.
            total[kind].update((name, values[name].clone()) for name in sorted(values))
            continue
        for name in sorted(values.keys() | total[kind].keys()):
            if name not in values or name not in total[kind] or values[name].shape != total[kind][name].shape:
                raise StateError(
                    f"not every rank's state has {kind} of {name!r}, of the same size; give the states of one run at "
                    "one step"
                )
            total[kind][name].add_(values[name])


def _check_complete(ranks: list[int], runs: set[tuple[Any, Any, Any]]) -> None:
    if len(runs) != 1 or sorted(ranks) != list(range(next(iter(runs))[0])):
        raise StateError(
            f"got states of ranks {sorted(ranks)} with (world size, step, loss scale) {sorted(runs, key=str)}; give "
            "the states of all ranks of one run at one step, or only this rank's own"
        )

"""Turn the states of all ranks in a checkpoint into the state of one rank, for any world size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cgx_ray.codecs.codec import KINDS, is_finite
from cgx_ray.engine.period.rounds import NO_ROUND
from cgx_ray.errors import StateError

STATE_FORMAT = 4
# Keys of the memory of parameters' changes, and of the round under way (`engine.period.rounds`).
CHANGES, ROUND = "changes", "round"
# Parts of parameters' names that wrappers of torch add: torch.compile, DataParallel and DDP, checkpoint_wrapper, FSDP.
_WRAPPERS = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def check_format(state: Mapping[str, Any]) -> None:
    """Raise StateError if `state` is none of an `Attachment`, or has another format than this version reads."""
    if not isinstance(state, Mapping) or "format" not in state:
        raise StateError(
            f"a {type(state).__name__} without a format is no state; give what attachment.state_dict() has returned on "
            "this rank, or a list of those of all ranks"
        )
    if state["format"] != STATE_FORMAT:
        raise StateError(
            f"state has format {state['format']!r}, this version reads {STATE_FORMAT}; load one of this version"
        )


def check_own(state: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Raise StateError unless `state` is that of `rank` of `world_size` ranks, and all its numbers are finite."""
    check_format(state)
    whose = f"rank {state['rank']} of {state['world_size']}"
    if (state["rank"], state["world_size"]) != (rank, world_size):
        raise StateError(
            f"got the state of {whose} on rank {rank} of {world_size}; memory is each rank's own, so save the states "
            "of all ranks and load them as a list, or load none to begin without memory"
        )
    if not 0 < state["loss_scale"] < math.inf:
        raise StateError(f"the state of {whose} has loss scale {state['loss_scale']}; start from another checkpoint")
    for kind, name, value in _memories(state):
        if value.dtype != torch.float32 or not is_finite(value):
            raise StateError(
                f"the state of {whose} has {kind} of layer {name!r} with NaN or Inf, or not in float32 (it is "
                f"{value.dtype}); start from another checkpoint"
            )


def own_place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    has_group = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if has_group else (0, 1)


def no_memory() -> dict[str, Any]:
    """Return the memory in a state of a rank that has none."""
    return {**{kind: {} for kind in KINDS}, CHANGES: {kind: {} for kind in KINDS}, ROUND: NO_ROUND}


def _memories(state: Mapping[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield all memory in a state: its kind, the layer, and the value."""
    for part in (state, state[CHANGES]):
        for kind in KINDS:
            yield from ((kind, name, value) for name, value in part[kind].items())


def named_as(memory: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return `memory`, of one kind, by the `names` of a model's layers.

    Names are the same if only wrappers of torch, such as torch.compile, set them apart. A name that is none or several
    of `names` stays. Layers without elements, which earlier versions remembered, are left out.
    """
    known = set(names)
    of_plain: dict[str, list[str]] = {}
    for name in known:
        of_plain.setdefault(_without_wrappers(name), []).append(name)
    found: dict[str, Tensor] = {}
    for name in sorted(memory, key=lambda name: name not in known):
        same = [name] if name in known else of_plain.get(_without_wrappers(name), [])
        if memory[name].numel() > 0:
            found[same[0] if len(same) == 1 and same[0] not in found else name] = memory[name]
    return found


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def state_of(
    rank: int, world_size: int, states: Iterable[Mapping[str, Any]], *, is_complete: bool = True
) -> dict[str, Any]:
    """Return the state that `rank` of a new group of `world_size` ranks begins with.

    states       of all ranks of one run at one step, in any order. Each is let go before the next is taken, so where
                 `states` is an iterator that loads them, no more than two states are in memory, for any number of ranks
    is_complete  False if some ranks have no state: then every rank begins with the mean of the others

    It is the rank's own state if the old group had as many ranks, else the mean of all. The mean keeps the gradient
    that is not sent yet: (1/N) times the sum of residuals is the same before and after, for any two world sizes.
    Momentum is a sum of gradients too. PowerSGD's Q is the same on all ranks, except over allgather, where every start
    will do.

    Raises StateError unless the states belong together and, if `is_complete`, none is missing.
    """
    if not isinstance(states, Iterable):
        check_format(states)  # raises, as it is no state either
    total = no_memory()
    runs: set[tuple[Any, Any, Any]] = set()
    ranks: list[int] = []
    for state in states:
        check_format(state)
        ranks.append(state["rank"])
        runs.add((state["world_size"], state["step"], state["loss_scale"]))
        averages = not is_complete or state["world_size"] != world_size
        is_own = not averages and state["rank"] == rank
        if is_own or (averages and len(runs) == 1):
            is_first = is_own or len(ranks) == 1
            _add(state, total, is_first=is_first)
            _add(state[CHANGES], total[CHANGES], is_first=is_first)
            # A round goes on only where it began. All ranks have the same rho.
            total[ROUND] = state[ROUND] if is_own else {**state[ROUND], "anchor": {}, "folds": []}
        del state  # else it would stay in memory while the next one is loaded
    if len(runs) != 1 or (is_complete and sorted(ranks) != list(range(next(iter(runs))[0]))):
        raise StateError(
            f"got states of ranks {sorted(ranks)} with (world size, step, loss scale) {sorted(runs, key=str)}; give "
            "the states of all ranks of one run at one step, or only this rank's own"
        )
    old_size, step, loss_scale = runs.pop()
    if old_size != world_size or not is_complete:
        for _, _, value in _memories(total):
            value.div_(len(ranks))
    own = {"rank": rank, "world_size": world_size, "step": step, "loss_scale": loss_scale}
    return {"format": STATE_FORMAT, **own, **total}


def _add(state: Mapping[str, Any], total: Mapping[str, Any], *, is_first: bool) -> None:
    """Add the memories of `state` by kind to `total`, which has none yet if the state `is_first`."""
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

"""Reductions of a step's fields: values of the ranks of a node become one, and then values of nodes one of the step.

A record names the reduction of each field in its type: `lr: Annotated[float | None, MEDIAN]`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import attrgetter, itemgetter
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, get_type_hints

# Returns one value for those of several records, which are in order.
Reduce = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Functions of both stages. None: the next record has no such field, or its field is made by hand."""

    of_ranks: Reduce | None = None
    of_nodes: Reduce | None = None


def reducer(record: type, stage: Literal["of_ranks", "of_nodes"]) -> Callable[[Sequence[object]], dict[str, Any]]:
    """Return a function that reduces records to the fields of one. `record`: the dataclass that names the reductions.

    Fields are looked up here, once: the function reduces the records of 512 nodes in each step. Raises TypeError if a
    field names no reduction.
    """
    types = get_type_hints(record, include_extras=True)
    named = {field.name: getattr(types[field.name], "__metadata__", (None,))[0] for field in fields(record)}
    if unnamed := [name for name, reduction in named.items() if not isinstance(reduction, Reduction)]:
        raise TypeError(f"{record.__name__} names no reduction of {', '.join(unnamed)}; RANK_ONLY is one, too")
    functions = {name: found for name, one in named.items() if (found := getattr(one, stage)) is not None}
    values_of = attrgetter(*functions)

    def reduce(records: Sequence[object]) -> dict[str, Any]:
        columns = zip(*map(values_of, records), strict=True)
        return {name: function(column) for (name, function), column in zip(functions.items(), columns, strict=True)}

    return reduce


class Sum(NamedTuple):
    """A sum over `num` ranks."""

    total: float
    num: int


def by_name(reduce: Reduce) -> Reduce:
    """Return a function of mappings: it reduces the values of each name, of those that have it."""

    def of_mappings(mappings: Sequence[Any]) -> dict[str, Any]:
        values = defaultdict(list)
        for mapping in mappings:
            for name, value in mapping.items():
                values[name].append(value)
        return {name: reduce(found) for name, found in values.items()}

    return of_mappings


def by_place(reduce: Reduce) -> Reduce:
    """Return a function of sequences: it reduces the values at each place, of those that are not empty."""
    return lambda sequences: tuple(map(reduce, zip(*filter(None, sequences), strict=True)))


def _of_known(reduce: Reduce, is_kept: Callable[[float], bool] = lambda value: True) -> Reduction:
    """Return the reduction over the ranks that have a value and where it is kept; None without any."""

    def of_nodes(nodes: Sequence[Sequence[float]]) -> float | None:
        values = list(chain.from_iterable(nodes))
        return reduce(values) if values else None

    return Reduction(lambda values: tuple(one for one in values if one is not None and is_kept(one)), of_nodes)


def _sum(values: Sequence[float]) -> Sum:
    return Sum(math.fsum(values), len(values))


def _mean(sums: Sequence[Sum]) -> float:
    return math.fsum(one.total for one in sums) / sum(one.num for one in sums)


def _same_or_one(values: Sequence[int]) -> int:
    return values[0] if len(set(values)) == 1 else 1


# Nodes do not have it; their monitors read that of each rank.
RANK_ONLY = Reduction()
# Reduced in `monitors.sample` and `control.joined_steps`, since it depends on another field.
BY_HAND = Reduction()
# Nodes keep it by rank, in the order of `NodeStep.ranks`. Of the step, `control.joined_steps` makes what it needs.
PER_RANK = Reduction(tuple)
# All wait for the rank with the largest.
LARGEST = Reduction(tuple, lambda nodes: max(chain.from_iterable(nodes)))
LARGEST_BY_PLACE = Reduction(by_place(max), by_place(max))
# Alike on all ranks, or on those of a node.
SAME = Reduction(itemgetter(0), itemgetter(0))
SAME_IN_NODE = Reduction(itemgetter(0))
SAME_OR_ONE = Reduction(_same_or_one, _same_or_one)
# Over the ranks that have a value.
MEDIAN = _of_known(median)
MEAN_OF_FINITE = _of_known(fmean, math.isfinite)
ROOT_MEAN_SQUARE = _of_known(lambda values: math.hypot(*values) / math.sqrt(len(values)))
# Over the ranks that measured it. Nodes have sums.
MEAN_BY_NAME = Reduction(by_name(_sum), by_name(_mean))
MEAN_BY_PLACE = Reduction(by_place(_sum), by_place(_mean))

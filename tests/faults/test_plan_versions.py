"""Ranks that hold different plans: none takes effect that a rank does not hold."""

from __future__ import annotations

import pytest
from support.branches import Branches, train
from support.ranks import log_lines, run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.plan import Scheme


def _hold(rank: int, offers: list[list[list[int]]]) -> tuple[list[int], list[str], list[str]]:
    """Hold the plans of this rank before every fourth step; return versions in force, hashes and log."""
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="none", scheme="dense")
    lines = log_lines()
    layers, versions, hashes = cgx_ray.layers_of(model), [], []
    for turn, by_rank in enumerate(offers):
        for version in by_rank[rank]:
            codec = ("none", "qsgd:bits=8", "qsgd:bits=4", "qsgd:bits=2")[version]
            scheme = Scheme.SRA if version else Scheme.DENSE
            attachment.hold(cgx_ray.make_plan(layers, version=version, world_size=2, codec=codec, scheme=scheme))
        hashes += train(model, rank, range(4 * turn, 4 * turn + 4))
        assert attachment.last_step is not None
        versions.append(attachment.last_step.plan_version)
    attachment.close()
    return versions, hashes, lines


CASES = {
    # The second rank never gets plan 1: the plan in force stays until both hold plan 2.
    "a plan is lost": ([[[1], [2]], [[], []], [[2], []]], [0, 0, 2]),
    # The second rank already holds a newer one: both hold plan 1.
    "one rank is ahead": ([[[1], [1, 2]], [[2], []]], [1, 2]),
    "holes": ([[[1, 3], [2]], [[], [3]]], [0, 3]),
}


@pytest.mark.fault(
    "ranks that hold different versions of the plan", "the plan in force stays until all hold a newer one"
)
@pytest.mark.parametrize("case", CASES)
def test_a_plan_takes_effect_only_if_all_ranks_hold_it(case: str) -> None:
    offers, expected = CASES[case]
    first, second = run_ranks(2, _hold, offers)
    assert first[0] == second[0] == expected
    assert first[1] == second[1]
    lost = [line for line in second[2] if "which this rank never got" in line]
    assert len(lost) == (case == "a plan is lost"), lost

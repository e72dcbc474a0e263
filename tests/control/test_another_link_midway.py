"""The link changes while a plan is on its way to the ranks, or in the steps of a trial."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.control_runs import LAYERS, FakeTraining, start

from cgx_ray.control.learned.measured import is_dense
from cgx_ray.planner.planned_group import groups_of

FAST, SLOW = 1.0, 0.05


@pytest.mark.parametrize("lag", [4, 6, 10])
def test_a_plan_that_is_on_its_way_when_the_link_changes_is_decided_again_before_it_arrives(
    tmp_path: Path, lag: int
) -> None:
    run = FakeTraining(start(tmp_path).loop, gbps=FAST, step=1, lag=lag)
    assert [one.kind for one in run.run(4)] == ["replace"]
    run.gbps = SLOW
    again = run.run(3)
    assert [one.reason.partition(" from")[0] for one in again] == ["bandwidth fell"]
    state = run.loop._state
    assert state is not None
    assert state.decided is not None
    assert state.decided.network.between.bandwidth_gbps == pytest.approx(SLOW, rel=0.2)


@pytest.mark.parametrize("num_measured", [0, 1, 2])
def test_measuring_steps_end_when_the_link_changes(tmp_path: Path, num_measured: int) -> None:
    run = FakeTraining(start(tmp_path).loop, gbps=FAST, step=1, slowdown=1.55)
    state, home = run.loop._state, run.loop.plans[-1]
    assert state is not None
    for _ in range(200):
        if state.measuring is not None:
            break
        home = run.loop.plans[-1]
        run.run(1)
    assert state.measuring is not None, "nothing was compared with dense"
    run.run(num_measured)
    assert state.measuring.home.groups == home.groups
    run.gbps = SLOW
    decisions = run.run(3)
    # Back home, which the policy then keeps; or another plan.
    assert {one.reason.partition(" from")[0] for one in decisions} == {"bandwidth fell"}
    assert [one.kind for one in decisions] in (["replace", "keep"], ["replace"])
    assert state.measuring is None
    assert not is_dense(run.loop.plans[-1])


def test_the_times_of_a_plan_on_the_link_before_do_not_count_on_the_new_one(tmp_path: Path) -> None:
    run = FakeTraining(start(tmp_path).loop, gbps=FAST, step=1, slowdown=1.55, lag=4)
    state = run.loop._state
    assert state is not None
    while state.measuring is None and run.step < 200:
        run.run(1)
    assert state.measuring is not None
    home = groups_of(state.measuring.home, LAYERS)
    while state.measuring is not None:
        run.run(1)
    run.gbps = SLOW
    run.run(4)
    ran = state.steps.plan_times.on(state.known(), float(run.step)).get(home)
    assert ran is None or not ran.is_measured, "it has not run on this link"


@pytest.mark.parametrize(("slow_gbps", "is_noticed"), [(0.1, False), (0.02, True)])
def test_one_slow_step_is_another_link_unless_it_was_a_hiccup(
    tmp_path: Path, slow_gbps: float, is_noticed: bool
) -> None:
    run = FakeTraining(start(tmp_path).loop, gbps=20.0, compute_s=0.02, step=1)
    run.run(30)
    state = run.loop._state
    assert state is not None
    before = state.network.num_changes
    run.gbps = slow_gbps
    run.run(1)
    run.gbps = 20.0
    assert (state.network.num_changes > before) is is_noticed

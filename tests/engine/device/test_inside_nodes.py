"""Ranks of a node sum in the memory of a traced device, by Gloo in the place of NCCL; nodes exchange by messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.device.traced_device import RaceError, TracedDevice
from support.device.traced_training import TracedTraining
from support.failing_ranks import die, said_by_survivors
from support.ranks import run_ranks
from torch import Tensor

import cgx_ray
from cgx_ray.collectives import Transport
from cgx_ray.collectives.transport import tcp
from cgx_ray.collectives.transport.vendor_group import VendorGroup
from cgx_ray.plan import CodecSpec, GroupPlan, Intra, Layer, Option, Plan, Scheme

TIMEOUT_S = 30.0
STEPS = 3
Nodes = tuple[int, ...]
Case = tuple[str, str]
# The first two are a group whose chunks are equally long for two ranks, so that nothing is copied.
NUMELS = (2560, 2560, 1300, 2020)
CASES: list[Case] = [
    ("qsgd", "sra"),
    ("qsgd", "allgather"),
    ("topk:density=0.05", "allgather"),
    ("dgc:density=0.05", "allgather"),
    ("ef_signsgd", "sra"),
    ("none", "sra"),
    ("terngrad", "ring"),
    ("bf16", "tree"),
    ("onebit", "broadcast"),
    # By the host, since nodes sum messages.
    ("fp16", "allreduce"),
    ("powersgd", "allgather"),
]


class Outcome(NamedTuple):
    """Averages by step, what this rank gave, and its residuals, or the error."""

    averages: list[Tensor]
    given: list[Tensor]
    residuals: list[Tensor]
    error: str | None = None


def layers_of(dtype: str) -> list[Layer]:
    return [Layer(name=f"l{i}", numel=n, ndim=2, num_rows=20, dtype=dtype) for i, n in enumerate(NUMELS)]


def plan_of(case: Case, num_ranks: int, version: int = 0, intra: str = "dense") -> Plan:
    option = Option(codec=CodecSpec.parse(case[0]), scheme=Scheme(case[1]), intra=Intra(intra))
    groups = (("l0", "l1"), ("l2",), ("l3",))
    return Plan(
        version=version, world_size=num_ranks, groups=tuple(GroupPlan(layers=some, option=option) for some in groups)
    )


class Ranks:
    """The vendor's groups of all ranks and of this node, and transports that use them on `device`."""

    def __init__(self, rank: int, nodes: Nodes) -> None:
        self._rank = rank
        tcp.host_key = lambda: f"node {nodes[rank]}"
        here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        self.everyone = dist.new_group()
        self._inside = dist.new_group(here, use_local_synchronization=True)

    def train(self, layers: Sequence[Layer], plan: Plan, device: TracedDevice | None) -> TracedTraining:
        world = dist.group.WORLD
        assert world is not None
        mesh = tcp.connect_mesh(world, TIMEOUT_S)
        vendor = self.everyone if device is not None else None
        transport = Transport(world, mesh=mesh, timeout_s=TIMEOUT_S, cuda_group=vendor)
        if device is not None:
            transport.inside = VendorGroup(self._inside, device)
        return TracedTraining(self._rank, layers, plan, transport, device)


def outcome_of(training: TracedTraining, num_steps: int = STEPS) -> Outcome:
    averages, given = [], []
    try:
        for _ in range(num_steps):
            averages.append(training.step())
            given.append(torch.cat(list(training.given.values())))
    except (cgx_ray.CGXError, RaceError) as error:
        training.engine.close(1.0)
        return Outcome([], [], [], str(error))
    residuals = list(training.engine.state()["residuals"].values())
    training.engine.close()
    return Outcome(averages, given, residuals)


def _outcomes(rank: int, nodes: Nodes, cases: Sequence[Case], dtype: str) -> list[tuple[Outcome, Outcome]]:
    """Return for each case what a traced device and what the CPU makes."""
    ranks, layers = Ranks(rank, nodes), layers_of(dtype)
    on_cpu = [outcome_of(ranks.train(layers, plan_of(case, len(nodes)), None)) for case in cases]
    device = TracedDevice(len(nodes))
    device.install(ranks.everyone)
    found = []
    for case in cases:
        training = ranks.train(layers, plan_of(case, len(nodes)), device)
        is_on_host = case[1] == "allreduce"
        assert [group._crosses for group in training.engine._banks.gradients.groups] == [is_on_host] * 3
        found.append(outcome_of(training))
    return list(zip(found, on_cpu, strict=True))


@pytest.mark.parametrize(
    ("nodes", "cases", "dtype"),
    [
        ((0, 0, 1, 1), CASES[:5], "float32"),
        pytest.param((0, 0, 1, 1), CASES[:3], "bfloat16", marks=pytest.mark.slow),
        ((0, 1, 1), CASES[5:], "float32"),
        pytest.param((0, 0), CASES[:3], "float32", marks=pytest.mark.slow),
    ],
    ids=["2 x 2", "2 x 2 of bfloat16", "1 and 2", "one node"],
)
def test_nodes_of_at_most_two_ranks_make_the_bits_of_the_cpu(nodes: Nodes, cases: Sequence[Case], dtype: str) -> None:
    """A sum of two numbers has no order."""
    results = run_ranks(len(nodes), _outcomes, nodes, cases, dtype)
    for index, case in enumerate(cases):
        for found, expected in (result[index] for result in results):
            assert found.error is None, (case, found.error)
            assert len(found.averages) == STEPS
            _assert_same(found, expected, case)


def _assert_same(found: Outcome, expected: Outcome, case: Case) -> None:
    assert len(found.residuals) == len(expected.residuals)
    pairs = zip([*found.averages, *found.residuals], [*expected.averages, *expected.residuals], strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=str(case))


def _uneven(rank: int, nodes: Nodes, seed: int) -> list[Outcome]:
    """Return what plans of one option make, then one whose groups are summed in four ways."""
    ranks, layers = Ranks(rank, nodes), layers_of("float32")
    device = TracedDevice(seed)
    device.install(ranks.everyone)
    plans = [plan_of(case, len(nodes)) for case in (("none", "sra"), ("topk:density=0.05", "allgather"))]
    texts = ("qsgd over sra, dense inside nodes", "dense, dense inside nodes", "qsgd over allgather", "dense")
    mixed = tuple(GroupPlan(layers=(f"l{i}",), option=Option.parse(text)) for i, text in enumerate(texts))
    plans.append(Plan(version=0, world_size=len(nodes), groups=mixed))
    outcomes = []
    for plan in plans:
        training = ranks.train(layers, plan, device)
        assert not any(group._crosses for group in training.engine._banks.gradients.groups)
        if plan.groups == mixed:
            assert [group.is_enqueued for group in training.engine._banks.gradients.groups] == [
                False,
                True,
                False,
                True,
            ]
        outcomes.append(outcome_of(training))
    return outcomes


@pytest.mark.parametrize("seed", range(2))
def test_uneven_nodes_hold_the_same_bits_which_are_the_average_and_owe_what_it_lacks(seed: int) -> None:
    """As on the CPU; sums of three are made in the vendor's order."""
    nodes = (0, 0, 0, 1)
    results = run_ranks(len(nodes), _uneven, nodes, seed)
    for index, name in enumerate(("none", "topk", "mixed")):
        outcomes: list[Outcome] = [result[index] for result in results]
        assert [one.error for one in outcomes] == [None] * len(nodes), name
        for one in outcomes[1:]:
            assert all(torch.equal(a, b) for a, b in zip(one.averages, outcomes[0].averages, strict=True)), name
        given_N = torch.stack([torch.stack(one.given).double().sum(0) for one in outcomes]).mean(0)
        sent_N = torch.stack(outcomes[0].averages).double().sum(0)
        if name == "topk":
            owed_N = torch.stack([torch.cat(_by_layer(one)) for one in outcomes]).double().mean(0)
            assert owed_N.norm() > 0
            sent_N += owed_N
        error_N = (sent_N - given_N).abs()
        # As in test_hierarchical: sums of up to N float32 numbers under 40 in size.
        limit = 40 * STEPS * (2 * len(nodes) + 4) * 2**-24
        exact_N = error_N[NUMELS[0] : NUMELS[0] + NUMELS[1]] if name == "mixed" else error_N
        assert float(exact_N.max()) <= limit, (name, float(exact_N.max()), limit)


def _by_layer(outcome: Outcome) -> list[Tensor]:
    return [residual.view(-1) for residual in outcome.residuals]


def _eventful(rank: int, nodes: Nodes) -> list[Outcome]:
    """Train with unused layers, a NaN and changes of plan: on a traced device, then on the CPU."""
    ranks, layers = Ranks(rank, nodes), layers_of("float32")
    case, num_ranks, outcomes = ("topk:density=0.05", "allgather"), len(nodes), []
    for on_device in (False, True):
        device = TracedDevice(1) if on_device else None
        if device is not None:
            device.install(ranks.everyone)
        training = ranks.train(layers, plan_of(case, num_ranks), device)
        averages = [training.step(unused=())]
        averages.append(training.step(unused=("l2",)))
        averages.append(training.step(unused=("l0", "l3") if rank == 0 else ()))
        averages.append(training.step(unused=(), broken="l3" if rank == 1 else None))
        for version, intra in ((1, "flat"), (2, "dense")):
            training.engine.hold(plan_of(case, num_ranks, version, intra))
            averages += [training.step(unused=()) for _ in range(4)]
            assert training.engine.plan.version == version
        residuals = list(training.engine.state()["residuals"].values())
        training.engine.close()
        outcomes.append(Outcome(averages, [], residuals))
    return outcomes


def test_unused_layers_nan_and_changes_of_plan_leave_the_residuals_of_the_cpu() -> None:
    for on_cpu, on_device in run_ranks(4, _eventful, (0, 0, 1, 1)):
        assert on_device.averages[3].isnan().any()
        assert not on_device.averages[4].isnan().any()
        assert any(residual.count_nonzero() for residual in on_device.residuals)
        _assert_same(on_device, on_cpu, ("topk", "eventful"))


def _traced(rank: int, nodes: Nodes, case: Case, removed: str | None) -> tuple[str | None, set[str], dict[str, float]]:
    """Return the error of some steps, the sites of what was waited for, and the counts per group."""
    ranks = Ranks(rank, nodes)
    device = TracedDevice(0, removed)
    device.install(ranks.everyone)
    training = ranks.train(layers_of("float32"), plan_of(case, len(nodes)), device)
    device.sites.clear()
    outcome = outcome_of(training)
    return outcome.error, device.sites, {what: n / STEPS / training.num_groups for what, n in device.counts.items()}


@pytest.mark.parametrize(
    "case", [("qsgd", "sra"), pytest.param(("topk:density=0.05", "allgather"), marks=pytest.mark.slow)], ids="-".join
)
def test_without_any_one_wait_a_race_is_found(case: Case) -> None:
    nodes = (0, 0, 1)
    sites = set[str]().union(*(sites for _, sites, _ in run_ranks(len(nodes), _traced, nodes, case, None)))
    names = {site.split(":")[1] for site in sites if ":" in site}
    assert {"reduce_scatter", "all_gather"} <= names, sites
    for site in sorted(sites):
        errors = [error for error, _, _ in run_ranks(len(nodes), _traced, nodes, case, site)]
        assert any(error is not None and "are not ordered" in error for error in errors), (site, errors)


def test_a_group_costs_one_sum_and_one_gather_and_no_wait() -> None:
    for error, _, counts in run_ranks(4, _traced, (0, 0, 1, 1), ("qsgd", "sra"), None):
        assert error is None, error
        assert counts["sums"] == counts["gathers"] == 1
        assert counts["waits"] == 0


def _killed(rank: int, folder: Path, nodes: Nodes) -> None:
    """Rank 1 is killed when its device has come to the sum of its node in the second step."""
    ranks = Ranks(rank, nodes)
    sum_rows, num_sums = VendorGroup._sum_rows, 0
    plan = plan_of(("qsgd", "sra"), len(nodes))

    def sum_or_die(inside: VendorGroup, rows_LC: Tensor) -> None:
        nonlocal num_sums
        num_sums += 1
        if num_sums == len(plan.groups) + 1:
            die(folder)
        sum_rows(inside, rows_LC)

    if rank == 1:
        VendorGroup._sum_rows = sum_or_die  # type: ignore[method-assign]
    device = TracedDevice(0)
    device.install(ranks.everyone)
    training = ranks.train(layers_of("float32"), plan, device)
    for _ in range(4):
        training.step()


@pytest.mark.fault("SIGKILL inside a sum of NCCL inside a node, with Gloo in its place", "all ranks raise an error")
def test_a_rank_killed_inside_a_sum_of_its_node_ends_the_training_of_all(tmp_path: Path) -> None:
    said = said_by_survivors(4, 1, tmp_path, _killed, (0, 0, 1, 1))
    for rank, text in said.items():
        assert f"rank {rank}, step 1" in text, said

"""The engine behind DDP, on real processes."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, batch, train
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.codecs.codec import KINDS
from cgx_ray.codecs.wire import HEADER_BYTES
from cgx_ray.collectives import Transport
from cgx_ray.engine import gain_schedule
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.gain_meter import GainMeter
from cgx_ray.engine.hook import DdpBuckets, cgx_hook
from cgx_ray.plan import CodecSpec, Plan, Scheme, make_plan
from cgx_ray.session.attachment import merge_states, open_session
from cgx_ray.session.settings import Settings

COMPRESSED = [("qsgd", "sra"), ("topk:density=0.05", "allgather"), ("topk:density=0.05", "artopk_ring")]

DDP_OPTIONS = ["gradient_as_bucket_view", "find_unused_parameters", "bucket_cap_mb", "static_graph"]


def _train_pair(rank: int, codec: str, scheme: str, ddp: dict[str, Any], dtype: torch.dtype) -> Any:
    model = DistributedDataParallel(Branches().to(dtype), **ddp)
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
    hashes = train(model, rank, range(6))
    sample = attachment.last_step
    attachment.close()
    return hashes, sample


@pytest.mark.parametrize("codec_scheme", COMPRESSED)
@pytest.mark.parametrize(
    "ddp", [{option: 0.01 if option == "bucket_cap_mb" else True} for option in DDP_OPTIONS], ids=DDP_OPTIONS
)
def test_ddp_options_work(codec_scheme: tuple[str, str], ddp: dict[str, Any]) -> None:
    results = run_ranks(2, _train_pair, *codec_scheme, ddp, torch.float32)
    assert results[0][0] == results[1][0]


def _train_unused(rank: int) -> list[str]:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    attachment = cgx_ray.attach(model, codec="topk:density=0.05", scheme="allgather")
    hashes = train(model, rank, range(2), use_right=rank == 0)
    hashes += train(model, rank, range(2, 4), use_right=False)
    attachment.close()
    return hashes


def test_parameters_unused_on_one_rank_or_on_all_stay_identical() -> None:
    first, second = run_ranks(2, _train_unused)
    assert first == second


def _train_against_ddp(rank: int, accumulate: int) -> float:
    plain = DistributedDataParallel(Branches())
    ours = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(ours, codec="none", scheme="dense")
    train(plain, rank, range(5), accumulate=accumulate)
    train(ours, rank, range(5), accumulate=accumulate)
    attachment.close()
    return max(float((a - b).abs().max()) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


def _train_over(rank: int, transport: str) -> list[str]:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra", transport=transport)
    hashes = train(model, rank, range(4))
    attachment.close()
    return hashes


def test_the_transport_does_not_change_what_is_learned() -> None:
    # Two ranks: small layers go dense, and the vendor's sum of three has an order of its own.
    tcp, gloo = run_ranks(2, _train_over, "tcp"), run_ranks(2, _train_over, "gloo")
    assert tcp[0] == tcp[1] == gloo[0]


def _train_until_killed(rank: int, folder: Path) -> None:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra")
    train(model, rank, range(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        train(model, rank, range(2, 4))
    except (cgx_ray.TransportError, RuntimeError) as error:
        (folder / f"rank{rank}").write_text(str(error))
    attachment.close()


def test_when_a_rank_is_killed_the_others_say_which_and_where(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code -9"):
        run_ranks(3, _train_until_killed, tmp_path)
    for rank in (0, 2):
        said = (tmp_path / f"rank{rank}").read_text()
        assert re.search(rf"rank {rank}, step 2, group 0: .* did not get through \(rank 1 hung up", said), said


@pytest.mark.parametrize("accumulate", [1, 3])
def test_dense_without_codec_trains_like_plain_ddp(accumulate: int) -> None:
    # The ring adds in another order for other bucket sizes: a few units in the last place of weights under 1.
    assert max(run_ranks(3, _train_against_ddp, accumulate)) <= 16 * 2**-24


def _paid_back(rank: int, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Sum of what was sent through a change from top-k to `scheme`, and of what should have been."""
    layer = nn.Linear(2000, 1, bias=False)
    model = DistributedDataParallel(layer)
    attachment = cgx_ray.attach(model, codec="topk:density=0.1", scheme="allgather")
    plan = cgx_ray.make_plan(cgx_ray.layers_of(model), version=1, world_size=2, scheme=scheme)
    # A layer with one row is small by its size only, so make_plan compresses it.
    x_1N = torch.randn(1, 2000, generator=torch.Generator().manual_seed(rank))
    total_N = torch.zeros(2000)
    for step in range(6):
        if step == 2:
            attachment.hold(plan)
        layer.weight.grad = None
        model(x_1N).sum().backward()
        assert layer.weight.grad is not None
        total_N += layer.weight.grad[0]
    owed = len(attachment.state_dict()["residuals"])
    assert attachment.last_step is not None
    assert attachment.last_step.plan_version == 1
    attachment.close()
    return total_N, 6 * x_1N[0], owed


@pytest.mark.parametrize("scheme", [Scheme.DENSE, Scheme.SRA])
def test_residuals_are_paid_when_the_next_plan_needs_none(scheme: Scheme) -> None:
    (sent_N, first_N, owed), (_, second_N, _) = run_ranks(2, _paid_back, scheme)
    torch.testing.assert_close(sent_N, (first_N + second_N) / 2, rtol=0, atol=1e-4)
    assert owed == 0


def _after_close(rank: int) -> str:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="none", scheme="dense")
    train(model, rank, range(1))
    attachment.close()
    with pytest.raises(cgx_ray.CGXError) as caught:
        train(model, rank, range(1, 2))
    return str(caught.value)


def test_training_on_after_close_is_one_clear_error() -> None:
    assert "the engine is closed" in run_ranks(2, _after_close)[0]


def _bad_states(rank: int) -> list[str]:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="topk:density=0.1", scheme="allgather")
    train(model, rank, range(2))
    good = attachment.state_dict()
    foreign = {**good, "residuals": {"other.weight": torch.zeros(3)}}
    larger = {**good, "momentum": {"left.weight": torch.zeros(3)}}
    messages = []
    for states in ([], [good], foreign, larger, {**good, "format": 1}):
        with pytest.raises(cgx_ray.StateError) as caught:
            attachment.load_state_dict(states)
        messages.append(str(caught.value))
    train(model, rank, range(2, 3))
    attachment.close()
    return messages


def test_states_that_are_incomplete_or_of_another_model_are_refused() -> None:
    empty, partial, foreign, larger, version = run_ranks(2, _bad_states)[0]
    assert "ranks []" in empty
    assert "ranks [0]" in partial
    assert "no such layer" in foreign
    assert "momentum of 3 elements for layer 'left.weight', the model has 4323" in larger
    assert "format 1, this version reads 2" in version


def _gain_in_use(rank: int, scheme: Scheme) -> tuple[float, float]:
    """Gain that the engine reports for the codec in use at step 1, and the true one."""
    spec = CodecSpec(name="topk", density=0.1)
    layer = nn.Linear(3000, 1, bias=False)
    model = DistributedDataParallel(layer)
    group = cgx_ray.GroupPlan(layers=("weight",), option=cgx_ray.Option(codec=spec, scheme=scheme))
    plan = cgx_ray.Plan(version=0, world_size=2, groups=(group,))
    transport = Transport(dist.new_group())
    engine = Engine(cgx_ray.layers_of(model), plan, transport, candidates=[spec])
    model.register_comm_hook(DdpBuckets(model, engine), cgx_hook)
    x_1N = torch.randn(1, 3000, generator=torch.Generator().manual_seed(rank))
    model(x_1N).sum().backward()
    layer.weight.grad = None
    fed_N = x_1N[0] + engine.state()["residuals"]["weight"]
    model(x_1N).sum().backward()
    left_N = engine.state()["residuals"]["weight"]
    engine.close()
    assert engine.last_step is not None
    return engine.last_step.gain[str(spec)], 1 - float(left_N.norm() / fed_N.norm()) ** 2


@pytest.mark.parametrize("scheme", [Scheme.ALLGATHER, Scheme.ARTOPK_RING])
def test_gain_of_the_codec_in_use_is_what_the_exchange_really_kept(scheme: Scheme) -> None:
    results = run_ranks(2, _gain_in_use, scheme)
    for reported, true in results:
        assert reported == pytest.approx(true, rel=1e-4)
    if scheme is Scheme.ARTOPK_RING:
        # At step 1 the indices are those of rank 1; for rank 0 they are as good as random.
        assert results[0][0] < 0.5 * results[1][0]


class _PricedMeter(GainMeter):
    """A meter that takes as long as it is told."""

    price_s = 0.0

    def measure(self, grad_N: torch.Tensor) -> float:
        energy = super().measure(grad_N)
        time.sleep(self.price_s)
        self.seconds = self.price_s
        return energy


def _metered_steps(rank: int, prices_s: list[float]) -> list[int]:
    _PricedMeter.price_s = prices_s[rank]
    gain_schedule.GainMeter = _PricedMeter  # type: ignore[misc]
    model = DistributedDataParallel(nn.Linear(1100, 1, bias=False))
    layers, spec = cgx_ray.layers_of(model), CodecSpec(name="topk", density=0.1)
    plan = make_plan(layers, version=0, world_size=2, codec="none", scheme="dense")
    engine = Engine(layers, plan, Transport(dist.new_group()), candidates=[spec])
    model.register_comm_hook(DdpBuckets(model, engine), cgx_hook)
    for _ in range(65):
        model(torch.ones(1, 1100)).sum().backward()
    engine.close()
    return [sample.step for sample in engine.take_samples() if sample.gain]


def test_gains_are_measured_less_often_where_one_rank_cannot_afford_it_and_on_all_ranks_alike() -> None:
    assert run_ranks(2, _metered_steps, [0.0, 0.0]) == [[1, 21, 41, 61]] * 2
    assert run_ranks(2, _metered_steps, [0.0, 0.2]) == [[1]] * 2


def _train_two_changes(rank: int) -> tuple[list[str], list[int]]:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="none", scheme="dense")
    layers = cgx_ray.layers_of(model)
    changes = {
        # Ranks get hold of a plan at different steps, as they do from a controller.
        50 + 3 * rank: ("topk:density=0.05", "allgather"),
        120 - 2 * rank: ("qsgd", "sra"),
    }
    hashes, versions = [], []
    for step in range(200):
        if step in changes:
            codec, scheme = changes[step]
            version = 1 if step < 100 else 2
            attachment.hold(
                cgx_ray.make_plan(
                    layers,
                    version=version,
                    world_size=dist.get_world_size(),
                    codec=CodecSpec.parse(codec),
                    scheme=Scheme(scheme),
                )
            )
        hashes += train(model, rank, range(step, step + 1))
        assert attachment.last_step is not None
        versions.append(attachment.last_step.plan_version)
    attachment.close()
    return hashes, versions


def test_ranks_hold_identical_weights_through_200_steps_with_two_plan_changes() -> None:
    results = run_ranks(4, _train_two_changes)
    hashes, versions = results[0]
    for other_hashes, other_versions in results[1:]:
        assert other_hashes == hashes
        assert other_versions == versions
    assert versions == sorted(versions)
    assert set(versions) == {0, 1, 2}
    # The last rank holds plan 1 before step 59: told at 59, read at 60.
    assert versions.index(1) == 60
    assert versions.index(2) == 121


def _bad_plans(rank: int) -> list[str]:
    model = DistributedDataParallel(Branches())
    layers = cgx_ray.layers_of(model)
    attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra")
    messages = []
    offers = [
        cgx_ray.make_plan(layers, version=1, world_size=5),
        cgx_ray.make_plan(layers[1:], version=1, world_size=2),
        cgx_ray.make_plan(layers, version=0, world_size=2),
    ]
    for offer in offers:
        with pytest.raises(cgx_ray.PlanError) as caught:
            attachment.hold(offer)
        messages.append(str(caught.value))
    train(model, rank, range(4))
    assert attachment.last_step is not None
    assert attachment.last_step.plan_version == 0
    attachment.close()
    return messages


def test_a_rejected_plan_leaves_the_old_one_in_force() -> None:
    world, layers, stale = run_ranks(2, _bad_plans)[0]
    assert "world size 5" in world
    assert "first.weight" in layers
    assert "not newer" in stale


class NoPlan:
    settings = Settings()

    def first_plan(self, layers: Any, world_size: int) -> Plan:
        raise OSError("the disk is full")

    def start(self, attachment: cgx_ray.Attachment) -> None:
        raise AssertionError("there is nothing to start with")


def _attach_wrong(rank: int, case: str) -> str:
    model: nn.Module = DistributedDataParallel(Branches())
    arguments: dict[str, Any] = {}
    if case == "not ddp":
        model = Branches()
    elif case == "other layers":
        arguments["plan"] = cgx_ray.make_plan(cgx_ray.layers_of(model)[:-1], version=0, world_size=2)
    elif case == "subgroup":
        # Both ranks must make both groups.
        alone = [dist.new_group([0]), dist.new_group([1])]
        model = DistributedDataParallel(Branches(), process_group=alone[rank])
    elif case == "hook twice":
        cgx_ray.attach(model)
    elif case == "plan and codec":
        arguments = {"plan": cgx_ray.make_plan(cgx_ray.layers_of(model), version=0, world_size=2), "codec": "topk"}
    elif case == "other world":
        arguments["plan"] = cgx_ray.make_plan(cgx_ray.layers_of(model), version=0, world_size=3)
    elif case == "one rank has another plan":
        version = rank
        arguments["plan"] = cgx_ray.make_plan(cgx_ray.layers_of(model), version=version, world_size=2)
    elif case == "one rank alone is wrong" and rank == 1:
        model = Branches()
    elif case == "no plan":
        open_session(NoPlan())
    with pytest.raises(cgx_ray.CGXError) as caught:
        cgx_ray.attach(model, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("not ddp", "wrap it first"),
        ("other layers", "covers 7 layers, the model has 8"),
        ("subgroup", "averaged over 1 of 2 ranks"),
        ("hook twice", "attach once a model"),
        ("plan and codec", "give one of them"),
        ("other world", "world size 3"),
        ("one rank has another plan", "different plans"),
        ("one rank alone is wrong", "wrap it first"),
        ("no plan", "rank 0 cannot attach: OSError('the disk is full')"),
    ],
)
def test_a_wrong_attach_fails_on_all_ranks_with_one_clear_error(case: str, says: str) -> None:
    first, second = run_ranks(2, _attach_wrong, case)
    assert says in first
    assert first == second


RESUMED = [
    ("topk:density=0.02", "allgather"),
    ("dgc:density=0.02,warmup_steps=12", "artopk_ring"),
    ("powersgd", "allreduce"),
    ("powersgd", "allgather"),
    ("ef_signsgd", "sra"),
]


def _resume(rank: int, codec: str, scheme: str, interrupt: bool, as_list: bool = False) -> str:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
    train(model, rank, range(5))
    if interrupt:
        weights = model.state_dict()
        states: list[Any] = [None, None]
        dist.all_gather_object(states, attachment.state_dict())
        attachment.close()
        model = DistributedDataParallel(Branches())
        model.load_state_dict(weights)
        attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
        attachment.load_state_dict(reversed(states) if as_list else states[rank])
    hashes = train(model, rank, range(5, 9))
    attachment.close()
    return hashes[-1]


@pytest.mark.parametrize(("codec", "scheme"), RESUMED)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(codec: str, scheme: str) -> None:
    uninterrupted = run_ranks(2, _resume, codec, scheme, False)
    assert run_ranks(2, _resume, codec, scheme, True) == uninterrupted
    assert run_ranks(2, _resume, codec, scheme, True, True) == uninterrupted


def test_memories_keep_their_mean_when_the_world_size_changes() -> None:
    states = [
        {
            "step": 7,
            "residuals": {"w": torch.full((3,), float(rank))},
            "momentum": {"w": torch.full((3,), -float(rank))},
            "powersgd_q": {},
        }
        for rank in range(4)
    ]
    step, merged = merge_states(states)
    assert step == 7
    assert torch.equal(merged["residuals"]["w"], torch.full((3,), 1.5))
    assert torch.equal(merged["momentum"]["w"], torch.full((3,), -1.5))
    assert merged["powersgd_q"] == {}
    with pytest.raises(cgx_ray.StateError, match="not every rank's state has momentum of 'w'"):
        merge_states([states[0], {**states[1], "momentum": {}}])


def _through_codecs(rank: int) -> tuple[list[str], list[set[str]], list[list[float]]]:
    """Weights, the kinds of memory that are not empty, and Q, through plans that need other kinds each."""
    model = DistributedDataParallel(Branches())
    layers = cgx_ray.layers_of(model)
    attachment = cgx_ray.attach(model, codec="powersgd:rank=3", scheme="allgather")
    hashes = train(model, rank, range(3))
    kinds, qs = [], []

    def look() -> None:
        state = attachment.state_dict()
        kinds.append({kind for kind in KINDS if state[kind]})
        qs.append([float(value) for q_M in state["powersgd_q"].values() for value in q_M])

    plans = [("powersgd:rank=3", "allreduce"), ("dgc:density=0.1", "allgather"), ("topk", "artopk_ring")]
    for version, (codec, scheme) in enumerate(plans, start=1):
        look()
        plan = cgx_ray.make_plan(
            layers, version=version, world_size=3, codec=CodecSpec.parse(codec), scheme=Scheme(scheme)
        )
        attachment.hold(plan)
        hashes += train(model, rank, range(3 * version, 3 * version + 3))
    look()
    assert attachment.last_step is not None
    assert attachment.last_step.plan_version == len(plans)
    attachment.close()
    return hashes, kinds, qs


def test_ranks_stay_identical_through_codecs_that_remember_other_things() -> None:
    """Over allgather each rank has a Q of its own, over the all-reduce after it all ranks have one."""
    results = run_ranks(3, _through_codecs)
    (hashes, kinds, qs), *others = results
    for other_hashes, other_kinds, other_qs in others:
        assert other_hashes == hashes
        assert other_kinds == kinds
        assert [q == other_q for q, other_q in zip(qs, other_qs, strict=True)] == [False, True, True, True]
    q, momentum, residuals = {"residuals", "powersgd_q"}, {"residuals", "momentum"}, {"residuals"}
    assert kinds == [q, q, momentum, residuals]


def _mixed_plan(rank: int) -> tuple[list[str], float, float]:
    """Weights after each step, and the loss before and after."""
    model = DistributedDataParallel(Branches())
    plan = cgx_ray.make_plan(
        cgx_ray.layers_of(model),
        version=0,
        world_size=3,
        codec=CodecSpec.parse("qsgd"),
        scheme=Scheme.SRA,
        overrides={"left.w*": (CodecSpec.parse("topk:density=0.1"), Scheme.ALLGATHER)},
    )
    attachment = cgx_ray.attach(model, plan=plan)
    x_BD = torch.cat([batch(0, step) for step in range(100, 150)])

    def loss() -> float:
        with torch.no_grad():
            return float((model.module(x_BD) - x_BD).square().mean())

    before = loss()
    hashes = train(model, rank, range(60))
    after = loss()
    attachment.close()
    return hashes, before, after


def test_topk_on_chosen_layers_next_to_qsgd_elsewhere_trains() -> None:
    results = run_ranks(3, _mixed_plan)
    assert results[0] == results[1] == results[2]
    _, before, after = results[0]
    # The loss of doing nothing is 1, the variance of the batches; random weights start above it.
    assert after < 0.8 * before, (before, after)


def _warming_up(rank: int) -> list[tuple[int, int]]:
    """Bytes sent in each step, and how many of them are indices."""
    layer = nn.Linear(100, 40, bias=False)
    model = DistributedDataParallel(layer)
    attachment = cgx_ray.attach(model, codec="dgc:density=0.01,warmup_steps=8", scheme="allgather")
    sizes = []
    for step in range(10):
        layer.weight.grad = None
        model(torch.randn(1, 100, generator=torch.Generator().manual_seed(step + 100 * rank))).sum().backward()
        assert attachment.last_step is not None
        (transfer,) = attachment.last_step.transfers
        sizes.append((attachment.last_step.wire_bytes, transfer.index_bytes))
    attachment.close()
    return sizes


def test_dgc_sends_less_and_less_while_it_warms_up() -> None:
    densities = [0.25] * 2 + [0.0625] * 2 + [0.015625] * 2 + [0.01] * 4
    specs = [CodecSpec(name="dgc", density=density) for density in densities]
    expected = [(HEADER_BYTES + spec.payload_bytes(4000), spec.index_bytes(4000)) for spec in specs]
    for sizes in run_ranks(2, _warming_up):
        assert sizes == expected


def _attach_and_close(rank: int) -> list[int]:
    """Open files after each of some attachments."""
    counts = []
    for _ in range(4):
        model = DistributedDataParallel(Branches())
        attachment = cgx_ray.attach(model, codec="qsgd", scheme="sra")
        train(model, rank, range(2))
        attachment.close()
        attachment.close()
        del model
        gc.collect()
        # Nobody hangs up on a rank that is still in its last step.
        dist.barrier()
        counts.append(psutil.Process().num_fds())
    dist.destroy_process_group()
    attachment.close()
    return counts


def _attach_in_vain(rank: int) -> int:
    """How many process groups are left of attachments that were refused."""
    groups = dist.distributed_c10d._world.pg_map  # noqa: TID251 - torch has no public list
    before = len(groups)
    for _ in range(3):
        with pytest.raises(cgx_ray.ConfigError, match="attach got a Linear"):
            cgx_ray.attach(nn.Linear(2, 2))
    return len(groups) - before


def test_a_refused_attachment_leaves_no_process_group() -> None:
    assert run_ranks(2, _attach_in_vain) == [0, 0]


def test_a_closed_attachment_lets_its_connections_go() -> None:
    for counts in run_ranks(2, _attach_and_close):
        assert counts[1] == counts[2] == counts[3], counts


def test_world_size_one_is_a_clean_no_op() -> None:
    model = Branches()
    attachment = cgx_ray.attach(model)
    model(batch(0, 0)).sum().backward()
    assert attachment.plan is None
    assert attachment.last_step is None
    assert attachment.take_samples() == []
    attachment.load_state_dict(attachment.state_dict())
    attachment.close()


def test_importing_cgx_ray_imports_neither_ray_nor_torch_and_an_agent_needs_no_torch() -> None:
    code = """
import sys, cgx_ray, cgx_ray.cli
heavy = [name for name in ("ray", "torch", "numpy", "matplotlib") if name in sys.modules]
import cgx_ray.monitors.agent
print(heavy, "ray" in sys.modules, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[] True False"


def test_attach_stays_the_function_whoever_imports_its_module() -> None:
    code = """
import cgx_ray.session.attach, cgx_ray.backend
from cgx_ray.session.attach import attach
from cgx_ray.session.attachment import Attachment
assert cgx_ray.attach is attach and cgx_ray.Attachment is Attachment, cgx_ray.attach
assert {name: getattr(cgx_ray, name) for name in cgx_ray.__all__}["attach"] is attach
assert set(cgx_ray.__all__) <= set(dir(cgx_ray))
try:
    cgx_ray.no_such_name
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "module 'cgx_ray' has no attribute 'no_such_name'"


def test_public_names_are_frozen() -> None:
    assert sorted(cgx_ray.__all__) == [
        "Attachment", "CGXConfig", "CGXError", "CodecSpec", "ConfigError", "GroupPlan", "Intra", "Layer", "Option",
        "Plan", "PlanError", "Scheme", "SimulatedLink", "StateError", "TransportError", "WireError", "add_state",
        "attach", "configure_backend", "exclude_layers", "layers_of", "make_plan", "register_model",
    ]  # fmt: skip

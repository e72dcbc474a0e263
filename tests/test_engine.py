"""The engine behind DDP, on real processes."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.attach import merge_states
from cgx_ray.collectives import Transport
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.hook import DdpBuckets, cgx_hook
from cgx_ray.plan import CodecSpec, Scheme

PAIRS = [
    ("none", "dense"),
    ("none", "sra"),
    ("none", "allgather"),
    ("bf16", "sra"),
    ("bf16", "allgather"),
    ("qsgd", "sra"),
    ("qsgd:bits=8,bucket_size=64", "allgather"),
    ("topk:density=0.05", "allgather"),
    ("topk:density=0.05", "artopk_ring"),
]
COMPRESSED = [("qsgd", "sra"), ("topk:density=0.05", "allgather"), ("topk:density=0.05", "artopk_ring")]

DDP_OPTIONS = ["gradient_as_bucket_view", "find_unused_parameters", "bucket_cap_mb", "static_graph"]


class Branches(nn.Module):
    """A model with small layers, an odd-sized one, and a branch that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(33, 131)
        self.norm = nn.LayerNorm(131)
        self.left = nn.Linear(131, 33)
        self.right = nn.Linear(131, 33)

    def forward(self, x_BD: torch.Tensor, use_right: bool = True) -> torch.Tensor:
        hidden = self.norm(self.first(x_BD).relu())
        return self.left(hidden) + (self.right(hidden) if use_right else 0)


def weights_hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 33, generator=torch.Generator().manual_seed(1000 * rank + step)).to(dtype)


def train(model: DistributedDataParallel, rank: int, steps: range, *, accumulate: int = 1, **forward: Any) -> list[str]:
    """Plain SGD; returns the hash of the weights after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dtype = next(model.parameters()).dtype
    hashes = []
    for step in steps:
        optimizer.zero_grad()
        for part in range(accumulate):
            quiet = model.no_sync() if part < accumulate - 1 else contextlib.nullcontext()
            with quiet:
                x_BD = batch(rank, step * accumulate + part, dtype)
                (model(x_BD, **forward) - x_BD).square().mean().backward()
        optimizer.step()
        hashes.append(weights_hash(model))
    return hashes


def _train_pair(rank: int, codec: str, scheme: str, ddp: dict[str, Any], dtype: torch.dtype) -> Any:
    model = DistributedDataParallel(Branches().to(dtype), **ddp)
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
    hashes = train(model, rank, range(6))
    sample = attachment.last_step
    attachment.close()
    return hashes, sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("codec", "scheme"), PAIRS)
def test_ranks_hold_identical_weights_after_every_step(codec: str, scheme: str, dtype: torch.dtype) -> None:
    results = run_ranks(3, _train_pair, codec, scheme, {}, dtype)
    hashes = [result[0] for result in results]
    assert hashes[0] == hashes[1] == hashes[2]
    assert len(set(hashes[0])) == 6, "weights did not move"
    assert results[0][1].step == 5


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


@pytest.mark.parametrize("accumulate", [1, 3])
def test_dense_without_codec_trains_like_plain_ddp(accumulate: int) -> None:
    # The ring adds in another order for other bucket sizes: a few units in the last place of weights under 1.
    assert max(run_ranks(3, _train_against_ddp, accumulate)) <= 16 * 2**-24


def _average_once(rank: int, codec: str, scheme: str, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    layer = nn.Linear(numel, 1, bias=False)
    model = DistributedDataParallel(layer)
    attachment = cgx_ray.attach(
        model,
        plan=cgx_ray.Plan(
            version=0,
            world_size=dist.get_world_size(),
            groups=(cgx_ray.GroupPlan(layers=("weight",), codec=CodecSpec.parse(codec), scheme=Scheme(scheme)),),
        ),
    )
    x_1N = torch.randn(1, numel, generator=generator)
    model(x_1N).sum().backward()
    attachment.close()
    assert layer.weight.grad is not None
    return x_1N[0], layer.weight.grad[0].clone()


@pytest.mark.parametrize("numel", [1, 7, 129, 5000])
@pytest.mark.parametrize(("codec", "scheme"), PAIRS)
def test_average_is_within_the_codecs_error_of_a_float64_sum(codec: str, scheme: str, numel: int) -> None:
    results = run_ranks(3, _average_once, codec, scheme, numel)
    inputs_RN = torch.stack([result[0] for result in results]).double()
    averages = [result[1] for result in results]
    assert all(torch.equal(averages[0], average) for average in averages)
    error_N = (averages[0].double() - inputs_RN.mean(0)).abs()
    largest = float(inputs_RN.abs().max())
    spec = CodecSpec.parse(codec)
    if spec.name == "topk":
        _check_sparse_average(spec, scheme, inputs_RN, averages[0].double())
        return
    # A rounding step is at most 2^-9 for bf16 and, for qsgd, the grid's step with its bf16 ends (2^-7 wider);
    # sra rounds twice, once the parts and once their average.
    step = {"none": 2**-23, "bf16": 2**-8, "qsgd": 2 * (1 + 2**-6) / (2 ** (spec.bits or 1) - 1)}[spec.name]
    assert float(error_N.max()) <= 2 * step * largest + 3 * 2**-23 * largest


def _check_sparse_average(spec: CodecSpec, scheme: str, inputs_RN: torch.Tensor, average_N: torch.Tensor) -> None:
    num_kept = spec.num_kept(inputs_RN.shape[1])
    kept_RN = torch.zeros_like(inputs_RN)
    for rank, input_N in enumerate(inputs_RN):
        # AR-Topk at step 0 uses the indices of rank 0.
        chosen = inputs_RN[0] if scheme == "artopk_ring" else input_N
        index_K = chosen.abs().topk(num_kept).indices
        kept_RN[rank, index_K] = input_N[index_K]
    torch.testing.assert_close(average_N, kept_RN.mean(0), rtol=0, atol=1e-6)


def _accumulated(rank: int, codec: str, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of averages and of residuals after some steps of one constant gradient per rank."""
    layer = nn.Linear(3000, 1, bias=False)
    model = DistributedDataParallel(layer)
    plan = cgx_ray.Plan(
        version=0,
        world_size=dist.get_world_size(),
        groups=(cgx_ray.GroupPlan(layers=("weight",), codec=CodecSpec.parse(codec), scheme=Scheme(scheme)),),
    )
    attachment = cgx_ray.attach(model, plan=plan)
    x_1N = torch.randn(1, 3000, generator=torch.Generator().manual_seed(rank))
    total_N = torch.zeros(3000, dtype=torch.float64)
    for _ in range(7):
        layer.weight.grad = None
        model(x_1N).sum().backward()
        assert layer.weight.grad is not None
        total_N += layer.weight.grad[0]
    residual_N = attachment.state_dict()["residuals"]["weight"]
    attachment.close()
    return total_N, 7 * x_1N[0].double() - residual_N


@pytest.mark.parametrize("scheme", ["allgather", "artopk_ring"])
def test_what_was_not_sent_is_in_the_residuals(scheme: str) -> None:
    results = run_ranks(3, _accumulated, "topk:density=0.1", scheme)
    sent_mean_N = torch.stack([result[1] for result in results]).mean(0)
    # 7 sums of 3 float32 numbers under 40 in size.
    torch.testing.assert_close(results[0][0], sent_mean_N, rtol=0, atol=40 * 21 * 2**-24)


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
    larger = {**good, "residuals": {"left.weight": torch.zeros(3)}}
    messages = []
    for states in ([], [good], foreign, larger, {**good, "format": 9}):
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
    assert "3 elements for layer 'left.weight', the model has 4323" in larger
    assert "format 9" in version


def _gain_in_use(rank: int, scheme: Scheme) -> tuple[float, float]:
    """Gain that the engine reports for the codec in use at step 1, and the true one."""
    spec = CodecSpec(name="topk", density=0.1)
    layer = nn.Linear(3000, 1, bias=False)
    model = DistributedDataParallel(layer)
    group = cgx_ray.GroupPlan(layers=("weight",), codec=spec, scheme=scheme)
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


def _poisoned(rank: int, codec: str, scheme: str, value: float) -> tuple[bool, bool, list[str]]:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
    train(model, rank, range(3))
    before = attachment.state_dict()["residuals"]
    for parameter in model.parameters():
        parameter.grad = None
    x_BD = batch(rank, 3)
    if rank == 1:
        x_BD[0, 0] = value
    model(x_BD).square().mean().backward()
    # Of a group with NaN everywhere top-k sends a share: the group arrives non-finite, not each of its layers.
    finite = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.ndim > 1 and p.grad is not None)
    after = attachment.state_dict()["residuals"]
    untouched = all(torch.equal(before[name], after[name]) for name in before)
    hashes = train(model, rank, range(4, 6))
    attachment.close()
    return finite, untouched, hashes


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("codec", "scheme"), PAIRS)
def test_a_non_finite_gradient_is_non_finite_on_all_ranks_and_leaves_no_residual(
    codec: str, scheme: str, value: float
) -> None:
    for finite, untouched, _ in run_ranks(2, _poisoned, codec, scheme, value):
        assert not finite
        assert untouched


def _train_scaled(rank: int, codec: str, scheme: str) -> tuple[list[str], list[float]]:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    hashes, scales = [], []
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x_BD = batch(rank, step)
            if step == 4 and rank == 1:
                x_BD[0, 0] = float("inf")
            loss = (model(x_BD) - x_BD.nan_to_num(posinf=0)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        hashes.append(weights_hash(model))
        scales.append(scaler.get_scale())
    attachment.close()
    return hashes, scales


@pytest.mark.parametrize(("codec", "scheme"), COMPRESSED)
def test_gradscaler_skips_the_same_step_on_all_ranks(codec: str, scheme: str) -> None:
    (first, scales), (second, other_scales) = run_ranks(2, _train_scaled, codec, scheme)
    assert first == second
    assert scales == other_scales
    assert first[4] == first[3], "the overflowing step was not skipped"
    assert scales[4] < scales[3]
    assert first[5] != first[4]


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
    ],
)
def test_a_wrong_attach_fails_on_all_ranks_with_one_clear_error(case: str, says: str) -> None:
    first, second = run_ranks(2, _attach_wrong, case)
    assert says in first
    assert first == second


def _resume(rank: int, interrupt: bool, as_list: bool = False) -> str:
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="topk:density=0.02", scheme="allgather")
    train(model, rank, range(5))
    if interrupt:
        weights = model.state_dict()
        states: list[Any] = [None, None]
        dist.all_gather_object(states, attachment.state_dict())
        attachment.close()
        model = DistributedDataParallel(Branches())
        model.load_state_dict(weights)
        attachment = cgx_ray.attach(model, codec="topk:density=0.02", scheme="allgather")
        attachment.load_state_dict(reversed(states) if as_list else states[rank])
    hashes = train(model, rank, range(5, 9))
    attachment.close()
    return hashes[-1]


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit() -> None:
    uninterrupted = run_ranks(2, _resume, False)
    assert run_ranks(2, _resume, True) == uninterrupted
    assert run_ranks(2, _resume, True, True) == uninterrupted


def test_residuals_keep_their_mean_when_the_world_size_changes() -> None:
    states = [{"step": 7, "residuals": {"w": torch.full((3,), float(rank))}} for rank in range(4)]
    step, merged = merge_states(states)
    assert step == 7
    assert torch.equal(merged["w"], torch.full((3,), 1.5))


def test_world_size_one_is_a_clean_no_op() -> None:
    model = Branches()
    attachment = cgx_ray.attach(model)
    model(batch(0, 0)).sum().backward()
    assert attachment.plan is None
    assert attachment.last_step is None
    assert attachment.take_samples() == []
    attachment.load_state_dict(attachment.state_dict())
    attachment.close()


def test_importing_cgx_ray_does_not_import_ray() -> None:
    import subprocess
    import sys

    code = "import sys, cgx_ray; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_frozen() -> None:
    assert sorted(cgx_ray.__all__) == [
        "Attachment", "CGXConfig", "CGXError", "CodecSpec", "ConfigError", "GroupPlan", "Layer", "Plan", "PlanError",
        "Scheme", "SimulatedLink", "StateError", "TransportError", "WireError", "add_state", "attach", "layers_of",
        "make_plan",
    ]  # fmt: skip

"""Training of FSDP2 and HSDP models through the engine of sharded models, on real processes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, batch
from support.ranks import run_cases, run_ranks
from support.sharded import (
    BITS8,
    backward,
    gradients_of,
    largest_difference,
    make_mesh,
    shard,
    sum_inside,
    train,
    weights_of,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import cgx_ray
from cgx_ray.codecs.wire import HEADER_BYTES
from cgx_ray.engine.sharded.shards import ShardedLayer
from cgx_ray.plan import CodecSpec, Layer


class _Integers(nn.Module):
    """A model whose gradients are the integers in `noise`, for any weights."""

    def __init__(self, noise: Callable[[tuple[int, ...]], torch.Tensor]) -> None:
        super().__init__()
        # Row counts that 2, 3 or 4 ranks cannot share evenly, fewer rows than ranks, small layers between large ones.
        shapes = [(7, 300), (3, 700), (5,), (13, 170), (1, 2000), (2, 2), (1,)]
        self.layers = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.noise = [noise(shape) for shape in shapes]

    def forward(self, x_1: torch.Tensor) -> torch.Tensor:
        return torch.stack([(w * n).sum() for w, n in zip(self.layers, self.noise, strict=True)]).sum() * x_1


def _reduced(
    rank: int, codec: str, num_replicas: int, dim: int, *, sums_inside: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return by layer this rank's gradients, and the averages that the ranks hold together."""
    if sums_inside:
        sum_inside()
    generator = torch.Generator().manual_seed(rank)
    model = _Integers(lambda shape: torch.randint(-64, 65, shape, generator=generator).float())
    fully_shard(model, mesh=make_mesh(num_replicas), shard_placement_fn=_second_if_even if dim else None)
    attachment = cgx_ray.attach(model, codec=codec)
    model(torch.ones(1)).sum().backward()
    attachment.close()
    return model.noise, list(gradients_of(model).values())


def _second_if_even(parameter: nn.Parameter) -> Shard:
    """Shard along the second dimension where it is even: FSDP2 pads along the first dimension only."""
    return Shard(1 if parameter.ndim > 1 and parameter.shape[1] % 4 == 0 else 0)


REDUCED = ("none", "qsgd:bits=4", "qsgd:bits=8,rounding=nearest")


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "dim", "sums_inside"),
    [
        (3, 1, 0, False),
        (4, 1, 1, False),
        (4, 2, 0, False),
        (4, 2, 0, True),
        pytest.param(2, 1, 0, False, marks=pytest.mark.slow),
        pytest.param(6, 3, 0, False, marks=pytest.mark.slow),
    ],
)
def test_every_shard_is_the_mean_within_the_error_of_the_codec(
    num_ranks: int, num_replicas: int, dim: int, sums_inside: bool
) -> None:
    reduced = partial(_reduced, num_replicas=num_replicas, dim=dim, sums_inside=sums_inside)
    cases = [partial(reduced, codec=codec) for codec in REDUCED]
    for codec, results in zip(REDUCED, run_cases(num_ranks, cases), strict=True):
        _check_shards(codec, num_replicas, results)


def _check_shards(codec: str, num_replicas: int, results: list[Any]) -> None:
    assert all(isinstance(result, tuple) for result in results), results
    spec = CodecSpec.parse(codec)
    # Values are from -64 to 64, with bounds rounded outwards to bfloat16. Each encoding adds an error of a little more
    # than one step of the grid: one encoding in FSDP2, and two more between replicas.
    step = 128 * (1 + 2**-6) / (2**spec.bits - 1) if spec.bits else 0.0
    num_encodings = 1 if num_replicas == 1 else 3
    for layer, noises in enumerate(zip(*(noise for noise, _ in results), strict=True)):
        mean = torch.stack(noises).double().mean(0)
        is_small = mean.ndim == 1 or mean.numel() < 1024
        # Sums of integers are exact. Only the divisions, by shards and by replicas, round.
        atol = 64 * 2**-23 + (0 if is_small else num_encodings * step)
        for _, averages in results:
            torch.testing.assert_close(averages[layer].double(), mean, rtol=0, atol=atol, msg=lambda t: f"{codec}: {t}")


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # By name: arguments of `fully_shard` for our model and for plain FSDP2. Ours always sums in float32.
    "plain": ({}, {}),
    "no reshard after forward": ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
    **{
        f"reduce in {dtype}": (
            {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)},
            {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        )
        for dtype in (torch.bfloat16, torch.float16)
    },
}


def _accumulate(model: Any, rank: int, step: int, options: dict[str, Any]) -> None:
    """Run a backward pass that is not the last one of its step, in one of the ways that FSDP2 offers."""
    match step % 4:
        case 1 if not options:  # adds whole gradients, in `reduce_dtype`
            model.set_requires_gradient_sync(False)
        case 2:  # adds sharded gradients; with replicas, before they exchange them
            model.set_requires_all_reduce(False)
        case 3:  # adds averages
            pass
        case _:
            return
    model.set_is_last_backward(False)
    backward(model, rank, 100 + step)
    model.set_is_last_backward(True)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)


def _beside_plain(rank: int, variant: str, num_replicas: int, parameters: str | None, *, sums_inside: bool) -> float:
    """Return the largest difference of weights from those of plain FSDP2."""
    mesh, (options, plain_options) = make_mesh(num_replicas), VARIANTS[variant]
    if sums_inside:
        sum_inside()
    ours, plain = shard(Branches(), mesh, **options), shard(Branches(), mesh, **plain_options)
    attachment = cgx_ray.attach(ours, codec="none", parameters=parameters)
    if hasattr(ours, "set_reduce_scatter_max_input_buffers"):  # since torch 2.13
        ours.set_reduce_scatter_max_input_buffers(2)
    weights = []
    for model in (ours, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(8):
            optimizer.zero_grad()
            _accumulate(model, rank, step, options)
            backward(model, rank, step)
            optimizer.step()
        weights.append(weights_of(model))
    attachment.close()
    return largest_difference(*weights)


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "sums_inside"),
    [(2, 1, False), (4, 2, True), pytest.param(4, 2, False, marks=pytest.mark.slow)],
)
def test_without_a_codec_it_trains_bit_for_bit_like_plain_fsdp2(
    num_ranks: int, num_replicas: int, sums_inside: bool
) -> None:
    # Two summands have only one order of addition.
    parameters = "none" if num_ranks == 2 else None
    beside = partial(_beside_plain, num_replicas=num_replicas, parameters=parameters, sums_inside=sums_inside)
    cases = [partial(beside, variant=variant) for variant in VARIANTS]
    differences = dict(zip(VARIANTS, run_cases(num_ranks, cases), strict=True))
    for variant, found in differences.items():
        assert all(isinstance(one, float) for one in found), found
        # Torch 2.15 itself rounds to 16 bits on the way.
        limit = 1e-3 if "reduce" in variant and torch.__version__ >= "2.15" else 0.0
        assert max(found) <= limit, (variant, found)


def _losses(rank: int, num_replicas: int, kinds: list[tuple[str, str | None]]) -> tuple[dict[str, float], list[str]]:
    """Return by codec and parameter codec the loss on fresh data after training, and digests of this rank's shards."""
    mesh = make_mesh(num_replicas)
    target = torch.randn(33, 33, generator=torch.Generator().manual_seed(5)) / 33**0.5
    fresh_BD = torch.randn(256, 33, generator=torch.Generator().manual_seed(6))
    losses, digests = {}, []
    for codec, parameters in [("dense", None), *kinds]:
        model = fully_shard(Branches(), mesh=mesh)
        attachment = cgx_ray.attach(model, codec=codec, parameters=parameters) if codec != "dense" else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for step in range(150):
            x_BD = torch.randn(16, 33, generator=torch.Generator().manual_seed(1000 * rank + step))
            optimizer.zero_grad()
            (model(x_BD) - x_BD @ target).square().mean().backward()
            optimizer.step()
        if attachment is not None:
            attachment.close()
        with torch.no_grad():
            losses[f"{codec}, parameters {parameters}"] = float((model(fresh_BD) - fresh_BD @ target).square().mean())
        # After forward, FSDP2 does not reshard the outermost module.
        model.reshard()
        shards = b"".join(parameter.detach().to_local().numpy().tobytes() for parameter in model.parameters())
        digests.append(hashlib.sha256(shards).hexdigest())
    return losses, digests


# Largest allowed ratio of the loss to that of dense training, as in test_convergence.
LIMITS = {
    ("qsgd", None): 1.05,
    ("none", BITS8): 1.05,
    ("qsgd", BITS8): 1.05,
    ("qsgd:bits=2,rounding=nearest", None): 1.05,
    ("ef_signsgd", None): 1.05,
}


# For `make test`: gradients and parameters compressed, and residuals.
FEW = [("qsgd", BITS8), ("ef_signsgd", None)]


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "kinds"),
    [
        pytest.param(3, 1, [*LIMITS], marks=pytest.mark.slow),
        pytest.param(4, 2, [*LIMITS], marks=pytest.mark.slow),
        (2, 1, FEW),
    ],
    ids=["3 ranks", "4 ranks", "2 ranks, few"],
)
def test_codecs_train_about_as_well_as_plain_fsdp2(
    num_ranks: int, num_replicas: int, kinds: list[tuple[str, str | None]]
) -> None:
    results = run_ranks(num_ranks, _losses, num_replicas, kinds)
    losses, digests = results[0]
    num_shards = num_ranks // num_replicas
    for rank, (other_losses, other_digests) in enumerate(results):
        assert other_losses == losses
        # Rank j of a replica holds shard j.
        assert (other_digests == digests) is (rank % num_shards == 0)
    dense = losses.pop("dense, parameters None")
    assert dense < 0.1, f"dense training came to {dense}; guessing zero has a loss of 1"
    limits = {f"{codec}, parameters {parameters}": limit for (codec, parameters), limit in LIMITS.items()}
    ratios = {name: (loss / dense, limits[name]) for name, loss in losses.items()}
    assert all(ratio <= limit for ratio, limit in ratios.values()), ratios


def _sent_and_owed(
    rank: int, codec: str, num_replicas: int, *, sums_inside: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Train on a constant gradient. Return the sum of applied averages, this rank's residual, and its gradient."""
    if sums_inside:
        sum_inside()
    layer = nn.Linear(100, 30, bias=False)
    model = fully_shard(layer, mesh=make_mesh(num_replicas))
    attachment = cgx_ray.attach(model, codec=codec)
    x_1D = torch.randn(1, 100, generator=torch.Generator().manual_seed(rank))
    for _ in range(NUM_REPEATS):
        model(x_1D).sum().backward()
    (owed_N,) = attachment.state_dict()["residuals"].values()
    attachment.close()
    (sent,) = gradients_of(model).values()
    return sent, owed_N.view(30, 100), x_1D.expand(30, 100)


NUM_REPEATS = 5


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "sums_inside"), [(2, 1, False), (3, 1, False), (6, 3, False), (6, 2, True)]
)
def test_what_was_applied_and_the_mean_of_what_is_owed_add_up(
    num_ranks: int, num_replicas: int, sums_inside: bool
) -> None:
    codecs = ("ef_signsgd", "qsgd:bits=2,rounding=nearest")
    owed_of = partial(_sent_and_owed, num_replicas=num_replicas, sums_inside=sums_inside)
    cases = [partial(owed_of, codec=codec) for codec in codecs]
    for codec, results in zip(codecs, run_cases(num_ranks, cases), strict=True):
        assert all(isinstance(result, tuple) for result in results), results
        owed = torch.stack([owed for _, owed, _ in results]).mean(0)
        mean = torch.stack([gradient for _, _, gradient in results]).mean(0)
        assert owed.abs().max() > 0.1, codec
        torch.testing.assert_close(results[0][0] + owed, NUM_REPEATS * mean, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("shape", "dim"), [((7, 3), 0), ((2, 5), 0), ((3,), 0), ((5, 12), 1)])
def test_what_is_owed_does_not_depend_on_the_number_of_ranks(shape: tuple[int, ...], dim: int) -> None:
    whole_N = torch.arange(1.0, 1 + math.prod(shape))
    for num_ranks in (2, 3, 4):
        shard_shape = tuple(-(-n // num_ranks) if d == dim else n for d, n in enumerate(shape))
        layer = Layer(name="w", numel=math.prod(shape), ndim=len(shape))
        sharded = ShardedLayer(layer=layer, shape=shape, shard_shape=shard_shape, dim=dim)
        rows_RS = torch.full((num_ranks, sharded.width), 9.0)
        sharded.cut(whole_N, rows_RS)
        assert torch.equal(sharded.whole(rows_RS), whole_N)
        for rank, first in sharded.padding(num_ranks):
            rows_RS[rank, first:] = 9.0
        assert int((rows_RS == 9.0).sum()) - int((whole_N == 9.0).sum()) == rows_RS.numel() - whole_N.numel()


def _gathered(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the parameters as a forward pass sees them, and as they are stored."""
    model = shard(Branches(), make_mesh())
    attachment = cgx_ray.attach(model, codec="none", parameters=BITS8)
    for module in (model, model.first, model.left, model.right):
        module.unshard()
    seen = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for module in (model, model.first, model.left, model.right):
        module.reshard()
    attachment.close()
    return seen, weights_of(model)


def test_all_ranks_compute_with_the_same_8_bits_and_keep_their_shards_as_they_are() -> None:
    results = run_ranks(3, _gathered)
    torch.manual_seed(0)
    initial = {name: parameter.detach() for name, parameter in Branches().named_parameters()}
    for seen, kept in results:
        assert largest_difference(seen, results[0][0]) == 0.0
        assert all(torch.equal(kept[name], initial[name]) for name in kept)
        for name, parameter in initial.items():
            # Half a step of a grid over at most the range of the layer, with bounds rounded outwards to bfloat16.
            step = float(parameter.max() - parameter.min()) * (1 + 2**-6) / 255
            is_small = parameter.ndim == 1
            error = float((seen[name] - parameter).abs().max())
            assert error == 0 if is_small else 0 < error <= step / 2 + 1e-7, (name, error, step)


def _train_over(rank: int, transport: str) -> dict[str, torch.Tensor]:
    model = shard(Branches(), make_mesh(2))
    attachment = cgx_ray.attach(model, codec="qsgd", parameters=BITS8, transport=transport)
    weights = train(model, rank, range(3))
    attachment.close()
    return weights


def test_the_transport_does_not_change_what_is_learned() -> None:
    tcp, gloo = run_ranks(4, _train_over, "tcp"), run_ranks(4, _train_over, "gloo")
    # Also on the ranks of the other replica.
    assert [largest_difference(tcp[0], other) for other in [*tcp, *gloo]] == [0.0] * 8


def _overlapped(rank: int) -> dict[str, torch.Tensor]:
    """Let rank 1 begin backward only when rank 0 is about to run backward of its first layer."""
    model = shard(nn.Sequential(nn.Linear(33, 131), nn.Linear(131, 33)), make_mesh(), reshard_after_forward=False)
    attachment = cgx_ray.attach(model, codec="qsgd")
    token = torch.zeros(1)
    if rank == 0:
        # By then rank 0 has begun to reduce the gradients of the next layer, which needs rank 1.
        model[0].register_full_backward_pre_hook(lambda *_: dist.send(token, 1))
    loss = model(batch(rank, 0)).square().mean()
    if rank == 1:
        dist.recv(token, 0)
    loss.backward()
    attachment.close()
    return gradients_of(model)


def test_backward_goes_on_while_gradients_are_under_way() -> None:
    first, second = run_ranks(2, _overlapped)
    assert first.keys() == second.keys()
    assert float(first["0.weight"].abs().max()) > 0


def _not_finite(rank: int) -> tuple[list[torch.Tensor], bool]:
    """Return the averages of a step with one NaN on one rank, and whether this rank's residual has changed."""
    layer = nn.Linear(100, 30, bias=False)
    model = fully_shard(layer, mesh=make_mesh())
    attachment = cgx_ray.attach(model, codec="ef_signsgd")
    x_1D = torch.randn(1, 100, generator=torch.Generator().manual_seed(rank))
    model(x_1D).sum().backward()
    before = attachment.state_dict()["residuals"]["weight"]
    model.zero_grad()
    if rank == 1:
        # Row 0 is in the shard of rank 0. Rank 2 learns of the NaN but never sees it.
        weight_1O = torch.ones(1, 30)
        weight_1O[0, 0] = math.nan
        (model(x_1D) * weight_1O).sum().backward()
    else:
        model(x_1D).sum().backward()
    (average,) = gradients_of(model).values()
    after = attachment.state_dict()["residuals"]["weight"]
    attachment.close()
    return list(average), torch.equal(before, after)


def test_nan_arrives_and_no_rank_remembers_the_step() -> None:
    for rows, is_unchanged in run_ranks(3, _not_finite):
        assert not rows[0].isfinite().all()
        assert rows[-1].isfinite().all()
        assert is_unchanged


def _sampled(rank: int, parameters: str | None) -> list[tuple[int, int, int]]:
    model = shard(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False)), make_mesh())
    attachment = cgx_ray.attach(model, codec="qsgd", parameters=parameters)
    for _ in range(2):
        model(torch.randn(1, 64)).sum().backward()
    samples = attachment.take_samples()
    assert attachment.last_step == samples[-1]
    # All ranks are on one node.
    assert {(sample.card_bytes, sample.num_local) for sample in samples} == {(0, dist.get_world_size())}
    attachment.close()
    return [(sample.step, sample.wire_bytes, sample.dense_bytes) for sample in samples]


@pytest.mark.parametrize("parameters", [None, BITS8])
def test_samples_count_what_a_rank_sends(parameters: str | None) -> None:
    numels, bias = (64 * 128, 128 * 64), 128

    def sent(codec: str) -> int:
        """Return the bytes of a quarter of every weight and of the bias, sent to each of three peers."""
        weights = sum(HEADER_BYTES + CodecSpec.parse(codec).payload_bytes(numel // 4) for numel in numels)
        return 3 * (weights + HEADER_BYTES + bias)

    # Parameters are gathered in forward and in backward. Also in the first module, since its weight needs a gradient.
    expected = sent("qsgd") + (2 * sent(parameters) if parameters else 0)
    for samples in run_ranks(4, _sampled, parameters):
        assert samples == [(step, expected, 4 * (sum(numels) + bias)) for step in range(2)]

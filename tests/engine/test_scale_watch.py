"""Ways to scale losses that the engine understands, on real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.branches import Branches
from support.ranks import run_ranks
from support.scaled_training import COLUMNS, FED_BACK, MAX_ERROR, Run, Trainer, inputs, relative_error
from support.sharded import make_mesh
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cgx_ray
from cgx_ray.engine.loss_scale import WATCH, ScaleWatch


class _Own(GradScaler):
    """A scaler that does not call the `scale` of its base class, like torch's ShardedGradScaler."""

    def scale(self, outputs: Any) -> Any:
        return outputs * self.get_scale()


class _Manual:
    """A loss scale that no GradScaler applies."""

    def __init__(self) -> None:
        self.value = 256.0

    def get_scale(self) -> float:
        return self.value


def _accumulated(trainer: Trainer, step: int, scale: float) -> None:
    trainer.scaler.update(scale)
    with trainer.model.no_sync():
        trainer.scaler.scale(trainer.loss(2 * step)).backward()
    trainer.scaler.scale(trainer.loss(2 * step + 1)).backward()


def _two_scalers(trainer: Trainer, step: int, scale: float) -> None:
    """Train as a GAN does: both losses are scaled before either backward, the discriminator's last."""
    discriminator = nn.Linear(COLUMNS, 1)
    other = torch.amp.GradScaler("cpu", init_scale=4096.0)
    trainer.scaler.update(scale)
    own = trainer.scaler.scale(trainer.loss(step))
    others = other.scale(discriminator(inputs(trainer.rank, step)).sum())
    own.backward()
    others.backward()


def _one_of_list(trainer: Trainer, step: int, scale: float) -> None:
    trainer.scaler.update(scale)
    losses = trainer.scaler.scale([trainer.loss(step), torch.zeros(())])
    (losses[0] / 1).backward()


def _unscaled_sometimes(trainer: Trainer, step: int, scale: float) -> None:
    trainer.scaler.update(scale)
    if step % 2:
        trainer.scaler.scale(trainer.loss(step)).backward()
    else:
        trainer.loss(step).backward()
        assert trainer.layer.weight.grad is not None
        trainer.layer.weight.grad *= scale


def _overridden(trainer: Trainer, step: int, scale: float) -> None:
    trainer.scaler = _Own("cpu", init_scale=1.0)
    GradScaler.scale(trainer.scaler, torch.zeros(()))
    trainer.scaler.update(scale)
    trainer.scaler.scale(trainer.loss(step)).backward()


def _disabled(trainer: Trainer, step: int, scale: float) -> None:
    trainer.scaler = torch.amp.GradScaler("cpu", enabled=False)
    trainer.scaler.scale(trainer.loss(step)).backward()
    assert trainer.layer.weight.grad is not None
    trainer.layer.weight.grad *= scale


def _in_ray(trainer: Trainer, step: int, scale: float) -> None:
    from ray.train.torch.train_loop_utils import _TorchAccelerator

    # Its `__init__` asks for Ray's context, and so starts a cluster or waits for one that this machine had.
    accelerator = _TorchAccelerator.__new__(_TorchAccelerator)
    # The accelerator's own scaler needs CUDA.
    accelerator.amp_is_enabled, accelerator.scaler = True, trainer.scaler
    trainer.scaler.update(scale)
    accelerator.backward(trainer.loss(step))


WAYS: dict[str, Callable[[Trainer, int, float], None]] = {
    "accumulated": _accumulated,
    "two scalers": _two_scalers,
    "a list of losses": _one_of_list,
    "unscaled every other step": _unscaled_sometimes,
    "a subclass that overrides scale": _overridden,
    "disabled": _disabled,
    "Ray's backward": _in_ray,
}


def _in_a_way(rank: int, way: str) -> Run:
    trainer = Trainer(rank, *FED_BACK[0])
    trainer.scaler.scale(torch.zeros(()))
    for step, scale in enumerate([512.0, 256.0, 64.0, 128.0, 32.0]):
        WAYS[way](trainer, step, scale)
        trainer.take(scale)
    return trainer.result(32.0)


@pytest.mark.parametrize("way", WAYS)
def test_the_scale_is_found_without_being_given(way: str) -> None:
    error = relative_error(run_ranks(2, _in_a_way, way))
    assert error <= MAX_ERROR, error


def _given_scale(rank: int) -> Run:
    scaler = _Manual()
    trainer = Trainer(rank, *FED_BACK[0], scaler=scaler)
    for step, scale in enumerate([512.0, 256.0, 64.0]):
        scaler.value = scale
        (trainer.loss(step) * scale).backward()
        trainer.take(scale)
    return trainer.result(64.0)


def test_a_scale_that_no_gradscaler_applies_can_be_given() -> None:
    assert relative_error(run_ranks(2, _given_scale)) <= MAX_ERROR


def _unknown(rank: int, case: str, codec: str, scheme: str) -> str | None:
    trainer = Trainer(rank, codec, scheme)
    first, second = (torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1) for scale in (1.0, 2.0))
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    try:
        for step in range(3):
            if case == "two scales in one pass":
                (first.scale(trainer.loss(step)) + second.scale(trainer.layer.weight.sum())).backward()
            elif case == "scaled by hand":
                first.scale(torch.zeros(()))
                (trainer.loss(step) * first.get_scale()).backward()
                first.step(optimizer)
                first.update()
            elif case == "scale of zero":
                first.scale(torch.zeros(()))
                first.update(0.0)
                first.scale(trainer.loss(step)).backward()
    # DDP turns an error in a step that has begun into a RuntimeError.
    except (cgx_ray.CGXError, RuntimeError) as error:
        return str(error)
    finally:
        trainer.attachment.close()
    return None


CASES = {
    "two scales in one pass": "rank {}, step 0: gradients of one step have loss scales 1 and 2, so",
    "scaled by hand": "rank {}, step 1: a GradScaler is updated whose scale() was not used on the loss, so",
    "scale of zero": "rank {}, step 0: the loss scale is 0, so",
}


@pytest.mark.parametrize("case", CASES)
def test_a_scale_that_cannot_be_known_is_one_error_on_all_ranks_if_the_codec_has_memory(case: str) -> None:
    for said in run_ranks(2, _unknown, case, *FED_BACK[0]):
        assert said is not None
        # A rank that hears of the other's error first has that one's words.
        assert any(CASES[case].format(rank) in said for rank in (0, 1))
        assert "attach(..., scaler=)" in said
    assert run_ranks(2, _unknown, case, "qsgd", "sra") == [None, None]


def _wrong_scaler(rank: int, sharded: bool) -> str:
    model = fully_shard(Branches(), mesh=make_mesh()) if sharded else DistributedDataParallel(Branches())
    with pytest.raises(cgx_ray.ConfigError) as caught:
        cgx_ray.attach(model, scaler=1024.0 if rank else None)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_no_scaler_is_one_error_on_all_ranks(sharded: bool) -> None:
    first, second = run_ranks(2, _wrong_scaler, sharded)
    assert first == second
    assert "scaler 1024.0 is not allowed; give a torch.amp.GradScaler" in first


class _Narrow(GradScaler):
    """A scaler whose methods have other parameters than those of GradScaler."""

    def scale(self, loss: Any, factor: float = 1.0) -> Any:  # type: ignore[override]
        return super().scale(loss) * factor

    def update(self) -> None:  # type: ignore[override]
        super().update(1.0)


def test_a_watched_scaler_keeps_its_own_signatures() -> None:
    WATCH.start()
    scaler = _Narrow("cpu", init_scale=8.0)
    assert scaler.scale(loss=torch.ones((), requires_grad=True), factor=2.0).item() == 16
    scaler.update()
    assert scaler.get_scale() == 1


def test_a_scaler_that_is_used_after_all_bypasses_nothing() -> None:
    watch = ScaleWatch()
    watch.start()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight, other = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    (weight * scaler.get_scale()).sum().backward()
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert watch.is_bypassed({id(weight)})
    assert not watch.is_bypassed({id(other)})
    scaler.scale(weight.sum()).backward()
    assert not watch.is_bypassed({id(weight)})


def test_a_pass_inside_another_one_has_the_scales_of_the_outer_one() -> None:
    WATCH.start()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight, seen = nn.Parameter(torch.ones(1)), []
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(WATCH.scales))
    product = checkpoint(lambda x: (x * weight).sum(), torch.ones(1, requires_grad=True), use_reentrant=True)
    scaler.scale(product).backward()
    assert [[float(scale) for scale in scales] for scales in seen] == [[8.0]]
    assert WATCH.scales == ()


def _unscaled_on_one_rank(rank: int, codec: str, scheme: str) -> str | None:
    trainer = Trainer(rank, codec, scheme)
    try:
        for step in range(4):
            loss = trainer.loss(step)
            is_forgotten = rank == 1 and step == 2
            (loss if is_forgotten else _scaled(trainer, loss)).backward()
    except (cgx_ray.CGXError, RuntimeError) as error:
        return str(error)
    finally:
        trainer.attachment.close()
    return None


def _scaled(trainer: Trainer, loss: torch.Tensor) -> torch.Tensor:
    trainer.scaler.scale(torch.zeros(()))
    trainer.scaler.update(1024.0)
    scaled: torch.Tensor = trainer.scaler.scale(loss)
    return scaled


def test_ranks_whose_losses_have_different_scales_are_one_error_in_the_next_step() -> None:
    for said in run_ranks(2, _unscaled_on_one_rank, *FED_BACK[0]):
        assert said is not None
        # A rank that hears of the other's error first names that one.
        assert ": ranks had loss scales 1 to 1024 in step 2; scale the " in said
    assert run_ranks(2, _unscaled_on_one_rank, "qsgd", "sra") == [None, None]

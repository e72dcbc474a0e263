"""Trainers of others: each goes on from its checkpoint bit for bit, with what codecs have kept on each rank."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_cases, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.integrations.rank_files import load_rank_files, save_rank_file
from cgx_ray.session.attach import attach
from cgx_ray.session.attachment import Attachment
from cgx_ray.session.state_files import state_file, write_state
from cgx_ray.session.states import STATE_FORMAT, no_memory

OPTIONS = {"codec": "topk:density=0.1", "scheme": "allgather"}


def _as_launched(rank: int) -> None:
    """Set what torchrun sets."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


class _Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x_I = torch.randn(24, generator=torch.Generator().manual_seed(index))
        return {"x": x_I, "labels": x_I[:3].sum().view(1)}


def _with_transformers(rank: int, folder: Path) -> tuple[Tensor, Tensor, int]:
    """Train 6 steps; then again from the checkpoint after 3. Return both results, and how many residuals were saved."""
    from transformers import Trainer, TrainingArguments

    from cgx_ray.integrations.transformers import CGXCallback

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.layers(x) - labels).square().mean()}

    def train(checkpoint: str | None) -> Tensor:
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=6,
            save_steps=3,
            logging_steps=1,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=Loss(), args=arguments, train_dataset=_Numbers())
        callback = CGXCallback(trainer, **OPTIONS)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert callback.attachment is not None
        assert callback.attachment.plan is not None
        assert "topk" in callback.attachment.plan.describe()
        callback.attachment.close()
        return _flat(trainer.model)

    _as_launched(rank)
    whole, resumed = train(None), train(str(folder / "checkpoint-3"))
    state = torch.load(folder / "checkpoint-3" / state_file(rank, 2), weights_only=True)
    return whole, resumed, len(state["residuals"])


def _with_accelerate(rank: int, folder: Path) -> tuple[Tensor, Tensor, int]:
    from accelerate import Accelerator

    from cgx_ray.integrations.accelerate import attach

    _as_launched(rank)
    accelerator = Accelerator(cpu=True)
    module = _model()
    model, optimizer = accelerator.prepare(module, torch.optim.Adam(module.parameters(), lr=0.01))
    attachment = attach(accelerator, model, **OPTIONS)

    def train(steps: range) -> Tensor:
        for step in steps:
            one = _Numbers()[2 * step + rank]
            accelerator.backward((model(one["x"][None]) - one["labels"]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return _flat(model)

    train(range(3))
    accelerator.save_state(str(folder))
    whole = train(range(3, 6))
    accelerator.load_state(str(folder))
    resumed = train(range(3, 6))
    attachment.close()
    return whole, resumed, len(torch.load(folder / state_file(rank, 2), weights_only=True)["residuals"])


def _lightning_module() -> Any:
    """Return a module of Lightning around `_model`."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _model()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return (self.layers(batch["x"]) - batch["labels"]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Module()


def _with_lightning(rank: int, folder: Path) -> tuple[Tensor, Tensor, int]:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from cgx_ray.integrations.lightning import CGXCallback

    def train(checkpoint: str | None) -> Tensor:
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            callbacks=[CGXCallback(**OPTIONS), ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        module = _lightning_module()
        trainer.fit(module, torch.utils.data.DataLoader(_Numbers(), batch_size=16), ckpt_path=checkpoint)
        return _flat(module)

    _as_launched(rank)
    whole, resumed = train(None), train(str(folder / "epoch=0.ckpt"))
    states = torch.load(folder / "epoch=0.ckpt", weights_only=True)["cgx_ray"]
    return whole, resumed, len(states[rank]["residuals"])


def _observed_by_why(rank: int, folder: Path) -> list[int]:
    """Train with Accelerate, then with Lightning, as their users do; return how many steps `cgx-ray why` has seen."""
    import lightning.pytorch as pl
    from accelerate import Accelerator

    from cgx_ray.why import observer
    from cgx_ray_autoload.observing import arm

    def num_steps() -> int:
        assert observer._observer is not None
        observer._observer._steps.finish()
        return observer._observer._steps.num_warm + len(observer._observer._steps.steps)

    _as_launched(rank)
    arm(str(folder))
    accelerator, module = Accelerator(cpu=True), _model()
    model, optimizer = accelerator.prepare(module, torch.optim.Adam(module.parameters(), lr=0.01))
    for step in range(7):
        one = _Numbers()[2 * step + rank]
        accelerator.backward((model(one["x"][None]) - one["labels"]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    with_accelerate = num_steps()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", enable_checkpointing=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(_lightning_module(), torch.utils.data.DataLoader(_Numbers(), batch_size=16))
    assert list(folder.glob("error-*")) == []
    return [with_accelerate, num_steps() - with_accelerate]


def test_trainings_go_on_from_their_checkpoints_bit_for_bit(tmp_path: Path) -> None:
    # In the same two processes: to import the trainers takes ten times as long as to train.
    trainings = [_with_transformers, _with_accelerate, _with_lightning]
    cases = [partial(train, folder=tmp_path / train.__name__) for train in trainings]
    *all_results, observed = run_cases(2, [*cases, partial(_observed_by_why, folder=tmp_path / "why")])
    # 96 numbers for two ranks, 16 at a time, are 3 steps.
    assert observed == [[7, 3]] * 2
    for train, results in zip(trainings, all_results, strict=True):
        assert not isinstance(results[0], Exception), results[0]
        (whole, resumed, num_residuals), (other, *_) = results
        assert torch.equal(whole, other), train
        assert torch.equal(whole, resumed), train
        assert not torch.equal(whole, _flat(_model())), train
        assert num_residuals == 2, train


def test_the_journal_of_a_trainer_that_decides_is_in_its_own_folder() -> None:
    from transformers import Trainer

    from cgx_ray.integrations.transformers import CGXCallback

    trainer, arguments = Trainer.__new__(Trainer), SimpleNamespace(output_dir="out")
    for options, folder in [
        ({}, None),
        ({"codec": "bf16"}, None),
        ({"policy": cgx_ray.Static("bf16")}, None),
        ({"policy": "adaptive"}, "out"),
        ({"policy": cgx_ray.Adaptive()}, "out"),
        ({"policy": "adaptive", "folder": "own"}, "own"),
    ]:
        assert CGXCallback(trainer, **options)._with_folder(arguments).get("folder") == folder, options


def test_a_callback_that_is_given_other_arguments_says_what_to_write() -> None:
    from transformers import Trainer

    from cgx_ray.integrations import lightning, transformers

    trainer = Trainer.__new__(Trainer)
    for make, says in (
        (lambda: lightning.CGXCallback("adaptive"), "by name; did you mean CGXCallback(policy='adaptive')?"),
        (lambda: transformers.CGXCallback(trainer, "static"), "did you mean CGXCallback(trainer, policy='static')?"),
        (lambda: transformers.CGXCallback("bf16"), "got 'bf16' in place of the Trainer; make the Trainer first, then "),
        (lambda: transformers.CGXCallback(codec="bf16"), "then trainer.add_callback(CGXCallback(trainer))"),
    ):
        with pytest.raises(cgx_ray.ConfigError) as caught:
            make()
        assert says in str(caught.value)


def test_files_of_other_ranks_are_averaged(tmp_path: Path) -> None:
    for rank in range(2):
        state = {"format": STATE_FORMAT, "rank": rank, "world_size": 2, "step": 5, "loss_scale": 1.0, **no_memory()}
        write_state({**state, "residuals": {"w": torch.full((3,), 1.0 + 2 * rank)}}, tmp_path)
    # This process is the only one of its run.
    attachment = Attachment(None)
    load_rank_files(attachment, tmp_path)
    assert attachment.state_dict()["residuals"]["w"].tolist() == [2.0] * 3


def _lack(rank: int, folder: Path) -> str:
    """Load a checkpoint of which each rank's disk should have its own file. Rank 1 has none."""
    attachment = attach(DistributedDataParallel(_model()), **OPTIONS)
    if rank == 0:
        save_rank_file(attachment, folder / "0")
    with closing(attachment), pytest.raises(cgx_ray.StateError) as caught:
        load_rank_files(attachment, folder / str(rank))
    return str(caught.value)


def test_a_file_that_one_rank_lacks_is_an_error_of_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, _lack, tmp_path)
    assert "rank 1 finds no state in " in first
    assert f"rank 0 {state_file(0, 2)}; give every node the files of all ranks" in first
    assert first.replace("/0,", "/1,") == second


def test_a_checkpoint_without_them_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_rank_files(Attachment(None), tmp_path)
    assert "has no file cgx_ray-rank00000-of-00001.pt" in caplog.text

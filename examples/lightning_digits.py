"""Train a Lightning module with Ray Train and compressed gradients.

    pip install lightning scikit-learn
    python examples/lightning_digits.py --workers 2

Lightning wraps the module in DDP itself, just before training starts. A callback then attaches the wrapped module. The
module and the training function need no change.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from ray.train import ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cgx_ray
from cgx_ray.integrations.lightning import CGXCallback

TRAIN_IMAGES = 1400
Batch = tuple[Tensor, Tensor]


class Digits(pl.LightningModule):
    """A classifier of handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: Batch, index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: Batch, index: int) -> None:
        images, labels = batch
        right = self.layers(images).argmax(1) == labels
        self.log("accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train_fn(config: dict[str, Any]) -> None:
    """Train; runs on every worker."""
    pl.seed_everything(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train, validation = torch.utils.data.random_split(dataset, (TRAIN_IMAGES, len(dataset) - TRAIN_IMAGES))
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        accelerator=config["accelerator"],
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[CGXCallback(), RayTrainReportCallback()],  # cgx_ray: CGXCallback
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    trainer.fit(Digits(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(validation, batch_size=200))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--use-gpu", action="store_true")
    args = parser.parse_args()
    result = TorchTrainer(
        train_fn,
        train_loop_config={"epochs": args.epochs, "accelerator": "gpu" if args.use_gpu else "cpu"},
        torch_config=cgx_ray.CGXConfig(),  # cgx_ray
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.use_gpu),
    ).fit()
    assert result.metrics is not None
    print(f"epoch {result.metrics['epoch'] + 1}: accuracy {result.metrics['accuracy']:.1%}")


if __name__ == "__main__":
    main()

"""Train a classifier of handwritten digits with Ray Train.

    pip install scikit-learn
    python examples/existing_script.py --workers 2
    python examples/existing_script_cgx.py --workers 2

The first script is ordinary Ray Train. The second is the same with three more lines, and compresses its gradients.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.nn.functional as F
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TRAIN_IMAGES = 1400


def train_fn(config: dict[str, Any]) -> None:
    """Train; runs on every worker."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model = ray.train.torch.prepare_model(model)
    dataset = TensorDataset(images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES])
    loader = ray.train.torch.prepare_data_loader(DataLoader(dataset, batch_size=32, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for x_BD, label_B in loader:
            loss = F.cross_entropy(model(x_BD), label_B)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            right = model(images[TRAIN_IMAGES:]).argmax(1) == labels[TRAIN_IMAGES:]
        accuracy = right.float().mean().item()
        ray.train.report({"epoch": epoch + 1, "accuracy": accuracy})
    if ray.train.get_context().get_world_rank() == 0:
        print(f"epoch {config['epochs']}: accuracy {accuracy:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    TorchTrainer(
        train_fn,
        train_loop_config={"epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=args.workers),
    ).fit()


if __name__ == "__main__":
    main()

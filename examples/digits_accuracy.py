"""Train a CNN on scikit-learn's images of digits, dense and compressed, and compare the accuracies.

    pip install scikit-learn
    torchrun --nproc-per-node 2 examples/digits_accuracy.py --codec qsgd:bits=3

Both trainings have the same weights, batches and number of steps, so the codec is the only difference.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray

TRAIN_IMAGES = 1400


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    images, labels = load()
    for codec in ("none", args.codec):
        model = DistributedDataParallel(build())
        attachment = cgx_ray.attach(model, codec=codec)
        train(model, images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES], args.steps)
        accuracy = validate(model.module, images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:])
        sample = attachment.last_step
        if dist.get_rank() == 0 and sample is not None:
            print(f"{codec}: accuracy {accuracy:.1%}, {sample.wire_bytes:,} bytes sent per step and rank", flush=True)
        attachment.close()
    dist.destroy_process_group()


def load() -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 8, 8) in [0, 1] and labels (N,), shuffled."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(digits.target)[order]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, num_steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        batch = torch.randint(len(labels), (16,), generator=generator)
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def validate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return (model(images).argmax(1) == labels).float().mean().item()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="qsgd:bits=3", help="such as bf16, qsgd:bits=2 or topk:density=0.01")
    parser.add_argument("--steps", type=int, default=200)
    return parser.parse_args()


if __name__ == "__main__":
    main()

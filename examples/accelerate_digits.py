"""Train a classifier of handwritten digits with Hugging Face Accelerate and compressed gradients.

pip install accelerate scikit-learn
torchrun --nproc-per-node 2 examples/accelerate_digits.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cgx_ray.integrations.accelerate import attach

TRAIN_IMAGES = 1400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save", help="folder to save the state to in the end")
    parser.add_argument("--load", help="folder to load the state from first")
    args = parser.parse_args()
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train = TensorDataset(images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES])
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(train, batch_size=16, shuffle=True))
    attachment = attach(accelerator, model, codec="topk:density=0.1", scheme="allgather")  # cgx_ray
    if args.load:
        accelerator.load_state(args.load)
    for _ in range(args.epochs):
        for image, label in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(image), label)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    if args.save:
        accelerator.save_state(args.save)
    right = model(images[TRAIN_IMAGES:].to(accelerator.device)).argmax(1).cpu() == labels[TRAIN_IMAGES:]
    accelerator.print(f"accuracy {right.float().mean():.1%}")
    attachment.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()

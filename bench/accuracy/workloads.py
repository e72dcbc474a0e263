"""The trainings of `python -m bench accuracy`: models, batches and optimizers that depend on the seed alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.accuracy.cases import LARGE_WORKLOAD, REGRESSION
from cgx_ray.demo.gpt import BATCH_SIZE, GPTConfig, StdlibBytes, build_gpt
from cgx_ray.errors import ConfigError

Batch = tuple[Tensor, Tensor]
# 0.39 million parameters: small enough for hundreds of trainings on two cores.
_GPT = GPTConfig(context=64, width=96, num_layers=3, num_heads=4)
_GPT_BATCH_SIZE = 4
_GPT_VALIDATION_SEQUENCES = 256
_DIGITS_BATCH_SIZE = 16
# Noise on the digits, in units of their range. Without it the validation loss falls so low that a few images decide.
_DIGITS_NOISE = 0.3
_DIGITS_VALIDATION_SHARE = 0.4
# Each validation image counts with this many draws of noise.
_DIGITS_NUM_DRAWS = 4
# Inputs, hidden units of teacher and model, outputs.
_TEACHER, _MODEL = (128, 64, 10), (128, 256, 256, 10)
_TEACHER_SEED = 1 << 20
_REGRESSION_BATCH_SIZE, _REGRESSION_VALIDATION = 32, 4096
# At 0.1 rounding errors alone move the last loss by 0.8 %, at 0.03 by 0.1 %.
_DIGITS_RATE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask:
    """Model, batches and optimizer of a training.

    build           model of a seed; `model(input, target)` returns the mean loss
    batch           of a (seed, step, rank)
    validation      batches of one size, the same for all seeds
    make_optimizer  of the parameters; without momentum if the second argument is False, as dgc has its own
    reports_loss    to the policy, by `Attachment.observe`
    """

    build: Callable[[int], nn.Module]
    batch: Callable[[int, int, int], Batch]
    validation: tuple[Batch, ...]
    make_optimizer: Callable[[Iterable[nn.Parameter], bool], torch.optim.Optimizer]
    reports_loss: bool = False


def load_task(name: str) -> TrainingTask:
    """Return a workload. Raises ConfigError if its data is not installed."""
    if name == "digits":
        return _digits()
    if name == REGRESSION:
        return _regression()
    if name == LARGE_WORKLOAD:
        return _gpt(GPTConfig(), BATCH_SIZE, _adamw)
    return _gpt(_GPT, _GPT_BATCH_SIZE, _adamw if name == "gpt_adamw" else _sgd(0.1))


def check_workload(name: str) -> None:
    """Raise ConfigError if the data of a workload is not installed."""
    if name == "digits":
        _load_digits()


def _adamw(parameters: Iterable[nn.Parameter], has_momentum: bool) -> torch.optim.Optimizer:
    # As in the demo.
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9 if has_momentum else 0.0, 0.95), weight_decay=0.1)


def _sgd(rate: float) -> Callable[[Iterable[nn.Parameter], bool], torch.optim.Optimizer]:
    return lambda parameters, has_momentum: torch.optim.SGD(parameters, lr=rate, momentum=0.9 if has_momentum else 0.0)


def _gpt(
    config: GPTConfig,
    batch_size: int,
    make_optimizer: Callable[[Iterable[nn.Parameter], bool], torch.optim.Optimizer],
) -> TrainingTask:
    data = StdlibBytes(context=config.context)
    return TrainingTask(
        build=lambda seed: build_gpt(seed, config),
        batch=lambda seed, step, rank: data.train_batch(seed=seed, step=step, rank=rank, batch_size=batch_size),
        validation=tuple(data.validation_batches(num_sequences=_GPT_VALIDATION_SEQUENCES, batch_size=32)),
        make_optimizer=make_optimizer,
    )


class DigitsCNN(nn.Module):
    """Two convolutions and a hidden layer on images of 8x8 points: 42 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, image_BHW: Tensor, digit_B: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(image_BHW.unsqueeze(1)), digit_B)


def _digits() -> TrainingTask:
    image_IHW, digit_I = _load_digits()
    num_validation = int(_DIGITS_VALIDATION_SHARE * len(digit_I)) // 64 * 64
    train_IHW, train_I = image_IHW[num_validation:], digit_I[num_validation:]

    def build(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return DigitsCNN()

    def batch(seed: int, step: int, rank: int) -> Batch:
        random = np.random.default_rng((seed, step, rank))
        chosen_B = torch.from_numpy(random.integers(0, len(train_I), size=_DIGITS_BATCH_SIZE))
        noise_BHW = torch.from_numpy(random.standard_normal((_DIGITS_BATCH_SIZE, 8, 8), np.float32))
        return train_IHW[chosen_B] + _DIGITS_NOISE * noise_BHW, train_I[chosen_B]

    clean_IHW = image_IHW[:num_validation].repeat(_DIGITS_NUM_DRAWS, 1, 1)
    noisy_IHW = clean_IHW + _DIGITS_NOISE * torch.randn(clean_IHW.shape, generator=torch.Generator().manual_seed(0))
    checked_I = digit_I[:num_validation].repeat(_DIGITS_NUM_DRAWS)
    return TrainingTask(
        build=build,
        batch=batch,
        validation=tuple(zip(noisy_IHW.split(64), checked_I.split(64), strict=True)),
        make_optimizer=_sgd(_DIGITS_RATE),
    )


class Regression(nn.Module):
    """An MLP with squared error: 101 thousand parameters as the model, 9 thousand as its teacher."""

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
        self.layers = nn.Sequential(layers[0], *(part for layer in layers[1:] for part in (nn.ReLU(), layer)))

    def forward(self, x_BI: Tensor, y_BO: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x_BI), y_BO)


def _regression() -> TrainingTask:
    # Not a seed of a model, whose first layer would begin with the teacher's weights.
    teacher = Regression(_TEACHER, seed=_TEACHER_SEED).layers
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(3)

    def draw(num: int, *seeds: int) -> Batch:
        x_BI = torch.from_numpy(np.random.default_rng(seeds).standard_normal((num, _TEACHER[0]), np.float32))
        with torch.no_grad():
            return x_BI, teacher(x_BI)

    x_VI, y_VO = draw(_REGRESSION_VALIDATION, 0)
    return TrainingTask(
        build=lambda seed: Regression(_MODEL, seed),
        batch=lambda seed, step, rank: draw(_REGRESSION_BATCH_SIZE, seed, step, rank),
        validation=tuple(zip(x_VI.split(64), y_VO.split(64), strict=True)),
        make_optimizer=_adamw,
        reports_loss=True,
    )


def _load_digits() -> Batch:
    """Return scikit-learn's images, scaled to [0, 1], and their digits, in a fixed random order."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            'workload digits needs scikit-learn; pip install "cgx-ray[bench]", or give --workloads gpt_adamw,gpt_sgd'
        ) from error
    found = load_digits()
    order_I = np.random.default_rng(0).permutation(len(found.target))
    images = torch.from_numpy(found.images[order_I].astype(np.float32) / 16)
    return images, torch.from_numpy(found.target[order_I].astype(np.int64))

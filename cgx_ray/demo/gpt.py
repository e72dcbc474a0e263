"""A byte-level GPT in plain PyTorch, and CPython's standard library as its training data.

Shapes: B sequences, T bytes of context, C width, H heads, V byte values
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cgx_ray.errors import ConfigError

NUM_BYTES = 256
# Per worker. With 128 bytes of context a step of 4 workers on 2 cores takes about 0.3 s of compute.
BATCH_SIZE = 2
VALIDATION_SHARE = 0.1
# Debian ships CPython without its tests, and sites add packages: without both, the data is the same everywhere.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """About 4.9 million parameters by default, 19.6 MB of float32 gradients."""

    context: int = 128
    width: int = 256
    num_layers: int = 6
    num_heads: int = 4

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ConfigError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")


class Block(nn.Module):
    """A residual block: pre-norm attention, then an MLP four times as wide."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self._attention(self.norm_attention(x_BTC))
        mlp_BTC: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x_BTC))))
        return x_BTC + mlp_BTC

    def _attention(self, x_BTC: Tensor) -> Tensor:
        qkv = self.qkv(x_BTC).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed_BHTc = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out_BTC: Tensor = self.attention_out(mixed_BHTc.transpose(1, 2).flatten(2))
        return out_BTC


class GPT(nn.Module):
    """A GPT that predicts the next byte. `forward(input, target)` returns the mean cross entropy in nats per byte."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        config = config or GPTConfig()
        self.config = config
        self.embed = nn.Embedding(NUM_BYTES, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, NUM_BYTES, bias=False)

    def forward(self, input_BT: Tensor, target_BT: Tensor) -> Tensor:
        x_BTC = self.embed(input_BT) + self.position.weight[: input_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = self.head(self.norm(x_BTC))
        return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten())

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def build_gpt(seed: int, config: GPTConfig | None = None) -> GPT:
    """Return a GPT whose weights depend on `seed` alone; the global random state does not change."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = GPT(config)
        depth_scale = (2 * model.config.num_layers) ** -0.5
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                continue
            # As in GPT-2, residual branches start smaller the deeper the model is, which keeps the size of their sum.
            std = 0.02 * (depth_scale if name.endswith(("attention_out.weight", "mlp_out.weight")) else 1.0)
            nn.init.normal_(parameter, std=std)
    return model


class StdlibBytes:
    """The source of the running Python's standard library, split by file into training and validation data.

    The hash of a file's relative path decides, so the split is the same on every machine. A batch depends on (seed,
    step, rank) alone, so a resumed run gets the same batches as an uninterrupted one.
    """

    def __init__(self, root: Path | None = None, *, context: int = 128) -> None:
        self.root = root or Path(sysconfig.get_path("stdlib"))
        self.context = context
        self.train_files, self.validation_files = split_files(self.root)
        if not self.train_files or not self.validation_files:
            raise ConfigError(f"no Python source below {self.root}; install CPython's standard library")

    @cached_property
    def _train(self) -> Tensor:
        return _read_all(self.train_files)

    @cached_property
    def _validation(self) -> Tensor:
        return _read_all(self.validation_files)

    def train_batch(self, *, seed: int, step: int, rank: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return input and target, both (batch_size, context) int64."""
        random = np.random.default_rng((seed, step, rank))
        starts = random.integers(0, len(self._train) - self.context - 1, size=batch_size)
        return self._cut(self._train, starts)

    def validation_batches(self, *, num_sequences: int = 64, batch_size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the validation batches, evenly spaced sequences that are the same for every seed."""
        starts = np.linspace(0, len(self._validation) - self.context - 2, num_sequences).astype(np.int64)
        for first in range(0, num_sequences, batch_size):
            yield self._cut(self._validation, starts[first : first + batch_size])

    def _cut(self, text: Tensor, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        pieces = torch.stack([text[start : start + self.context + 1] for start in starts.tolist()]).long()
        return pieces[:, :-1], pieces[:, 1:]


def split_files(root: Path) -> tuple[list[Path], list[Path]]:
    """Return training and validation files below `root`, sorted by path."""
    train: list[Path] = []
    validation: list[Path] = []
    for path in sorted(_python_files(root)):
        digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
        (validation if digest[0] < 256 * VALIDATION_SHARE else train).append(path)
    return train, validation


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        # Skips whole folders, because site-packages holds more files than everything else.
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _read_all(paths: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)

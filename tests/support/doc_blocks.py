"""Code blocks of the Markdown files, and a model for those that need one.

A comment before a Python block says how it runs:

    <!-- run on 2 ranks -->       with torch, dist, nn, cgx_ray, model, ddp_model (behind DDP) and tokens, a batch
    <!-- run on 2 new ranks -->   without a process group and ddp_model
    <!-- compile only: reason --> what needs a cluster, root or another package

Without a comment it runs by itself, with cgx_ray. "... after:" is followed by lines of code that run before the block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray

ROOT = Path(__file__).resolve().parents[2]
MODES = ("run", "run on 2 ranks", "run on 2 new ranks", "compile only")
_BLOCK = re.compile(
    r"(?:<!-- (?P<mode>[^:>]*?) ?(?P<rest>:(?:(?!-->).)*)?-->\n\n?)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block. `before`: code that runs first; `line`: of its first line of code."""

    file: str
    line: int
    language: str
    code: str
    mode: str
    before: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def run(self, names: dict[str, Any]) -> None:
        """Run it with `names`. Raises what it raises."""
        exec(compile(self.before, f"before {self}", "exec"), names)
        # Lines in front, so that a traceback has the line of the page.
        exec(compile("\n" * (self.line - 1) + self.code, ROOT / self.file, "exec"), names)


def blocks_of(path: Path) -> Iterator[Block]:
    """Yield the blocks of a file."""
    text = path.read_text()
    for found in _BLOCK.finditer(text):
        mode, rest = found["mode"] or "run", found["rest"] or ""
        has_before = mode.endswith(" after")
        yield Block(
            file=str(path.relative_to(ROOT)),
            line=text.count("\n", 0, found.start("code")) + 1,
            language=found["language"],
            code=found["code"],
            mode=mode.removesuffix(" after"),
            before=rest[1:] if has_before else "",
        )


class Small(nn.Module):
    """A model with layers of the names that the pages use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.body = nn.Linear(32, 64)
        self.head = nn.Linear(64, 64)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.norm(self.embedding(tokens_BT % 64))))
        return logits


def run_on_a_rank(rank: int, block: Block) -> None:
    """Run a block on one of several ranks, and end what it attached."""
    names: dict[str, Any] = {"torch": torch, "dist": dist, "nn": nn, "cgx_ray": cgx_ray, "model": Small()}
    names["tokens"] = torch.arange(64).view(2, 32) + rank
    if dist.is_initialized():
        names["ddp_model"] = DistributedDataParallel(names["model"])
    block.run(names)
    for value in list(names.values()):
        if isinstance(value, cgx_ray.Attachment):
            value.close()

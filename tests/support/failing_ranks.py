"""Ranks that meet a fault: what the others say, how soon, and what is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cgx_ray
from support.ranks import run_ranks
from support.shared_memory import left_behind

# An error takes about a second. Time-outs are GROUP_TIMEOUT_S, so this tells an answer from a wait.
WITHIN_S = 30.0


def die(folder: Path) -> None:
    """Kill this process, and note when."""
    (folder / "killed").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def said_by_survivors(
    world_size: int, victim: int, folder: Path, function: Callable[..., Any], *args: Any
) -> dict[int, str]:
    """Run `function(rank, folder, *args)` on all ranks, of which `victim` calls `die`; return the errors of the others.

    Each other rank must raise one error within WITHIN_S, and nothing may be left of any.
    """
    with pytest.raises(RuntimeError, match=rf"rank {victim} ended with exit code -9"):
        run_ranks(world_size, _noting_errors, folder, function, args)
    assert left_behind([int(path.read_text()) for path in folder.glob("pid*")]) == []
    said, killed_s = {}, float((folder / "killed").read_text())
    for rank in set(range(world_size)) - {victim}:
        raised_s, _, said[rank] = (folder / f"rank{rank}").read_text().partition("\n")
        assert float(raised_s) - killed_s < WITHIN_S, (rank, said[rank])
    return said


def _noting_errors(rank: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    with pytest.raises((cgx_ray.CGXError, RuntimeError)) as caught:
        function(rank, folder, *args)
    (folder / f"rank{rank}").write_text(f"{time.monotonic()}\n{caught.value}")

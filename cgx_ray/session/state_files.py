"""Files with the memory of codecs in a checkpoint: one per rank. Imports no Ray."""

from __future__ import annotations

import logging
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cgx_ray.errors import StateError, listed
from cgx_ray.session.states import state_of

logger = logging.getLogger(__name__)

_NAME = re.compile(r"cgx_ray-rank(\d{5,})-of-(\d{5,})\.pt")
_NAMES = "cgx_ray-rank*-of-*.pt"


def state_file(rank: int, world_size: int) -> str:
    return f"cgx_ray-rank{rank:05d}-of-{world_size:05d}.pt"


def write_state(state: Mapping[str, Any], folder: Path) -> None:
    """Write this rank's `state`. Removes files of another world size: a script may reuse a checkpoint's folder."""
    for (_, world_size), file in state_files(folder).items():
        if world_size != state["world_size"]:
            file.unlink(missing_ok=True)  # another rank may have been faster
    torch.save(dict(state), folder / state_file(state["rank"], state["world_size"]))


def read_state(folder: Path, rank: int, world_size: int) -> dict[str, Any] | None:
    """Return the state that this rank begins with, from the files in `folder`; None if there are none.

    It is the rank's own, or the mean of all if the world size has changed: see `state_of`. If some ranks made none, it
    is the mean of the others, with a warning. One file is read at a time. Raises StateError that names the folder if it
    has files of several world sizes.
    """
    files = state_files(folder)
    if not files:
        return None
    sizes = sorted({size for _, size in files})
    if len(sizes) > 1:
        counts = ", ".join(f"{sum(size == each for _, size in files)} of {each} ranks" for each in sizes)
        raise StateError(
            f"checkpoint {folder} has states of several runs: {counts} ({_NAMES}); keep the files of the run "
            "that wrote the checkpoint last, and delete the others"
        )
    old_size = sizes[0]
    missing = [str(other) for other in range(old_size) if (other, old_size) not in files]
    if old_size == world_size and not missing:
        return load_state(files[rank, world_size])
    if missing and rank == 0:
        logger.warning(
            "checkpoint %s lacks the states of ranks %s of %d (%s): every rank begins with the mean of the others'; "
            "call add_state on every rank",
            folder,
            listed(missing),
            old_size,
            _NAMES,
        )
    return state_of(rank, world_size, map(load_state, files.values()), is_complete=not missing)


def state_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the files in `folder`, if it is there, by (rank, world size), in that order."""
    found = {}
    for file in sorted(folder.glob(_NAMES)):
        match = _NAME.fullmatch(file.name)
        if match:
            found[int(match[1]), int(match[2])] = file
    return found


def load_state(file: Path) -> dict[str, Any]:
    """Return the state in `file`. Raises StateError if it is cut, or has changed: torch ignores the checksums.

    `torch.save` compresses nothing and its tensors share no elements, so a state takes no more memory than its file.
    """
    num_bytes = file.stat().st_size
    try:
        with zipfile.ZipFile(file) as parts:
            is_larger = sum(part.file_size for part in parts.infolist()) > num_bytes
            damaged = "its parts are larger than it is" if is_larger else parts.testzip()
        if damaged is None:
            state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
            if _tensor_bytes(state) <= num_bytes:
                return state
            damaged = "its tensors are larger than it is"
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        RuntimeError,
        EOFError,
        ValueError,
        OSError,
        MemoryError,
    ) as error:
        # A flipped bit in the directory of the file may look like an encryption, an unknown method or a wrong offset.
        damaged = str(error)
    raise StateError(f"{file} is damaged ({damaged}); start from another checkpoint")


def _tensor_bytes(value: object) -> int:
    """Return the bytes that copies of all tensors in `value` take: an expanded tensor is larger than its file."""
    if isinstance(value, Mapping):
        return sum(map(_tensor_bytes, value.values()))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0

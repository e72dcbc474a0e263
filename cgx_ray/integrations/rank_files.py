"""Files beside a trainer's checkpoint, one per rank, with what codecs have kept."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cgx_ray.session.attachment import Attachment

logger = logging.getLogger(__name__)

_NAME = "cgx_ray_{}.pt"


def save_rank_file(attachment: Attachment, folder: Path) -> None:
    """Write the state of this rank to `folder`, which is made if it is missing."""
    state = attachment.state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / _NAME.format(state["rank"]))


def load_rank_files(attachment: Attachment, folder: Path) -> None:
    """Load the state of this rank, or the mean of all if there were more or fewer ranks. Warns where there is none.

    Only in the second case must the folder have the files of all ranks. Raises StateError as
    `Attachment.load_state_dict`.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = folder / _NAME.format(rank)
    if own.exists() and (state := _load(own)).get("world_size") == world_size:
        attachment.load_state_dict(state)
    elif found := sorted(folder.glob(_NAME.format("*"))):
        attachment.load_state_dict(map(_load, found))
    elif rank == 0:
        logger.warning("%s has no file %s: codecs begin without what they had kept", folder, own.name)


def _load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state

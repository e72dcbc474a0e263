"""Files beside a trainer's checkpoint, one per rank, with what codecs have kept."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cgx_ray.session.attachment import Attachment

logger = logging.getLogger(__name__)

_NAME = "{}cgx_ray_{}_of_{}.pt"


def save_rank_file(attachment: Attachment, folder: Path, prefix: str = "") -> None:
    """Write the state of this rank to `folder`, which is made if it is missing. Removes those of more or fewer ranks.

    prefix  of the files' names
    """
    state = attachment.state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / _NAME.format(prefix, state["rank"], state["world_size"]))
    of_all = set(folder.glob(_NAME.format(prefix, "*", "*")))
    for other in of_all - set(folder.glob(_NAME.format(prefix, "*", state["world_size"]))):
        other.unlink(missing_ok=True)


def load_rank_files(attachment: Attachment, folder: Path, prefix: str = "") -> None:
    """Load the state of this rank, or the mean of all if there were more or fewer ranks. Warns where there is none.

    Only in the second case must the folder have the files of all ranks. Raises StateError as
    `Attachment.load_state_dict`.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = folder / _NAME.format(prefix, rank, world_size)
    if own.exists():
        attachment.load_state_dict(_load(own))
    elif found := sorted(folder.glob(_NAME.format(prefix, "*", "*"))):
        attachment.load_state_dict(map(_load, found))
    else:
        logger.warning("%s has no file %s: codecs begin without what they had kept", folder, own.name)


def _load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state

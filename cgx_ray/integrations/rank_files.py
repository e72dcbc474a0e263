"""Files beside a trainer's checkpoint, one per rank, with what codecs have kept."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from cgx_ray.session.attachment import Attachment
from cgx_ray.session.state_files import load_state, read_state, state_file, write_state

logger = logging.getLogger(__name__)


def save_rank_file(attachment: Attachment, folder: Path) -> None:
    """Write the state of this rank to `folder`, made if it is missing. Removes those of more or fewer ranks."""
    state = attachment.state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    write_state(state, folder)


def load_rank_files(attachment: Attachment, folder: Path) -> None:
    """Load the state of this rank, or the mean of all if there were more or fewer ranks. Warns where there is none.

    Only in the second case must the folder have the files of other ranks: nodes may have disks of their own. Raises
    StateError as `read_state` and `Attachment.load_state_dict`.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = folder / state_file(rank, world_size)
    if own.exists():
        attachment.load_state_dict(load_state(own))
    elif folder.is_dir() and (state := read_state(folder, rank, world_size)) is not None:
        attachment.load_state_dict(state)
    else:
        logger.warning("%s has no file %s: codecs begin without what they had kept", folder, own.name)

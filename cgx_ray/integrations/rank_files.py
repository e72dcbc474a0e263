"""Files beside a trainer's checkpoint, one per rank, with what codecs have kept."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from cgx_ray.errors import StateError, listed
from cgx_ray.session.attachment import Attachment
from cgx_ray.session.state_files import load_state, read_state, state_file, state_files, write_state
from cgx_ray.session.states import own_place

logger = logging.getLogger(__name__)


def save_rank_file(attachment: Attachment, folder: Path) -> None:
    """Write the state of this rank to `folder`, made if it is missing. Removes those of more or fewer ranks."""
    state = attachment.state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    write_state(state, folder)


def load_rank_files(attachment: Attachment, folder: Path) -> None:
    """Load the state of this rank, or the mean of all if there were more or fewer ranks. Warns where there is none.

    Only in the second case must the folder have the files of other ranks: nodes may have disks of their own. Raises
    StateError on all ranks if they find different files, else as `read_state` and `Attachment.load_state_dict`.
    """
    rank, world_size = own_place()
    everyones = [[file.name for file in state_files(folder).values()]]
    if attachment.host_group is not None:
        everyones = everyones * world_size
        dist.all_gather_object(everyones, everyones[rank], group=attachment.host_group)
    own = [state_file(other, world_size) for other in range(world_size)]
    if all(name in names for name, names in zip(own, everyones, strict=True)):
        attachment.load_state_dict(load_state(folder / own[rank]))
        return
    if other := next((other for other, names in enumerate(everyones) if names != everyones[0]), None):
        raise StateError(
            f"rank {other} finds {listed(everyones[other]) or 'no state'} in {folder}, rank 0 "
            f"{listed(everyones[0]) or 'none'}; give every node the files of all ranks, or delete all of them"
        )
    state = read_state(folder, rank, world_size)
    if state is not None:
        attachment.load_state_dict(state)
    elif rank == 0:
        logger.warning("%s has no file %s: codecs begin without what they had kept", folder, own[0])

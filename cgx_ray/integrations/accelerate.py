"""cgx_ray with Hugging Face Accelerate: `attach(accelerator, model)` after `accelerator.prepare`."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from cgx_ray.integrations.rank_files import load_rank_files, save_rank_file
from cgx_ray.session import attach as session_attach
from cgx_ray.session.attachment import Attachment

# By accelerator, in the order in which they were attached.
_attached: weakref.WeakKeyDictionary[Accelerator, list[Attachment]] = weakref.WeakKeyDictionary()


def attach(accelerator: Accelerator, model: nn.Module, **options: Any) -> Attachment:
    """Attach a model that `accelerator.prepare` has returned, on every rank.

    `accelerator.save_state` then also writes what codecs have kept, a file per rank,
    `cgx_ray-rank<rank>-of-<ranks>.pt`, and `load_state` reads it. Before it saves, all ranks have the same parameters,
    also if a period is more than 1. Attach several models in the same order in each run.

    options  arguments of `cgx_ray.attach`, such as `codec="qsgd:bits=4"`; errors as there
    """
    attachment = session_attach.attach(model, **options)
    others = _attached.setdefault(accelerator, [])
    others[:] = [one for one in others if not one.is_closed]
    place = f"cgx_ray_model{len(others)}" if others else ""
    others.append(attachment)

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        if not attachment.is_closed:
            # The weights are the parameters' own tensors, and are written afterwards.
            attachment.end_round()
            save_rank_file(attachment, Path(folder, place))

    def load(models: list[nn.Module], folder: str) -> None:
        if not attachment.is_closed:
            load_rank_files(attachment, Path(folder, place))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return attachment

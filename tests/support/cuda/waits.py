"""Finds waits of the host for a CUDA device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise RuntimeError if the block waits for a CUDA device."""
    before = torch.cuda.get_sync_debug_mode()
    _set_mode("error")
    try:
        yield
    finally:
        _set_mode(before)


def _set_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        # Torch warns that this is a prototype, and warnings are errors in tests.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)

"""Hooks on the forward pass of a model that its copies do not have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class ForwardHook:
    """A hook on the forward passes of one model.

    Copies of the model have a hook that does nothing in its place. A file with the model does not name cgx_ray.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *given: object) -> None:
        self._call(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        # It takes any arguments and returns None, so inputs and output stay as they are.
        return getattr, (nullcontext(), "__exit__")

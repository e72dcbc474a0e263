"""Marks of a device that does not exist: a test says when it comes to them."""

from __future__ import annotations

import threading

from cgx_ray.runtime_ext.streams import Mark


class GivenMark(Mark):
    """Done once `set` is called. `is_awaited` is set when a thread waits for it."""

    stream = 1

    def __init__(self) -> None:
        self._event = threading.Event()
        self.is_awaited = threading.Event()

    def set(self) -> None:
        self._event.set()

    @property
    def is_done(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        self.is_awaited.set()
        self._event.wait()

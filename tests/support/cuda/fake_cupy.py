"""Stand-in for CuPy as `cuda_launch` uses it, without a driver: it notes launches, and streams and modules made."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from cgx_ray.runtime_ext.cuda_compile import kernel_names


class Launch(NamedTuple):
    """A launch: the kernel, its number of blocks and its arguments, and device and stream that were current."""

    kernel: str
    num_blocks: int
    args: tuple[Any, ...]
    device: int | None
    stream: int


@dataclass
class FakeStream:
    """A stream of torch."""

    cuda_stream: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.cuda_stream)


@dataclass
class FakeCupy:
    """Takes the place of the module. Streams and devices are current per thread, as in CuPy.

    num_blocks  that a multiprocessor holds
    """

    num_blocks: int = 3
    launches: list[Launch] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._current = threading.local()
        driver = SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=self._occupancy)
        self.cuda = SimpleNamespace(
            Device=self._device, Stream=SimpleNamespace(from_external=self._from_external), driver=driver
        )

    def RawModule(self, *, path: str) -> SimpleNamespace:  # noqa: N802 - CuPy's name
        source = Path(path).name.split("-")[1]
        assert set(kernel_names(source, Path(path).read_bytes()))
        return SimpleNamespace(get_function=lambda name: _Kernel(self, name))

    def _device(self, index: int | None) -> _Entered:
        return _Entered(self._current, "device", index)

    def _from_external(self, stream: FakeStream) -> _Entered:
        assert hasattr(self._current, "device"), "CuPy takes the stream for one of the current device"
        version, handle = stream.__cuda_stream__()
        assert version == 0
        self.streams.append(handle)
        return _Entered(self._current, "stream", handle)

    def _occupancy(self, function: int, block_size: int, shared_bytes: int) -> int:
        assert (block_size, shared_bytes) == (256, 0)
        return self.num_blocks


class _Entered:
    """Makes `value` current while it lasts."""

    def __init__(self, current: threading.local, name: str, value: Any) -> None:
        self._current, self._name, self._value = current, name, value

    def __enter__(self) -> None:
        setattr(self._current, self._name, self._value)

    def __exit__(self, *error: object) -> None:
        delattr(self._current, self._name)


class _Kernel:
    def __init__(self, cupy: FakeCupy, name: str) -> None:
        self._cupy, self._name = cupy, name
        self._is_loaded = False

    @property
    def kernel(self) -> SimpleNamespace:
        if not self._is_loaded:
            self._cupy.loaded.append(self._name)
        self._is_loaded = True
        return SimpleNamespace(ptr=hash(self._name))

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
        assert block == (256,)
        assert all(arg.size == 1 for arg in args if isinstance(arg, np.ndarray)), "CuPy takes one struct by value"
        current = self._cupy._current
        self._cupy.launches.append(Launch(self._name, *grid, args, current.device, current.stream))

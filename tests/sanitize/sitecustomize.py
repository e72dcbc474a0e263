"""Have Python load the native module that CGX_RAY_NATIVE names. `make test-sanitize` puts this folder on PYTHONPATH.

Python runs this file whenever it starts, so that processes which tests start load that module too. Other ways do not
do: the finder of an editable install comes before PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

NAME = "cgx_ray.runtime_ext._native"


class NativeFinder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_file_location(name, os.environ["CGX_RAY_NATIVE"]) if name == NAME else None


sys.meta_path.insert(0, NativeFinder)

"""Counts the memory that torch takes for new tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedMemory(TorchDispatchMode):
    """`num_bytes`: those of tensors that were made without a value, or with one value, on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(word in str(func) for word in ("empty", "zeros", "full")):
            tensors = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
            self.num_bytes += sum(one.untyped_storage().nbytes() for one in tensors)
        return made

"""Where the layers of a group end, for selections by layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


class LayerEnds:
    """Where L layers end in a gradient of N elements, and where their elements end among the K kept ones.

    ends_L, kept_ends_L  (L,) int64, on the host
    parts                by layer, its slices of the gradient and of the kept elements
    """

    def __init__(self, numels: Sequence[int], num_kept: Sequence[int]) -> None:
        """By layer: its elements, and how many of them are kept."""
        for numel, kept in zip(numels, num_kept, strict=True):
            if not 0 <= kept <= numel:
                raise ValueError(f"cannot keep {kept} of a layer of {numel} elements; give 0 to {numel}")
        ends, kept_ends = (list(itertools.accumulate(counts, initial=0)) for counts in (numels, num_kept))
        self.ends_L, self.kept_ends_L = (
            torch.tensor(x[1:], dtype=torch.int64, device="cpu") for x in (ends, kept_ends)
        )
        self.numel, self.num_kept = ends[-1], kept_ends[-1]
        pairs = zip(itertools.pairwise(ends), itertools.pairwise(kept_ends), strict=True)
        self.parts = [(slice(*part), slice(*kept)) for part, kept in pairs]

"""Error feedback: what a codec dropped is added to the next step's gradient. And how much it drops: the gain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from cgx_ray.codecs import Codec
from cgx_ray.errors import StateError

# Gains are measured on blocks, because neighbours share a scale that a bucketed codec makes use of.
GAIN_BLOCK = 1024
GAIN_SAMPLE_NUMEL = 1 << 16


class Residuals:
    """Error-feedback memory by parameter name, float32, so that it outlives buckets, groups and plans."""

    def __init__(self) -> None:
        self._by_name: dict[str, Tensor] = {}

    def group_buffer(self, names: Iterable[str], numels: Iterable[int]) -> Tensor:
        """One flat tensor for a group, filled with what is known of its layers, else zero.

        The layers' entries become views of it, so later in-place changes are seen in `state`.
        """
        sizes = dict(zip(names, numels, strict=True))
        flat_N = torch.zeros(sum(sizes.values()))
        for (name, numel), view in zip(sizes.items(), flat_N.split(list(sizes.values())), strict=True):
            if name in self._by_name:
                if self._by_name[name].numel() != numel:
                    raise StateError(
                        f"residual of {name!r} has {self._by_name[name].numel()} elements, the layer has {numel}; "
                        "the checkpoint is of another model"
                    )
                view.copy_(self._by_name[name])
            self._by_name[name] = view
        return flat_N

    def pop(self, name: str) -> Tensor | None:
        """What is owed to a layer, which is forgotten: for codecs that send everything."""
        return self._by_name.pop(name, None)

    def state(self) -> dict[str, Tensor]:
        """Copies, for a checkpoint."""
        return {name: view.clone() for name, view in self._by_name.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Forget everything and keep `state` until a group asks for it."""
        self._by_name = {name: value.clone() for name, value in state.items()}


def sample_blocks(grad_N: Tensor) -> Tensor:
    """At most `GAIN_SAMPLE_NUMEL` elements of `grad_N`: whole blocks, evenly spaced."""
    num_blocks = grad_N.numel() // GAIN_BLOCK
    stride = num_blocks * GAIN_BLOCK // GAIN_SAMPLE_NUMEL
    if stride <= 1:
        return grad_N
    return grad_N[: num_blocks * GAIN_BLOCK].view(num_blocks, GAIN_BLOCK)[::stride].reshape(-1)


def kept_energy(codec: Codec, grad_N: Tensor, key: int) -> float:
    """|g|^2 less |g - decode(encode(g))|^2, in float64.

    For top-k this is |g_c|^2, the numerator of the compression gain (Flexible Communication, section 2-C3), as what
    it drops is orthogonal to what it keeps. For unbiased codecs |g_c|^2 would exceed |g|^2: the error says what is
    lost.
    """
    payload = torch.empty(codec.spec.payload_bytes(grad_N.numel()), dtype=torch.uint8)
    decoded_N = torch.empty_like(grad_N)
    codec.encode(grad_N, payload, key)
    codec.decode(payload, decoded_N, add=False)
    grad_N = grad_N.double()
    return float(grad_N.square().sum() - (grad_N - decoded_N).square().sum())

"""Private torch names. tests/engine/test_attach_checks.py runs them on the pinned torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def bucket_parameters(model: DistributedDataParallel) -> list[list[Tensor]]:
    """The parameters in each of DDP's buckets, as it has cut them by now. Together, those that it averages.

    Torch makes room for all buckets for that, which is let go again at once. Raises RuntimeError for sparse gradients.
    """
    return [bucket.parameters() for bucket in model.reducer._get_zeros_like_grad_buckets()]

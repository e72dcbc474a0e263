"""Every codec once on a GPU, small and without pytest, for compute-sanitizer: `python -m support.cuda.small_run`."""

from __future__ import annotations

import torch

from cgx_ray import codecs
from cgx_ray.plan import CodecSpec

TEXTS = [
    *(f"qsgd:bits={bits}" for bits in (1, 3, 4, 8)),
    "qsgd:bits=4,grid=l2,rounding=nearest,bucket_size=40",
    "terngrad",
    "ef_signsgd",
    "onebit",
    "onebit:bucket_size=8",
    "topk",
    "topk:density=0.1,value_bits=4",
    "lwtopk:density=0.1",
    "mstopk:density=0.1",
    "dgc:density=0.1",
    "sidco:density=0.1",
    "randomk:density=0.1",
]


def main() -> None:
    codecs.build_kernels([CodecSpec.parse(text) for text in TEXTS], torch.device("cuda", 0))


if __name__ == "__main__":
    main()

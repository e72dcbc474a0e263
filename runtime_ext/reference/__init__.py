"""The specification of every kernel in plain PyTorch, on any device. `ops` and `sparse` check the arguments.

N elements of a gradient, K kept elements, B quantization buckets, S elements per quantization bucket, L lanes of a sum
"""

from .bits import magnitudes, pack_levels, unpack_levels
from .buckets import add_feedback
from .gradient import add_momentum, poison
from .hashes import crc32c, lowbias32, random_below, uniform
from .indices import index_layout, pack_indices, random_indices, scatter_add, scatter_zero, unpack_indices
from .qsgd import L2, LINF, MAX_MIN, grid_bytes_per_bucket, qsgd_decode, qsgd_encode, top_level
from .selection import collect, topk_select
from .sign import EF_SIGNSGD, ONEBIT, mean_bytes_per_bucket, sign_decode, sign_encode
from .thresholds import HISTOGRAM_SHIFT, NUM_BINS, bisect_thresholds, magnitude_histogram, sidco_threshold

__all__ = [
    "EF_SIGNSGD",
    "HISTOGRAM_SHIFT",
    "L2",
    "LINF",
    "MAX_MIN",
    "NUM_BINS",
    "ONEBIT",
    "add_feedback",
    "add_momentum",
    "bisect_thresholds",
    "collect",
    "crc32c",
    "grid_bytes_per_bucket",
    "index_layout",
    "lowbias32",
    "magnitude_histogram",
    "magnitudes",
    "mean_bytes_per_bucket",
    "pack_indices",
    "pack_levels",
    "poison",
    "qsgd_decode",
    "qsgd_encode",
    "random_below",
    "random_indices",
    "scatter_add",
    "scatter_zero",
    "sidco_threshold",
    "sign_decode",
    "sign_encode",
    "top_level",
    "topk_select",
    "uniform",
    "unpack_indices",
    "unpack_levels",
]

"""Records of the codecs that come with cgx_ray, and the bytes of what they send."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cgx_ray.plan.codec_record import CodecRecord, LossCost, Parameter, one_of, whole

if TYPE_CHECKING:
    from cgx_ray.plan.codec_spec import CodecSpec

VALUE_BUCKET_SIZE = 128  # elements that share a grid when top-k values are quantized
COUNT_BYTES = 4  # a sparse message begins with its number of elements


def value_bytes(num_kept: int, value_bits: int) -> int:
    """Return the bytes of `num_kept` values: as they are, as float16, or on qsgd's max-min grid."""
    if value_bits >= 16:
        return num_kept * value_bits // 8
    return 4 * -(-num_kept // VALUE_BUCKET_SIZE) + -(-num_kept * value_bits // 8)


def packed_index_bytes(numel: int, num_kept: int) -> int:
    """Return the bytes of `num_kept` ascending indices below `numel`: the smallest of offsets, bitmap and raw.

    It repeats `runtime_ext.reference.index_layout`, which a plan may not import.
    """
    if num_kept == 0:
        return 0
    low_bits = max((numel // num_kept).bit_length() - 1, 0)
    num_high = num_kept + (numel - 1 >> low_bits) + 1
    words = (-(-num_kept * low_bits // 32) + -(-num_high // 32), -(-numel // 32), num_kept)
    return 4 * min(words)


def near_square(numel: int) -> tuple[int, int]:
    """Return the rows and columns of the smallest near-square matrix with room for `numel` elements."""
    if numel == 0:
        return 0, 0
    rows = math.isqrt(numel - 1) + 1
    return rows, -(-numel // rows)


def _grid_bytes(spec: CodecSpec, numel: int) -> int:
    assert spec.bucket_size is not None
    return (4 if spec.grid == "max_min" else 2) * -(-numel // spec.bucket_size) + -(-numel * (spec.bits or 2) // 8)


def _sparse_bytes(spec: CodecSpec, numel: int) -> int:
    assert spec.value_bits is not None
    return spec.index_bytes(numel) + value_bytes(spec.num_kept(numel), spec.value_bits)


def _sign_bytes(spec: CodecSpec, numel: int, mean_bytes: int) -> int:
    assert spec.bucket_size is not None
    return mean_bytes * -(-numel // spec.bucket_size) + -(-numel // 8)


def _factor_bytes(spec: CodecSpec, numel: int) -> int:
    assert spec.rank is not None
    rows, columns = near_square(numel)
    return 4 * min(spec.rank, rows, columns) * (rows + columns)


def _qsgd_problem(spec: CodecSpec) -> str | None:
    if spec.bits == 1 and spec.grid != "max_min":
        return f"bits 1 is not allowed with grid {spec.grid}, whose middle level is zero; give 2 to 8"
    return None


_DENSITY = Parameter(default=0.01, is_allowed=lambda x: 0 < x <= 1, allowed="a share in (0, 1]; 0.01 keeps 1 %")
_CAST: dict[str, Any] = {
    "payload_bytes": lambda spec, numel: 2 * numel,
    "is_reencoded": True,
    "is_summed_encoded": True,
    "is_summed_inside": True,
    "is_by_element": True,
    "takes_16_bit": True,
    "for_parameters": True,
}
_SPARSE: dict[str, Any] = {
    "payload_bytes": _sparse_bytes,
    "parameters": {"density": _DENSITY, "value_bits": one_of(32, 16, 8, 4)},
    "selects": True,
    "needs_feedback": True,
}
_SIGN: dict[str, Any] = {
    "codec": "cgx_ray.codecs.qsgd:Sign",
    "parameters": {"bucket_size": whole(1024, 8, 1 << 16, multiple=8)},
    "is_reencoded": True,
    "is_summed_inside": True,
    "needs_feedback": True,
}

# Gains: medians over the 28 decisions of five `cgx-ray demo` runs, a GPT of 4.9 M parameters in its first 48 steps.
# Those of qsgd with 2 and 3 bits follow from that of 4 bits: errors grow as 1 / (2^bits - 1)^2 (`known_losses`), and 64
# elements have 0.59 times the error of 128 in the runs that measured losses.
# Losses: the committed run of `python -m bench accuracy`, bench/data/accuracy.json, over each codec's usual scheme; a
# test holds them together. A codec's times are in planner/typical_profile.json.
_RECORDS = (
    CodecRecord(
        name="none",
        wire_id=0,
        codec="cgx_ray.codecs.cast:Raw",
        payload_bytes=lambda spec, numel: 4 * numel,
        is_reencoded=True,
        is_by_element=True,
        for_parameters=True,
    ),
    CodecRecord(name="fp16", wire_id=4, codec="cgx_ray.codecs.cast:Fp16", **_CAST),
    CodecRecord(
        name="bf16",
        wire_id=1,
        codec="cgx_ray.codecs.cast:Bf16",
        **_CAST,
        is_foreseen=True,
        typical_gains={"bf16": 1.0},
        losses={"bf16": LossCost(gpt_adamw=1.0, gpt_sgd=0.9996, digits=0.9993, relative_error=3.27e-06)},
    ),
    CodecRecord(
        name="prefix",
        wire_id=5,
        codec="cgx_ray.codecs.cast:Prefix",
        payload_bytes=lambda spec, numel: 4 * spec.num_prefix(numel),
        parameters={
            "ratio": Parameter(default=4.0, is_allowed=lambda x: 1 <= x < math.inf, allowed="a number, 1 or more")
        },
        is_reencoded=True,
        # Not inside nodes: it would keep other elements there than between nodes.
        is_summed_encoded=True,
        loses_elements=True,
    ),
    CodecRecord(
        name="qsgd",
        wire_id=2,
        codec="cgx_ray.codecs.qsgd:Qsgd",
        payload_bytes=_grid_bytes,
        parameters={
            "bits": whole(4, 1, 8),
            "bucket_size": whole(128, 8, 1 << 16, multiple=8),
            "grid": one_of("max_min", "l2", "linf"),
            "rounding": one_of("stochastic", "nearest"),
        },
        problem=_qsgd_problem,
        is_reencoded=True,
        is_summed_inside=True,
        takes_16_bit=True,
        needs_feedback=lambda spec: spec.rounding == "nearest",
        for_parameters=True,
        is_foreseen=True,
        typical_gains={
            "qsgd:bits=8,bucket_size=128": 0.9999,
            "qsgd:bits=4,bucket_size=128": 0.987,
            "qsgd:bits=3,bucket_size=128": 0.94,
            "qsgd:bits=2,bucket_size=128": 0.68,
            "qsgd:bits=2,bucket_size=64": 0.81,
        },
        losses={
            "qsgd:bits=8,bucket_size=128": LossCost(
                gpt_adamw=1.0, gpt_sgd=0.9968, digits=1.0004, relative_error=0.000124
            ),
            "qsgd:bits=4,bucket_size=128": LossCost(
                gpt_adamw=1.0046, gpt_sgd=0.9968, digits=1.0004, relative_error=0.0319
            ),
            "qsgd:bits=3,bucket_size=128": LossCost(
                gpt_adamw=1.007, gpt_sgd=0.9966, digits=1.0057, relative_error=0.147
            ),
            "qsgd:bits=2,bucket_size=128": LossCost(
                gpt_adamw=1.0214, gpt_sgd=1.0153, digits=1.0395, relative_error=0.912
            ),
            "qsgd:bits=2,bucket_size=64": LossCost(
                gpt_adamw=1.0149, gpt_sgd=1.0144, digits=1.0274, relative_error=0.537
            ),
        },
    ),
    CodecRecord(
        name="terngrad",
        wire_id=6,
        codec="cgx_ray.codecs.qsgd:Qsgd",
        payload_bytes=_grid_bytes,
        parameters={"bucket_size": whole(128, 8, 1 << 16, multiple=8)},
        is_reencoded=True,
        is_summed_inside=True,
        takes_16_bit=True,
        losses={
            "terngrad:bucket_size=128": LossCost(gpt_adamw=1.0356, gpt_sgd=1.05, digits=1.1636, relative_error=1.92)
        },
    ),
    CodecRecord(
        name="topk",
        wire_id=3,
        codec="cgx_ray.codecs.selectors:TopK",
        **_SPARSE,
        is_foreseen=True,
        typical_gains={
            "topk:density=0.1": 0.87,
            "topk:density=0.033": 0.72,
            "topk:density=0.011": 0.53,
            "topk:density=0.004": 0.38,
            "topk:density=0.001": 0.22,
        },
        losses={
            "topk:density=0.1": LossCost(gpt_adamw=1.0547, gpt_sgd=1.0481, digits=1.0167),
            "topk:density=0.033": LossCost(gpt_adamw=1.1012, gpt_sgd=1.0977, digits=1.05),
            "topk:density=0.01": LossCost(gpt_adamw=1.1276, gpt_sgd=1.1866, digits=1.134),
            "topk:density=0.001": LossCost(gpt_adamw=1.2196, gpt_sgd=1.234, digits=1.5053),
        },
    ),
    CodecRecord(name="lwtopk", wire_id=7, codec="cgx_ray.codecs.selectors:LwTopK", **_SPARSE),
    CodecRecord(name="mstopk", wire_id=8, codec="cgx_ray.codecs.selectors:MsTopK", **_SPARSE),
    CodecRecord(
        name="dgc",
        wire_id=9,
        codec="cgx_ray.codecs.selectors:Dgc",
        **_SPARSE
        | {
            "parameters": {
                **_SPARSE["parameters"],
                "momentum": Parameter(
                    default=0.9, is_allowed=lambda x: 0 <= x < 1, allowed="a number in [0, 1); 0 is none"
                ),
                "clip": Parameter(
                    default=0.0, is_allowed=lambda x: 0 <= x < math.inf, allowed="a norm, 0 or more; 0 is off"
                ),
                "warmup_steps": whole(0, 0, (1 << 31) - 1),
            }
        },
        losses={"dgc:density=0.01": LossCost(gpt_adamw=1.0448, gpt_sgd=1.1649, digits=4.5928)},
    ),
    CodecRecord(name="sidco", wire_id=10, codec="cgx_ray.codecs.selectors:Sidco", **_SPARSE),
    CodecRecord(
        name="randomk",
        wire_id=11,
        codec="cgx_ray.codecs.sparse:RandomK",
        payload_bytes=lambda spec, numel: 4 * spec.num_kept(numel),
        parameters={"density": _DENSITY},
        is_summed_encoded=True,
        needs_feedback=True,
        shares_key=True,
    ),
    CodecRecord(
        name="ef_signsgd",
        wire_id=12,
        payload_bytes=lambda spec, numel: _sign_bytes(spec, numel, mean_bytes=4),
        **_SIGN,
        losses={"ef_signsgd:bucket_size=1024": LossCost(gpt_adamw=1.1937, gpt_sgd=1.3672, digits=1.1476)},
    ),
    CodecRecord(
        name="onebit",
        wire_id=13,
        payload_bytes=lambda spec, numel: _sign_bytes(spec, numel, mean_bytes=8),
        **_SIGN,
    ),
    CodecRecord(
        name="powersgd",
        wire_id=14,
        codec="cgx_ray.codecs.powersgd:PowerSgd",
        payload_bytes=_factor_bytes,
        parameters={"rank": whole(4, 1, 1 << 10)},
        # By two all-reduces of its own. Its gain depends on the layers' shapes and on what it sent before, so it is
        # not foreseen.
        is_summed_encoded=True,
        needs_feedback=True,
        losses={"powersgd:rank=4": LossCost(gpt_adamw=1.0304, gpt_sgd=1.0052, digits=1.0172)},
    ),
)
BUILT_IN: dict[str, CodecRecord] = {record.name: record for record in _RECORDS}

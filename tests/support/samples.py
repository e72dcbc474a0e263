"""Samples as an engine takes them."""

from __future__ import annotations

from cgx_ray.monitors.sample import CURVE_DENSITIES, StepSample, Transfer


def step_sample(rank: int, step: int) -> StepSample:
    return StepSample(
        rank=rank,
        step=step,
        plan_version=3,
        step_s=0.25,
        compute_s=0.1,
        encode_s=0.01,
        exchange_s=0.2,
        decode_s=0.02,
        wire_bytes=1500,
        dense_bytes=4000,
        ready_s=(0.1,),
        transfers=(
            Transfer(
                group=0,
                scheme="allgather",
                codec="topk:density=0.1",
                numel=1000,
                wire_bytes=1000,
                sent_bytes=1500,
                dense_bytes=4000,
                seconds=0.2,
            ),
        ),
        gain={"bf16": 0.99},
        gain_curve=tuple(0.5 + rank / 10 for _ in CURVE_DENSITIES),
        norm=2.5,
        loss=3.5,
        lr=0.01,
        residual_norm=5.0,
        weight_drift=2e-8,
        lag_s={1 - rank: 0.01},
    )

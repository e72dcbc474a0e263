"""Codec specifications: as text, refused values, and numbers of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codec_cases import TEXTS

from cgx_ray.errors import ConfigError
from cgx_ray.plan import BUILT_IN, CodecSpec, GroupPlan, Option, Plan, near_square, packed_index_bytes, spoken
from cgx_ray.runtime_ext import ops, sparse

# A busy machine would miss hypothesis's deadline of 200 ms per example.
UNTIMED = settings(deadline=None)


@pytest.mark.parametrize("name", BUILT_IN)
def test_codec_text_round_trips_and_names_the_principal_parameters(name: str) -> None:
    spec = CodecSpec(name=name)
    assert CodecSpec.parse(str(spec)) == CodecSpec.parse(name) == spec
    principal = [key for key in BUILT_IN[name].parameters if key in ("bits", "bucket_size", "density", "rank", "ratio")]
    assert [item.split("=")[0] for item in str(spec).partition(":")[2].split(",") if item] == principal


@pytest.mark.parametrize("text", TEXTS)
def test_codec_text_with_parameters_round_trips(text: str) -> None:
    assert CodecSpec.parse(str(CodecSpec.parse(text))) == CodecSpec.parse(text)


def test_codec_text_is_as_short_as_it_can_be() -> None:
    assert str(CodecSpec.parse("qsgd")) == "qsgd:bits=4,bucket_size=128"
    assert str(CodecSpec.parse("topk: value_bits=32, density=0.01")) == "topk:density=0.01"
    assert str(CodecSpec.parse("topk:value_bits=16")) == "topk:density=0.01,value_bits=16"
    assert str(CodecSpec(name="prefix", ratio=2)) == "prefix:ratio=2.0"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("qsgd over sra", "qsgd 4-bit over sra"),
        ("qsgd:bits=2,bucket_size=64 over sra on cpu", "qsgd 2-bit bucket_size=64 over sra on cpu"),
        (
            "topk:value_bits=16 over allgather, dense inside nodes",
            "topk 1 % value_bits=16 over allgather, dense inside nodes",
        ),
        ("powersgd", "powersgd rank 4"),
        ("bf16 on cpu", "bf16 on cpu"),
        ("none over sra", "dense over sra"),
        ("dense", "dense"),
        ("none", "dense"),
        ("a codec of mine", "a codec of mine"),
    ],
)
def test_people_read_codecs_and_options_without_their_defaults(text: str, says: str) -> None:
    assert spoken(text) == says


def test_a_plan_shows_what_it_is() -> None:
    groups = tuple(GroupPlan(layers=(name,), option=Option.parse("qsgd over sra")) for name in "ab")
    plan = Plan(version=3, world_size=4, groups=groups, period=8)
    assert repr(plan) == "<Plan 3: qsgd 4-bit over sra, every 8 steps; 2 layers in 2 groups, 4 ranks>"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("zip", "unknown codec 'zip'; known: none, fp16"),
        ("qsdg:bits=4", "unknown codec 'qsdg'; did you mean 'qsgd'? known: none, fp16"),
        ("qsgd:bitz=4", "codec qsgd has no bitz; did you mean 'bits=4'? it takes bits, bucket_size, grid, rounding"),
        ("QSGD", "unknown codec 'QSGD'; did you mean 'qsgd'?"),
        ("qsgd bits=4, bucket_size=64", "did you mean 'qsgd:bits=4,bucket_size=64'?"),
        ("topk 1 %", "unknown codec 'topk 1 %'; parameters come after a colon, such as 'topk:density=0.01'"),
        ("qsgd:bits=4 over sra", "has a scheme, too; give them apart: codec='qsgd:bits=4', scheme='sra'"),
        ("none 1", "unknown codec 'none 1'; codec none has no parameters"),
        ("qsgd:bits:4", "codec qsgd has no bits:4; did you mean 'bits=4'?"),
        ("qsgd:4", "codec qsgd has no 4; did you mean 'bits=4'? it takes bits, bucket_size, grid, rounding"),
        ("topk:0.1", "codec topk has no 0.1; did you mean 'density=0.1'? it takes density, value_bits"),
        ("none:4", "codec none has no 4; it takes no parameters"),
        ("qsgd:density=0.1", "codec qsgd has no density; it takes bits, bucket_size, grid, rounding"),
        ("none:bits=4", "codec none has no bits; it takes no parameters"),
        ("qsgd:bits=9", "bits 9 is not allowed; give a whole number from 1 to 8"),
        ("qsgd:bits=1,grid=l2", "bits 1 is not allowed with grid l2"),
        ("qsgd:bucket_size=12", "bucket_size 12 is not allowed; give a whole number from 8 to 65536, a multiple of 8"),
        ("qsgd:grid=l1", "grid 'l1' is not allowed; give max_min, l2, linf"),
        ("qsgd:rounding=up", "rounding 'up' is not allowed; give stochastic, nearest"),
        ("topk:density=2", "density 2.0 is not allowed; give a share in (0, 1]"),
        ("topk:density=nan", "density nan is not allowed"),
        ("topk:density=x", "density 'x' is not allowed; give a share in (0, 1]"),
        ("qsgd:bits=4,bits=2", "bits is given twice"),
        ("qsgd:bits=4.0", "bits '4.0' is not allowed; give a whole number from 1 to 8"),
        (4, "codec 4 is not allowed; give text such as"),
        ("topk:value_bits=2", "value_bits 2 is not allowed; give 32, 16, 8, 4"),
        ("powersgd:rank=0", "rank 0 is not allowed; give a whole number from 1 to 1024"),
        ("prefix:ratio=0.5", "ratio 0.5 is not allowed; give a number, 1 or more"),
        ("dgc:momentum=1", "momentum 1.0 is not allowed; give a number in [0, 1)"),
        ("dgc:clip=-1", "clip -1.0 is not allowed; give a norm, 0 or more"),
        ("dgc:warmup_steps=-1", "warmup_steps -1 is not allowed; give a whole number from 0"),
    ],
)
def test_impossible_codecs_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CodecSpec.parse(text)
    assert says in str(caught.value)


def test_a_parameter_that_is_written_wrong_is_named() -> None:
    with pytest.raises(ConfigError, match=r"codec qsgd has no bitz; did you mean 'bits=4'\? it takes bits"):
        CodecSpec(name="qsgd", bitz=4)


@pytest.mark.parametrize(("key", "value"), [("bits", True), ("bits", 4.0), ("rounding", 1), ("bucket_size", "128")])
def test_parameters_of_another_type_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} .* is not allowed"):
        CodecSpec(name="qsgd", **{key: value})


def test_warmup_of_dgc_keeps_less_in_four_steps_and_never_less_than_the_target() -> None:
    spec = CodecSpec(name="dgc", density=0.01, warmup_steps=8)
    densities = [spec.at_step(step).density for step in range(10)]
    assert densities == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.01, 0.01, 0.01, 0.01]
    low = CodecSpec(name="dgc", density=0.001, warmup_steps=3)
    assert [low.at_step(step).density for step in range(4)] == [0.25, 0.0625, 0.015625, 0.001]
    assert CodecSpec(name="topk").at_step(0) == CodecSpec(name="topk")


@UNTIMED
@given(numel=st.integers(0, 100_000), density=st.floats(1e-6, 1))
def test_a_plan_knows_the_size_of_packed_indices(numel: int, density: float) -> None:
    spec = CodecSpec(name="topk", density=density)
    num_kept = spec.num_kept(numel)
    assert packed_index_bytes(numel, num_kept) == sparse.index_bytes(numel, num_kept)
    rows, columns = near_square(numel)
    assert rows * columns - numel < max(columns, 1)
    assert abs(rows - columns) <= 1


@UNTIMED
@given(bits=st.integers(2, 8), grid=st.sampled_from(["max_min", "l2", "linf"]), numel=st.integers(0, 9999))
def test_a_plan_knows_the_size_of_quantized_payloads(bits: int, grid: str, numel: int) -> None:
    spec = CodecSpec(name="qsgd", bits=bits, bucket_size=64, grid=grid)
    assert spec.payload_bytes(numel) == ops.qsgd_bytes(numel, bits, 64, grid)
    for kind in ("ef_signsgd", "onebit"):
        assert CodecSpec(name=kind, bucket_size=64).payload_bytes(numel) == ops.sign_bytes(numel, 64, kind)

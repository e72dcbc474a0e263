"""Messages and plans: damaged, misdirected and impossible ones are refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.wire import HEADER_BYTES, Message, Stamp
from cgx_ray.collectives.parcel import Parcel
from cgx_ray.collectives.pieces import chunk_bounds
from cgx_ray.errors import ConfigError, DamagedMessageError, PlanError, WireError
from cgx_ray.plan import (
    BUILT_IN,
    MAX_GROUPS,
    MAX_PAYLOAD_BYTES,
    CodecSpec,
    GroupPlan,
    Layer,
    Option,
    Plan,
    Scheme,
    make_plan,
)

STAMP = Stamp(plan_version=3, step=100, group=2, codec="qsgd")
SPECS = [CodecSpec(name=name) for name in BUILT_IN] + [CodecSpec.parse("qsgd:bits=1,bucket_size=8")]


def sealed(spec: CodecSpec, numel: int) -> Message:
    codec = make_codec(spec)
    message = Message(codec.payload_bytes(numel))
    grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    codec.encode(grad_N, message.payload, key=7)
    message.seal(replace(STAMP, codec=spec.name), numel)
    return message


@pytest.mark.fault("a bit of a message flips", "`WireError`; nothing of it is decoded")
@settings(deadline=None)
@given(spec=st.sampled_from(SPECS), numel=st.integers(0, 700), data=st.data())
def test_any_flipped_bit_is_noticed(spec: CodecSpec, numel: int, data: st.DataObject) -> None:
    message = sealed(spec, numel)
    stamp = replace(STAMP, codec=spec.name)
    message.check(stamp, numel, sender=1)
    position = data.draw(st.integers(0, message.wire.numel() - 1))
    message.wire[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError, match="rank 1"):
        message.check(stamp, numel, sender=1)


def test_a_message_that_the_mesh_has_found_damaged_is_refused() -> None:
    message = Message(12, is_sealed_by_mesh=True)
    message.seal(STAMP, 3)
    message.check(STAMP, 3, sender=1)
    message.header[:2] = 0
    with pytest.raises(DamagedMessageError, match="message of rank 1 was damaged"):
        message.check(STAMP, 3, sender=1)


@pytest.mark.fault("a message of another plan or step", "`WireError`; nothing of it is decoded")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"plan_version": 4}, "plan is 3, expected 4"),
        ({"step": 101}, "step is 100, expected 101"),
        ({"group": 1}, "group is 2, expected 1"),
        ({"codec": "topk"}, "codec is 2, expected 3"),
        ({"phase": 1}, "phase is 0, expected 1"),
    ],
)
def test_a_message_of_another_plan_step_group_codec_or_phase_is_refused(change: dict[str, object], says: str) -> None:
    message = sealed(CodecSpec(name="qsgd"), 300)
    with pytest.raises(WireError, match=says):
        message.check(replace(STAMP, **change), 300, sender=0)


def test_the_numbers_of_codecs_never_change() -> None:
    assert [record.name for record in sorted(BUILT_IN.values(), key=lambda record: record.wire_id)] == [
        "none", "bf16", "qsgd", "topk", "fp16", "prefix", "terngrad", "lwtopk", "mstopk", "dgc", "sidco", "randomk",
        "ef_signsgd", "onebit", "powersgd",
    ]  # fmt: skip
    assert sorted(record.wire_id for record in BUILT_IN.values()) == list(range(15))


@given(numel=st.integers(0, 5000), num_chunks=st.integers(1, 9), granule=st.sampled_from([1, 8, 128]))
def test_chunks_cover_everything_once_at_multiples_of_the_granule(numel: int, num_chunks: int, granule: int) -> None:
    bounds = chunk_bounds(numel, num_chunks, granule)
    assert len(bounds) == num_chunks
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(bounds))
    assert all(start % granule == 0 or start == numel for start, _ in bounds)
    assert max(stop - start for start, stop in bounds) <= numel / num_chunks + 2 * granule


LAYERS = [
    Layer(name="w1", numel=400_000, ndim=2),
    Layer(name="b1", numel=500, ndim=1),
    Layer(name="w2", numel=2_000_000, ndim=2),
    Layer(name="h", numel=2048, ndim=2, dtype="bfloat16"),
]


def test_small_layers_go_uncompressed_before_the_last_group_and_types_do_not_mix() -> None:
    plan = make_plan(LAYERS, version=0, world_size=2, codec=CodecSpec(name="qsgd"), scheme=Scheme.SRA)
    assert [group.layers for group in plan.groups] == [("h",), ("w2",), ("b1",), ("w1",)]
    assert str(plan.groups[2].option) == "none over sra"
    plan.check(LAYERS, 2)


def test_overrides_give_layers_another_codec_in_groups_of_their_own() -> None:
    layers = [Layer(name=name, numel=3000, ndim=2) for name in ("in", "emb.a", "emb.b", "mid", "emb.c", "out")]
    layers.append(Layer(name="emb.bias", numel=10, ndim=1))
    topk, randomk = (CodecSpec(name="topk"), Scheme.ALLGATHER), (CodecSpec(name="randomk"), Scheme.ALLREDUCE)
    plan = make_plan(
        layers,
        version=0,
        world_size=2,
        codec=CodecSpec(name="qsgd"),
        scheme=Scheme.SRA,
        overrides={"emb.a": randomk, "emb.*": topk},
    )
    assert [(group.option.codec.name, group.layers) for group in plan.groups] == [
        ("topk", ("emb.bias",)),
        ("qsgd", ("out",)),
        ("topk", ("emb.c",)),
        ("qsgd", ("mid",)),
        ("topk", ("emb.b",)),
        ("randomk", ("emb.a",)),
        ("qsgd", ("in",)),
    ]
    plan.check(layers, 2)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match=r"pattern 'head.\*' of exclude or overrides matches none of 7 layers"):
        make_plan(layers, version=0, world_size=2, overrides={"head.*": topk})
    with pytest.raises(ConfigError, match="scheme dense cannot carry codec topk"):
        make_plan(layers, version=0, world_size=2, overrides={"in": (topk[0], Scheme.DENSE)})
    with pytest.raises(ConfigError, match="is not a codec and a scheme; give a codec"):
        make_plan(layers, version=0, world_size=2, overrides={"in": (topk[0],)})
    with pytest.raises(ConfigError, match="unknown scheme 'mesh'; known: dense"):
        make_plan(layers, version=0, world_size=2, codec="qsgd", scheme="mesh")


def test_a_plan_takes_codecs_and_schemes_as_text() -> None:
    as_text = make_plan(
        LAYERS, version=0, world_size=2, codec="qsgd", scheme="sra", overrides={"w1": ("topk", "allgather")}
    )
    codec, scheme = CodecSpec(name="topk"), Scheme.ALLGATHER
    for choice in ((codec, scheme), Option(codec=codec, scheme=scheme)):
        assert as_text == make_plan(
            LAYERS, version=0, world_size=2, codec=CodecSpec(name="qsgd"), scheme=Scheme.SRA, overrides={"w1": choice}
        )


def test_a_uniform_plan_is_one_group_a_dtype_small_layers_and_all() -> None:
    layers = [*LAYERS, Layer(name="half", numel=5, ndim=1, dtype="float16")]
    plan = make_plan(layers, version=0, world_size=2, codec="qsgd", scheme="sra", group_bytes=1, uniform=True)
    names = {layer.dtype: [each.name for each in reversed(layers) if each.dtype == layer.dtype] for layer in layers}
    assert sorted(group.layers for group in plan.groups) == sorted(tuple(names[dtype]) for dtype in names)
    assert {(str(group.option.codec), group.option.scheme) for group in plan.groups} == {
        (str(CodecSpec(name="qsgd")), Scheme.SRA)
    }
    with pytest.raises(ConfigError, match="leave out overrides and bits, or uniform"):
        make_plan(layers, version=0, world_size=2, overrides={"half": ("none", "dense")}, uniform=True)


def test_what_a_header_cannot_say_is_refused_when_the_plan_is_made() -> None:
    groups = tuple(GroupPlan(layers=(str(i),)) for i in range(MAX_GROUPS))
    Plan(version=0, world_size=2, groups=groups)
    with pytest.raises(PlanError, match="65537 groups; at most 65536 are allowed, so give larger groups"):
        Plan(version=0, world_size=2, groups=(*groups, GroupPlan(layers=("one too many",))))
    codec = make_codec(CodecSpec(name="none"))
    # The memory is never written, so the system allocates none of it.
    assert Parcel(codec, MAX_PAYLOAD_BYTES // 4).num_bytes == MAX_PAYLOAD_BYTES - 3 + HEADER_BYTES
    with pytest.raises(PlanError, match=r"1073741824 elements make a message of 4294967296 bytes with codec none"):
        Parcel(codec, 1 << 30)
    huge = [Layer(name="huge", numel=1 << 31, ndim=2)]
    make_plan(huge, version=0, world_size=2, codec="qsgd", scheme="sra").check(huge, 2)
    with pytest.raises(PlanError, match="2147483648 elements; topk counts with 32 bits"):
        make_plan(huge, version=0, world_size=2, codec="topk", scheme="allgather").check(huge, 2)


def test_overrides_of_a_dense_plan_leave_the_other_layers_in_ddps_order() -> None:
    choice = (CodecSpec(name="bf16"), Scheme.SRA)
    plan = make_plan(LAYERS, version=0, world_size=2, overrides={"w1": choice})
    assert [(group.option.codec.name, group.layers) for group in plan.groups] == [
        ("none", ("h",)),
        ("none", ("w2",)),
        ("none", ("b1",)),
        ("bf16", ("w1",)),
    ]


def test_plans_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="in two groups"):
        Plan(version=0, world_size=2, groups=(GroupPlan(layers=("a",)), GroupPlan(layers=("a", "b"))))
    with pytest.raises(PlanError, match="mixes bfloat16, float32"):
        Plan(version=0, world_size=2, groups=(GroupPlan(layers=("w1", "b1", "w2", "h")),)).check(LAYERS, 2)
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json("{}")
    with pytest.raises(ConfigError, match="artopk_ring cannot carry codec qsgd; it carries dgc, lwtopk"):
        GroupPlan(layers=("a",), option=Option(codec=CodecSpec(name="qsgd"), scheme=Scheme.ARTOPK_RING))
    with pytest.raises(ConfigError, match="sums values as they are, not with value_bits 16; give 32"):
        GroupPlan(layers=("a",), option=Option(codec=CodecSpec(name="topk", value_bits=16), scheme=Scheme.ARTOPK_RING))
    with pytest.raises(PlanError, match="'w' of 10 elements cannot have 3 rows"):
        Layer(name="w", numel=10, ndim=2, num_rows=3)

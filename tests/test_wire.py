"""Messages: what is damaged or belongs elsewhere is refused, never decoded."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.feedback import Residuals, kept_energy, sample_blocks
from cgx_ray.codecs.topk import check_indices
from cgx_ray.codecs.wire import Stamp, check, new_message, payload_of, seal
from cgx_ray.collectives.sra import chunk_bounds
from cgx_ray.errors import ConfigError, PlanError, StateError, WireError
from cgx_ray.plan import CodecSpec, GroupPlan, Layer, Plan, Scheme, make_plan

STAMP = Stamp(plan_version=3, step=100, group=2, codec="qsgd")
SPECS = [CodecSpec.parse(text) for text in ("none", "bf16", "qsgd", "qsgd:bits=1,bucket_size=8", "topk:density=0.1")]


def sealed(spec: CodecSpec, numel: int) -> torch.Tensor:
    message = new_message(spec.payload_bytes(numel))
    grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    make_codec(spec).encode(grad_N, payload_of(message), key=7)
    seal(message, replace(STAMP, codec=spec.name), numel)
    return message


@given(spec=st.sampled_from(SPECS), numel=st.integers(0, 700), data=st.data())
def test_any_flipped_bit_is_noticed(spec: CodecSpec, numel: int, data: st.DataObject) -> None:
    message = sealed(spec, numel)
    stamp = replace(STAMP, codec=spec.name)
    check(message, stamp, numel, sender=1)
    position = data.draw(st.integers(0, message.numel() - 1))
    message[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError, match="rank 1"):
        check(message, stamp, numel, sender=1)


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
    message = sealed(SPECS[2], 300)
    with pytest.raises(WireError, match=says):
        check(message, replace(STAMP, **change), 300, sender=0)


@pytest.mark.parametrize("index", [[3, 2], [2, 2], [-1, 2], [0, 10]])
def test_impossible_indices_are_refused(index: list[int]) -> None:
    with pytest.raises(WireError, match="broken"):
        check_indices(torch.tensor(index, dtype=torch.int32), numel=10)


@given(numel=st.integers(0, 5000), num_chunks=st.integers(1, 9), granule=st.sampled_from([1, 8, 128]))
def test_chunks_cover_everything_once_at_multiples_of_the_granule(numel: int, num_chunks: int, granule: int) -> None:
    bounds = chunk_bounds(numel, num_chunks, granule)
    assert len(bounds) == num_chunks
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(bounds))
    assert all(start % granule == 0 or start == numel for start, _ in bounds)
    assert max(stop - start for start, stop in bounds) <= numel / num_chunks + 2 * granule


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_decode_add_equals_decode_then_add(spec: CodecSpec) -> None:
    payload = payload_of(sealed(spec, 500))
    decoded_N, sum_N = torch.empty(500), torch.ones(500)
    make_codec(spec).decode(payload, decoded_N, add=False)
    make_codec(spec).decode(payload, sum_N, add=True)
    assert torch.equal(sum_N, decoded_N + 1)


def test_kept_energy_of_topk_is_the_energy_of_what_it_keeps() -> None:
    grad_N = torch.tensor([3.0, -1.0, 0.5, 4.0, 0.0])
    assert kept_energy(make_codec(CodecSpec(name="topk", density=0.4)), grad_N, key=0) == pytest.approx(25.0)
    assert kept_energy(make_codec(CodecSpec(name="none")), grad_N, key=0) == pytest.approx(26.25)


def test_a_sample_is_made_of_whole_evenly_spaced_blocks() -> None:
    grad_N = torch.arange(1 << 20)
    sample = sample_blocks(grad_N)
    assert sample.numel() == 1 << 16
    blocks = sample.view(-1, 1024)
    assert torch.equal(blocks[:, 0] % 1024, torch.zeros(64, dtype=torch.int64))
    assert torch.equal(blocks - blocks[:, :1], torch.arange(1024).expand(64, 1024))
    assert sample_blocks(grad_N[:100]).numel() == 100


def test_residuals_follow_their_layers_into_other_groups() -> None:
    residuals = Residuals()
    residuals.group_buffer(["a", "b"], [2, 3]).copy_(torch.arange(5))
    moved_N = residuals.group_buffer(["b", "c"], [3, 1])
    assert torch.equal(moved_N, torch.tensor([2.0, 3.0, 4.0, 0.0]))
    assert set(residuals.state()) == {"a", "b", "c"}
    with pytest.raises(StateError, match="'a' has 2 elements, the layer has 7"):
        residuals.group_buffer(["a"], [7])


def test_codec_text_round_trips_and_rejects_what_it_does_not_know() -> None:
    for spec in SPECS:
        assert CodecSpec.parse(str(spec)) == spec
    for text in ("qsgd:bitz=4", "qsgd:density=0.1", "topk:density=2", "qsgd:bucket_size=12", "none:bits=4"):
        with pytest.raises(ConfigError):
            CodecSpec.parse(text)


LAYERS = [
    Layer(name="w1", numel=400_000, ndim=2),
    Layer(name="b1", numel=500, ndim=1),
    Layer(name="w2", numel=2_000_000, ndim=2),
    Layer(name="h", numel=2048, ndim=2, dtype="bfloat16"),
]


def test_small_layers_go_dense_in_the_last_groups_and_types_do_not_mix() -> None:
    plan = make_plan(LAYERS, version=0, world_size=2, codec=CodecSpec(name="qsgd"), scheme=Scheme.SRA)
    assert [group.layers for group in plan.groups] == [("h",), ("w2",), ("w1",), ("b1",)]
    assert plan.groups[-1].scheme is Scheme.DENSE
    plan.check(LAYERS, 2)


def test_plans_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="in two groups"):
        Plan(version=0, world_size=2, groups=(GroupPlan(layers=("a",)), GroupPlan(layers=("a", "b"))))
    with pytest.raises(PlanError, match="mixes bfloat16, float32"):
        Plan(version=0, world_size=2, groups=(GroupPlan(layers=("w1", "b1", "w2", "h")),)).check(LAYERS, 2)
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json("{}")
    with pytest.raises(ConfigError, match="artopk_ring cannot carry codec qsgd; it carries topk"):
        GroupPlan(layers=("a",), codec=CodecSpec(name="qsgd"), scheme=Scheme.ARTOPK_RING)

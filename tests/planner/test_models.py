"""Model files: their public sizes, and plans that no named strategy beats on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.planner.cases import COMPRESSING, DENSE_INDEX, MODEL_OPTIONS, OFFLOADED, model_pipeline
from bench.planner.fusion import fuse
from bench.planner.strategies import named_strategies
from cgx_ray.errors import ConfigError
from cgx_ray.planner.models import MODEL_NAMES, generate, load_model
from cgx_ray.planner.search import search

ROUNDING = 1e-12


@pytest.mark.parametrize(
    ("model", "num_layers", "numel", "gmacs"),
    [
        ("alexnet", 16, 61_100_840, 0.71),
        ("gpt2", 148, 124_439_808, None),
        ("resnet18", 62, 11_689_512, 1.82),
        ("resnet50", 161, 25_557_032, 4.11),
        ("resnet101", 314, 44_549_160, 7.83),
        ("transformer_xl_base", 182, 151_107_538, None),
        ("vgg16", 32, 138_357_544, 15.48),
        ("vit_b_16", 152, 86_567_656, 17.58),
    ],
)
def test_models_have_the_published_sizes(model: str, num_layers: int, numel: int, gmacs: float | None) -> None:
    """Multiply-adds of the image models are those of torchvision's model cards."""
    description = load_model(model)
    assert (len(description.layers), description.numel) == (num_layers, numel)
    if gmacs is not None:
        assert sum(description.forward_macs) / 1e9 == pytest.approx(gmacs, rel=0.01)


def test_bert_has_its_published_size_and_207_tensors_with_the_heads() -> None:
    layers = load_model("bert_base").layers
    encoder = [layer for layer in layers if layer.name.startswith("bert.")]
    assert (len(layers), len(encoder), sum(layer.numel for layer in encoder)) == (207, 199, 109_482_240)


def test_model_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    generate.write(tmp_path)
    written = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    assert written.keys() == set(MODEL_NAMES)
    folder = Path(generate.__file__).parent
    assert written == {path.stem: path.read_text() for path in folder.glob("*.csv")}


def test_backward_times_are_shares_of_the_multiply_adds_from_the_last_layer_to_the_first() -> None:
    description = load_model("vgg16")
    backward_s = description.backward_s(3.0)
    assert sum(backward_s) == pytest.approx(3.0)
    assert backward_s[-1] / backward_s[0] == pytest.approx(description.forward_macs[0] / description.forward_macs[-1])
    with pytest.raises(ConfigError, match="total_s -1"):
        description.backward_s(-1)


# `bench planner` has all models at both rates.
@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "gbps"),
    [
        ("alexnet", 25),
        ("resnet18", 1),
        pytest.param("resnet50", 1, marks=pytest.mark.slow),
        ("vgg16", 25),
        pytest.param("bert_base", 25, marks=pytest.mark.slow),
    ],
)
def test_joint_plan_is_never_behind_a_named_strategy_on_a_model(model: str, gbps: float) -> None:
    pipeline = model_pipeline(model, gbps)
    plan = search(pipeline)
    assert plan.gap <= 0.01, plan
    strategies = named_strategies(pipeline, dense=DENSE_INDEX, compressing=COMPRESSING, offloaded=OFFLOADED)
    print(f"{model} at {gbps} Gbit/s: {1e3 * plan.finish_s:.1f} ms, gap {plan.gap:.2%}")
    for name, groups in strategies.items():
        finish_s = pipeline.finish_s(groups)
        print(f"  {name}: +{finish_s / plan.finish_s - 1:.1%}, {len(groups)} groups")
        assert plan.finish_s <= finish_s * (1 + ROUNDING), (name, finish_s, plan.finish_s)


def test_fusion_of_resnet101_is_never_behind_any_bucket_size() -> None:
    pipeline = model_pipeline("resnet101", 10)
    for option in range(len(MODEL_OPTIONS)):
        groups, finish_s = fuse(pipeline, option)
        assert pipeline.finish_s(groups) == pytest.approx(finish_s, rel=ROUNDING)
        assert finish_s >= search(pipeline).bound_s * (1 - ROUNDING)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,shape\nw,3x3\n", "line 2"),
        ("name,shape,forward_macs\nw,3xa,9\n", "line 2"),
        ("name,shape,forward_macs\nw,3x-1,9\n", "line 2: sizes"),
        ("name,shape,forward_macs\nw,3x0,9\n", "0 layers"),
        ("name,shape,forward_macs\n", "0 layers"),
        ("name,shape,forward_macs\nw,3x3,0\n", "0 multiply-adds"),
        ("name,shape,forward_macs\nw,3x3,9\nv,3x3,9\nw,3x3,9\n", "line 4: line 2 is 'w' too"),
        ("name,shape,forward_macs\nw,3x3,9\n,3x3,9\n", "line 3: the name is empty"),
        ("\udcff", "is no CSV table"),
    ],
)
def test_files_that_are_no_model_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "model.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        load_model(path)


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'resnet34'; did you mean 'resnet[0-9]+'\? known: alexnet"):
        load_model("resnet34")


def test_a_script_is_told_how_its_model_is_described(tmp_path: Path) -> None:
    script = tmp_path / "gpt.py"
    script.write_text("import torch\n")
    with pytest.raises(ConfigError, match=r"gpt.py is Python; `cgx-ray profile-model .*gpt.py:FUNCTION` makes"):
        load_model(script)

"""Options of the backend "cgx": arguments, CGX's variables, and ranks that differ in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import join_group, run_ranks
from torch import nn

import cgx_ray
from cgx_ray.backend.backend_options import current_options
from cgx_ray.plan import CodecSpec


def _variables(patch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ("QUANTIZATION_BITS", "BUCKET_SIZE", "MINIMAL_SIZE", "FAKE_RATIO"):
        patch.delenv(f"CGX_COMPRESSION_{name}", raising=False)
    for name, value in variables.items():
        patch.setenv(f"CGX_COMPRESSION_{name}", value)


@pytest.fixture
def _fresh_options() -> Any:
    yield
    cgx_ray.configure_backend()


@pytest.mark.usefixtures("_fresh_options")
def test_variables_of_cgx_are_honoured_and_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    _variables(monkeypatch)
    assert str(current_options()) == "qsgd:bits=4,bucket_size=128 over sra from 1024 elements on"
    _variables(monkeypatch, QUANTIZATION_BITS="2", BUCKET_SIZE="512", MINIMAL_SIZE="16")
    assert str(current_options()) == "qsgd:bits=2,bucket_size=512 over sra from 16 elements on"
    _variables(monkeypatch, QUANTIZATION_BITS="32", BUCKET_SIZE="")
    assert current_options().option.codec.name == "none"
    _variables(monkeypatch, QUANTIZATION_BITS="8", FAKE_RATIO="0.25")
    assert current_options().option.codec == CodecSpec(name="prefix", ratio=4.0)
    _variables(monkeypatch, QUANTIZATION_BITS="8", FAKE_RATIO="1")
    assert str(current_options().option.codec) == "qsgd:bits=8,bucket_size=128"
    _variables(monkeypatch, QUANTIZATION_BITS="9", MINIMAL_SIZE="16")
    cgx_ray.configure_backend(codec="qsgd:bits=8", scheme="allgather", min_numel=7)
    assert str(current_options()) == "qsgd:bits=8,bucket_size=128 over allgather from 7 elements on"
    cgx_ray.configure_backend(codec="fp16")
    assert str(current_options()) == "fp16 over sra from 16 elements on"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("QUANTIZATION_BITS", "9", "1 to 8, or 32"),
        ("QUANTIZATION_BITS", "four", "1 to 8, or 32"),
        ("BUCKET_SIZE", "100", "a multiple of 8"),
        ("MINIMAL_SIZE", "-1", "0 or more"),
        ("FAKE_RATIO", "4", "or less, such as 0.25"),
        ("FAKE_RATIO", "nan", "share of elements"),
    ],
)
def test_a_variable_with_a_wrong_value_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    _variables(monkeypatch, **{name: value})
    with pytest.raises(cgx_ray.ConfigError, match=f"CGX_COMPRESSION_{name} is '{value}'.*{allowed}"):
        current_options()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codec": "topk"}, "keeps no error feedback.*cgx_ray.attach"),
        ({"codec": "qsgd:rounding=nearest"}, "rounding=stochastic"),
        ({"codec": "zip"}, "unknown codec"),
        ({"scheme": "dense"}, "give one of sra, allgather"),
        ({"scheme": "star"}, "scheme 'star' is not for"),
        ({"min_numel": -1}, "min_numel -1"),
        ({"min_numel": 1.5}, "min_numel 1.5"),
    ],
)
def test_a_wrong_argument_is_one_clear_error(arguments: dict[str, Any], message: str) -> None:
    before = current_options()
    with pytest.raises(cgx_ray.ConfigError, match=message):
        cgx_ray.configure_backend(**arguments)
    assert current_options() == before


def test_wrong_layers_and_models_are_refused() -> None:
    with pytest.raises(cgx_ray.ConfigError, match="parts of parameter names"):
        cgx_ray.exclude_layers("")


def _register_an_unwrapped_model(rank: int) -> str:
    with pytest.raises(cgx_ray.ConfigError) as error:
        cgx_ray.register_model(nn.Linear(2, 2))
    return str(error.value)


def test_a_registered_model_must_be_wrapped() -> None:
    for message in run_ranks(2, _register_an_unwrapped_model, backend="cgx"):
        assert "register_model got a Linear; wrap it first" in message


def _switched_off(rank: int, folder: Path) -> list[float]:
    os.environ["CGX_COMPRESSION_QUANTIZATION_BITS"] = "32"
    join_group(rank, 2, folder, "cgx")
    values = torch.linspace(-1, 1, 5000) * (rank + 1)
    dist.all_reduce(values)
    return values.tolist()


def test_32_bits_switch_compression_off(tmp_path: Path) -> None:
    once = torch.linspace(-1, 1, 5000)
    for got in run_ranks(2, _switched_off, tmp_path, backend=None):
        assert got == (once + once * 2).tolist()


def _disagree(rank: int, folder: Path, values: tuple[str, str]) -> str:
    os.environ["CGX_COMPRESSION_QUANTIZATION_BITS"] = values[rank]
    with pytest.raises(cgx_ray.ConfigError) as error:
        join_group(rank, 2, folder, "cgx")
    return str(error.value)


def test_ranks_with_other_options_find_out_before_they_exchange(tmp_path: Path) -> None:
    for rank, message in enumerate(run_ranks(2, _disagree, tmp_path, ("4", "32"), backend=None)):
        assert f"on rank {rank}" in message
        assert "qsgd:bits=4" in message
        assert "none over sra" in message


def test_a_wrong_variable_on_one_rank_stops_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, _disagree, tmp_path, ("4", "12"), backend=None)
    assert "on rank 1" in first
    for message in (first, second):
        assert "CGX_COMPRESSION_QUANTIZATION_BITS is '12'" in message

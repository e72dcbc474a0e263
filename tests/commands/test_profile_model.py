"""`cgx-ray profile-model`: times of a real backward, and a file that `load_model` reads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from cgx_ray.cli import main
from cgx_ray.commands.profile_model import load_target
from cgx_ray.errors import ConfigError
from cgx_ray.planner.models import load_model
from cgx_ray.session.gradient_times import measure_ready_s

SCRIPT = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))

def batch():
    return model(), torch.randn(8, 16)

def loss():
    built, x = batch()
    return built, lambda: built(x).square().mean()

class Output(dict):
    @property
    def loss(self):
        return self["loss"]

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model()
    def forward(self, x, y):
        return Output(loss=(self.inner(x) - y).square().mean())

def keywords():
    return Named(), {"x": torch.randn(8, 16), "y": torch.zeros(8, 4)}

def half():
    return model().bfloat16(), (torch.randn(8, 16, dtype=torch.bfloat16),)

def frozen():
    return model().requires_grad_(False), torch.randn(8, 16)

def unused():
    built = Named()
    built.inner.unused = nn.Linear(2, 2)
    built.inner.forward = lambda x: built.inner[0](x)[:, :4]
    return built, {"x": torch.randn(8, 16), "y": torch.zeros(8, 4)}

class WithEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model()
        self.empty = nn.Parameter(torch.empty(0, 8))
    def forward(self, x):
        return self.inner(x) + self.empty.sum()

def empty():
    return WithEmpty(), torch.randn(8, 16)

def needs(size):
    return size


def nothing():
    return None

class Detached(nn.Linear):
    def forward(self, x):
        return [super().forward(x).detach()]

def detached():
    return Detached(2, 2), torch.randn(3, 2)

def constant():
    return nn.Linear(2, 2), lambda: torch.zeros(())

def vector():
    built, x = batch()
    return built, lambda: built(x)

number = 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(SCRIPT)
    return path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["profile-model", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


class Slow(torch.autograd.Function):
    """Identity whose backward takes 20 ms."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        time.sleep(0.02)
        return grad


def test_gradients_are_ready_from_the_last_layer_to_the_first_and_after_what_lies_between() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(2, 4)
    ready_s = measure_ready_s(
        nn.ModuleDict({"first": first, "last": last}),
        lambda: last(Slow.apply(first(x))).sum(),
        num_steps=3,
        num_warm_steps=1,
    )
    assert list(ready_s) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    gap_s = min(ready_s["first.weight"], ready_s["first.bias"]) - max(ready_s["last.weight"], ready_s["last.bias"])
    assert gap_s >= 0.02, ready_s
    assert first.weight.grad is None, "the model is left without gradients"


def test_a_profiled_model_with_a_parameter_without_elements_is_one_to_plan_with(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    code, output = run(f"{script}:empty", "--out", str(out), "--steps", "2")
    assert code == 0, output
    assert "\nempty,0x8," in out.read_text()
    assert [layer.name for layer in load_model(out).layers] == [
        f"inner.{index}.{kind}" for index in range(3) for kind in ("weight", "bias")
    ]
    network = ["--workers", "4", "--latency", "1ms", "--bandwidth", "1gbps"]
    planned = CliRunner().invoke(main, ["plan", "--model", str(out), *network])
    assert planned.exit_code == 0, planned.output


@pytest.mark.parametrize("function", ["batch", "loss", "keywords", "half", "model"])
def test_a_profiled_model_is_one_to_plan_with(script: Path, tmp_path: Path, function: str) -> None:
    out = tmp_path / "out.csv"
    shape = ["--input", "8x16"] if function == "model" else []
    code, output = run(f"{script}:{function}", "--out", str(out), "--steps", "2", *shape)
    assert code == 0, output
    assert "6 layers, 740 elements" in output, output
    found = load_model(out)
    assert [layer.name.rpartition("inner.")[2] for layer in found.layers] == [
        "0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias",
    ]  # fmt: skip
    assert {layer.dtype for layer in found.layers} == {"bfloat16" if function == "half" else "float32"}
    assert [layer.ndim for layer in found.layers] == [2, 1, 1, 1, 2, 1]
    assert found.measured_s == max(found.ready_s)
    assert sum(found.step_s()) == pytest.approx(found.measured_s)
    assert found.step_s()[0] > 0, "the first gradient waits for forward"


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("no_such_package.module:build", (), "cannot import no_such_package.module"),
        ("no_such_file.py:build", (), "cannot import no_such_file.py"),
        ("{}", (), "give package.module:function or script.py:function"),
        ("{}:missing", (), "has no function 'missing'"),
        ("{}:number", (), "has no function 'number'"),
        ("{}:nothing", (), "returns NoneType"),
        ("{}:needs", (), "takes arguments (missing a required argument: 'size')"),
        ("{}:model", (), "returns a model alone"),
        ("{}:model", ("--input", "8xa"), "'8xa' is not a shape"),
        ("{}:batch", ("--input", "8x16"), "leave out --input 8x16"),
        ("{}:batch", ("--steps", "0"), "--steps 0"),
        ("{}:frozen", (), "no parameter with requires_grad"),
        ("{}:unused", (), "got no gradient; use them in the loss"),
        ("{}:detached", (), "returns list without a gradient"),
        ("{}:constant", (), "1 elements with no gradient"),
        ("{}:vector", (), "32 elements with a gradient"),
    ],
)
def test_what_cannot_be_profiled_is_one_clear_error(
    script: Path, tmp_path: Path, target: str, arguments: tuple[str, ...], message: str
) -> None:
    code, output = run(target.format(script), "--out", str(tmp_path / "out.csv"), *arguments)
    assert code == 2, output
    assert message in " ".join(output.split()), output
    assert "Traceback" not in output
    assert not (tmp_path / "out.csv").exists()


def test_a_script_that_does_not_parse_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def build(:\n")
    with pytest.raises(ConfigError, match=r"cannot import .*broken.py"):
        load_target(f"{tmp_path / 'broken.py'}:build")

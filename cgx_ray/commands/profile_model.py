"""`cgx-ray profile-model`: a model file for `cgx-ray plan`, from a model that runs here."""

from __future__ import annotations

import importlib
import inspect
import math
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor, nn

from cgx_ray.commands.options import FILE, console_for
from cgx_ray.engine.layers import layers_of
from cgx_ray.errors import ConfigError
from cgx_ray.planner.models import MeasuredLayer, write_model
from cgx_ray.report.show import print_line, progress_bar, whole_file
from cgx_ray.session.gradient_times import measure_ready_s

NUM_WARM_STEPS = 3
_RETURNS = "(model, batch) or (model, function that computes the loss), or the model alone and give --input 8x3x224x224"


@click.command("profile-model")
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option("--out", type=FILE, default="model.csv", show_default=True, help="The model file.")
@click.option("--input", "input_shape", metavar="SHAPE", help="Shape of a batch of noise, such as 8x3x224x224.")
@click.option("--steps", default=10, show_default=True, help="Measured steps, after three to warm up.")
def profile_model(target: str, out: Path, input_shape: str | None, steps: int) -> None:
    """Measure a model that runs here, for `plan`.

    MODULE:FUNCTION, or script.py:function, names a function without arguments. It returns the model and a batch, or
    the model and a function that computes its loss. The file goes to `plan --model`.
    """
    if steps < 1:
        raise ConfigError(f"--steps {steps} is not allowed; give 1 or more")
    model, loss = load_target(target, input_shape)
    layers_of(model)  # raises for a model that no run could train
    console = console_for(None)
    ready_s = _measure(model, loss, steps, console)
    parameters = dict(model.named_parameters())
    layers = [
        MeasuredLayer(name, tuple(parameters[name].shape), str(parameters[name].dtype).removeprefix("torch."), seconds)
        for name, seconds in ready_s.items()
    ]
    with whole_file(out) as new:
        write_model(layers, new)
    numel = sum(math.prod(layer.shape) for layer in layers)
    print_line(
        console,
        f"{out}: {len(layers)} layers, {numel:,} elements; forward and backward take "
        f"{1e3 * max(ready_s.values()):.1f} ms, the first gradient is ready after {1e3 * min(ready_s.values()):.1f} ms "
        f"(median of {steps} steps)\nnext: cgx-ray plan --model {out} --workers 8 --latency 1ms --bandwidth 10gbps",
    )


def _measure(model: nn.Module, loss: Callable[[], Tensor], num_steps: int, console: Console) -> dict[str, float]:
    """Return, per parameter, the seconds from the start of forward until its gradient is ready."""
    num_all, num_done = NUM_WARM_STEPS + num_steps, 0
    with progress_bar(console) as on_part:

        def on_step() -> None:
            nonlocal num_done
            num_done += 1
            on_part(f"step {num_done} of {num_all}", num_done / num_all)

        return measure_ready_s(model, loss, num_steps=num_steps, num_warm_steps=NUM_WARM_STEPS, on_step=on_step)


def load_target(target: str, input_shape: str | None = None) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Call the function of `"package.module:function"` or `"script.py:function"`; return its model and loss function.

    The function may return a model and a batch (a tensor, a tuple of arguments or a dict of keywords), a model and a
    function without arguments that computes its loss, or a model alone, which then gets noise of `input_shape`. The
    loss of a batch is the model's output `loss`, else the sum of its outputs, whose backward takes as long.

    Raises ConfigError if that does not work; errors of the module itself pass through.
    """
    place, colon, name = target.rpartition(":")
    if not (place and colon and name):
        raise ConfigError(f"{target!r} is not allowed; give package.module:function or script.py:function")
    build = _import(place).get(name)
    if not callable(build):
        raise ConfigError(f"{place} has no function {name!r}; give one that returns {_RETURNS}")
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise ConfigError(
            f"{target} takes arguments ({error}); give a function without, which returns {_RETURNS}"
        ) from None
    match build():
        case nn.Module() as model:
            if input_shape is None:
                raise ConfigError(f"{target} returns a model alone; return {_RETURNS}")
            batch: Any = _noise(model, input_shape)
        case (nn.Module() as model, batch):
            if input_shape is not None:
                raise ConfigError(f"{target} returns a batch or a loss, so leave out --input {input_shape}")
        case built:
            raise ConfigError(f"{target} returns {type(built).__name__}; return {_RETURNS}")
    if callable(batch) and not isinstance(batch, Tensor):
        return model, batch
    if isinstance(batch, Mapping):
        return model, lambda: _loss_of(model(**batch))
    arguments = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    return model, lambda: _loss_of(model(*arguments))


def _import(place: str) -> Mapping[str, Any]:
    """Return the names of a module, imported as `python script.py` or `python -m package.module` would."""
    path = Path(place)
    is_file = path.suffix == ".py"
    sys.path.insert(0, str(path.parent.resolve() if is_file else Path.cwd()))
    # A script that reads its arguments finds none.
    sys.argv = [place]
    try:
        return runpy.run_path(place, run_name=path.stem) if is_file else vars(importlib.import_module(place))
    except (ImportError, SyntaxError, OSError) as error:
        raise ConfigError(
            f"cannot import {place}: {error}; give an installed module, one in this folder, or a path to a .py file"
        ) from error


def _noise(model: nn.Module, shape: str) -> Tensor:
    """Return a batch of noise with the type and device of the first parameter."""
    try:
        sizes = [int(size) for size in shape.split("x")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--input {shape!r} is not a shape; give sizes of 1 or more, such as 8x3x224x224")
    like = next(model.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))
    return torch.randn(sizes, dtype=like.dtype, device=like.device)


def _loss_of(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    sums = [tensor.sum() for tensor in _tensors(output) if tensor.requires_grad]
    if not sums:
        raise ConfigError(f"the model returns {type(output).__name__} without a gradient; return {_RETURNS}")
    return torch.stack([one.float() for one in sums]).sum()


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    inner = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [tensor for one in inner for tensor in _tensors(one)]

"""The layers in DDP's buckets, and so how each part of a bucket is reduced.

A process group gets flat tensors without names. DDP reports how it cuts its buckets, so a tensor is recognised as a
bucket by its size and by its turn among DDP's calls since the last forward pass. Both are the same on all ranks;
addresses would not be. A tensor mistaken for a bucket is still reduced correctly, only cut differently.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.backend.backend_options import BackendOptions, check_option
from cgx_ray.engine.layers import as_layer, averaged_parameters, layers_of, sparse_modules
from cgx_ray.errors import ConfigError
from cgx_ray.plan import NONE, Intra, Layer, Option, Plan
from cgx_ray.torch_compat import (
    allows_uneven_inputs,
    bucket_parameters,
    has_rebuilt_buckets,
    is_in_forward,
    uncompiled,
)
from cgx_ray.units import format_count

logger = logging.getLogger(__name__)

Run = tuple[int, int]  # elements [start, stop)
# Parts of a tensor by the option that reduces them, in ascending order. None: Gloo reduces them, uncompressed.
Parts = dict[Option | None, list[Run]]


class _Registry:
    """The registered model and excluded names of this process. Its groups get tensors without their model."""

    def __init__(self) -> None:
        self.model: RegisteredModel | None = None
        self.excluded_names: list[str] = []


_registry = _Registry()


def exclude_layers(*substrings: str) -> None:
    """Leave layers of a registered model uncompressed if their names contain one of `substrings`: `"bn"`, `"bias"`.

    This adds to earlier calls and to small layers, from the next forward pass on. Call it on all ranks at the same step
    with the same arguments: backward raises ConfigError if ranks differ, after the time-out if a rank made no call.
    Raises ConfigError unless all arguments are non-empty strings.
    """
    for substring in substrings:
        if not isinstance(substring, str) or not substring:
            raise ConfigError(f"exclude_layers got {substring!r}; give parts of parameter names, such as 'bias'")
    _registry.excluded_names.extend(substrings)


def register_model(model: nn.Module, plan: Plan | None = None) -> None:
    """Let backend "cgx" tell the layers in this model's buckets apart, from the next forward pass on.

    Gloo then reduces layers of one dimension (biases, norms), layers with fewer than `min_numel` elements and those of
    `exclude_layers`, uncompressed. The other layers of a bucket are compressed as one tensor. Without a registered
    model a bucket is compressed as a whole.

    model  a DistributedDataParallel; call it on all ranks. A second model replaces the first. At world size 1 any model
           is accepted and nothing happens
    plan   codec and scheme by layer instead, such as CGX's adaptive bits: `make_plan(layers_of(model), bits=...)`. Gloo
           reduces layers that are uncompressed in it, those of `exclude_layers`, and buckets of fewer than `min_numel`
           elements. DDP's buckets are still sent as they are cut; the layers of a bucket with the same codec are
           compressed as one tensor

    Another model in the same process group with buckets of the same sizes is taken for this one: give it a group of its
    own. Raises ConfigError for another kind of model, a model with sparse gradients, or a plan that this backend cannot
    run; PlanError for a plan of another model or world size. The earlier registration then stays. Forward raises
    ConfigError inside `model.join()`: a rank without inputs does not see how the buckets change.
    """
    model = uncompiled(model)
    if isinstance(model, DistributedDataParallel):
        if model.process_group.size() == 1:
            return
        registered = RegisteredModel(model, plan)
        if _registry.model is not None:
            _registry.model.forget()
        _registry.model = registered
        if model.process_group.rank() == 0:
            layers = layers_of(model)
            size = sum(layer.dense_bytes for layer in layers) / 1e6
            under = f" under {plan.describe()}" if plan is not None else ""
            logger.info("backend cgx: %s, %.3g MB, registered%s", format_count(len(layers), "layer"), size, under)
    elif dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"register_model got a {type(model).__name__}; wrap it first, with "
            "torch.nn.parallel.DistributedDataParallel: only DDP reports how it cuts its buckets"
        )


def parts_of(
    group: dist.ProcessGroup, numel: int, options: BackendOptions, gather: Callable[[str], list[str]]
) -> Parts:
    """Return how to reduce the parts of the next tensor of `numel` elements in `group`.

    gather  returns, by rank, the strings that all ranks of the group pass to it

    Raises ConfigError on all ranks if their answers differ.
    """
    registered = _registry.model
    parts = registered.take(group, numel, options, gather) if registered is not None else None
    return {options.option: [(0, numel)]} if parts is None else parts


class RegisteredModel:
    """The buckets of a DDP model, read again when DDP has rebuilt them."""

    def __init__(self, model: DistributedDataParallel, plan: Plan | None) -> None:
        if sparse := sparse_modules(model):
            raise ConfigError(
                f"the model has sparse gradients, of {', '.join(sparse)}, which lie in no bucket; use sparse=False, or "
                "leave register_model out"
            )
        self._planned = _options_of(plan, model) if plan is not None else None
        # Registering does not keep the model alive.
        self._model = weakref.ref(model)
        self._buckets: list[list[Layer]] = []
        self._has_rebuilt = False
        self._excluded: list[str] = []
        self._is_agreed = False
        self._turns: Counter[int] = Counter()  # by size, tensors of that size since the last forward pass
        # A hook of the inner module, since DDP's own forward has rebuilt the buckets by then.
        self._handle = model.module.register_forward_pre_hook(_before_forward)

    def forget(self) -> None:
        """Take the hook out of the model."""
        self._handle.remove()

    def take(
        self, group: dist.ProcessGroup, numel: int, options: BackendOptions, gather: Callable[[str], list[str]]
    ) -> Parts | None:
        """Return the parts of the next bucket of `numel` elements; None if there is no such bucket."""
        model = self._model()
        # Turns count in the model's group only: not every rank takes part in other groups.
        if model is None or model.process_group is not group or not self._buckets:
            return None
        if not self._is_agreed:
            # All ranks come here with the same tensor. If they cut it differently, Gloo would end the process.
            self._agree(options, gather)
        same = [bucket for bucket in self._buckets if sum(layer.numel for layer in bucket) == numel]
        if not same:
            return None
        bucket = same[self._turns[numel] % len(same)]
        self._turns[numel] += 1
        return self._parts(bucket, options)

    def _parts(self, bucket: Sequence[Layer], options: BackendOptions) -> Parts:
        """Return the parts of `bucket`, with neighbouring layers joined to one run."""
        parts: Parts = {}
        starts = itertools.accumulate((layer.numel for layer in bucket), initial=0)
        for start, layer in zip(starts, bucket, strict=False):
            runs = parts.setdefault(self._option(layer, options), [])
            first = runs.pop()[0] if runs and runs[-1][1] == start else start
            runs.append((first, start + layer.numel))
        return parts

    def _option(self, layer: Layer, options: BackendOptions) -> Option | None:
        if any(part in layer.name for part in self._excluded):
            return None
        if self._planned is not None:
            return self._planned[layer.name]
        return None if layer.ndim <= 1 or layer.numel < options.min_numel else options.option

    def _agree(self, options: BackendOptions, gather: Callable[[str], list[str]]) -> None:
        parts = [
            {str(option): runs for option, runs in self._parts(bucket, options).items()} for bucket in self._buckets
        ]
        offers = gather(hashlib.sha256(repr(parts).encode()).hexdigest())
        for rank, offer in enumerate(offers):
            if offer != offers[0]:
                raise ConfigError(
                    f"ranks 0 and {rank} differ in how they compress layers, or in which; call register_model with the "
                    "same model and plan, and exclude_layers with the same arguments, on all ranks"
                )
        self._is_agreed = True

    def begin_forward(self) -> None:
        """Read the buckets if DDP has cut them again, which it does once, some forward passes after the first."""
        model = self._model()
        # If the inner module is called by itself, DDP has not yet rebuilt its buckets.
        if model is None or not is_in_forward(model):
            return
        if allows_uneven_inputs(model):
            raise ConfigError(
                "a model that register_model got cannot train inside model.join(); leave register_model out, or give "
                "every rank as many inputs"
            )
        self._turns.clear()
        if self._excluded != _registry.excluded_names:
            self._excluded = list(_registry.excluded_names)
            self._is_agreed = False
        if torch.is_grad_enabled() and (not self._buckets or self._has_rebuilt != has_rebuilt_buckets(model)):
            self._buckets, self._has_rebuilt = _buckets_of(model), has_rebuilt_buckets(model)
            self._is_agreed = False


@torch.compiler.disable
def _before_forward(module: nn.Module, inputs: Any) -> None:
    # A function at the top of this module, since models are pickled with their hooks.
    if _registry.model is not None:
        _registry.model.begin_forward()


def _buckets_of(model: DistributedDataParallel) -> list[list[Layer]]:
    layers = {id(parameter): as_layer(name, parameter) for name, parameter in averaged_parameters(model).items()}
    return [
        [layers[id(parameter)] for parameter in bucket if parameter.numel() > 0] for bucket in bucket_parameters(model)
    ]


def _options_of(plan: Plan, model: DistributedDataParallel) -> dict[str, Option | None]:
    """Return the plan's option by layer. Raises PlanError for another model's plan, ConfigError if it cannot run."""
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"register_model got a {type(plan).__name__} as plan; make one, such as make_plan(layers_of(model), "
            "version=0, world_size=4, codec='qsgd', bits={'head.weight': 8})"
        )
    if not getattr(model.process_group, "is_compressing", False):
        raise ConfigError(
            "a plan needs a process group of backend cgx that compresses: make it by init_process_group('cgx'), with "
            "another codec than none, or leave the plan out"
        )
    plan.check(layers_of(model), model.process_group.size())
    options: dict[str, Option | None] = {}
    for group in plan.groups:
        if group.option.intra is not Intra.FLAT:
            raise ConfigError(
                f"intra {group.option.intra!s} is not for backend cgx; give a plan with 'flat', or use cgx_ray.attach"
            )
        compresses = group.option.codec != NONE
        if compresses:
            check_option(group.option.codec, group.option.scheme)
        options.update(dict.fromkeys(group.layers, group.option if compresses else None))
    return options

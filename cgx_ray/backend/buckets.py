"""Which layers DDP's buckets consist of, and so how each part of them is reduced.

A process group gets flat tensors. DDP tells how it cuts its buckets, so a tensor is recognised by its size and by its
turn among DDP's calls since the last forward pass. Both are the same on all ranks, as addresses would not be. A tensor
that is taken for a bucket by mistake is still reduced rightly: only its parts are others.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.backend.options import BackendOptions, Way
from cgx_ray.engine.layers import as_layer, averaged_parameters, sparse_modules
from cgx_ray.errors import ConfigError
from cgx_ray.plan import NONE, Intra, Layer, Plan
from cgx_ray.torch_compat import bucket_parameters

Run = tuple[int, int]  # elements [start, stop)
# The parts of a tensor by how they are reduced, each in ascending order. None: by Gloo, uncompressed.
Parts = dict[Way | None, list[Run]]

_excluded_names: list[str] = []
_registered: RegisteredModel | None = None


def exclude_layers(*substrings: str) -> None:
    """Leave layers of a registered model uncompressed whose names contain one of `substrings`: `"bn"`, `"bias"`.

    In addition to those named before and to layers that are small; from the next forward pass on. Call it on every
    rank, alike and at the same step: backward raises ConfigError if ranks differ, after the time-out if some do not
    know of any change. Raises ConfigError for anything but non-empty strings.
    """
    for substring in substrings:
        if not isinstance(substring, str) or not substring:
            raise ConfigError(f"exclude_layers got {substring!r}; give parts of parameter names, such as 'bias'")
    _excluded_names.extend(substrings)


def register_model(model: nn.Module, plan: Plan | None = None) -> None:
    """Let backend "cgx" tell the layers in this model's buckets apart, from the next forward pass on.

    Layers of one dimension (biases, norms), with fewer than `min_numel` elements, and those of `exclude_layers` then go
    through Gloo as they are; the rest of a bucket is compressed as one. Without it a bucket is compressed as a whole.

    model  a DistributedDataParallel; call it on every rank. A second one takes the place of the first. Anything at
           world size 1: nothing happens
    plan   codec and scheme by layer instead, such as CGX's adaptive bits: `make_plan(layers_of(model), bits=...)`. What
           is uncompressed in it, layers of `exclude_layers`, and buckets of fewer than `min_numel` elements go through
           Gloo. DDP's buckets stay what is sent together; what has the same codec in one is compressed as one

    Another model whose buckets are as large, in the same process group, is taken for this one: give it its own.
    Raises ConfigError for another kind of model, one with sparse gradients, or a plan that this backend cannot carry
    out, PlanError for a plan of another model or world size; what was registered before stays, then. Forward raises
    ConfigError inside `model.join()`: a rank that has no more inputs does not see what becomes of the buckets.
    """
    global _registered  # noqa: PLW0603 - a process group gets tensors, and no word on whose
    if isinstance(model, DistributedDataParallel):
        if model.process_group.size() == 1:
            return
        registered = RegisteredModel(model, plan)
        if _registered is not None:
            _registered.forget()
        _registered = registered
    elif dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"register_model got a {type(model).__name__}; wrap it first, with "
            "torch.nn.parallel.DistributedDataParallel: only DDP says how it cuts its buckets"
        )


def parts_of(
    group: dist.ProcessGroup, numel: int, options: BackendOptions, gather: Callable[[str], list[str]]
) -> Parts:
    """How the parts of a tensor of `numel` elements are reduced whose turn it is in `group`.

    gather  gives what all ranks of the group give it

    Raises ConfigError on all ranks if it is not the same on all of them.
    """
    parts = _registered.take(group, numel, options, gather) if _registered is not None else None
    return {options.way: [(0, numel)]} if parts is None else parts


class RegisteredModel:
    """The buckets of a DDP model, read again when DDP has rebuilt them."""

    def __init__(self, model: DistributedDataParallel, plan: Plan | None) -> None:
        if sparse := sparse_modules(model.module):
            raise ConfigError(
                f"the model has sparse gradients, of {', '.join(sparse)}, which lie in no bucket; use sparse=False, or "
                "leave register_model out"
            )
        self._planned = _ways(plan, model) if plan is not None else None
        # Not kept alive by being registered.
        self._model = weakref.ref(model)
        self._buckets: list[list[Layer]] = []
        self._has_rebuilt = False
        self._excluded: list[str] = []
        self._is_agreed = False
        self._turns: Counter[int] = Counter()  # by size, tensors of that size since the last forward pass
        # Of the inner module: DDP's own forward has rebuilt its buckets by then.
        self._handle = model.module.register_forward_pre_hook(_before_forward)

    def forget(self) -> None:
        self._handle.remove()

    def take(
        self, group: dist.ProcessGroup, numel: int, options: BackendOptions, gather: Callable[[str], list[str]]
    ) -> Parts | None:
        """The parts of the bucket of `numel` elements whose turn it is; None if there is no such bucket."""
        model = self._model()
        # Turns count in the model's group only: not every rank knows of what happens in another one.
        if model is None or model.process_group is not group or not self._buckets:
            return None
        if not self._is_agreed:
            # All ranks come here with the same tensor. What they did not agree on, Gloo would end the process for.
            self._agree(options, gather)
        same = [bucket for bucket in self._buckets if sum(layer.numel for layer in bucket) == numel]
        if not same:
            return None
        bucket = same[self._turns[numel] % len(same)]
        self._turns[numel] += 1
        return self._parts(bucket, options)

    def _parts(self, bucket: Sequence[Layer], options: BackendOptions) -> Parts:
        """Neighbours are one run."""
        parts: Parts = {}
        starts = itertools.accumulate((layer.numel for layer in bucket), initial=0)
        for start, layer in zip(starts, bucket, strict=False):
            runs = parts.setdefault(self._way(layer, options), [])
            first = runs.pop()[0] if runs and runs[-1][1] == start else start
            runs.append((first, start + layer.numel))
        return parts

    def _way(self, layer: Layer, options: BackendOptions) -> Way | None:
        if any(part in layer.name for part in self._excluded):
            return None
        if self._planned is not None:
            return self._planned[layer.name]
        return None if layer.ndim <= 1 or layer.numel < options.min_numel else options.way

    def _agree(self, options: BackendOptions, gather: Callable[[str], list[str]]) -> None:
        parts = [{str(way): runs for way, runs in self._parts(bucket, options).items()} for bucket in self._buckets]
        offers = gather(hashlib.sha256(repr(parts).encode()).hexdigest())
        for rank, offer in enumerate(offers):
            if offer != offers[0]:
                raise ConfigError(
                    f"ranks 0 and {rank} differ in how they compress layers, or in which; call register_model with the "
                    "same model and plan, and exclude_layers with the same arguments, on all ranks"
                )
        self._is_agreed = True

    def begin_forward(self) -> None:
        """Read the buckets if DDP has built them anew: it does so once, some forward passes after the first."""
        model = self._model()
        # Who calls the inner module by itself comes before DDP has rebuilt its buckets.
        if model is None or DistributedDataParallel._get_active_ddp_module() is not model:
            return
        if model._join_config.enable:
            raise ConfigError(
                "a model that register_model got cannot train inside model.join(); leave register_model out, or give "
                "every rank as many inputs"
            )
        self._turns.clear()
        if self._excluded != _excluded_names:
            self._excluded = list(_excluded_names)
            self._is_agreed = False
        if torch.is_grad_enabled() and (not self._buckets or self._has_rebuilt != model._has_rebuilt_buckets):
            self._buckets, self._has_rebuilt = _buckets_of(model), model._has_rebuilt_buckets
            self._is_agreed = False


@torch.compiler.disable
def _before_forward(module: nn.Module, inputs: Any) -> None:
    # A function of the module, for models are pickled with their hooks.
    if _registered is not None:
        _registered.begin_forward()


def _buckets_of(model: DistributedDataParallel) -> list[list[Layer]]:
    layers = {id(parameter): as_layer(name, parameter) for name, parameter in averaged_parameters(model).items()}
    return [[layers[id(parameter)] for parameter in bucket] for bucket in bucket_parameters(model)]


def _ways(plan: Plan, model: DistributedDataParallel) -> dict[str, Way | None]:
    """By layer. Raises ConfigError or PlanError for a plan that is not for the model or not for this backend."""
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
    layers = [as_layer(name, parameter) for name, parameter in averaged_parameters(model).items()]
    plan.check(layers, model.process_group.size())
    ways: dict[str, Way | None] = {}
    for group in plan.groups:
        if group.intra is not Intra.FLAT:
            raise ConfigError(
                f"intra {group.intra!s} is not for backend cgx; give a plan with 'flat', or use cgx_ray.attach"
            )
        way = Way(codec=group.codec, scheme=group.scheme) if group.codec != NONE else None
        ways.update(dict.fromkeys(group.layers, way))
    return ways

"""Refusals by every public kernel: tensors on devices without kernels, and numbers that are no integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cgx_ray.runtime_ext import ops, sparse

N, K = 128, 3


def _grad() -> Tensor:
    return torch.randn(N)


def _bytes(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def _kept() -> dict[str, Any]:
    return {"index_K": torch.arange(K, dtype=torch.int32), "value_K": torch.zeros(K)}


def _fed() -> dict[str, Any]:
    return {"grad_N": _grad(), "residual_N": _grad(), "next_N": _grad()}


def _momentum() -> dict[str, Any]:
    return {"momentum_N": _grad(), "next_momentum_N": _grad()}


def _count() -> Tensor:
    return torch.tensor([K], dtype=torch.int32)


def _calls() -> dict[str, tuple[Callable[..., object], dict[str, Any]]]:
    """Return all public kernels, each with arguments that it accepts."""
    qsgd = {"bits": 4, "bucket_size": 128}
    sign = {"kind": "onebit", "bucket_size": 128}
    qsgd_bytes, sign_bytes = ops.qsgd_bytes(N, 4, 128, "max_min"), ops.sign_bytes(N, 128, "onebit")
    index_bytes = sparse.index_bytes(N, K)
    return {
        "crc32c": (ops.crc32c, {"data": _bytes(9), "seed": 0}),
        "qsgd_encode": (ops.qsgd_encode, {**_fed(), "out": _bytes(qsgd_bytes), "key": 0, **qsgd}),
        "qsgd_decode": (ops.qsgd_decode, {"payload": _bytes(qsgd_bytes), "out_N": _grad(), **qsgd}),
        "sign_encode": (ops.sign_encode, {**_fed(), "out": _bytes(sign_bytes), **sign}),
        "sign_decode": (ops.sign_decode, {"payload": _bytes(sign_bytes), "out_N": _grad(), **sign}),
        "topk_select": (sparse.topk_select, {**_fed(), **_kept()}),
        "topk_encode": (sparse.topk_encode, {**_fed(), **_kept(), "payload": _bytes(4 + index_bytes + 4 * K)}),
        "magnitude_histogram": (sparse.magnitude_histogram, {"grad_N": _grad()}),
        "bisect_thresholds": (sparse.bisect_thresholds, {"grad_N": _grad(), "num_kept": K, "num_rounds": 25}),
        "sample_thresholds": (sparse.sample_thresholds, {"grad_N": _grad(), "num_kept": K, "stride": 2, "key": 0}),
        "sidco_thresholds": (sparse.sidco_thresholds, {"grad_N": _grad(), "num_kept": K, "ratios": [1.0]}),
        "collect": (
            sparse.collect,
            {"grad_N": _grad(), "thresholds_2": torch.ones(2).long(), **_kept(), "count_1": _count(), "key": 0},
        ),
        "random_indices": (sparse.random_indices, {"numel": N, "index_K": _kept()["index_K"], "key": 0}),
        "pack_indices": (
            sparse.pack_indices,
            {"index_K": _kept()["index_K"], "count_1": _count(), "numel": N, "out": _bytes(index_bytes)},
        ),
        "unpack_indices": (
            sparse.unpack_indices,
            {"packed": _packed(), "count_1": _count(), "numel": N, "index_K": _kept()["index_K"]},
        ),
        "scatter_add": (sparse.scatter_add, {**_kept(), "count_1": _count(), "out_N": _grad()}),
        "scatter_zero": (
            sparse.scatter_zero,
            {"index_K": _kept()["index_K"], "count_1": _count(), "out_N": _grad()},
        ),
        "pack_message": (
            sparse.pack_message,
            {**_kept(), "count_1": _count(), "numel": N, "payload": _bytes(4 + index_bytes + 4 * K)},
        ),
        "unpack_message": (
            sparse.unpack_message,
            {"payload": _bytes(4 + index_bytes + 4 * K), "index_K": _kept()["index_K"], "out_N": _grad(), "add": True},
        ),
        "add_poison": (ops.add_poison, {"grad_N": _grad(), "value_K": _kept()["value_K"]}),
        "add_momentum": (ops.add_momentum, {**_fed(), **_momentum(), "factor": 0.9}),
    }


def _packed() -> Tensor:
    packed = _bytes(sparse.index_bytes(N, K))
    sparse.pack_indices(_kept()["index_K"], _count(), N, packed)
    return packed


def _cases(kind: type) -> list[tuple[str, str]]:
    return [
        (call, name)
        for call, (_, arguments) in _calls().items()
        for name, value in arguments.items()
        if type(value) is kind
    ]


@pytest.mark.parametrize("call", _calls())
def test_good_arguments_are_taken(call: str) -> None:
    kernel, arguments = _calls()[call]
    kernel(**arguments)


@pytest.mark.parametrize(("call", "name"), _cases(Tensor))
def test_one_tensor_on_a_device_without_kernels_is_refused(call: str, name: str) -> None:
    kernel, arguments = _calls()[call]
    arguments[name] = arguments[name].to("meta")
    # Others are compared with the tensor that is checked first, so the message depends on which one this is.
    with pytest.raises(ValueError, match=r"is on meta; there are|other tensors are on (cpu|meta); move"):
        kernel(**arguments)


@pytest.mark.parametrize("call", _calls())
def test_tensors_that_are_all_on_a_device_without_kernels_are_refused(call: str) -> None:
    kernel, arguments = _calls()[call]
    moved = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=r"is on meta; there are kernels for cpu and cuda$"):
        kernel(**moved)


@pytest.mark.parametrize(("call", "name"), _cases(int))
def test_a_number_that_is_no_integer_is_refused(call: str, name: str) -> None:
    kernel, arguments = _calls()[call]
    arguments[name] = float(arguments[name])
    with pytest.raises(TypeError, match=rf"^{name} is {arguments[name]!r}; give an integer$"):
        kernel(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("call", "name"), [case for case in _cases(Tensor) if sum(case[0] == call for call, _ in _cases(Tensor)) > 1]
)
def test_tensors_on_two_devices_are_refused(call: str, name: str) -> None:
    kernel, arguments = _calls()[call]
    arguments[name] = arguments[name].to("cuda")
    with pytest.raises(ValueError, match=r"other tensors are on .*; move them to one device"):
        kernel(**arguments)

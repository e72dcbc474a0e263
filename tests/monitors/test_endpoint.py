"""Metrics without Ray: what a rank serves, as Prometheus reads it."""

from __future__ import annotations

import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from support.ranks import run_ranks
from support.samples import step_sample

from cgx_ray.errors import ConfigError
from cgx_ray.monitors.export import METRICS, RUN, RUN_ID, served_name
from cgx_ray.monitors.node_metrics import NodeMetrics
from cgx_ray.session.attach import attach

HOST = "127.0.0.1"


def _scrape(address: tuple[str, int]) -> str:
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def _serve(rank: int) -> tuple[str, tuple[str, int], list[str]]:
    """Train 5 steps; return the served text, the address, and what was refused."""
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2000, 10, bias=False))
    attachment = attach(ddp, codec="topk:density=0.1", scheme="allgather")
    address = attachment.serve_metrics('a "run"', host=HOST)
    assert address is not None
    for _ in range(5):
        ddp(torch.ones(1, 2000)).sum().backward()
    end_s = time.monotonic() + 60
    wanted = f'{served_name("cgx_ray_steps")}{{codec="topk"'
    while wanted not in (text := _scrape(address)) or "} 5.0" not in text:
        assert time.monotonic() < end_s, text
        time.sleep(0.1)
    refused = []
    try:
        attachment.serve_metrics("again")
    except ConfigError as error:
        refused.append(str(error))
    attachment.close()
    try:
        _scrape(address)
    except OSError as error:
        refused.append(str(error))
    return text, address, refused


def test_a_rank_without_ray_serves_its_metrics_until_it_is_closed() -> None:
    results = run_ranks(2, _serve)
    assert results[0][1] != results[1][1]
    for rank, (text, _, refused) in enumerate(results):
        families = {family.name: family for family in text_string_to_metric_families(text)}
        of_cgx = {f"{name}_total" if family.type == "counter" else name for name, family in families.items()}
        known = {served_name(name) for name in METRICS}
        assert of_cgx - known == {name for name in of_cgx if name.endswith("_created")}
        (groups,) = families["ray_cgx_ray_groups"].samples
        labels = {RUN: 'a "run"', RUN_ID: "", "ray_train_worker_world_rank": str(rank)}
        assert groups.labels == {**labels, "codec": "topk", "scheme": "allgather"}
        assert groups.value == 1
        (density,) = families["ray_cgx_ray_density"].samples
        assert density.value == pytest.approx(0.1)
        assert families["ray_cgx_ray_density"].documentation == METRICS["cgx_ray_density"].help
        (dense_bytes,) = [one for one in families["ray_cgx_ray_dense_bytes"].samples if one.name.endswith("_total")]
        assert dense_bytes.value == 5 * 4 * 20_000
        assert "call serve_metrics once" in refused[0]
        assert "refused" in refused[1]


class _Recorded:
    """A sink that keeps the last value of each gauge and the total of each counter."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = defaultdict(float)

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        self._check(name, labels)
        self.values[name, frozenset(labels.items())] = value

    def increase(self, name: str, by: float, labels: Mapping[str, str]) -> None:
        self._check(name, labels)
        self.values[name, frozenset(labels.items())] += by

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        self._check(name, labels)

    def _check(self, name: str, labels: Mapping[str, str]) -> None:
        assert set(labels) == set(METRICS[name].labels), (name, labels)

    def of(self, name: str, **labels: str) -> dict[str, float]:
        """Return the values of a metric by codec."""
        found = ((dict(key), value) for (one, key), value in self.values.items() if one == name)
        return {key["codec"]: value for key, value in found if labels.items() <= key.items()}


def test_groups_of_an_earlier_plan_become_zero_and_bytes_belong_to_their_codec() -> None:
    sink = _Recorded()
    metrics = NodeMetrics(sink, "run")
    first = step_sample(0, 0)
    (transfer,) = first.transfers
    dense = transfer._replace(codec="none", scheme="dense", sent_bytes=8000, wire_bytes=4000)
    metrics.export_steps([first])
    metrics.export_steps([replace(first, step=1, transfers=(dense, dense))])
    assert sink.of("cgx_ray_groups") == {"topk": 0, "dense": 2}
    assert sink.of("cgx_ray_wire_bytes") == {"topk": 1500, "dense": 16000}
    assert sink.of("cgx_ray_steps") == {"topk": 1, "dense": 1}


def test_density_and_bits_are_means_over_elements() -> None:
    sink = _Recorded()
    sample = step_sample(0, 0)
    (sparse,) = sample.transfers
    quantized = sparse._replace(codec="qsgd:bits=4", numel=3000, wire_bytes=1500)
    NodeMetrics(sink, "run").export_steps([replace(sample, transfers=(sparse, quantized), is_finite=False)])
    values = {name: value for (name, _), value in sink.values.items()}
    assert values["cgx_ray_density"] == pytest.approx((1000 * 0.1 + 3000) / 4000)
    assert values["cgx_ray_bits_per_element"] == pytest.approx(8 * 2500 / 4000)
    assert values["cgx_ray_residual_ratio"] == 2.0
    assert values["cgx_ray_weight_drift"] == 2e-8
    assert values["cgx_ray_non_finite_steps"] == 1


def test_bytes_of_a_sharded_model_are_counted_too() -> None:
    sink = _Recorded()
    NodeMetrics(sink, "run").export_steps([replace(step_sample(0, 0), transfers=())])
    assert sink.of("cgx_ray_wire_bytes") == {"sharded": 1500}
    assert sink.of("cgx_ray_groups") == {}

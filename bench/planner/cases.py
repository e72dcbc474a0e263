"""Planning problems with known answers: measured tables, random problems and brute force, models and networks."""

from __future__ import annotations

import csv
import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from cgx_ray.plan import DENSE, CodecSpec, Option, Scheme
from cgx_ray.planner.candidates import FREE, CodecCost, candidate_codecs, host_name, offloaded
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.models import load_model
from cgx_ray.planner.papers.bytecomp import twins
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.planner.pipeline import GroupCost, GroupEnd, Pipeline, group_cost
from cgx_ray.planner.prediction import Measured

_QSGD = Option(codec=CodecSpec(name="qsgd"), scheme=Scheme.SRA)
_TOPK = Option(codec=CodecSpec(name="topk", density=0.01), scheme=Scheme.ALLGATHER)
_BF16 = Option(codec=CodecSpec(name="bf16"), scheme=Scheme.SRA)
# Dense, three options that encode where backward runs, and two of these on the host: ByteComp's GPU and CPU.
MODEL_OPTIONS = (DENSE, _BF16, _QSGD, _TOPK, *offloaded((_QSGD, _TOPK)))
# Arguments of `named_strategies`.
DENSE_INDEX, COMPRESSING, OFFLOADED = 0, (1, 2, 3), twins(MODEL_OPTIONS)
QSGD_INDEX = 2
GPU = CodecCost(encode_a_s=3e-5, encode_b_s_per_element=4e-11, decode_a_s=1e-5, decode_b_s_per_element=2e-11)
CPU = CodecCost(encode_a_s=1e-4, encode_b_s_per_element=1e-9, decode_a_s=2e-5, decode_b_s_per_element=3e-10)
# PCIe 4.0 x16, pinned memory.
BUS = Link.from_rates(bandwidth_gbps=200, latency_ms=0.02)
RANKS_PER_NODE = 8
# Gains of `candidate_codecs(CANDIDATE_DENSITIES)`: none, bf16, qsgd, top-k from 10 % to 0.1 %.
GAINS = (1.0, 0.99999, 0.99, 0.9, 0.8, 0.65, 0.5, 0.35)


def read_table(name: str) -> list[dict[str, str]]:
    """Return the rows of `flexible_table2` or `flexible_table6` of Flexible Communication, times in ms."""
    with (Path(__file__).parents[1] / "data" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def model_pipeline(model: str, gbps: float, compute_s: float = 0.2, num_workers: int = 8) -> Pipeline:
    """Return the pipeline of a model file under MODEL_OPTIONS, on machines with one GPU each."""
    network = Network.flat(num_workers, Link.from_rates(bandwidth_gbps=gbps, latency_ms=0.05))
    costs = [group_cost(DENSE, network=network, codec_cost=FREE)]
    costs += [
        group_cost(option, network=network, codec_cost=GPU, encodes_on="backward") for option in MODEL_OPTIONS[1:4]
    ]
    costs += [group_cost(option, network=network, codec_cost=CPU, bus=BUS) for option in MODEL_OPTIONS[4:]]
    description = load_model(model)
    return Pipeline(
        backward_s=description.backward_s(compute_s),
        numel=tuple(layer.numel for layer in reversed(description.layers)),
        costs=tuple(costs),
    )


def over(seconds: float, best_s: float) -> float:
    """Return the ratio to `best_s`, rounded so that sums of doubles in another order make no difference."""
    return round(seconds / best_s, 9)


def repeated(pipeline: Pipeline, num_layers: int) -> Pipeline:
    """Return a pipeline of `num_layers` layers: the first ones, or all of them repeatedly."""
    return replace(
        pipeline,
        backward_s=tuple(itertools.islice(itertools.cycle(pipeline.backward_s), num_layers)),
        numel=tuple(itertools.islice(itertools.cycle(pipeline.numel), num_layers)),
    )


def cluster(num_workers: int, *, gbps: float, ranks_per_node: int = RANKS_PER_NODE) -> Network:
    """Return nodes of GPUs on links of 300 Gbit/s and 10 us, with `gbps` and 50 us between them."""
    return Network(
        num_nodes=num_workers // ranks_per_node,
        ranks_per_node=ranks_per_node,
        between=Link.from_rates(bandwidth_gbps=gbps, latency_ms=0.05),
        inside=Link.from_rates(bandwidth_gbps=300, latency_ms=0.01),
    )


def resnet101(network: Network, compute_s: float = 0.2) -> Measured:
    """Return the 314 tensors of ResNet-101 with codec times of a GPU, and gains like those that runs measure."""
    description = load_model("resnet101")
    return Measured(
        layers=description.layers,
        backward_s=description.backward_s(compute_s),
        network=network,
        codec_costs={str(codec): GPU for codec in candidate_codecs(CANDIDATE_DENSITIES)},
        gain={str(codec): gain for codec, gain in zip(candidate_codecs(CANDIDATE_DENSITIES), GAINS, strict=True)},
    )


def with_hosts(measured: Measured) -> Measured:
    """Return `measured` with hosts that codecs can be offloaded to."""
    costs = {**measured.codec_costs, **{host_name(codec): CPU for codec in measured.codec_costs}}
    return replace(measured, codec_costs=costs, bus=BUS)


def with_bits(measured: Measured) -> Measured:
    """Return `measured` with gains of qsgd with 2 and 3 bits, and with errors that differ by layer over two decades."""
    rng = random.Random(0)
    scale = {layer.name: layer.numel * 10 ** rng.uniform(-1, 1) for layer in measured.layers if not layer.is_small}
    gain = {"qsgd:bits=3,bucket_size=128": 0.95, "qsgd:bits=2,bucket_size=128": 0.6, "qsgd:bits=2,bucket_size=64": 0.7}
    return replace(
        measured,
        gain={**measured.gain, **gain},
        codec_costs={**measured.codec_costs, "qsgd": GPU},
        squared_errors={
            bits: {name: value / ((1 << bits) - 1) ** 2 * rng.uniform(0.9, 1.1) for name, value in scale.items()}
            for bits in (2, 3, 4)
        },
    )


def longer(measured: Measured, num_layers: int) -> Measured:
    """Return a model of `num_layers` layers, those of `measured` again and again."""
    layers = itertools.islice(itertools.cycle(measured.layers), num_layers)
    return replace(
        measured,
        layers=tuple(replace(layer, name=f"{index} {layer.name}") for index, layer in enumerate(layers)),
        backward_s=tuple(itertools.islice(itertools.cycle(measured.backward_s), num_layers)),
    )


def random_pipeline(rng: random.Random, num_layers: int, num_options: int) -> Pipeline:
    """Return a pipeline with sizes over four decades, and times of like magnitude, some of them 0.

    Some groups need the network late, or are done long after it is done with them, and so are some steps.
    """
    numel = [int(10 ** rng.uniform(2, 6)) for _ in range(num_layers)]
    backward_s = [rng.choice((0.0, 1.0, 1.0)) * rng.expovariate(1) for _ in numel]
    dense_s = 10 ** rng.uniform(-1, 1) * num_layers / sum(numel)
    costs = [
        GroupCost(
            compute_a_s=rng.choice((0.0, rng.uniform(0, 0.5))),
            compute_b_s_per_element=rng.choice((0.0, dense_s * 10 ** rng.uniform(-2, 0))),
            network_a_s=rng.choice((0.0, rng.uniform(0, 0.5))),
            network_b_s_per_element=dense_s * 10 ** rng.uniform(-2, 0),
            **_random_edges(rng, dense_s),
        )
        for _ in range(num_options)
    ]
    after_s = rng.choice((0.0, rng.uniform(0, 2)))
    return Pipeline(backward_s=tuple(backward_s), numel=tuple(numel), costs=tuple(costs), after_s=after_s)


def _random_edges(rng: random.Random, dense_s: float) -> dict[str, float]:
    """Return lead, tail and the gap in both, most of them 0."""
    edges: dict[str, float] = {}
    for term, longest_s in (("a_s", 2.0), ("b_s_per_element", dense_s)):
        gap_s, lead_s, tail_s = (rng.choice((0.0, 0.0, longest_s * 10 ** rng.uniform(-2, 0))) for _ in range(3))
        edges |= {f"lead_{term}": lead_s + gap_s, f"tail_{term}": tail_s + gap_s, f"gap_{term}": gap_s}
    return edges


def earliest_finish_s(pipeline: Pipeline) -> float:
    """Return the earliest finish, with tolls, over all groupings and all options of each group, by brute force."""
    # By number of layers k, for all plans of the first k layers: the finishes of compute, network and all groups, and
    # the tolls.
    finishes = [(np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1))]
    for end in range(1, pipeline.num_layers + 1):
        compute, network, done, toll = [], [], [], []
        for start in range(end):
            numel, backward_s = sum(pipeline.numel[start:end]), sum(pipeline.backward_s[start:end])
            for option, cost in enumerate(pipeline.costs):
                before, own_s = finishes[start], cost.network_s(numel)
                compute.append(before[0] + backward_s + cost.compute_s(numel))
                network.append(np.maximum(before[1], compute[-1] + cost.lead_s(numel)) + own_s)
                by_network, by_itself = before[1] + own_s + cost.tail_s(numel), compute[-1] + cost.alone_s(numel)
                done.append(np.maximum(before[2], np.maximum(by_network, by_itself)))
                toll.append(before[3] + sum(pipeline.tolls_s[option][start:end] if pipeline.tolls_s else ()))
        finishes.append((np.concatenate(compute), np.concatenate(network), np.concatenate(done), np.concatenate(toll)))
    assert len(finishes[-1][0]) == len(pipeline.costs) * (1 + len(pipeline.costs)) ** (pipeline.num_layers - 1)
    _, network_s, done_s, toll_s = finishes[-1]
    return float((np.maximum(network_s + pipeline.after_s, done_s) + toll_s).min())


def with_random_tolls(rng: random.Random, pipeline: Pipeline) -> Pipeline:
    """Return `pipeline` with tolls of at most its finish in each option, by elements or in any other proportion."""
    scale_s = pipeline.finish_s([GroupEnd(pipeline.num_layers, 0)]) * 10 ** rng.uniform(-3, 0)
    tolls = []
    for _ in pipeline.costs:
        weights = [rng.choice((0.0, 1.0, 1.0)) * 10 ** rng.uniform(-3, 0) for _ in pipeline.numel]
        row = rng.choice((pipeline.numel, weights))
        whole_s = scale_s * rng.choice((0, rng.random()))
        tolls.append(tuple(whole_s * weight / (sum(row) or 1.0) for weight in row))
    return replace(pipeline, tolls_s=tuple(tolls))

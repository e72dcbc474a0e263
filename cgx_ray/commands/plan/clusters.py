"""Priced clusters: read from a file, and compared by what an hour and a US dollar buy on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from cgx_ray.commands.plan.question import INSIDE_BANDWIDTH, INSIDE_LATENCY, Question, read_question
from cgx_ray.errors import ConfigError
from cgx_ray.planner.joint import BestPlan
from cgx_ray.planner.models import load_model
from cgx_ray.planner.prediction import Prediction
from cgx_ray.planner.scenario import Epoch
from cgx_ray.untrusted import parse_yaml, read_bytes, read_table

_TEXT = {"type": "string", "minLength": 1}
_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "name": _TEXT,
            "nodes": {"type": "integer", "minimum": 1, "maximum": 1_000_000},
            "gpus_per_node": {"type": "integer", "minimum": 1, "maximum": 1_000_000},
            "usd_per_hour": {"type": "number", "exclusiveMinimum": 0, "minimum": 1e-6, "maximum": 1e9},
            "bandwidth": _TEXT,
            "latency": _TEXT,
            "inside_bandwidth": _TEXT,
            "inside_latency": _TEXT,
            "gpu": _TEXT,
            "throughput": {"type": "number", "exclusiveMinimum": 0, "minimum": 1e-6, "maximum": 1e12},
            "step_time": _TEXT,
        },
        "required": ["name", "usd_per_hour"],
        "additionalProperties": False,
    },
}
_FIELDS: Mapping[str, Mapping[str, Any]] = _SCHEMA["items"]["properties"]  # type: ignore[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedCluster:
    """Nodes for rent, all alike. Rates and times are texts, as the options of `cgx-ray plan`.

    nodes               most nodes that can be rented
    usd_per_hour        price of one node
    bandwidth, latency  between nodes; needed if there are several
    gpu, throughput, step_time
                        compute time of a worker's step, as in `compute_time`; give at most one
    """

    name: str
    usd_per_hour: float
    nodes: int = 1
    gpus_per_node: int = 1
    bandwidth: str | None = None
    latency: str | None = None
    inside_bandwidth: str = INSIDE_BANDWIDTH
    inside_latency: str = INSIDE_LATENCY
    gpu: str | None = None
    throughput: float | None = None
    step_time: str | None = None

    @property
    def node_counts(self) -> tuple[int, ...]:
        """Return 1, 2, 4, ... and `nodes`."""
        return tuple(sorted({*(1 << power for power in range(self.nodes.bit_length())), self.nodes}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """Some nodes of a cluster, and the predicted steps of a model on them."""

    cluster: PricedCluster
    num_nodes: int
    question: Question
    answer: BestPlan

    @property
    def num_workers(self) -> int:
        return self.num_nodes * self.cluster.gpus_per_node

    @property
    def usd_per_hour(self) -> float:
        return self.num_nodes * self.cluster.usd_per_hour

    @property
    def kept(self) -> float:
        """Share of a dense step's progress that a step of the plan makes."""
        assert self.answer.best.efficiency is not None
        return self.answer.best.efficiency

    def samples_per_s(self, step: Prediction) -> float:
        """Return the throughput of all workers. `step`: the dense or the best one of `answer`."""
        assert self.question.price is not None
        return self.num_workers * self.question.price.batch / step.step_s

    def samples_per_usd(self, step: Prediction) -> float:
        return samples_per_usd(self.samples_per_s(step), self.usd_per_hour)

    def epoch(self, step: Prediction) -> Epoch | None:
        """Return the duration and price of an epoch, None if nobody said how many samples it has."""
        price = self.question.price
        assert price is not None
        return None if price.samples is None else price.epoch(step.step_s, self.num_workers)


def samples_per_usd(samples_per_s: float, usd_per_hour: float) -> float:
    """Return the samples that a US dollar pays for."""
    return 3600 * samples_per_s / usd_per_hour


def rent(clusters: Sequence[PricedCluster], given: Mapping[str, Any]) -> Iterator[Rental]:
    """Yield each cluster with each of its `node_counts`, and the best plan for it.

    given  options of `cgx-ray plan` about model, compute and codecs; a cluster's own compute time comes before theirs

    Raises ConfigError that names the cluster.
    """
    for cluster in clusters:
        for num_nodes in cluster.node_counts:
            try:
                question = _question(cluster, num_nodes, given)
                answer = question.scenario.solve()
            except ConfigError as error:
                raise ConfigError(f"cluster {cluster.name!r}, {num_nodes} of its nodes: {error}") from error
            yield Rental(cluster=cluster, num_nodes=num_nodes, question=question, answer=answer)


def _question(cluster: PricedCluster, num_nodes: int, given: Mapping[str, Any]) -> Question:
    between = (cluster.latency, cluster.bandwidth)
    if cluster.nodes == 1:
        # One node sends nothing to others, and a network needs some link.
        between = (cluster.latency or cluster.inside_latency, cluster.bandwidth or cluster.inside_bandwidth)
    elif None in between:
        raise ConfigError(
            "the network between nodes is unknown; give the cluster latency (50us) and bandwidth (10gbps)"
        )
    own = {name: getattr(cluster, name) for name in ("gpu", "throughput", "step_time")}
    compute = own if any(value is not None for value in own.values()) else {name: given[name] for name in own}
    return read_question(
        model=load_model(given["model"]),
        workers=num_nodes * cluster.gpus_per_node,
        ranks_per_node=cluster.gpus_per_node,
        latency=between[0],
        bandwidth=between[1],
        inside_latency=cluster.inside_latency,
        inside_bandwidth=cluster.inside_bandwidth,
        **compute,
        batch=given["batch"],
        profile=given["profile"],
        fidelity=given["fidelity"],
        gains=given["gains"],
        min_gain=given["min_gain"],
        period=given["period"],
        price=cluster.usd_per_hour / cluster.gpus_per_node,
        samples_per_epoch=given["samples_per_epoch"],
        sweep=None,
    )


def read_clusters(path: Path) -> tuple[PricedCluster, ...]:
    """Read clusters from a YAML list of mappings, or a CSV table with one line per cluster.

    Both have the fields of `PricedCluster`. A cell that is empty counts as not given. Raises ConfigError, with cluster
    and field, if the file is not of this form.
    """
    rows = _read_csv(path) if path.suffix == ".csv" else _read_yaml(path)
    try:
        jsonschema.validate(rows, _SCHEMA)
    except jsonschema.ValidationError as error:
        where = "".join(f", {part}" for part in _where(rows, list(error.absolute_path)))
        raise ConfigError(
            f"{path}{where}: {error.message}; give a list of clusters, each with name, usd_per_hour (of a node), and "
            f"what it needs of {', '.join(name for name in _FIELDS if name not in ('name', 'usd_per_hour'))}"
        ) from error
    clusters = tuple(PricedCluster(**{key: _whole(key, value) for key, value in row.items()}) for row in rows)
    names = [cluster.name for cluster in clusters]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{path}: there are {names.count(twice[0])} clusters {twice[0]!r}; give each its own name")
    return clusters


def _where(rows: Any, keys: Sequence[int | str]) -> Iterator[str]:
    """Yield the cluster and the field that the path of an error leads to."""
    for key in keys:
        if isinstance(key, int):
            name = rows[key].get("name") if isinstance(rows[key], dict) else None
            yield f"cluster {key + 1}" + (f" ({name})" if name else "")
        else:
            yield key


def _read_yaml(path: Path) -> Any:
    content = read_bytes(path)
    try:
        return parse_yaml(content.decode())
    except ValueError as error:
        raise ConfigError(
            f"{path} cannot be read as YAML ({error}); a table in CSV needs a name that ends in .csv"
        ) from error


def _read_csv(path: Path) -> list[dict[str, Any]]:
    return [{key: _number(key, text) for key, text in line.items() if text} for line in read_table(path)]


def _whole(key: str, value: Any) -> Any:
    """Return `value` as an int where the schema asks for one: to JSON 4.0 is a whole number too."""
    return int(value) if _FIELDS[key]["type"] == "integer" else value


def _number(key: str, text: str) -> float | int | str:
    """Return `text` as a number if the schema asks for one and it is one; else the schema names it."""
    try:
        match _FIELDS.get(key, {}).get("type"):
            case "integer":
                return int(text)
            case "number":
                return float(text)
    except ValueError:
        pass  # the schema names the cell
    return text

"""The manifests of deploy/k8s, checked without a cluster: schemas, ports, memory, versions and commands."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from referencing import Registry, Resource
from support.kustomize import render

from cgx_ray import ports

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
MONITORING = K8S / "overlays" / "monitoring"
# Each describes a cluster.
OVERLAYS = sorted(path.parent for path in K8S.glob("overlays/*/kustomization.yaml") if path.parent != MONITORING)
# The oldest Kubernetes that KubeRay 1.7 and endPort in network policies both support.
KUBERNETES = "1.29"
# Resources of other projects, whose schemas are not here: their fields are compared with those projects' documents by
# hand.
UNCHECKED = frozenset({"PodMonitor", "PrometheusRule", "ResourceFlavor", "ClusterQueue", "LocalQueue"})
MIB = 1 << 20
_UNITS = {"Mi": MIB, "Gi": 1 << 30}


@cache
def rendered(overlay: Path) -> list[dict[str, Any]]:
    return render(overlay)


def of_kind(overlay: Path, kind: str) -> dict[str, Any]:
    (found,) = [resource for resource in rendered(overlay) if resource["kind"] == kind]
    return found


@pytest.fixture(params=OVERLAYS, ids=lambda path: path.name)
def overlay(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def validate(resource: dict[str, Any]) -> None:
    """Raise an error that names the field if the API server would refuse `resource`, or drop a field of it."""
    kind = resource["kind"]
    if kind in ("RayCluster", "RayJob"):
        schema = json.loads((Path(__file__).parent / "schemas" / f"{kind.lower()}.json").read_text())
        with_defaults = apply_defaults(schema, copy.deepcopy(resource["spec"]))
        registry: Registry[Any] = Registry().with_resource("pod", Resource.opaque({}))
        jsonschema.Draft202012Validator(schema, registry=registry).validate(with_defaults)
        for pod in pods(resource):
            metadata = {"name": "pod"}
            validate({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod})
    elif kind not in UNCHECKED:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def apply_defaults(schema: dict[str, Any], value: Any) -> Any:
    """Fill in what the API server fills in before it validates."""
    if isinstance(value, dict):
        for name, field in schema.get("properties", {}).items():
            if name not in value and "default" in field:
                value[name] = field["default"]
            if name in value:
                apply_defaults(field, value[name])
    elif isinstance(value, list):
        for one in value:
            apply_defaults(schema.get("items", {}), one)
    return value


def pods(resource: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the pod specs of a RayCluster or a RayJob."""
    spec = resource["spec"]
    if "submitterPodTemplate" in spec:
        yield spec["submitterPodTemplate"]["spec"]
    if "headGroupSpec" in spec:
        yield spec["headGroupSpec"]["template"]["spec"]
        yield from (group["template"]["spec"] for group in spec["workerGroupSpecs"])


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * _UNITS[quantity[-2:]]


@pytest.mark.parametrize("folder", [*OVERLAYS, MONITORING], ids=lambda path: path.name)
def test_every_overlay_is_valid(folder: Path) -> None:
    for resource in rendered(folder):
        validate(resource)


def _misspell_field(cluster: dict[str, Any]) -> None:
    cluster["spec"]["workerGroupSpecs"][0]["minReplica"] = 2


def _leave_out_the_head(cluster: dict[str, Any]) -> None:
    del cluster["spec"]["headGroupSpec"]


def _give_a_number_as_parameter(cluster: dict[str, Any]) -> None:
    cluster["spec"]["headGroupSpec"]["rayStartParams"]["node-manager-port"] = 6380


def _misspell_a_field_of_the_pod(cluster: dict[str, Any]) -> None:
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["resource"] = {}


def _ask_for_an_unknown_token(cluster: dict[str, Any]) -> None:
    cluster["spec"]["authOptions"]["mode"] = "tokens"


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (_misspell_field, "minReplica"),
        (_leave_out_the_head, "headGroupSpec"),
        (_give_a_number_as_parameter, "6380"),
        (_misspell_a_field_of_the_pod, "resource"),
        (_ask_for_an_unknown_token, "tokens"),
    ],
)
def test_a_planted_error_is_caught(plant: Callable[[dict[str, Any]], None], named: str) -> None:
    cluster = copy.deepcopy(of_kind(K8S / "overlays" / "gpu", "RayCluster"))
    plant(cluster)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError), match=named):
        validate(cluster)


@pytest.mark.parametrize("folder", [*OVERLAYS, MONITORING], ids=lambda path: path.name)
def test_kubectl_renders_the_same(folder: Path) -> None:
    """Compare with kubectl where it is installed. Elsewhere, only that it can be rendered is known."""
    assert len({resource["kind"] for resource in rendered(folder)}) > 2
    if shutil.which("kubectl") is None:
        return
    done = subprocess.run(["kubectl", "kustomize", str(folder)], check=True, capture_output=True, text=True)

    def in_order(resources: list[dict[str, Any]]) -> list[str]:
        return sorted(json.dumps(resource, sort_keys=True) for resource in resources)

    assert in_order(list(yaml.safe_load_all(done.stdout))) == in_order(rendered(folder))


def test_pods_ask_for_what_they_may_use_and_have_shared_memory_for_ray_and_us(overlay: Path) -> None:
    for pod in pods(of_kind(overlay, "RayCluster")):
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
        assert shm["medium"] == "Memory"
        memory, size = num_bytes(container["resources"]["limits"]["memory"]), num_bytes(shm["sizeLimit"])
        ranks = int(container["resources"]["limits"]["cpu"])
        # Ray's object store, then rings and slots of our segment (runtime_ext/csrc/net/shm_segment.cpp).
        assert 0.3 * memory + (16 + ranks) * MIB <= size < memory / 2
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_pods_are_unprivileged_and_have_time_to_end(overlay: Path) -> None:
    cluster = of_kind(overlay, "RayCluster")
    for pod in (*pods(cluster), *pods(of_kind(overlay, "RayJob"))):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    worker = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    pause = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert int(pause[1]) < worker["terminationGracePeriodSeconds"]


def test_workers_reach_every_port_that_ray_and_we_listen_on(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, policy = of_kind(overlay, "RayCluster"), of_kind(overlay, "NetworkPolicy")
    between_nodes = policy["spec"]["ingress"][0]
    assert between_nodes["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    allowed = {
        port for rule in between_nodes["ports"] for port in range(rule["port"], rule.get("endPort", rule["port"]) + 1)
    }
    for pod, group in zip(
        pods(cluster), (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]), strict=True
    ):
        params = group["rayStartParams"]
        assert {int(params["node-manager-port"]), int(params["object-manager-port"])} <= allowed
        assert set(range(int(params["min-worker-port"]), int(params["max-worker-port"]) + 1)) <= allowed
        (sysctl,) = pod["securityContext"]["sysctls"]
        assert sysctl["name"] == "net.ipv4.ip_local_port_range"
        first, last = map(int, sysctl["value"].split())
        assert set(range(first, last + 1)) <= allowed
        (own,) = [one["value"] for one in pod["containers"][0]["env"] if one["name"] == ports.VARIABLE]
        monkeypatch.setenv(ports.VARIABLE, own)
        own_first, own_last = ports.port_range()
        assert set(range(own_first, own_last + 1)) <= allowed
        assert own_last < first, "a program that connects could be given a port of ours"
        # Per rank one, and five for monitors.
        assert own_last - own_first >= int(pod["containers"][0]["resources"]["limits"]["cpu"]) + 5
        named = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
        assert named["metrics"] == int(params["metrics-export-port"])
    egress = policy["spec"]["egress"][0]
    assert (egress["to"], egress["ports"]) == (between_nodes["from"], between_nodes["ports"])


def test_prometheus_reaches_the_ports_that_pods_name(overlay: Path) -> None:
    (head, *_) = pods(of_kind(overlay, "RayCluster"))
    metrics = {port["containerPort"] for port in head["containers"][0]["ports"] if port["name"].endswith("metrics")}
    rules = of_kind(overlay, "NetworkPolicy")["spec"]["ingress"]
    monitor = of_kind(MONITORING, "PodMonitor")
    namespace = monitor["metadata"]["namespace"]
    (for_prometheus,) = [rule for rule in rules if namespace in json.dumps(rule["from"])]
    assert {port["port"] for port in for_prometheus["ports"]} == metrics
    named = {port["name"]: port["containerPort"] for port in head["containers"][0]["ports"]}
    assert {named[end["port"]] for end in monitor["spec"]["podMetricsEndpoints"]} == metrics
    cluster = of_kind(overlay, "RayCluster")["metadata"]
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": [cluster["namespace"]]}
    assert monitor["spec"]["selector"] == {"matchLabels": {"ray.io/cluster": cluster["name"]}}


def test_boards_and_rules_are_those_of_the_dashboards() -> None:
    boards, rules = of_kind(MONITORING, "ConfigMap"), of_kind(MONITORING, "PrometheusRule")
    assert boards["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert boards["data"] == {path.name: path.read_text() for path in (ROOT / "dashboards").glob("*.json")}
    assert rules["spec"] == yaml.safe_load((ROOT / "dashboards" / "rules.yaml").read_text())


def test_versions_are_those_that_the_image_installs(overlay: Path) -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    cluster = of_kind(overlay, "RayCluster")
    assert cluster["spec"]["rayVersion"] == pins["ray"]
    dockerfile = (K8S / "Dockerfile").read_text()
    variants = set(re.findall(r"^FROM common AS (\w+)$", dockerfile, re.MULTILINE))
    for pod in (*pods(cluster), *pods(of_kind(overlay, "RayJob"))):
        name, _, variant = pod["containers"][0]["image"].partition(":")
        assert name == "cgx-ray"
        assert variant in variants


def test_the_entrypoint_is_a_command_line_of_the_example(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, job = of_kind(overlay, "RayCluster"), of_kind(overlay, "RayJob")
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    _, script, *arguments = shlex.split(job["spec"]["entrypoint"])
    path = ROOT / "examples" / Path(script).name
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    parsed = example.parse_args()
    assert parsed.workers == cluster["spec"]["workerGroupSpecs"][0]["replicas"]
    (volume,) = [
        mount for mount in next(pods(cluster))["containers"][0]["volumeMounts"] if mount["name"] == "checkpoints"
    ]
    assert str(parsed.storage) == volume["mountPath"]
    gpus = (
        "nvidia.com/gpu"
        in cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"]["limits"]
    )
    assert parsed.use_gpu == gpus

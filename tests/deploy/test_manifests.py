"""The manifests of deploy/k8s, checked without a cluster: schemas, ports, memory, versions and commands."""

from __future__ import annotations

import copy
import importlib.util
import ipaddress
import json
import os
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
MONITORING, OBJECT_STORES = K8S / "overlays" / "monitoring", K8S / "overlays" / "object-stores"
# Those beside others.
ADDED = [MONITORING, OBJECT_STORES]
# Each describes a cluster.
OVERLAYS = sorted(path.parent for path in K8S.glob("overlays/*/kustomization.yaml") if path.parent not in ADDED)
ONE_JOB = K8S / "overlays" / "one-job"
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


def cluster_of(overlay: Path) -> dict[str, Any]:
    """Return the spec of the Ray cluster, which a RayJob may make itself."""
    made = of_kind(overlay, "RayJob")["spec"].get("rayClusterSpec")
    spec: dict[str, Any] = made if made is not None else of_kind(overlay, "RayCluster")["spec"]
    return spec


def templates(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the templates of the pods of a Ray cluster, the head's first."""
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


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
    cluster = spec.get("rayClusterSpec", spec)
    if "headGroupSpec" in cluster:
        yield from (template["spec"] for template in templates(cluster))


def images(resources: list[dict[str, Any]]) -> set[str]:
    return {
        container["image"]
        for resource in resources
        if resource["kind"] in ("RayCluster", "RayJob")
        for pod in pods(resource)
        for container in pod["containers"]
    }


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * _UNITS[quantity[-2:]]


@pytest.mark.parametrize("folder", [*OVERLAYS, *ADDED], ids=lambda path: path.name)
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


@pytest.mark.parametrize("folder", [*OVERLAYS, *ADDED], ids=lambda path: path.name)
def test_kubectl_renders_the_same(folder: Path) -> None:
    """Compare with kubectl where it is installed. Elsewhere, only that it can be rendered is known."""
    assert len({resource["kind"] for resource in rendered(folder)}) > (0 if folder == OBJECT_STORES else 2)
    compare_with_kubectl(folder, rendered(folder))


def compare_with_kubectl(folder: Path, resources: list[dict[str, Any]]) -> None:
    if shutil.which("kubectl") is None:
        return
    done = subprocess.run(["kubectl", "kustomize", str(folder)], check=True, capture_output=True, text=True)

    def in_order(resources: list[dict[str, Any]]) -> list[str]:
        return sorted(json.dumps(resource, sort_keys=True) for resource in resources)

    assert in_order(list(yaml.safe_load_all(done.stdout))) == in_order(resources)


def test_one_entry_of_images_renames_the_image_of_all_pods(overlay: Path, tmp_path: Path) -> None:
    own = {"resources": [os.path.relpath(overlay, tmp_path)]}
    image = {"name": "cgx-ray", "newName": "registry.example/cgx-ray", "newTag": "v1"}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(own | {"images": [image]}))
    resources = render(tmp_path)
    assert images(resources) == {"registry.example/cgx-ray:v1"}
    compare_with_kubectl(tmp_path, resources)
    # Manifests name it without a tag: the tag is in `images` alone.
    named = re.findall(r"image: (\S+)", "".join(path.read_text() for path in K8S.rglob("*.yaml")))
    assert set(named) == {"cgx-ray"}


def test_patches_go_by_names_not_by_positions() -> None:
    for path in K8S.rglob("kustomization.yaml"):
        kustomization = yaml.safe_load(path.read_text())
        for patch in kustomization.get("patches", []):
            assert isinstance(yaml.safe_load(patch["patch"]), dict), f"{path}: a list of operations has positions"
        for replacement in kustomization.get("replacements", []):
            fields = [field for target in replacement["targets"] for field in target["fieldPaths"]]
            assert not [field for field in fields if re.search(r"\.\d+(\.|$)", field)], path


def test_a_job_makes_its_cluster_and_ends_it() -> None:
    job = of_kind(ONE_JOB, "RayJob")["spec"]
    assert "clusterSelector" not in job
    assert job["shutdownAfterJobFinishes"] is True
    assert job["ttlSecondsAfterFinished"] > 0
    assert "RayCluster" not in {resource["kind"] for resource in rendered(ONE_JOB)}
    # The same as beside a job that is submitted to it.
    assert job["rayClusterSpec"] == of_kind(K8S / "overlays" / "cpu-demo", "RayCluster")["spec"]


def test_object_stores_are_reached_over_https_and_nothing_private_is(overlay: Path) -> None:
    policy = of_kind(OBJECT_STORES, "NetworkPolicy")
    own = of_kind(overlay, "NetworkPolicy")
    # Policies of the same pods add up.
    assert policy["metadata"]["namespace"] == own["metadata"]["namespace"]
    assert policy["metadata"]["name"] != own["metadata"]["name"]
    assert policy["spec"]["podSelector"] == own["spec"]["podSelector"]
    assert policy["spec"]["policyTypes"] == ["Egress"]
    (rule,) = policy["spec"]["egress"]
    assert rule["ports"] == [{"port": 443, "protocol": "TCP"}]

    def is_open(address: str) -> bool:
        one = ipaddress.ip_address(address)
        return any(
            one in ipaddress.ip_network(to["ipBlock"]["cidr"])
            and not any(one in ipaddress.ip_network(closed) for closed in to["ipBlock"]["except"])
            for to in rule["to"]
        )

    assert all(map(is_open, ("52.216.1.1", "142.250.1.207", "2600:1f18::1")))
    # Pods, services, nodes of common networks; the metadata service; carrier-grade NAT, which some clouds give to pods.
    private = ("10.96.0.1", "10.244.1.7", "172.20.0.1", "192.168.1.5", "169.254.169.254", "100.64.3.1", "fd00::1")
    assert not any(map(is_open, private))


def test_kueues_flavor_says_what_it_is() -> None:
    resources = rendered(K8S / "overlays" / "kueue")
    (flavor,) = [one["metadata"]["name"] for one in resources if one["kind"] == "ResourceFlavor"]
    assert flavor != "default"
    (queue,) = [one for one in resources if one["kind"] == "ClusterQueue"]
    assert [one["name"] for group in queue["spec"]["resourceGroups"] for one in group["flavors"]] == [flavor]


def test_pods_ask_for_what_they_may_use_and_have_shared_memory_for_ray_and_us(overlay: Path) -> None:
    for pod in (template["spec"] for template in templates(cluster_of(overlay))):
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
    cluster, job = cluster_of(overlay), of_kind(overlay, "RayJob")
    for pod in (*(template["spec"] for template in templates(cluster)), *pods(job)):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    worker = cluster["workerGroupSpecs"][0]["template"]["spec"]
    pause = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert int(pause[1]) < worker["terminationGracePeriodSeconds"]


def test_workers_reach_every_port_that_ray_and_we_listen_on(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, policy = cluster_of(overlay), of_kind(overlay, "NetworkPolicy")
    between_nodes = policy["spec"]["ingress"][0]
    assert between_nodes["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    allowed = {
        port for rule in between_nodes["ports"] for port in range(rule["port"], rule.get("endPort", rule["port"]) + 1)
    }
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        params, pod = group["rayStartParams"], group["template"]["spec"]
        # The name of the cluster, which is a label too, is made by KubeRay if a job makes it.
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()
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
    head, *_ = (template["spec"] for template in templates(cluster_of(overlay)))
    metrics = {port["containerPort"] for port in head["containers"][0]["ports"] if port["name"].endswith("metrics")}
    rules = of_kind(overlay, "NetworkPolicy")["spec"]["ingress"]
    monitor = of_kind(MONITORING, "PodMonitor")
    namespace = monitor["metadata"]["namespace"]
    (for_prometheus,) = [rule for rule in rules if namespace in json.dumps(rule["from"])]
    assert {port["port"] for port in for_prometheus["ports"]} == metrics
    named = {port["name"]: port["containerPort"] for port in head["containers"][0]["ports"]}
    assert {named[end["port"]] for end in monitor["spec"]["podMetricsEndpoints"]} == metrics
    policy = of_kind(overlay, "NetworkPolicy")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": [policy["metadata"]["namespace"]]}
    assert monitor["spec"]["selector"] == policy["spec"]["podSelector"]


def test_boards_and_rules_are_those_of_the_dashboards() -> None:
    boards, rules = of_kind(MONITORING, "ConfigMap"), of_kind(MONITORING, "PrometheusRule")
    assert boards["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert boards["data"] == {path.name: path.read_text() for path in (ROOT / "dashboards").glob("*.json")}
    assert rules["spec"] == yaml.safe_load((ROOT / "dashboards" / "rules.yaml").read_text())


def test_versions_are_those_that_the_image_installs(overlay: Path) -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert cluster_of(overlay)["rayVersion"] == pins["ray"]
    dockerfile = (K8S / "Dockerfile").read_text()
    variants = set(re.findall(r"^FROM common AS (\w+)$", dockerfile, re.MULTILINE))
    ((name, _, variant),) = [image.partition(":") for image in images(rendered(overlay))]
    assert name == "cgx-ray"
    assert variant in variants


def test_the_entrypoint_is_a_command_line_of_the_example(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, job = cluster_of(overlay), of_kind(overlay, "RayJob")
    if overlay != ONE_JOB:
        name = of_kind(overlay, "RayCluster")["metadata"]["name"]
        assert job["spec"]["clusterSelector"] == {"ray.io/cluster": name}
    _, script, *arguments = shlex.split(job["spec"]["entrypoint"])
    path = ROOT / "examples" / Path(script).name
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    parsed = example.parse_args()
    (worker,) = cluster["workerGroupSpecs"]
    assert parsed.workers == worker["replicas"] == worker["minReplicas"] == worker["maxReplicas"]
    (container,) = worker["template"]["spec"]["containers"]
    (volume,) = [mount for mount in container["volumeMounts"] if mount["name"] == "checkpoints"]
    assert str(parsed.storage) == volume["mountPath"]
    assert parsed.use_gpu == ("nvidia.com/gpu" in container["resources"]["limits"])

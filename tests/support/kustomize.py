"""Render a folder as `kubectl kustomize` does, for the subset that deploy/k8s uses.

A test compares it with kubectl's own where that is installed. Everything outside the subset is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

Resource = dict[str, Any]

_KNOWN = frozenset(
    {"apiVersion", "kind", "namespace", "resources", "patches", "configMapGenerator", "generatorOptions"}
)
_WITHOUT_NAMESPACE = frozenset({"Namespace", "ClusterQueue", "ResourceFlavor"})


def render(folder: Path) -> list[Resource]:
    """Return the resources that the kustomization in `folder` describes. Raises ValueError outside the subset."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := kustomization.keys() - _KNOWN:
        raise ValueError(f"{folder}/kustomization.yaml has {sorted(unknown)}, which this renderer does not know")
    resources: list[Resource] = []
    for name in kustomization.get("resources", []):
        path = (folder / name).resolve()
        resources += render(path) if path.is_dir() else _load(path)
    resources += [_config_map(folder, kustomization, maker) for maker in kustomization.get("configMapGenerator", [])]
    if "namespace" in kustomization:
        for resource in resources:
            if resource["kind"] not in _WITHOUT_NAMESPACE:
                resource["metadata"]["namespace"] = kustomization["namespace"]
    for patch in kustomization.get("patches", []):
        resources = _patched(resources, patch["target"], yaml.safe_load(patch["patch"]))
    return resources


def _load(path: Path) -> list[Resource]:
    # Through JSON, which knows no anchors: a patch changes one of the places that share one, not all.
    return [json.loads(json.dumps(resource)) for resource in yaml.safe_load_all(path.read_text())]


def _config_map(folder: Path, kustomization: dict[str, Any], maker: dict[str, Any]) -> Resource:
    options = kustomization.get("generatorOptions", {}) | maker.get("options", {})
    if not options.get("disableNameSuffixHash"):
        raise ValueError(f"config map {maker['name']} would get a hash as suffix; set disableNameSuffixHash")
    metadata = {"name": maker["name"]}
    metadata |= {key: options[key] for key in ("labels", "annotations") if key in options}
    if "namespace" in maker:
        metadata["namespace"] = maker["namespace"]
    data = {Path(name).name: (folder / name).read_text() for name in maker["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patched(resources: list[Resource], target: dict[str, str], operations: list[Any]) -> list[Resource]:
    def is_meant(resource: Resource) -> bool:
        return resource["kind"] == target["kind"] and target.get("name") in (None, resource["metadata"]["name"])

    if not any(map(is_meant, resources)):
        raise ValueError(f"a patch is for {target}, which is not among the resources")
    return [jsonpatch.apply_patch(one, operations) if is_meant(one) else one for one in resources]

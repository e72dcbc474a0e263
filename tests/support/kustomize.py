"""Render a folder as `kubectl kustomize` does, for the subset that deploy/k8s uses.

A test compares it with kubectl's own where that is installed. Everything outside the subset is an error.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

_KNOWN = frozenset(
    {
        *("apiVersion", "kind", "namespace", "resources", "components", "patches", "images", "replacements"),
        *("configMapGenerator", "generatorOptions"),
    }
)
_WITHOUT_NAMESPACE = frozenset({"Namespace", "ClusterQueue", "ResourceFlavor"})
# A resource with it gives values to others, and is no part of the result.
_LOCAL = {"config.kubernetes.io/local-config": "true"}
# Their lists have names in Kubernetes' schemas, so a strategic merge would go by those; here it knows none.
_WITH_NAMED_LISTS = frozenset({"Deployment", "DaemonSet", "StatefulSet", "Job", "CronJob", "Pod", "Service"})


def render(folder: Path) -> list[Resource]:
    """Return the resources that the kustomization in `folder` describes. Raises ValueError outside the subset."""
    return [one for one in _accumulated(folder, []) if not _is_local(one)]


def _is_local(resource: Resource) -> bool:
    return _LOCAL.items() <= resource["metadata"].get("annotations", {}).items()


def _accumulated(folder: Path, resources: list[Resource]) -> list[Resource]:
    """Return `resources`, those of a component's user, with what the kustomization adds and changes."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := kustomization.keys() - _KNOWN:
        raise ValueError(f"{folder}/kustomization.yaml has {sorted(unknown)}, which this renderer does not know")
    for name in kustomization.get("resources", []):
        path = (folder / name).resolve()
        resources = resources + (render(path) if path.is_dir() else _load(path))
    for name in kustomization.get("components", []):
        resources = _accumulated((folder / name).resolve(), resources)
    resources += [_config_map(folder, kustomization, maker) for maker in kustomization.get("configMapGenerator", [])]
    for patch in kustomization.get("patches", []):
        _merge_patch(resources, patch)
    if "namespace" in kustomization:
        for resource in resources:
            if resource["kind"] not in _WITHOUT_NAMESPACE:
                resource["metadata"]["namespace"] = kustomization["namespace"]
    for image in kustomization.get("images", []):
        _set_image(resources, image)
    for replacement in kustomization.get("replacements", []):
        _replace(resources, replacement)
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


def _merge_patch(resources: list[Resource], patch: dict[str, Any]) -> None:
    """Merge a strategic-merge patch, which names its resource itself."""
    content = yaml.safe_load(patch["patch"])
    if patch.keys() != {"patch"} or not isinstance(content, dict) or content["kind"] in _WITH_NAMED_LISTS:
        raise ValueError(f"this renderer merges patches of maps into resources without named lists alone, not {patch}")
    _merge(_selected(resources, kind=content["kind"], name=content["metadata"]["name"])[0], content)


def _merge(into: dict[str, Any], patch: dict[str, Any]) -> None:
    for name, value in patch.items():
        if value is None:
            into.pop(name, None)
        elif isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        else:
            into[name] = value


def _selected(resources: list[Resource], *, kind: str, name: str | None = None) -> list[Resource]:
    found = [one for one in resources if one["kind"] == kind and name in (None, one["metadata"]["name"])]
    if not found:
        raise ValueError(f"a patch or replacement is for {kind} {name or ''}, which is not among the resources")
    return found


def _set_image(node: Any, image: dict[str, str]) -> None:
    """Change name and tag of an image in all containers below `node`, in resources of any kind."""
    if isinstance(node, list):
        for one in node:
            _set_image(one, image)
    elif isinstance(node, dict):
        for container in (*node.get("containers", ()), *node.get("initContainers", ())):
            name, colon, tag = container["image"].partition(":")
            if name == image["name"]:
                tag = f":{image['newTag']}" if "newTag" in image else colon + tag
                container["image"] = image.get("newName", name) + tag
        for one in node.values():
            _set_image(one, image)


def _replace(resources: list[Resource], replacement: dict[str, Any]) -> None:
    source = replacement["source"]
    ((value_of, last),) = _places(
        _selected(resources, kind=source["kind"], name=source["name"])[0], source["fieldPath"], is_made=False
    )
    for target in replacement["targets"]:
        for resource in _selected(resources, **target["select"]):
            for path in target["fieldPaths"]:
                is_made = target.get("options", {}).get("create", False)
                for holder, name in _places(resource, path, is_made=is_made):
                    holder[name] = copy.deepcopy(value_of[last])


def _places(resource: Resource, path: str, *, is_made: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the map and the name in it to which a path such as `spec.groups.[name=a].size` leads."""
    *parts, last = re.findall(r"\[[^\]]*\]|[^.\[\]]+", path)
    node: Any = resource
    for part in parts:
        if part.startswith("["):
            name, _, value = part[1:-1].partition("=")
            (node,) = [one for one in node if one[name] == value]
        else:
            node = node[part]
    if last not in node and not is_made:
        raise ValueError(f"{resource['kind']} has no {path}, and the replacement does not make it")
    yield node, last

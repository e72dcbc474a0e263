"""Make a JSON schema of a KubeRay CRD that is small enough to commit: no descriptions, pods by reference.

    python tests/deploy/condense_crd.py ray.io_rayclusters.yaml > tests/deploy/schemas/raycluster.json

The CRDs of a release of KubeRay (Apache-2.0) are in its folder ray-operator/config/crd/bases. Those here are of v1.7.0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

# Fields that only pods have. Their schema is Kubernetes' own, so it is left to kubernetes-validate.
_POD_FIELDS = frozenset({"containers", "volumes", "affinity"})
# What the API server acts on when it stores a resource; JSON Schema has no such word.
_SERVER_WORDS = ("description", "x-kubernetes-")


def main() -> None:
    crd = yaml.safe_load(Path(sys.argv[1]).read_text())
    (version,) = [one for one in crd["spec"]["versions"] if one["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    print(json.dumps(condense(schema["properties"]["spec"]), separators=(",", ":"), sort_keys=True))


def condense(node: Any) -> Any:
    if isinstance(node, list):
        return [condense(one) for one in node]
    if not isinstance(node, dict):
        return node
    fields = node.get("properties")
    if isinstance(fields, dict) and fields.keys() >= _POD_FIELDS:
        return {"$ref": "pod"}
    if isinstance(fields, dict):
        # Names of fields, which may be those of words, such as "description".
        properties = {name: condense(field) for name, field in fields.items()}
        rest = condense({word: value for word, value in node.items() if word != "properties"})
        # The API server drops fields that it does not know. Here they are errors.
        return rest | {"properties": properties, "additionalProperties": False}
    return {word: condense(value) for word, value in node.items() if not word.startswith(_SERVER_WORDS)}


if __name__ == "__main__":
    main()

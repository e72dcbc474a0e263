"""Make one JSON schema of Grafana's boards that is small enough to commit, from the types that Grafana publishes.

    npm install @grafana/schema@13.2.3 ts-json-schema-generator@2 typescript@5
    python tests/boards/condense_grafana.py node_modules > tests/boards/schemas/grafana.json

Grafana publishes the classic board, the format of dashboards/, as TypeScript types: @grafana/schema (Apache-2.0), one
version per release. ts-json-schema-generator turns them into JSON Schema, where a field that a type lacks is an error.
Left out here: descriptions, and types that no board uses.

The package leaves open what belongs to a data source: the fields of Prometheus' queries (`_TARGET`) and of its
annotations (`_ANNOTATION`) are those of the pinned grafana-foundation-sdk that the boards use.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEXT, FLAG = {"type": "string"}, {"type": "boolean"}
# By the name that a panel's `type` has, the folder of its types.
PANELS = {"timeseries": "timeseries", "stat": "stat", "state-timeline": "statetimeline", "table": "table"}
# Panels whose fields have no settings of their own.
WITHOUT_CUSTOM = frozenset({"stat"})
_TARGET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["refId", "expr"],
    "properties": {
        "refId": TEXT | {"minLength": 1},
        "expr": TEXT | {"minLength": 1},
        "legendFormat": TEXT,
        "format": {"enum": ["time_series", "table", "heatmap"]},
        "instant": FLAG,
        "range": FLAG,
        "datasource": {"$ref": "#/definitions/DataSourceRef"},
    },
}
_ANNOTATION = {
    "expr": TEXT | {"minLength": 1},
    "step": TEXT,
    "tagKeys": TEXT,
    "textFormat": TEXT,
    "titleFormat": TEXT,
    "useValueForTime": FLAG,
}
# Types of other kinds of boards, which may hold anything here.
_UNUSED = frozenset({"Snapshot", "LibraryPanelRef", "Action"})


def main() -> None:
    modules = Path(sys.argv[1])
    raw = modules / "@grafana" / "schema" / "dist" / "types" / "raw"
    schema = generated(modules, raw / "dashboard" / "x" / "types.gen.d.ts", "Dashboard")
    definitions: dict[str, Any] = schema["definitions"]
    for name, folder in PANELS.items():
        path = raw / "composable" / folder / "panelcfg" / "x" / "types.gen.d.ts"
        for kind in ("Options", "FieldConfig"):
            if kind == "FieldConfig" and name in WITHOUT_CUSTOM:
                continue
            found = generated(modules, path, kind)["definitions"]
            # Each panel's own types have the same names.
            definitions[f"{name} {kind}"] = found.pop(kind)
            definitions |= {other: one for other, one in found.items() if other not in definitions}
    definitions["AnnotationQuery"]["properties"] |= _ANNOTATION
    definitions["Panel"]["properties"]["targets"] = {"type": "array", "items": _TARGET}
    definitions["Panel"]["allOf"] = [_of_panel(name) for name in PANELS]
    # One kind by its type, not any of both: so errors name the field.
    row, panel = ({"$ref": f"#/definitions/{kind}"} for kind in ("RowPanel", "Panel"))
    definitions["Dashboard"]["properties"]["panels"]["items"] = {"if": _is("row"), "then": row, "else": panel}
    definitions |= {name: {} for name in _UNUSED & definitions.keys()}
    version = json.loads((modules / "@grafana" / "schema" / "package.json").read_text())["version"]
    condensed = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": f"Condensed from @grafana/schema {version} (Apache-2.0, Grafana Labs) by condense_grafana.py",
        "$ref": "#/definitions/Dashboard",
        "definitions": {name: condense(definitions[name]) for name in sorted(reachable(definitions, "Dashboard"))},
    }
    print(json.dumps(condensed, separators=(",", ":"), sort_keys=True))


def generated(modules: Path, path: Path, name: str) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    with tempfile.TemporaryDirectory(dir=modules.parent) as folder:
        config = {"compilerOptions": {"module": "esnext", "moduleResolution": "bundler", "strict": True}}
        (Path(folder) / "tsconfig.json").write_text(json.dumps(config | {"files": [str(path.resolve())]}))
        command = [modules / ".bin" / "ts-json-schema-generator", "--tsconfig", f"{folder}/tsconfig.json"]
        done = subprocess.run(
            [*command, "--no-type-check", "--path", path, "--type", name], check=True, capture_output=True, text=True
        )
    schema: dict[str, Any] = json.loads(done.stdout)
    return schema


def _of_panel(name: str) -> dict[str, Any]:
    """Return what a panel of this type has besides the fields of all panels."""
    then: dict[str, Any] = {"options": {"$ref": f"#/definitions/{name} Options"}}
    if name not in WITHOUT_CUSTOM:
        custom = {"properties": {"custom": {"$ref": f"#/definitions/{name} FieldConfig"}}}
        then["fieldConfig"] = {"properties": {"defaults": custom}}
    return {"if": _is(name), "then": {"properties": then}}


def _is(kind: str) -> dict[str, Any]:
    return {"properties": {"type": {"const": kind}}, "required": ["type"]}


def reachable(definitions: dict[str, Any], name: str) -> set[str]:
    """Return the names of the definitions that `name` needs, with itself."""
    found, new = {name}, [name]
    while new:
        for other in references(definitions[new.pop()]):
            if other not in found:
                found.add(other)
                new.append(other)
    return found


def references(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for one in node:
            yield from references(one)
    elif isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].removeprefix("#/definitions/")
        for value in node.values():
            yield from references(value)


def condense(node: Any) -> Any:
    """Return `node` without descriptions."""
    if isinstance(node, list):
        return [condense(one) for one in node]
    if not isinstance(node, dict):
        return node
    fields = node.get("properties")
    if isinstance(fields, dict):
        # Names of fields, which may be those of words, such as "description".
        rest = {word: value for word, value in node.items() if word != "properties"}
        return condense(rest) | {"properties": {name: condense(field) for name, field in fields.items()}}
    return {word: condense(value) for word, value in node.items() if word not in ("description", "default")}


if __name__ == "__main__":
    main()

"""JSON Schema, as far as this project's schemas go, compiled to functions.

jsonschema takes 1 ms for a journal's decision about 5 layers, and many seconds for a file that is made to take long. A
whole number has no fraction here, not even 0, since it may be an index.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]
# Says of a value why it does not fit a schema, as in "$.step: 1.5 is not of type 'integer'"; "" if it does.
Check = Callable[[Any], str]
_KEYWORDS = {
    *("type", "description", "required", "properties", "dependentRequired", "additionalProperties", "minProperties"),
    *("items", "minItems", "maxItems", "minimum", "exclusiveMinimum", "maximum", "minLength", "maxLength"),
}


def compile_check(schema: Schema, defs: Schema | None = None) -> Check:
    """Return the check of a schema. `defs`: what it refers to."""
    inside = _compile(schema, defs or {})
    return lambda value: f"${problem}" if (problem := inside(value)) else ""


def _compile(schema: Schema, defs: Schema) -> Check:
    """Return a check whose words lack the "$", as it may be that of a part."""
    if "$ref" in schema:
        return _compile(defs[schema["$ref"].removeprefix("#/$defs/")], defs)
    if "anyOf" in schema:
        choices = [_compile(one, defs) for one in schema["anyOf"]]
        # The longest message is about what is inside the value.
        return lambda value: max(found, key=len) if all(found := [choice(value) for choice in choices]) else ""
    if "const" in schema:
        return lambda value: "" if value == schema["const"] else f": {schema['const']!r} was expected"
    if "enum" in schema:
        allowed = schema["enum"]
        return lambda value: "" if value in allowed else f": {reprlib.repr(value)} is not one of {allowed}"
    assert schema.keys() <= _KEYWORDS, f"{sorted(schema.keys() - _KEYWORDS)} would not be checked"
    names = schema["type"]
    checks: dict[type, Check] = {}
    for name in [names] if isinstance(names, str) else names:
        kinds, make = _TYPES[name]
        checks |= dict.fromkeys(kinds, make(schema, defs))

    def check(value: Any) -> str:
        found = checks.get(type(value))
        return found(value) if found is not None else f": {reprlib.repr(value)} is not of type {names!r}"

    return check


def _number(schema: Schema, defs: Schema) -> Check:
    low, above, high = (
        schema.get(name, otherwise)
        for name, otherwise in (("minimum", -math.inf), ("exclusiveMinimum", -math.inf), ("maximum", math.inf))
    )
    allowed = ", ".join(
        f"{name} {schema[name]}" for name in ("minimum", "exclusiveMinimum", "maximum") if name in schema
    )
    return lambda value: "" if low <= value <= high and value > above else f": {value!r} is not allowed ({allowed})"


def _text(schema: Schema, defs: Schema) -> Check:
    least, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    return lambda value: (
        "" if least <= len(value) <= most else f": {len(value)} characters where {least} to {most} are allowed"
    )


def _array(schema: Schema, defs: Schema) -> Check:
    item = _compile(schema["items"], defs)
    least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)

    def check(values: list[Any]) -> str:
        if not least <= len(values) <= most:
            return f": {len(values)} items where {least} to {most} are allowed"
        return next((f"[{index}]{problem}" for index, value in enumerate(values) if (problem := item(value))), "")

    return check


def _object(schema: Schema, defs: Schema) -> Check:
    required = frozenset(schema.get("required", ()))
    together = [(key, frozenset(others)) for key, others in schema.get("dependentRequired", {}).items()]
    known = {key: _compile(one, defs) for key, one in schema.get("properties", {}).items()}
    least, others_schema = schema.get("minProperties", 0), schema.get("additionalProperties", True)
    other = _compile(others_schema, defs) if isinstance(others_schema, dict) else None

    def check(value: dict[str, Any]) -> str:
        missing = required - value.keys()
        for key, others in together:
            missing |= others - value.keys() if key in value else frozenset()
        if missing:
            return f": {min(missing)!r} is a required property"
        if len(value) < least:
            return f": {len(value)} properties where at least {least} are allowed"
        if others_schema is False and (unknown := value.keys() - known.keys()):
            return f": Additional properties are not allowed ({min(unknown)!r:.80} was unexpected)"
        for key, one in value.items():
            found = known.get(key, other)
            if found is not None and (problem := found(one)):
                return f".{key:.80}{problem}"
        return ""

    return check


def _any(schema: Schema, defs: Schema) -> Check:
    return lambda value: ""


_TYPES: Mapping[str, tuple[tuple[type, ...], Callable[[Schema, Schema], Check]]] = {
    "object": ((dict,), _object),
    "array": ((list,), _array),
    "string": ((str,), _text),
    "integer": ((int,), _number),
    "number": ((int, float), _number),
    "boolean": ((bool,), _any),
    "null": ((type(None),), _any),
}

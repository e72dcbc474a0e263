"""Check the types of fields that were read from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any

FieldType = tuple[type | UnionType, str]

NUMBER: FieldType = (int | float, "a number")
WHOLE: FieldType = (int, "a whole number")
TEXT: FieldType = (str, "a text")
OBJECT: FieldType = (dict, "an object")
OPTIONAL_WHOLE: FieldType = (int | None, "a whole number or left out")
OPTIONAL_BOOL: FieldType = (bool | None, "true, false or left out")


def check_fields(line: Mapping[str, Any], types: Mapping[str, FieldType]) -> None:
    """Raise KeyError for a missing field and TypeError for one of another type. "new.plan" is a field inside "new"."""
    for name, (kind, allowed) in types.items():
        value: Any = line
        for key in name.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise KeyError(name)
            value = value[key]
        if not isinstance(value, kind):
            raise TypeError(f"{name} {value!r} is not allowed; it is {allowed}")

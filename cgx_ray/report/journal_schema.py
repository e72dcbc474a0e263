"""The journal's own schema, which every line is checked by when it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cgx_ray.json_schema import Check, Schema, compile_check

# Format of decisions.jsonl that this version reads.
JOURNAL_FORMAT = 1
JOURNAL_SCHEMA = Path(__file__).with_name("journal.schema.json")
# Seconds since 1970, up to the year 9999, the last one of Python's calendar.
TIME: Schema = {"type": "number", "minimum": 0, "maximum": 253402300799}


def journal_problem(entry: Any) -> str:
    """Return why `entry` is no line of a journal; "" if it is one.

    A line of an unknown event, or the start of a later format, is another version's.
    """
    general, by_event = _journal_checks()
    if problem := general(entry):
        return problem
    number = entry.get("format") if entry["event"] == "start" else None
    is_known = entry["event"] in by_event and not (isinstance(number, int) and number > JOURNAL_FORMAT)
    return by_event[entry["event"]](entry) if is_known else ""


@cache
def _journal_checks() -> tuple[Check, Mapping[str, Check]]:
    """Return the check of every line, and of the lines of each event."""
    schema = json.loads(JOURNAL_SCHEMA.read_text())
    defs = schema["$defs"]
    general = {name: schema[name] for name in ("type", "required", "properties")}
    events = [one["if"]["properties"]["event"]["const"] for one in schema["allOf"]]
    return compile_check(general, defs), {event: compile_check(defs[event], defs) for event in events}

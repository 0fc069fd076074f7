"""The documentation of fields, and the JSON schema of run files for editors and validators.

It checks names, types, ranges and choices of fields. Rules across fields need `trainyard show`.
"""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from trainyard.config.load import walk_fields
from trainyard.config.run import Run
from trainyard.config.section import describe_fields

_EXTENDS = {"type": "string", "description": "A preset, or another run file, to start from."}
_INTERVAL = {
    "type": "string",
    "pattern": r"^\s*[0-9][0-9_,.]*\s*([kKMBGT]? steps|(second|minute|hour|day|week)s?\s*)$",
    "examples": ["30 minutes", "500 steps"],
}
_LENGTH = {
    "type": "string",
    "pattern": r"^\s*[0-9][0-9_,]*(\.[0-9]+)?\s*[kKMBGT]? (tokens|sequences|steps)\s*$",
    "examples": ["300B tokens", "1.5M sequences", "2000 steps"],
}

_POINTS = {"type": "string", "examples": ["0: 0, 2000 steps: 6e-4, 1B tokens: 6e-5"]}


def field_manuals(section: type[BaseModel] = Run) -> dict[str, str]:
    """Maps every dotted field name of a run file to its documentation."""
    manuals: dict[str, str] = {}
    for field, kind, name in walk_fields(section):
        manuals[field] = describe_fields(kind).get(name, "")
        annotation = kind.model_fields[name].annotation
        if get_origin(annotation) is Literal:
            manuals[field] += f" One of {', '.join(get_args(annotation))}."
    return manuals


def run_schema() -> dict[str, Any]:
    """Returns the schema (JSON Schema, draft 2020-12) of a run file."""
    schema = Run.model_json_schema(mode="validation")
    schema["$defs"]["Length"] = _LENGTH
    schema["$defs"]["RatePoints"] = _POINTS
    schema["$defs"]["Duration"] = _INTERVAL
    schema["properties"] = {"extends": _EXTENDS, **schema["properties"]}
    split = schema["$defs"]["Data"]["properties"]["split"]
    split["type"] = ["string", "number"]
    _let_none_be_named(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Trainyard run file",
    }


def render_schema() -> str:
    """Returns the schema as the text of a file."""
    return json.dumps(run_schema(), indent=1) + "\n"


def _let_none_be_named(schema: Any) -> None:
    """Replaces null, which TOML lacks, by the text "none"."""
    if isinstance(schema, dict):
        for choice in schema.get("anyOf", ()):
            if choice == {"type": "null"}:
                choice.clear()
                choice["const"] = "none"
        if schema.get("default", "") is None:
            del schema["default"]
        for inner in schema.values():
            _let_none_be_named(inner)
    elif isinstance(schema, list):
        for inner in schema:
            _let_none_be_named(inner)

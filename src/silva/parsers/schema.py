"""JSON values from bare text: formats without types take them from the tool's parameter schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from silva.parsers.literals import checked_json, python_value, quoted
from silva.parsers.parts import Tools

Schema = Mapping[str, object]
_KINDS: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
MAX_LINKS = 16
"""How many `$ref`, `anyOf` and the like are followed into each other."""


def parameters_of(tools: Tools, name: str) -> Schema:
    """The parameter schema of a tool; empty where it is not known."""
    for tool in tools or ():
        function = _mapping(tool.get("function"))
        if function.get("name") == name:
            return _mapping(function.get("parameters"))
    return {}


def typed_text(raw: str, parameters: Schema, key: str) -> str:
    """The JSON text of the argument `key` that was written as `raw`.

    A value of a type that the schema names, else a string. Texts that are JSON already stay as they were written.
    """
    kinds = _kinds(_mapping(_mapping(parameters.get("properties")).get(key)), parameters, MAX_LINKS)
    if kinds - {"string"}:
        for read in (checked_json, python_value):
            found = read(raw)
            if found is not None and _kind(found[0]) & kinds:
                return found[1]
    return quoted(raw)


def json_or_string(raw: str) -> str:
    """`raw` where it is JSON, else the JSON string of it."""
    found = checked_json(raw)
    return quoted(raw) if found is None else found[1]


def _kind(value: object) -> frozenset[str]:
    kind = _KINDS[type(value)]
    whole = kind == "integer" or (isinstance(value, float) and value.is_integer())
    return frozenset({"number", "integer"} if whole else {kind})


def _kinds(schema: Schema, root: Schema, links: int) -> frozenset[str]:
    """JSON types that a schema allows; empty where it names none."""
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(str(kind) for kind in cast("list[object]", named))
    if links == 0:
        return frozenset()
    kinds: frozenset[str] = frozenset()
    for word in ("anyOf", "oneOf", "allOf"):
        for part in _sequence(schema.get(word)):
            kinds |= _kinds(_mapping(part), root, links - 1)
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#/"):
        found = root
        for step in target[2:].split("/"):
            found = _mapping(found.get(step))
        kinds |= _kinds(found, root, links - 1)
    values = [*_sequence(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    for value in values:
        kinds |= _kind(value) if type(value) in _KINDS else frozenset()
    return kinds


def _mapping(value: object) -> Schema:
    return cast(Schema, value) if isinstance(value, Mapping) else {}


def _sequence(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []

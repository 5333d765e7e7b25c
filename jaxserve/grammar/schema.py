"""Which JSON schemas we enforce. A keyword that we do not is refused by name, never ignored.

Strings with a format are held to its syntax (a date has a month and a day), not to a calendar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxserve.grammar.spec import MAX_CHARS, GrammarRefused, check_pattern

MAX_DEPTH = 64
MAX_NODES = 20_000

# Where schemas hold schemas.
ONE = {"items", "additionalProperties"}
LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
MAPS = {"properties", "patternProperties", "$defs", "definitions"}
# What else constrains values and is enforced.
ASSERTIONS = {
    "type", "enum", "const", "$ref", "required", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "format", "minItems",
    "maxItems", "minProperties", "maxProperties",
}  # fmt: skip
# What describes and allows everything, by the JSON Schema specification.
ANNOTATIONS = {
    "title", "description", "default", "examples", "example", "$comment", "$schema", "$id",
    "$anchor", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType",
    "contentSchema",
}  # fmt: skip
KNOWN = ONE | LISTS | MAPS | ASSERTIONS | ANNOTATIONS


def check_schema(schema: Any) -> None:
    """Raises GrammarRefused for a schema that is too large, too deep or not enforced in full.

    Works without recursion: a schema may be nested as deep as its sender likes.
    """
    _check_size(schema)
    waiting = [(schema, "the schema")]
    while waiting:
        node, where = waiting.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, Mapping):
            raise GrammarRefused(f"{where} is {_shown(node)}, not a schema")
        _check_keywords(node, where)
        waiting.extend(_subschemas(node, where))


def _check_size(value: Any) -> None:
    waiting, count, chars = [(value, 0)], 0, 0
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise GrammarRefused(f"the schema is nested deeper than {MAX_DEPTH}")
        children = ()
        if isinstance(node, Mapping):
            children = [*node.keys(), *node.values()]
        elif isinstance(node, (list, tuple)):
            children = node
        elif isinstance(node, str):
            chars += len(node)
        elif not isinstance(node, (int, float, type(None))):
            raise GrammarRefused(f"the schema holds a {type(node).__name__}, which is not JSON")
        waiting.extend((child, depth + 1) for child in children)
        if count + len(waiting) > MAX_NODES or chars > MAX_CHARS:
            raise GrammarRefused(
                f"the schema is too large: at most {MAX_NODES} values and {MAX_CHARS} characters"
            )


def _check_keywords(node: Mapping, where: str) -> None:
    for keyword, value in node.items():
        if keyword in KNOWN or (keyword.startswith("x-") and keyword != "x-guidance"):
            continue
        raise GrammarRefused(f"{where} uses {keyword!r} ({_shown(value)}), which is not enforced")
    if "pattern" in node:
        check_pattern(node["pattern"], f"the pattern of {where}")
    for pattern in node.get("patternProperties", {}):
        check_pattern(pattern, f"a patternProperties key of {where}")
    reference = node.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise GrammarRefused(f"{where} refers to {_shown(reference)}; only '#...' is followed")


def _subschemas(node: Mapping, where: str) -> Iterator[tuple[Any, str]]:
    for keyword in node.keys() & (ONE | LISTS | MAPS):
        value = node[keyword]
        place = f"{where} / {keyword}"
        if keyword in ONE:
            yield value, place
        elif keyword in LISTS and isinstance(value, list):
            yield from ((part, f"{place} / {n}") for n, part in enumerate(value))
        elif keyword in MAPS and isinstance(value, Mapping):
            yield from ((part, f"{place} / {name}"[:200]) for name, part in value.items())
        else:
            raise GrammarRefused(f"{place} is {_shown(value)}")


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]

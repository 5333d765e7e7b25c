"""A tool's arguments as Lark, in each way that models write them.

Every function here takes (name, schema, literal, part): the tool's name, its parameters' schema,
what makes Lark of a text, and what names an expression that stands in several places. They raise
GrammarRefused for schemas that the notation cannot be held to.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterable

from jaxserve.grammar.schema import ANNOTATIONS
from jaxserve.grammar.spec import GrammarRefused, schema_options
from jaxserve.tokenizer.tools.tagged import kinds_of

DEFINITIONS = ("$defs", "definitions")


def as_json(name: str, schema: dict, literal, part) -> str:
    return json_value(schema)


def as_python(name: str, schema: dict, literal, part) -> str:
    """key=value, ... with JSON values, of which the parser reads true, false and null too."""
    parts = []
    for key, value, required in properties(f"{name}.parameters", schema, "pythonic"):
        if not key.isidentifier() or keyword.iskeyword(key):
            raise GrammarRefused(f"{name}.parameters: {key!r} cannot be an argument's name")
        parts.append((part(f"{literal(f'{key}=')} {json_value(value)}"), required))
    return in_order(parts, literal(", "))


def as_tags(name: str, schema: dict, literal, part) -> str:
    """<parameter=key> value </parameter>, a line each: bare text for strings, else JSON."""
    parts = []
    for key, value, required in properties(f"{name}.parameters", schema, "qwen3_coder"):
        if re.search(r"[<>\n]", key):
            raise GrammarRefused(f"{name}.parameters: {key!r} cannot be an argument's name")
        text = _bare_text(f"{name}.parameters / {key}", value, literal)
        shown = f"{literal(f'<parameter={key}>' + chr(10))} {text}"
        parts.append(f"{shown}" if required else f"({shown})?")
    return " ".join(parts)


def _bare_text(where: str, schema: dict | bool, literal) -> str:
    """A value and the end of its tag."""
    end = "\n</parameter>\n"
    if kinds_of(schema) != {"string"}:
        return f"{json_value(schema)} {literal(end)}"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if unknown := sorted(schema.keys() - {"type", "enum", "const", *DEFINITIONS, *ANNOTATIONS}):
        raise GrammarRefused(f"{where}: {unknown[0]!r} is not enforced in qwen3_coder calls")
    if values is None:
        return "bare_text"
    texts = [value for value in values if isinstance(value, str) and "</parameter>" not in value]
    if not texts:
        raise GrammarRefused(f"{where}: no value that can be written as bare text")
    return f"({' | '.join(literal(text + end) for text in texts)})"


def in_order(parts: list[tuple[str, bool]], comma: str) -> str:
    """The parts, each with whether it must be there, in this order with commas between."""
    beginnings = []
    for i, (part, required) in enumerate(parts):
        rest = [f"{comma} {p}" if needed else f"({comma} {p})?" for p, needed in parts[i + 1 :]]
        beginnings.append(" ".join([part, *rest]))
        if required:
            return f"({' | '.join(beginnings)})"
    return f"({' | '.join(beginnings)})?" if beginnings else ""


def properties(where: str, schema: dict, format: str) -> Iterable[tuple[str, dict | bool, bool]]:
    """(key, its schema, whether it is required) of each property, in the schema's order."""
    properties = schema.get("properties", {})
    known = {"type", "properties", "required", "additionalProperties", *DEFINITIONS, *ANNOTATIONS}
    if unknown := sorted(schema.keys() - known):
        raise GrammarRefused(f"{where}: {unknown[0]!r} is not enforced in {format} calls")
    if missing := sorted(set(schema.get("required", ())) - properties.keys()):
        raise GrammarRefused(f"{where}: {missing[0]!r} is required and no property")
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    for key, value in properties.items():
        value = {**definitions, **value} if isinstance(value, dict) else value
        yield key, value, key in schema.get("required", ())


def json_value(schema: dict | bool) -> str:
    schema = {} if schema is True else schema
    return f"%json {json.dumps({**schema, **schema_options()}, ensure_ascii=False)}"

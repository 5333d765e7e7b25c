"""A tool's arguments as Lark in Gemma 4's notation: JSON with bare keys, and strings between
tokens of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from jaxserve.grammar.arguments import DEFINITIONS, in_order, json_value, properties
from jaxserve.grammar.schema import ANNOTATIONS
from jaxserve.grammar.spec import GrammarRefused
from jaxserve.tokenizer.tools.gemma import QUOTE
from jaxserve.tokenizer.tools.tagged import kinds_of

# What the rules made here use.
RULES = {
    "QUOTED": r"/(.|\n)*/",  # up to the token that ends it
    "quoted[lazy]": r"/(.|\n)*" + re.escape(QUOTE) + "/",  # where that is no token but text
    "KEY": r"/[\w.$-]+/",
}
_MAX_DEPTH = 16
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


def as_gemma(name: str, schema: dict, literal, part) -> str:
    """key:value,... as the functions of jaxserve.grammar.arguments write it. Raises
    GrammarRefused."""
    return _Values(literal, part).members(f"{name}.parameters", schema, 0)


class _Values:
    """Values, spelled out by their schemas. where: a schema's place, for messages."""

    def __init__(self, literal, part):
        self._literal, self._part = literal, part
        quote = literal(QUOTE)
        part(f"{quote} QUOTED {quote}" if literal.is_token(QUOTE) else f"{quote} quoted", "string")
        member = '(string | KEY) ":" anything'
        part(f'"{{" ({member} ("," {member})*)? "}}"', "any_object")
        scalar = json_value({"type": ["number", "boolean", "null"]})
        part(f'string | {scalar} | any_object | "[" (anything ("," anything)*)? "]"', "anything")

    def members(self, where: str, schema: dict, depth: int) -> str:
        """An object without its braces, sorted by key as Gemma's template sorts it."""
        parts = []
        for key, value, required in sorted(properties(where, schema, "gemma4"), key=_first):
            if not re.fullmatch(r"[\w.$-]+", key):
                raise GrammarRefused(f"{where}: {key!r} cannot be an argument's name")
            text = f"{self._literal(f'{key}:')} {self._value(f'{where} / {key}', value, depth + 1)}"
            parts.append((self._part(text), required))
        return in_order(parts, self._literal(","))

    def _value(self, where: str, schema: dict | bool, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise GrammarRefused(f"{where}: nested deeper than {_MAX_DEPTH} in gemma4 calls")
        if schema is False:
            raise GrammarRefused(f"{where}: nothing satisfies the schema false")
        schema = {} if schema is True else schema
        asserted = schema.keys() - ANNOTATIONS - set(DEFINITIONS)
        if not asserted:
            return "anything"
        if asserted == {"$ref"}:
            return self._value(where, _inside(schema, _definition(where, schema)), depth + 1)
        if asserted == {"anyOf"}:
            ways = [self._value(where, _inside(schema, way), depth + 1) for way in schema["anyOf"]]
        elif asserted & {"const", "enum"}:
            ways = [self._literal(text) for text in _texts(where, schema, asserted)]
        else:
            kinds = kinds_of(schema) or ({"object"} if "properties" in schema else set())
            ways = [self._of_kind(kind, where, schema, asserted, depth) for kind in sorted(kinds)]
        if not ways:
            raise GrammarRefused(f"{where}: {min(asserted)!r} needs a type in gemma4 calls")
        return f"({' | '.join(ways)})"

    def _of_kind(self, kind: str, where: str, schema: dict, asserted: set, depth: int) -> str:
        if kind == "object":
            if asserted == {"type"}:
                return "any_object"
            return f'"{{" {self.members(where, {**schema, "type": kind}, depth)} "}}"'
        if kind == "array":
            _check(where, asserted, {"type", "items", "minItems", "maxItems"})
            return self._array(where, schema, depth)
        if kind == "string":
            _check(where, asserted, {"type"})
            return "string"
        _check(where, asserted, {"type", *_BOUNDS})
        return json_value({"type": kind} | {key: schema[key] for key in asserted & _BOUNDS})

    def _array(self, where: str, schema: dict, depth: int) -> str:
        item = self._value(where, _inside(schema, schema.get("items", True)), depth + 1)
        item, low, high = self._part(item), schema.get("minItems", 0), schema.get("maxItems")
        if high == 0:
            return '"[" "]"'
        counts = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        items = f'{item} ("," {item}){counts}'
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'


def _first(member: tuple) -> str:
    return member[0]


def _inside(schema: dict, value: dict | bool) -> dict | bool:
    """A schema inside another, which may refer to the other's definitions."""
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    return {**definitions, **value} if isinstance(value, dict) else value


def _definition(where: str, schema: dict) -> dict | bool:
    """What $ref points to."""
    _, *path = schema["$ref"].split("/")
    if len(path) == 2 and path[0] in DEFINITIONS:
        found: Any = schema.get(path[0], {}).get(path[1])
        if isinstance(found, dict | bool):
            return found
    raise GrammarRefused(f"{where}: $ref {schema['$ref']!r} is not followed in gemma4 calls")


def _check(where: str, asserted: set[str], enforced: Iterable[str]) -> None:
    if unknown := asserted.difference(enforced):
        raise GrammarRefused(f"{where}: {min(unknown)!r} is not enforced in gemma4 calls")


def _texts(where: str, schema: dict, asserted: set[str]) -> list[str]:
    """What const or enum allows, as it is written."""
    _check(where, asserted, {"type", "const", "enum"})
    values = [schema["const"]] if "const" in schema else schema["enum"]
    texts = []
    for value in values:
        if isinstance(value, dict | list):
            raise GrammarRefused(f"{where}: only plain values are listed in gemma4 calls")
        if not isinstance(value, str):
            texts.append(json.dumps(value))
        elif QUOTE not in value:
            texts.append(f"{QUOTE}{value}{QUOTE}")
    return texts

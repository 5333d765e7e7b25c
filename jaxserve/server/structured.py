"""What a request says about the form of its output, in OpenAI's words and in vLLM's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxserve.grammar import GrammarRefused, GrammarSpec
from jaxserve.server.errors import ApiError, quote
from jaxserve.server.protocol import Generating

# Field, or key of structured_outputs -> what makes a grammar of its value.
_MAKERS: dict[str, Callable[[Any], GrammarSpec]] = {
    "json": GrammarSpec.json_schema,
    "regex": GrammarSpec.regex,
    "choice": GrammarSpec.choice,
    "grammar": GrammarSpec.lark,
}
_KINDS = {"json": (dict, str), "regex": str, "choice": list, "grammar": str}


def grammar_of(body: Generating) -> Callable[[], GrammarSpec] | None:
    """What makes the grammar that the output must follow, None without one. Making it may take some
    milliseconds; both raise ApiError."""
    asked = []  # (field to blame, maker, value)
    form = body.response_format
    if form is not None and form.get("type") != "text":
        asked.append(("response_format", _from_response_format, form))
    for name, maker in _MAKERS.items():
        value = getattr(body, f"guided_{name}")
        if value is not None:
            asked.append((f"guided_{name}", maker, value))
    for name, value in (body.structured_outputs or {}).items():
        if value is not None:
            asked.append(("structured_outputs", _maker_of(name), value))
    if len(asked) > 1:
        names = " and ".join(name for name, _, _ in asked)
        raise ApiError(400, f"{names}: give one of them", "invalid_value", asked[1][0])
    for name, maker, value in asked:
        return functools.partial(_made, maker, value, name)
    return None


def grammar_of_format(form: Any, field: str) -> GrammarSpec | None:
    """The grammar of a response_format that came in `field`; None for text."""
    if isinstance(form, dict) and form.get("type") == "text":
        return None
    return _made(_from_response_format, form, field)


def _made(maker: Callable[[Any], GrammarSpec], value: Any, field: str) -> GrammarSpec:
    try:
        return dataclasses.replace(maker(value), field=field)
    except GrammarRefused as error:
        raise ApiError(400, f"{field}: {error}", "invalid_grammar", field) from None


def _maker_of(name: str) -> Callable[[Any], GrammarSpec]:
    if name == "json_object":
        return lambda wanted: GrammarSpec.json_object()
    if name not in _MAKERS:
        raise ApiError(
            400, f"structured_outputs.{name}: unknown", "unknown_field", "structured_outputs"
        )
    kinds, maker = _KINDS[name], _MAKERS[name]

    def checked(value):
        if not isinstance(value, kinds):
            raise GrammarRefused(f"{name} has the wrong type")
        return maker(value)

    return checked


def _from_response_format(form: Any) -> GrammarSpec:
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        return GrammarSpec.json_object()
    if kind != "json_schema":
        raise GrammarRefused(f"type {quote(kind)} is not text, json_object or json_schema")
    wrapper = form.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict | bool):
        raise GrammarRefused("json_schema.schema must be a schema object")
    return GrammarSpec.json_schema(schema)

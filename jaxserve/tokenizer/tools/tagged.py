"""Calls in tags, an argument each: <function=name><parameter=key>value</parameter></function>."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.tokenizer.tools.parser import ToolParser

JSON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as models write them too
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object",
         list: "array", type(None): "null"}  # fmt: skip


class Qwen3CoderParser(ToolParser):
    """Qwen3-Coder and Qwen 3.5. Values are bare text, and the tool's schema says what they mean. An
    argument leaves when it is whole."""

    name = "qwen3_coder"
    marks = ("<tool_call>", "</tool_call>")

    def _read(self):
        while (yield from self._until("<tool_call>")):
            if (yield from self._function()):
                yield from self._text_up_to("</tool_call>")
                self._seen.clear()
            else:
                self._give_back()
        yield from self._rest()

    def _function(self):
        if (yield from self._word()) != "<" or not (yield from self._follows("function=")):
            return False
        name = yield from self._text_up_to(">")
        if name is None or not self._callable(name):
            return False
        self._begin(name)
        before = "{"
        while (yield from self._word()) == "<":
            tag = yield from self._text_up_to(">")
            if tag == "/function":
                self._arguments("{}" if before == "{" else "}")
                break
            key, value = (tag or "").removeprefix("parameter="), None
            if key != tag:
                value = yield from self._text_up_to("</parameter>")
            if value is None:
                break  # what has come of a malformed call stays
            value = value.removeprefix("\n").removesuffix("\n")
            shown = typed(value, kinds_of(self._schema(name, key)))
            self._arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {shown}")
            before = ", "
        return True

    def _schema(self, name: str, key: str) -> Any:
        """The schema of an argument, as far as the client has given one."""
        parameters = self._functions.get(name)
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        return properties.get(key) if isinstance(properties, dict) else None


def kinds_of(schema: Any) -> set[str] | None:
    """Names of the types that a schema allows; None if it does not say."""
    if not isinstance(schema, dict):
        return None
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return {KINDS[type(value)] for value in values}
    return None


def typed(text: str, kinds: set[str] | None) -> str:
    """A bare value as JSON text: a string if it may be one and reads as nothing else."""
    if kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    written = JSON_WORDS.get(text.strip(), text.strip())
    try:
        kind = KINDS[type(json.loads(written, parse_constant=_no_number))]
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)
    if fits or "string" not in kinds:
        return written
    return json.dumps(text, ensure_ascii=False)


def _no_number(name: str):
    raise ValueError(f"{name} is not JSON")

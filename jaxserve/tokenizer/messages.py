"""Messages in OpenAI's shapes, made into what chat templates expect."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.tokenizer.sandbox import TemplateError

MAX_DEPTH = 64  # nesting of messages, tools and template arguments
ROLE = re.compile(r"[A-Za-z_]{1,32}")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a template reads messages.

    parts: content may be a list of parts; for others several parts become one text, on lines of
    their own. none: it tells a missing content from an empty one. objects: the arguments of tool
    calls are objects, not JSON text. developer: it knows that role; for others it is system.
    """

    parts: bool = False
    none: bool = False
    objects: bool = True
    developer: bool = False


def template_message(message: Any, spell: Callable[[str], str], reading: Reading) -> dict:
    """A copy of one message as a template reads it, every string in it put through `spell`.

    Raises TemplateError naming what is wrong with the message.
    """
    if not isinstance(message, Mapping):
        raise TemplateError(f"a message is a {type(message).__name__}; send objects with a role")
    role = message.get("role")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise TemplateError(f"a message's role is {role!r:.80}; use system, user, assistant, tool")
    if role == "developer" and not reading.developer:
        role = "system"
    made = {"role": role, "content": _content(message.get("content"), role, spell, reading)}
    if message.get("tool_calls"):
        calls = json_copy(message["tool_calls"], str, "tool_calls")
        made["tool_calls"] = [_tool_call(call, spell, reading) for call in calls]
        if message.get("content") is None and reading.none:
            made["content"] = None
    rest = {key: value for key, value in message.items() if key not in (*made, "tool_calls")}
    return made | json_copy(rest, spell, f"the {role} message")


def json_copy(value: Any, spell: Callable[[str], str], what: str, depth: int = 0) -> Any:
    """A deep copy of JSON data with every string, keys too, put through `spell`."""
    if depth > MAX_DEPTH:
        raise TemplateError(f"{what}: nested deeper than {MAX_DEPTH}")
    if isinstance(value, str):
        return spell(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        copy = lambda part: json_copy(part, spell, what, depth + 1)
        return {copy(key): copy(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_copy(part, spell, what, depth + 1) for part in value]
    raise TemplateError(f"{what}: a {type(value).__name__} is not JSON")


def _content(content: Any, role: str, spell: Callable[[str], str], reading: Reading) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return spell(content)
    if not isinstance(content, Sequence):
        raise TemplateError(
            f"the {role} message's content is a {type(content).__name__}; send text"
        )
    texts = [spell(_part_text(part, role)) for part in content]
    if reading.parts and len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: Any, role: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(TEXT_PARTS[kind]) if kind in TEXT_PARTS else None
    if not isinstance(text, str):
        raise TemplateError(
            f"the {role} message has a content part of type {kind!r:.80}; this model reads text "
            'only: {"type": "text", "text": ...}'
        )
    return text


def _tool_call(call: Any, spell: Callable[[str], str], reading: Reading) -> dict:
    """Arguments as an object or as JSON text, whichever the template reads; `spell` sees them
    without JSON's escapes."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TemplateError("a tool call has no function name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise TemplateError(
                f"the arguments of the call to {function['name']!r:.80} are not JSON"
            ) from None
    if not isinstance(arguments, dict):
        raise TemplateError(f"the arguments of {function['name']!r:.80} are not a JSON object")
    call = {**call, "function": {**function, "arguments": arguments}}
    call = json_copy(call, spell, "tool_calls")
    if not reading.objects:
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        call["function"]["arguments"] = text
    return call

"""Messages in OpenAI's shapes, made into what chat templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.tokenizer.sandbox import TemplateError

MAX_DEPTH = 64  # nesting of messages, tools and template arguments
ROLE = re.compile(r"[A-Za-z_]{1,32}")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def template_message(
    message: Any, spell: Callable[[str], str], *, parts: bool, takes_objects: Callable[[], bool]
) -> dict:
    """A copy of one message for a template.

    spell: applied to every string in it, the role aside. parts: the template reads content as a
    list of parts; otherwise several parts become one text, on lines of their own. takes_objects:
    whether tool call arguments become objects; asked only where there are any. Raises
    TemplateError naming what is wrong.
    """
    if not isinstance(message, Mapping):
        raise TemplateError(f"a message is a {type(message).__name__}; send objects with a role")
    role = message.get("role")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise TemplateError(
            f"the role of a message is {role!r:.80}; use system, user, assistant, tool"
        )
    rest = {k: v for k, v in message.items() if k not in ("role", "content", "tool_calls")}
    made = {"role": role, **json_copy(rest, spell, f"the {role} message")}
    made["content"] = _content(message.get("content"), role, spell, parts)
    if message.get("tool_calls"):
        calls = json_copy(message["tool_calls"], spell, "tool_calls")
        made["tool_calls"] = [_tool_call(call, takes_objects()) for call in calls]
    return made


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


def _content(content: Any, role: str, spell: Callable[[str], str], parts: bool) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return spell(content)
    if not isinstance(content, Sequence):
        raise TemplateError(
            f"the {role} message's content is a {type(content).__name__}; send text"
        )
    texts = [spell(_part_text(part, role)) for part in content]
    if parts and len(texts) > 1:
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


def _tool_call(call: Any, as_object: bool) -> dict:
    """Arguments as an object or as JSON text, whichever the template reads."""
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
    if not as_object:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}

"""Chat messages to token ids: checks, the shapes that templates expect, the template itself."""

from __future__ import annotations

import orjson

from jaxserve.server.errors import ApiError, quote
from jaxserve.server.protocol import ChatRequest, Message
from jaxserve.server.service import Service

MAX_MESSAGES = 4096
# Template variables that belong to the server: a client that sets them would rewrite the prompt.
RESERVED = frozenset([
    "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize",
    "return_tensors", "return_dict", "chat_template", "conversation", "documents", "bos_token",
    "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now",
])  # fmt: skip


async def encode_chat(service: Service, body: ChatRequest) -> list[int]:
    """Prompt ids of the conversation; raises ApiError for what the template or context refuses."""
    messages = template_messages(body.messages)
    extra = dict(getattr(body, "chat_template_kwargs", None) or {})
    for name in extra:
        if name in RESERVED:
            message = f"chat_template_kwargs: {name} cannot be set by a request"
            raise ApiError(400, message, "invalid_value", "chat_template_kwargs")
    if getattr(body, "reasoning_effort", None) is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    service.check_chars(sum(map(_characters, messages)), "messages")
    generation_prompt = body.add_generation_prompt is not False
    ids = await service.in_thread(_render, service.tokenizer, messages, generation_prompt, extra)
    service.check_prompt(ids, "messages")
    return ids


def _render(tokenizer, messages: list[dict], generation_prompt: bool, extra: dict) -> list[int]:
    """Runs the template; its own complaints (TemplateError is a ValueError) become a 400."""
    try:
        return tokenizer.encode_chat(messages, add_generation_prompt=generation_prompt, **extra)
    except ValueError as error:
        raise ApiError(400, f"messages: {error}", "invalid_messages", "messages") from None


def template_messages(messages: list[Message]) -> list[dict]:
    """Messages as templates know them: plain text, decoded tool arguments, no absent keys."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        message = f"messages: {len(messages)} of them; there must be 1 to {MAX_MESSAGES}"
        raise ApiError(400, message, "invalid_value", "messages")
    return [_template_message(message, i) for i, message in enumerate(messages)]


def _template_message(message: Message, position: int) -> dict:
    where = f"messages.{position}"
    shaped = {"role": "system" if message.role == "developer" else message.role}
    if message.content is None and message.role != "assistant":
        raise ApiError(400, f"{where}.content: missing", "invalid_value", "messages")
    shaped["content"] = _text(message, where)
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            shaped[name] = getattr(message, name)
    if message.tool_calls:
        shaped["tool_calls"] = [_template_call(call, where) for call in message.tool_calls]
    return shaped


def _text(message: Message, where: str) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    texts = []
    for part in message.content:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal", "input_text", "output_text") or text is None:
            rule = f"{where}.content: parts of type {quote(part.type)} are not supported, only text"
            raise ApiError(400, rule, "unsupported_value", "messages")
        texts.append(text)
    return "\n".join(texts)


def _template_call(call, where: str) -> dict:
    """Clients send arguments as JSON text; templates iterate over them as a mapping."""
    try:
        arguments = orjson.loads(call.function.arguments or "{}")
    except orjson.JSONDecodeError:
        rule = f"{where}.tool_calls: arguments of {quote(call.function.name)} are not valid JSON"
        raise ApiError(400, rule, "invalid_value", "messages") from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _characters(message: dict) -> int:
    return len(message["content"]) + sum(
        len(str(call["function"])) for call in message.get("tool_calls", ())
    )

"""Chat messages to token ids, off the event loop. The tokenizer knows what templates expect."""

from __future__ import annotations

from jaxserve.server.errors import ApiError
from jaxserve.server.protocol import ChatRequest, Message, TokenizeRequest
from jaxserve.server.service import Service
from jaxserve.tokenizer.chat import RESERVED

MAX_MESSAGES = 4096


async def encode_chat(
    service: Service, body: ChatRequest | TokenizeRequest, functions: list[dict] = ()
) -> list[int]:
    """Prompt ids of the conversation; raises ApiError for what the template or context refuses.

    functions: the tools' function objects, checked.
    """
    messages = checked(body.messages)
    service.check_chars(sum(map(_characters, body.messages)), "messages")
    arguments = dict(body.chat_template_kwargs or {})
    for name in arguments:
        if name in RESERVED or name == "self":
            message = f"chat_template_kwargs: {name} cannot be set by a request"
            raise ApiError(400, message, "invalid_value", "chat_template_kwargs")
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        arguments.setdefault("reasoning_effort", effort)
    arguments["add_generation_prompt"] = body.add_generation_prompt is not False
    if functions:
        arguments["tools"] = [{"type": "function", "function": each} for each in functions]
    ids = await service.in_thread(_encoded, service, messages, arguments)
    service.check_prompt(ids, "messages")
    return ids


def _encoded(service: Service, messages: list[dict], arguments: dict) -> list[int]:
    """Runs the template; its own complaints (TemplateError is a ValueError) become a 400."""
    try:
        prompt = service.tokenizer.render_chat(messages, **arguments)
    except ValueError as error:
        raise ApiError(400, f"messages: {error}", "invalid_messages", "messages") from None
    service.check_fits(prompt.text, "messages")
    return service.tokenizer.encode_rendered(prompt)


def checked(messages: list[Message]) -> list[dict]:
    """The messages as plain data without absent keys; refuses none at all, and missing content."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        message = f"messages: {len(messages)} of them; there must be 1 to {MAX_MESSAGES}"
        raise ApiError(400, message, "invalid_value", "messages")
    for i, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise ApiError(400, f"messages.{i}.content: missing", "invalid_value", "messages")
    return [message.model_dump(exclude_none=True) for message in messages]


def _characters(message: Message) -> int:
    """Characters a client wrote into a message: a lower bound of what it renders to."""
    parts = message.content or ""
    if not isinstance(parts, str):
        parts = [part.text or part.refusal or "" for part in parts]
    calls = [call.function.arguments for call in message.tool_calls or ()]
    return sum(map(len, parts)) + sum(map(len, calls))

"""What Anthropic clients send: strict models, and the same conversation in the chat's terms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
import pydantic

from jaxserve.server.errors import ApiError, quote
from jaxserve.server.protocol import (
    Body,
    ContentPart,
    FunctionCall,
    Message,
    ToolCall,
    refuse_unless,
)
from jaxserve.server.toolbox import Toolbox, of_anthropic
from jaxserve.types import SamplingParams


class Block(pydantic.BaseModel):
    """A content block: text, tool_use, tool_result or thinking; others are refused by name."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore")

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentPart] | None = None
    thinking: str | None = None


class Turn(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    messages: list[Turn]
    system: str | list[ContentPart] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_fields(self) -> None:
        super().check_fields()
        if self.messages and self.messages[-1].role == "assistant":
            message = "messages: the last one must be the user's; answers cannot be begun for it"
            raise ApiError(400, message, "unsupported_value", "messages")
        refuse_unless(self, thinking=({"type": "disabled"},))

    def toolbox(self) -> Toolbox:
        """The tools and the choice among them, checked."""
        return of_anthropic(self.tools, self.tool_choice)


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, pydantic.Field(ge=0, le=1)] | None = None
    top_k: int | None = None
    top_p: float | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    container: str | None = None

    def check_fields(self) -> None:
        super().check_fields()
        refuse_unless(self, mcp_servers=([],), container=())
        if self.max_tokens < 1:
            raise ApiError(400, "max_tokens: must be at least 1", "invalid_value", "max_tokens")

    def params(self) -> SamplingParams:
        given = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        given = {name: value for name, value in given.items() if value is not None}
        stop = tuple(self.stop_sequences or ())
        return SamplingParams(max_tokens=self.max_tokens, stop=stop, **given)


class Conversation:
    """A request's conversation as encode_chat takes it: system prompt and results are messages."""

    add_generation_prompt = True

    def __init__(self, body: CountRequest):
        self.chat_template_kwargs = body.chat_template_kwargs
        self.messages = [message for turn in body.messages for message in _messages(turn)]
        if body.system and self.messages:
            self.messages.insert(0, Message(role="system", content=body.system))


def _messages(turn: Turn) -> list[Message]:
    """One message for a turn, after one for each tool result in it."""
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    results, texts, calls, thoughts = [], [], [], []
    for block in turn.content:
        if block.type == "text" and block.text is not None:
            texts.append(ContentPart(type="text", text=block.text))
        elif block.type == "tool_result":
            content, name = block.content or "", block.tool_use_id
            results.append(Message(role="tool", content=content, tool_call_id=name))
        elif block.type == "tool_use" and block.name and turn.role == "assistant":
            arguments = orjson.dumps(block.input or {}).decode()
            function = FunctionCall(name=block.name, arguments=arguments)
            calls.append(ToolCall(id=block.id, function=function))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        else:
            message = f"messages: blocks of type {quote(block.type)} are not supported here"
            raise ApiError(400, message, "unsupported_value", "messages")
    if not texts and not calls and results:
        return results
    said = Message(role=turn.role, content=texts or "", tool_calls=calls or None)
    said.reasoning_content = "".join(thoughts) or None
    return [*results, said]

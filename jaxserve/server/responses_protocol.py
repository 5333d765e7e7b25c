"""What clients of /v1/responses send: strict models, and the same in the chat's terms."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from jaxserve.grammar import GrammarSpec
from jaxserve.server.errors import ApiError, quote
from jaxserve.server.protocol import (
    Body,
    ContentPart,
    FunctionCall,
    Message,
    ToolCall,
    refuse_unless,
)
from jaxserve.server.structured import grammar_of_format
from jaxserve.server.toolbox import Toolbox, of_openai
from jaxserve.types import SamplingParams


class InputItem(pydantic.BaseModel):
    """A message, a call that the model made, or what came of one; other kinds are refused by name,
    but for reasoning, which is dropped: no template wants it back in this shape."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore")

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class ResponsesRequest(Body):
    """POST /v1/responses."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    include: list[str] | None = None
    truncation: str | None = None
    top_logprobs: int | None = None

    def check_fields(self) -> None:
        super().check_fields()
        refuse_unless(
            self, previous_response_id=(), conversation=(), prompt=(), background=(False,),
            include=([],), truncation=("disabled",), top_logprobs=(0,),
        )  # fmt: skip
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            message = f"max_output_tokens={self.max_output_tokens}: must be at least 1"
            raise ApiError(400, message, "invalid_value", "max_output_tokens")

    def params(self) -> SamplingParams:
        given = {name: getattr(self, name) for name in ("temperature", "top_p")}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=self.max_output_tokens, **given)

    def toolbox(self) -> Toolbox:
        """The tools and the choice among them, checked."""
        tools = [_nested(tool) for tool in self.tools or ()]
        return of_openai(tools, _choice(self.tool_choice), parallel=self.parallel_tool_calls)

    @property
    def format(self) -> dict:
        """The form of the answer, as the client said it."""
        return (self.text or {}).get("format") or {"type": "text"}

    def grammar(self) -> GrammarSpec | None:
        """The grammar of that form. May take some milliseconds; raises ApiError."""
        form = self.format
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        return grammar_of_format(form, "text")


class ResponsesChat:
    """The input as encode_chat takes it: instructions are the first message."""

    add_generation_prompt = None
    chat_template_kwargs = None

    def __init__(self, body: ResponsesRequest):
        items = body.input
        if isinstance(items, str):
            items = [InputItem(role="user", content=items)]
        self.messages: list[Message] = []
        for item in items:
            self._add(item)
        if body.instructions:
            self.messages.insert(0, Message(role="developer", content=body.instructions))
        self.reasoning_effort = (body.reasoning or {}).get("effort")

    def _add(self, item: InputItem) -> None:
        match item:
            case InputItem(type="message", role=str(role)):
                self.messages.append(Message(role=role, content=item.content))
            case InputItem(type="function_call", name=str(name), arguments=str(arguments)):
                function = FunctionCall(name=name, arguments=arguments)
                call = ToolCall(id=item.call_id, function=function)
                last = self.messages[-1] if self.messages else None
                if last is None or last.role != "assistant":
                    last = Message(role="assistant")
                    self.messages.append(last)
                last.tool_calls = last.tool_calls or []
                last.tool_calls.append(call)
            case InputItem(type="function_call_output"):
                said, call_id = item.output or "", item.call_id
                self.messages.append(Message(role="tool", content=said, tool_call_id=call_id))
            case InputItem(type="reasoning"):
                pass
            case _:
                message = f"input: items of type {quote(item.type)} are not supported here"
                raise ApiError(400, message, "unsupported_value", "input")


def _nested(tool: dict) -> dict:
    """A function as chats have it: its fields in an object of their own."""
    if tool.get("type") != "function":
        return tool  # refused as it is, by its type
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _choice(choice: str | dict | None) -> str | dict | None:
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "tools": list(tools), **rest}:
            nested = [_choice(tool) if isinstance(tool, dict) else tool for tool in tools]
            allowed = {"mode": rest.get("mode"), "tools": nested}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice

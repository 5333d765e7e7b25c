"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's shape of a chat."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import pydantic
from fastapi import APIRouter, Request

from jaxserve.server import sse
from jaxserve.server.errors import ApiError, anthropic_body, json_response
from jaxserve.server.generation import Choice, Tally, Work, collect, finish_name, run, work_of
from jaxserve.server.limits import run_while_connected
from jaxserve.server.messages import encode_chat
from jaxserve.server.openapi import takes
from jaxserve.server.protocol import Body, ContentPart, Message, refuse_unless
from jaxserve.server.service import Service, service_of
from jaxserve.types import OutputDelta, SamplingParams

router = APIRouter()


class AnthropicMessage(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentPart]


class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    messages: list[AnthropicMessage]
    system: str | list[ContentPart] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    add_generation_prompt: None = None

    def check_fields(self) -> None:
        super().check_fields()
        if self.messages and self.messages[-1].role == "assistant":
            message = "messages: the last one must be the user's; answers cannot be begun for it"
            raise ApiError(400, message, "unsupported_value", "messages")
        refuse_unless(
            self, tools=([],), tool_choice=({"type": "auto"}, {"type": "none"}),
            thinking=({"type": "disabled"},),
        )  # fmt: skip


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


class _Chat:
    """The same conversation as encode_chat takes it: the system prompt is a message."""

    def __init__(self, body: CountRequest):
        turns = [Message(role=turn.role, content=turn.content) for turn in body.messages]
        system = [Message(role="system", content=body.system)] if body.system else []
        self.messages = system + turns if turns else []
        self.chat_template_kwargs = body.chat_template_kwargs
        self.add_generation_prompt = True


@router.post("/v1/messages", **takes(MessagesRequest, streams=True))
async def messages(request: Request):
    """Answers the conversation; with stream, as Anthropic's typed events."""
    service = service_of(request)
    body = await service.parse(request, MessagesRequest)
    service.check_model(body.model)
    params = service.open_for(body.params())
    prompts = [await encode_chat(service, _Chat(body))]
    work = work_of(request, "msg_", prompts, params)
    if body.stream:
        error_event = lambda error: sse.event(anthropic_body(error), "error")
        return sse.EventStream(stream(service, work), request.state.request_id, error_event)
    return json_response(await run_while_connected(request, whole(service, work)))


@router.post("/v1/messages/count_tokens", **takes(CountRequest))
async def count_tokens(request: Request):
    """How many input tokens the conversation has."""
    service = service_of(request)
    body = await service.parse(request, CountRequest)
    service.check_model(body.model)
    return json_response({"input_tokens": len(await encode_chat(service, _Chat(body)))})


def stop_of(reason: str, stop_reason: int | str | None) -> dict:
    """Anthropic's stop_reason and stop_sequence for the engine's."""
    if reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    names = {"stop": "end_turn", "length": "max_tokens"}
    return {"stop_reason": names.get(reason, reason), "stop_sequence": None}


def _usage(tally: Tally) -> dict:
    cached = sum(tally.cached_tokens.values())
    return {
        "input_tokens": tally.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": tally.completion_tokens,
    }


def _message(service: Service, work: Work, content: list, ending: dict, usage: dict) -> dict:
    return {
        "id": work.id,
        "type": "message",
        "role": "assistant",
        "model": service.engine.model_name,
        "content": content,
        **ending,
        "usage": usage,
    }


async def whole(service: Service, work: Work) -> dict:
    """The finished message."""
    (choice,), tally = await collect(service, work)
    return _message(service, work, _content(choice), _ending(choice), _usage(tally))


def _content(choice: Choice) -> list[dict]:
    text = "".join(choice.text)
    return [{"type": "text", "text": text}] if text else []


def _ending(choice: Choice) -> dict:
    return stop_of(choice.finish_reason, choice.stop_reason)


async def stream(service: Service, work: Work) -> AsyncIterator[bytes]:
    """Events of one message with one text block."""
    tally = Tally(work.num_prompt_tokens)
    opened, ending = False, {}
    async with contextlib.aclosing(run(service, work)) as news:
        async for batch in news:
            events = []
            for prompt_index, delta in batch:
                tally.add(prompt_index, delta)
                if not opened:
                    opened = True
                    events += _opening(service, work, tally)
                events += _text_events(delta)
                if delta.finish_reason is not None:
                    ending = stop_of(finish_name(delta.finish_reason), delta.stop_reason)
            if events:
                yield b"".join(events)
    stop = {"type": "content_block_stop", "index": 0}
    final = {"type": "message_delta", "delta": ending, "usage": _usage(tally)}
    yield _event(stop) + _event(final) + _event({"type": "message_stop"})


def _event(content: dict) -> bytes:
    return sse.event(content, content["type"])


def _opening(service: Service, work: Work, tally: Tally) -> list[bytes]:
    ending = {"stop_reason": None, "stop_sequence": None}
    message = _message(service, work, [], ending, _usage(tally))
    block = {"type": "text", "text": ""}
    return [
        _event({"type": "message_start", "message": message}),
        _event({"type": "content_block_start", "index": 0, "content_block": block}),
    ]


def _text_events(delta: OutputDelta) -> list[bytes]:
    if not delta.text:
        return []
    piece = {"type": "text_delta", "text": delta.text}
    return [_event({"type": "content_block_delta", "index": 0, "delta": piece})]

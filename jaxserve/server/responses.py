"""POST /v1/responses: OpenAI's newer shape of a chat. Nothing is stored between requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import pydantic
from fastapi import APIRouter, Request

from jaxserve.server import sse
from jaxserve.server.errors import ApiError, json_response, quote
from jaxserve.server.generation import Tally, Work, collect, finish_name, run, work_of
from jaxserve.server.limits import run_while_connected
from jaxserve.server.messages import encode_chat
from jaxserve.server.openapi import takes
from jaxserve.server.protocol import Body, ContentPart, Message, refuse_unless
from jaxserve.server.service import Service, service_of
from jaxserve.server.speech import Reply, Style
from jaxserve.types import SamplingParams

router = APIRouter()


class InputItem(pydantic.BaseModel):
    """A message among the input; other kinds of items are refused by name."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore")

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None


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
            self, tools=([],), tool_choice=("auto", "none"), previous_response_id=(),
            conversation=(), prompt=(), background=(False,), include=([],),
            truncation=("disabled",), top_logprobs=(0,),
        )  # fmt: skip
        form = (self.text or {}).get("format")
        if form not in (None, {"type": "text"}):
            message = f"text.format={quote(form)} is not supported here"
            raise ApiError(400, message, "unsupported_value", "text")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            message = f"max_output_tokens={self.max_output_tokens}: must be at least 1"
            raise ApiError(400, message, "invalid_value", "max_output_tokens")

    def params(self) -> SamplingParams:
        given = {name: getattr(self, name) for name in ("temperature", "top_p")}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=self.max_output_tokens, **given)


class _Chat:
    """The input as encode_chat takes it: instructions are the first message."""

    add_generation_prompt = None
    chat_template_kwargs = None

    def __init__(self, body: ResponsesRequest):
        items = body.input
        if isinstance(items, str):
            items = [InputItem(role="user", content=items)]
        self.messages = [_turn(item) for item in items]
        if body.instructions:
            self.messages.insert(0, Message(role="developer", content=body.instructions))
        self.reasoning_effort = (body.reasoning or {}).get("effort")


def _turn(item: InputItem) -> Message:
    if item.type != "message" or item.role is None:
        message = f"input: items of type {quote(item.type)} are not supported here"
        raise ApiError(400, message, "unsupported_value", "input")
    return Message(role=item.role, content=item.content)


@router.post("/v1/responses", **takes(ResponsesRequest, streams=True))
async def responses(request: Request):
    """Answers the input; with stream, as typed events."""
    service = service_of(request)
    body = await service.parse(request, ResponsesRequest)
    service.check_model(body.model)
    params = service.open_for(body.params())
    prompt = await encode_chat(service, _Chat(body))
    style = service.style_of(prompt)
    params = await service.params_for(style, params)
    answer = Answer(service, body, work_of(request, "resp_", [prompt], params), style)
    if body.stream:
        return sse.EventStream(answer.stream(), request.state.request_id, answer.error_event)
    return json_response(await run_while_connected(request, answer.whole()))


class Answer:
    """Shapes one answer as a response object, whole or as the events that build it up.

    A model's reasoning stays inside: the API has summaries of it, and nobody here writes them.
    """

    def __init__(self, service: Service, body: ResponsesRequest, work: Work, style: Style):
        self._style = style
        self._service = service
        self._body = body
        self._work = work
        self._item_id = work.id.replace("resp_", "msg_")
        self._created = int(time.time())
        self._sequence = 0  # numbers the events

    def _response(self, status: str, output: list, usage: dict | None = None, **more) -> dict:
        body = self._body
        return {
            "id": self._work.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": self._service.engine.model_name,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": self._work.params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": self._work.params.top_p,
            "truncation": "disabled",
            "usage": usage,
            **more,
        }

    def _finished(self, text: str, reason: str, tally: Tally) -> dict:
        """The response object at its end; only a stop of the model's own completes it."""
        complete = reason == "stop"
        status = "completed" if complete else "incomplete"
        why = {"length": "max_output_tokens"}.get(reason, reason)
        details = None if complete else {"reason": why}
        output = [self._item(status, [_part(text)])]
        return self._response(status, output, _usage(tally), incomplete_details=details)

    def _item(self, status: str, content: list[dict]) -> dict:
        return {
            "type": "message",
            "id": self._item_id,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    async def whole(self) -> dict:
        (choice,), tally = await collect(self._service, self._work)
        text = "".join(choice.text)
        reply = await self._service.in_thread(Reply.of, self._style, text)
        return self._finished(reply.content, choice.finish_reason, tally)

    async def stream(self) -> AsyncIterator[bytes]:
        """Events from response.created to response.completed or response.incomplete."""
        tally, text, reason = Tally(self._work.num_prompt_tokens), [], "stop"
        speech = self._style.speech()
        async with contextlib.aclosing(run(self._service, self._work)) as news:
            async for batch in news:
                events = [] if self._sequence else self._opening()
                for prompt_index, delta in batch:
                    tally.add(prompt_index, delta)
                    parts = speech.push(delta.text)
                    if delta.finish_reason is not None:
                        parts += speech.finish()
                        reason = finish_name(delta.finish_reason)
                    for piece in (part for part in parts if isinstance(part, str)):
                        text.append(piece)
                        events.append(self._text_event("delta", delta=piece))
                yield b"".join(events)
        yield self._closing("".join(text), reason, tally)

    def _opening(self) -> list[bytes]:
        fresh = self._response("in_progress", [])
        return [
            self._event("response.created", response=fresh),
            self._event("response.in_progress", response=fresh),
            self._event(
                "response.output_item.added", output_index=0, item=self._item("in_progress", [])
            ),
            self._event("response.content_part.added", **self._place(), part=_part("")),
        ]

    def _closing(self, text: str, reason: str, tally: Tally) -> bytes:
        final = self._finished(text, reason, tally)
        return b"".join(
            [
                self._text_event("done", text=text),
                self._event("response.content_part.done", **self._place(), part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=final["output"][0]),
                self._event(f"response.{final['status']}", response=final),
            ]
        )

    def _place(self) -> dict:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _text_event(self, kind: str, **content) -> bytes:
        place = self._place()
        return self._event(f"response.output_text.{kind}", **place, **content, logprobs=[])

    def _event(self, kind: str, **content) -> bytes:
        numbered = {"type": kind, "sequence_number": self._sequence, **content}
        self._sequence += 1
        return sse.event(numbered, kind)

    def error_event(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)


def _part(text: str) -> dict:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(tally: Tally) -> dict:
    return {
        "input_tokens": tally.prompt_tokens,
        "input_tokens_details": {"cached_tokens": sum(tally.cached_tokens.values())},
        "output_tokens": tally.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tally.prompt_tokens + tally.completion_tokens,
    }

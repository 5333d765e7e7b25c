"""POST /v1/responses: OpenAI's newer shape of a chat. Nothing is stored between requests."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request

from jaxserve.server import sse
from jaxserve.server.errors import ApiError, json_response
from jaxserve.server.generation import Tally, Work, collect, finish_name, run, work_of
from jaxserve.server.limits import run_while_connected
from jaxserve.server.messages import encode_chat
from jaxserve.server.openapi import takes
from jaxserve.server.responses_protocol import ResponsesChat, ResponsesRequest
from jaxserve.server.service import Service, service_of
from jaxserve.server.speech import Call, Part, Reply, Style

router = APIRouter()


@router.post("/v1/responses", **takes(ResponsesRequest, streams=True))
async def responses(request: Request):
    """Answers the input; with stream, as typed events."""
    service = service_of(request)
    body = await service.parse(request, ResponsesRequest)
    service.check_model(body.model)
    params = service.open_for(body.params())
    toolbox = body.toolbox()
    form = None if body.text is None else await service.in_thread(body.grammar)
    chat = await service.in_thread(ResponsesChat, body)
    prompt = await encode_chat(service, chat, toolbox.functions)
    style = service.style_of(prompt, toolbox)
    params = await service.params_for(style, dataclasses.replace(params, grammar=form))
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
        self._created = int(time.time())
        self._items = Items(work.id.removeprefix("resp_"))
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
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": self._work.params.temperature,
            "text": {"format": body.format},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": self._work.params.top_p,
            "truncation": "disabled",
            "usage": usage,
            **more,
        }

    def _finished(self, reason: str, tally: Tally) -> dict:
        """The response object at its end; only a stop of the model's own completes it."""
        why = {"length": "max_output_tokens"}.get(reason, reason)
        details = None if reason == "stop" else {"reason": why}
        status = _status(reason)
        return self._response(status, self._items.output, _usage(tally), incomplete_details=details)

    async def whole(self) -> dict:
        (choice,), tally = await collect(self._service, self._work)
        text = "".join(choice.text)
        reply = await self._service.in_thread(Reply.of, self._style, text)
        for part in [reply.content] * bool(reply.content) + reply.calls:
            self._items.add(part)
        self._items.end(_status(choice.finish_reason))
        return self._finished(choice.finish_reason, tally)

    async def stream(self) -> AsyncIterator[bytes]:
        """Events from response.created to response.completed or response.incomplete."""
        tally, reason = Tally(self._work.num_prompt_tokens), "stop"
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
                    for part in parts:
                        events += map(self._numbered, self._items.add(part))
                if events:
                    yield b"".join(events)
        ends = map(self._numbered, self._items.end(_status(reason)))
        final = self._finished(reason, tally)
        yield b"".join([*ends, self._event(f"response.{final['status']}", response=final)])

    def _opening(self) -> list[bytes]:
        fresh = self._response("in_progress", [])
        return [
            self._event("response.created", response=fresh),
            self._event("response.in_progress", response=fresh),
        ]

    def _event(self, kind: str, **content) -> bytes:
        return self._numbered({"type": kind, **content})

    def _numbered(self, event: dict) -> bytes:
        numbered = {**event, "sequence_number": self._sequence}
        self._sequence += 1
        return sse.event(numbered, event["type"])

    def error_event(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)


class Items:
    """The output's items; at most one is open, the last. Reasoning is dropped.

    output: the items so far, whole once they are closed.
    """

    def __init__(self, response_id: str):
        self.output: list[dict] = []
        self._response_id = response_id
        self._open: str | int | None = None  # "message", or the index of a call

    def add(self, part: Part) -> list[dict]:
        """Events of one part: first those of a change of items, if it belongs into another."""
        match part:
            case str():
                events = self._switch("message", self._message)
                self.output[-1]["content"][0]["text"] += part
                place = self._place(content_index=0)
                return [*events, _event("output_text.delta", **place, delta=part, logprobs=[])]
            case Call():
                events = self._switch(part.index, lambda: self._call(part))
                self.output[-1]["arguments"] += part.arguments
                delta = _event(
                    "function_call_arguments.delta", **self._place(), delta=part.arguments
                )
                return [*events, delta] if part.arguments else events
        return []

    def end(self, status: str) -> list[dict]:
        """Closes the last item. An answer without any is an empty message."""
        events = [] if self.output else self._switch("message", self._message)
        return [*events, *self._close(status)]

    def _switch(self, held: str | int, item) -> list[dict]:
        if held == self._open:
            return []
        events = self._close("completed")
        self._open = held
        self.output.append(item())
        added = {**self.output[-1], "content": []} if held == "message" else {**self.output[-1]}
        events.append(_event("output_item.added", output_index=self._index, item=added))
        if held == "message":
            place = self._place(content_index=0)
            events.append(_event("content_part.added", **place, part=_text("")))
        return events

    def _close(self, status: str) -> list[dict]:
        if self._open is None:
            return []
        item, events = self.output[-1], []
        item["status"] = status
        if self._open == "message":
            place, text = self._place(content_index=0), item["content"][0]["text"]
            events.append(_event("output_text.done", **place, text=text, logprobs=[]))
            events.append(_event("content_part.done", **place, part=_text(text)))
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            events.append(_event("function_call_arguments.done", **self._place(), **told))
        events.append(_event("output_item.done", output_index=self._index, item=item))
        self._open = None
        return events

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    def _place(self, **more) -> dict:
        return {"item_id": self.output[-1]["id"], "output_index": self._index, **more}

    def _message(self) -> dict:
        return {
            "type": "message",
            "id": f"msg_{self._response_id}_{len(self.output)}",
            "status": "in_progress",
            "role": "assistant",
            "content": [_text("")],
        }

    def _call(self, call: Call) -> dict:
        return {
            "type": "function_call",
            "id": call.id.replace("call_", "fc_", 1),
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }


def _event(kind: str, **content) -> dict:
    return {"type": f"response.{kind}", **content}


def _text(text: str) -> dict:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(reason: str) -> str:
    return "completed" if reason == "stop" else "incomplete"


def _usage(tally: Tally) -> dict:
    return {
        "input_tokens": tally.prompt_tokens,
        "input_tokens_details": {"cached_tokens": sum(tally.cached_tokens.values())},
        "output_tokens": tally.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tally.prompt_tokens + tally.completion_tokens,
    }

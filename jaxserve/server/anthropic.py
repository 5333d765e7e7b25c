"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's shape of a chat."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import orjson
from fastapi import APIRouter, Request

from jaxserve.server import sse
from jaxserve.server.anthropic_protocol import Conversation, CountRequest, MessagesRequest
from jaxserve.server.errors import anthropic_body, json_response
from jaxserve.server.generation import Tally, Work, collect, finish_name, run, work_of
from jaxserve.server.limits import run_while_connected
from jaxserve.server.messages import encode_chat
from jaxserve.server.openapi import takes
from jaxserve.server.service import Service, service_of
from jaxserve.server.speech import Call, Part, Reply, Style, Thinking

router = APIRouter()


@router.post("/v1/messages", **takes(MessagesRequest, streams=True))
async def messages(request: Request):
    """Answers the conversation; with stream, as Anthropic's typed events."""
    service = service_of(request)
    body = await service.parse(request, MessagesRequest)
    service.check_model(body.model)
    params = service.open_for(body.params())
    toolbox = body.toolbox()
    chat = await service.in_thread(Conversation, body)
    prompt = await encode_chat(service, chat, toolbox.functions)
    style = service.style_of(prompt, toolbox)
    params = await service.params_for(style, params)
    work = work_of(request, "msg_", [prompt], params)
    if body.stream:
        error_event = lambda error: sse.event(anthropic_body(error), "error")
        return sse.EventStream(stream(service, work, style), request.state.request_id, error_event)
    return json_response(await run_while_connected(request, whole(service, work, style)))


@router.post("/v1/messages/count_tokens", **takes(CountRequest))
async def count_tokens(request: Request):
    """How many input tokens the conversation has."""
    service = service_of(request)
    body = await service.parse(request, CountRequest)
    service.check_model(body.model)
    chat = await service.in_thread(Conversation, body)
    prompt = await encode_chat(service, chat, body.toolbox().functions)
    return json_response({"input_tokens": len(prompt)})


def ending_of(reason: str, stop_reason: int | str | None, num_calls: int) -> dict:
    """Anthropic's stop_reason and stop_sequence for the engine's."""
    if reason == "stop" and num_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
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


async def whole(service: Service, work: Work, style: Style) -> dict:
    """The finished message."""
    (choice,), tally = await collect(service, work)
    reply = await service.in_thread(Reply.of, style, "".join(choice.text))
    ending = ending_of(choice.finish_reason, choice.stop_reason, len(reply.calls))
    return _message(service, work, _content(reply), ending, _usage(tally))


def _content(reply: Reply) -> list[dict]:
    blocks = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        blocks.append({**block, "input": _input(call.arguments)})
    return blocks


def _input(arguments: str) -> dict:
    """The arguments as an object; an empty one when the model wrote no valid JSON object."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


async def stream(service: Service, work: Work, style: Style) -> AsyncIterator[bytes]:
    """Events of one message: each of its blocks is opened, filled and closed in turn."""
    tally, blocks, speech = Tally(work.num_prompt_tokens), Blocks(), style.speech()
    opened, ending = False, {}
    async with contextlib.aclosing(run(service, work)) as news:
        async for batch in news:
            events = []
            for prompt_index, delta in batch:
                tally.add(prompt_index, delta)
                if not opened:
                    opened = True
                    events.append(_opening(service, work, tally))
                parts = speech.push(delta.text)
                if delta.finish_reason is not None:
                    parts += speech.finish()
                    reason = finish_name(delta.finish_reason)
                    ending = ending_of(reason, delta.stop_reason, speech.num_calls)
                for part in parts:
                    events += blocks.add(part)
            if events:
                yield b"".join(events)
    final = {"type": "message_delta", "delta": ending, "usage": _usage(tally)}
    yield b"".join([*blocks.close(), _event(final), _event({"type": "message_stop"})])


def _event(content: dict) -> bytes:
    return sse.event(content, content["type"])


def _opening(service: Service, work: Work, tally: Tally) -> bytes:
    ending = {"stop_reason": None, "stop_sequence": None}
    message = _message(service, work, [], ending, _usage(tally))
    return _event({"type": "message_start", "message": message})


class Blocks:
    """The content blocks of a streamed message; at most one is open, the last."""

    def __init__(self):
        self._index = -1
        self._open: object | None = None  # what the open block holds: a kind, or a call's index

    def add(self, part: Part) -> list[bytes]:
        """Events of one part: first those of a change of blocks, if it belongs into another."""
        match part:
            case Thinking(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                events = self._switch("thinking", block)
                return [*events, self._delta({"type": "thinking_delta", "thinking": text})]
            case Call(index, call_id, name, arguments):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                events = self._switch(index, block)
                delta = {"type": "input_json_delta", "partial_json": arguments}
                return [*events, self._delta(delta)] if arguments else events
        events = self._switch("text", {"type": "text", "text": ""})
        return [*events, self._delta({"type": "text_delta", "text": part})]

    def close(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [_event({"type": "content_block_stop", "index": self._index})]

    def _switch(self, held: object, block: dict) -> list[bytes]:
        if held == self._open:
            return []
        events = self.close()
        self._open = held
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*events, _event(start)]

    def _delta(self, delta: dict) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

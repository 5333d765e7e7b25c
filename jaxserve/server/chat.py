"""POST /v1/chat/completions: messages through the model's chat template."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response

from jaxserve.server import sse
from jaxserve.server.errors import json_response
from jaxserve.server.generation import Choice, Tally, Work, collect, finish_name, run, work_of
from jaxserve.server.limits import run_while_connected
from jaxserve.server.logprobs import chat_content, prompt_scores
from jaxserve.server.messages import encode_chat
from jaxserve.server.openapi import takes
from jaxserve.server.protocol import ChatRequest
from jaxserve.server.service import Service, service_of
from jaxserve.server.speech import Call, Part, Reply, Speech, Style, Thinking
from jaxserve.server.toolbox import of_openai
from jaxserve.types import OutputDelta

router = APIRouter()


@router.post("/v1/chat/completions", **takes(ChatRequest, streams=True))
async def chat_completions(request: Request):
    """Answers the conversation n times; with stream, as events that end in [DONE]."""
    service = service_of(request)
    body = await service.parse(request, ChatRequest)
    service.check_model(body.model)
    params = await service.params_of(body)
    toolbox = of_openai(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    prompt = await encode_chat(service, body, toolbox.functions)
    style = service.style_of(prompt, toolbox)
    params = await service.params_for(style, params)
    answer = Answer(service, body, work_of(request, "chatcmpl-", [prompt], params, body), style)
    if body.stream:
        return sse.EventStream(answer.stream(), request.state.request_id)
    return await run_while_connected(request, answer.whole())


class Answer:
    """Shapes one request's choices as OpenAI's chat.completion objects."""

    def __init__(self, service: Service, body: ChatRequest, work: Work, style: Style):
        self._service = service
        self._body = body
        self._work = work
        self._style = style

    def _envelope(self, kind: str) -> dict:
        return {
            "id": self._work.id,
            "object": kind,
            "created": int(time.time()),
            "model": self._service.engine.model_name,
            "system_fingerprint": None,
        }

    async def whole(self) -> Response:
        choices, tally = await collect(self._service, self._work)
        return await self._service.in_thread(self._shaped, choices, tally)

    def _shaped(self, choices: list[Choice], tally: Tally) -> Response:
        """For a thread: calls are parsed, and log-probabilities may be many."""
        answer = {
            **self._envelope("chat.completion"),
            "choices": [self._choice(choice) for choice in choices],
            "usage": tally.usage(),
        }
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._work.prompts[0]
            for shaped, choice in zip(answer["choices"], choices):
                shaped["token_ids"] = choice.token_ids
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_scores(
                self._service.tokenizer, choices[0].prompt_logprobs, self._body.prompt_logprobs
            )
        return json_response(answer)

    def _choice(self, choice: Choice) -> dict:
        reply = Reply.of(self._style, "".join(choice.text))
        message = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["content"] = reply.content or None
            message["tool_calls"] = [_whole_call(call) for call in reply.calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if self._body.logprobs else None,
            "finish_reason": _reason(choice.finish_reason, len(reply.calls)),
            "stop_reason": choice.stop_reason,
        }

    def _logprobs(self, scores) -> dict:
        count = self._body.top_logprobs or 0
        return {"content": chat_content(self._service.tokenizer, scores, count), "refusal": None}

    async def stream(self) -> AsyncIterator[bytes]:
        """Chunks: each choice opens with its role and closes with its finish_reason."""
        usage = {"usage": None} if self._body.include_usage else {}
        writer = sse.ChunkWriter(self._envelope("chat.completion.chunk"), **usage)
        tally = Tally(self._work.num_prompt_tokens)
        speeches: dict[int, Speech] = {}
        async with contextlib.aclosing(run(self._service, self._work)) as news:
            async for batch in news:
                chunks = []
                for prompt_index, delta in batch:
                    tally.add(prompt_index, delta)
                    if delta.index not in speeches:
                        speeches[delta.index] = self._style.speech()
                        chunks.append(writer.choice(self._opening(delta.index)))
                    chunks += map(writer.choice, self._chunks(delta, speeches[delta.index]))
                if chunks:
                    yield b"".join(chunks)
        if self._body.include_usage:
            yield writer.last(tally.usage())
        yield sse.DONE

    def _opening(self, index: int) -> dict:
        """A choice's first chunk."""
        chunk = _chunk(index, {"role": "assistant", "content": "", "refusal": None})
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = self._work.prompts[0]
        return chunk

    def _chunks(self, delta: OutputDelta, speech: Speech) -> list[dict]:
        """The parts of the delta's text, a chunk each, and its end as another."""
        ended = delta.finish_reason is not None
        parts = speech.push(delta.text) if delta.text else []
        parts += speech.finish() if ended else []
        chunks = [_chunk(delta.index, _delta(part)) for part in parts]
        if self._body.logprobs and delta.logprobs:
            chunks = chunks or [_chunk(delta.index, {"content": ""})]
            chunks[0]["logprobs"] = self._logprobs(delta.logprobs)
        if self._body.return_token_ids and delta.token_ids:
            chunks = chunks or [_chunk(delta.index, {"content": ""})]
            chunks[0]["token_ids"] = delta.token_ids
        if ended:
            reason = _reason(finish_name(delta.finish_reason), speech.num_calls)
            end = _chunk(delta.index, {}) | {"finish_reason": reason}
            chunks.append(end | {"stop_reason": delta.stop_reason})
        return chunks


def _reason(reason: str, num_calls: int) -> str:
    """A stop after calls is a stop for calls; one by a limit stays what it is."""
    return "tool_calls" if num_calls and reason == "stop" else reason


def _whole_call(call: Call) -> dict:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _delta(part: Part) -> dict:
    match part:
        case Thinking(text):
            return {"reasoning_content": text}
        case Call(id=None):
            call = {"index": part.index, "function": {"arguments": part.arguments}}
            return {"tool_calls": [call]}
        case Call():
            return {"tool_calls": [{"index": part.index, **_whole_call(part)}]}
    return {"content": part}


def _chunk(index: int, delta: dict) -> dict:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

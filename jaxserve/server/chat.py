"""POST /v1/chat/completions: messages through the model's chat template."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request

from jaxserve.server import sse
from jaxserve.server.errors import json_response
from jaxserve.server.generation import Choice, Tally, Work, collect, finish_name, run, work_of
from jaxserve.server.limits import run_while_connected
from jaxserve.server.logprobs import chat_content, prompt_scores
from jaxserve.server.messages import encode_chat
from jaxserve.server.openapi import takes
from jaxserve.server.protocol import ChatRequest
from jaxserve.server.service import Service, service_of
from jaxserve.types import OutputDelta

router = APIRouter()


@router.post("/v1/chat/completions", **takes(ChatRequest, streams=True))
async def chat_completions(request: Request):
    """Answers the conversation n times; with stream, as events that end in [DONE]."""
    service = service_of(request)
    body = await service.parse(request, ChatRequest)
    service.check_model(body.model)
    params = service.open_for(body.params())
    prompts = [await encode_chat(service, body)]
    work = work_of(request, "chatcmpl-", prompts, params, body)
    answer = Answer(service, body, work)
    if body.stream:
        return sse.EventStream(answer.stream(), request.state.request_id)
    return json_response(await run_while_connected(request, answer.whole()))


class Answer:
    """Shapes one request's choices as OpenAI's chat.completion objects."""

    def __init__(self, service: Service, body: ChatRequest, work: Work):
        self._service = service
        self._body = body
        self._work = work

    def _envelope(self, kind: str) -> dict:
        return {
            "id": self._work.id,
            "object": kind,
            "created": int(time.time()),
            "model": self._service.engine.model_name,
            "system_fingerprint": None,
        }

    async def whole(self) -> dict:
        choices, tally = await collect(self._service, self._work)
        answer = {
            **self._envelope("chat.completion"),
            "choices": [self._choice(choice) for choice in choices],
            "usage": tally.usage(),
        }
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_scores(
                self._service.tokenizer, choices[0].prompt_logprobs, self._body.prompt_logprobs
            )
        return answer

    def _choice(self, choice: Choice) -> dict:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if self._body.logprobs else None,
            "finish_reason": choice.finish_reason,
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
        started: set[int] = set()
        async with contextlib.aclosing(run(self._service, self._work)) as news:
            async for batch in news:
                chunks = []
                for prompt_index, delta in batch:
                    tally.add(prompt_index, delta)
                    if delta.index not in started:
                        started.add(delta.index)
                        opening = {"role": "assistant", "content": "", "refusal": None}
                        chunks.append(writer.choice(_chunk(delta.index, opening)))
                    chunks += map(writer.choice, self._chunks(delta))
                if chunks:
                    yield b"".join(chunks)
        if self._body.include_usage:
            yield writer.last(tally.usage())
        yield sse.DONE

    def _chunks(self, delta: OutputDelta) -> list[dict]:
        """The delta's text as a chunk, then its end as another."""
        chunks = []
        scored = self._body.logprobs and delta.logprobs
        if delta.text or scored:
            logprobs = self._logprobs(delta.logprobs) if scored else None
            chunks.append(_chunk(delta.index, {"content": delta.text}, logprobs))
        if delta.finish_reason is not None:
            end = _chunk(delta.index, {}, None, finish_name(delta.finish_reason))
            chunks.append(end | {"stop_reason": delta.stop_reason})
        return chunks


def _chunk(
    index: int, delta: dict, logprobs: dict | None = None, reason: str | None = None
) -> dict:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

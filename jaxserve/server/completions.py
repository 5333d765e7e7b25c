"""POST /v1/completions: text or token ids in, continuations out. The first family to read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response

from jaxserve.server import sse
from jaxserve.server.errors import json_response
from jaxserve.server.generation import Choice, Tally, Work, collect, finish_name, run, work_of
from jaxserve.server.limits import run_while_connected
from jaxserve.server.logprobs import CompletionLogprobs, prompt_scores
from jaxserve.server.openapi import takes
from jaxserve.server.protocol import CompletionRequest
from jaxserve.server.service import Service, service_of
from jaxserve.types import OutputDelta

router = APIRouter()


@router.post("/v1/completions", **takes(CompletionRequest, streams=True))
async def completions(request: Request):
    """Continues each prompt n times; with stream, as events that end in [DONE]."""
    service = service_of(request)
    body = await service.parse(request, CompletionRequest)
    service.check_model(body.model)
    params = await service.params_of(body)
    special = body.add_special_tokens is not False
    prompts = await service.encode_prompts(body.prompt, special=special, n=body.n or 1)
    work = work_of(request, "cmpl-", prompts, params, body)
    answer = Answer(service, body, work)
    if body.stream:
        return sse.EventStream(answer.stream(), request.state.request_id)
    return await run_while_connected(request, answer.whole())


class Answer:
    """Shapes one request's choices as OpenAI's text_completion objects."""

    def __init__(self, service: Service, body: CompletionRequest, work: Work):
        self._service = service
        self._body = body
        self._work = work
        self._scored = body.logprobs is not None
        self._envelope = {
            "id": work.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.engine.model_name,
            "system_fingerprint": None,
        }

    async def whole(self) -> Response:
        choices, tally = await collect(self._service, self._work)
        return await self._service.in_thread(self._shaped, choices, tally)

    def _shaped(self, choices: list[Choice], tally: Tally) -> Response:
        """For a thread: a long prompt's log-probabilities are many."""
        shaped = [self._choice(choice) for choice in choices]
        return json_response({**self._envelope, "choices": shaped, "usage": tally.usage()})

    def _choice(self, choice: Choice) -> dict:
        text = "".join(choice.text)
        ids, scores = choice.token_ids, choice.logprobs
        if self._body.echo:
            text = self._prompt_text(choice.prompt_index) + text
            ids = self._work.prompts[choice.prompt_index] + ids
            scores = self._echo_scores(choice.prompt_index, choice.prompt_logprobs) + scores
        shaped = {
            "index": choice.index,
            "text": text,
            "logprobs": self._scorer().piece(ids, scores) if self._scored else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            shaped["prompt_token_ids"] = self._work.prompts[choice.prompt_index]
            shaped["token_ids"] = choice.token_ids
        if self._body.prompt_logprobs is not None:
            shaped["prompt_logprobs"] = prompt_scores(
                self._service.tokenizer, choice.prompt_logprobs, self._body.prompt_logprobs
            )
        return shaped

    async def stream(self) -> AsyncIterator[bytes]:
        """Chunks: with echo the prompt comes as each choice's first text."""
        usage = {"usage": None} if self._body.include_usage else {}
        writer = sse.ChunkWriter(self._envelope, **usage)
        tally = Tally(self._work.num_prompt_tokens)
        scorers: dict[int, CompletionLogprobs] = {}
        started: set[int] = set()
        scores: dict[int, list] = {}  # of prompts; they come with the first choice's first delta
        async with contextlib.aclosing(run(self._service, self._work)) as news:
            async for batch in news:
                chunks = []
                for prompt_index, delta in batch:
                    tally.add(prompt_index, delta)
                    if delta.prompt_logprobs is not None:
                        scores[prompt_index] = delta.prompt_logprobs
                    index = prompt_index * self._work.params.n + delta.index
                    scorer = scorers.setdefault(index, self._scorer()) if self._scored else None
                    first = index not in started
                    started.add(index)
                    if first and self._body.echo:
                        echo = (index, prompt_index, scorer, scores.get(prompt_index))
                        chunk = await self._service.in_thread(self._echo, *echo)
                        chunks.append(writer.choice(chunk))
                    chunk = self._chunk(index, delta, scorer)
                    if chunk is not None:
                        if first and self._body.return_token_ids:
                            chunk["prompt_token_ids"] = self._work.prompts[prompt_index]
                        chunks.append(writer.choice(chunk))
                if chunks:
                    yield b"".join(chunks)
        if self._body.include_usage:
            yield writer.last(tally.usage())
        yield sse.DONE

    def _echo(self, index, prompt_index, scorer, known) -> dict:
        """The prompt as a choice's first chunk."""
        ids, logprobs = self._work.prompts[prompt_index], None
        if scorer is not None:
            logprobs = scorer.piece(ids, self._echo_scores(prompt_index, known))
        return _chunk_of(index, self._prompt_text(prompt_index), logprobs)

    def _chunk(self, index: int, delta: OutputDelta, scorer) -> dict | None:
        """One chunk's choice; None when the delta has nothing to show yet."""
        logprobs = scorer.piece(delta.token_ids, delta.logprobs) if delta.logprobs else None
        ids = delta.token_ids if self._body.return_token_ids else ()
        if not (delta.text or logprobs or ids) and delta.finish_reason is None:
            return None
        chunk = _chunk_of(index, delta.text, logprobs)
        if self._body.return_token_ids:
            chunk["token_ids"] = ids
        if delta.finish_reason is not None:
            chunk["finish_reason"] = finish_name(delta.finish_reason)
            chunk["stop_reason"] = delta.stop_reason
        return chunk

    def _echo_scores(self, prompt_index: int, known: list | None) -> list:
        """A score for each prompt token; null for those that were not computed in time."""
        known = known or []
        return [*known, *[None] * (len(self._work.prompts[prompt_index]) - len(known))]

    def _scorer(self) -> CompletionLogprobs:
        return CompletionLogprobs(
            self._service.tokenizer,
            self._body.logprobs,
            skip_special_tokens=self._work.params.skip_special_tokens,
        )

    def _prompt_text(self, prompt_index: int) -> str:
        """The prompt as it was sent, or its ids as text; that is for a thread."""
        prompt = self._body.prompt
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt[prompt_index], str):
            return prompt[prompt_index]
        ids, skip = self._work.prompts[prompt_index], self._work.params.skip_special_tokens
        return self._service.tokenizer.decode(ids, skip)


def _chunk_of(index: int, text: str, logprobs: dict | None) -> dict:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None,
        "stop_reason": None,
    }

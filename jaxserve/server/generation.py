"""Runs the prompts of one HTTP request and folds what comes back into choices.

A request's prompts times n are its choices, numbered prompt by prompt as OpenAI does. run() yields
news as it comes, for streams; collect() waits for all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping

import numpy as np
from starlette.requests import Request

from jaxserve.obs.metrics import Stopwatch
from jaxserve.obs.tracing import CONTEXT_HEADERS, RequestSpan
from jaxserve.server.errors import ApiError
from jaxserve.server.service import Service, caller_of, service_of
from jaxserve.types import (
    FinishReason,
    OutputDelta,
    RequestRefused,
    SamplingParams,
    TokenLogprob,
)

# Prompts of one request that the engine has at once. The others wait here, where they take no place
# in the queue that all clients share.
MAX_IN_FLIGHT = 128
# Of one answer, alternatives and repetition for each choice included: some 100 MB of JSON.
MAX_PROMPT_SCORES = 2_000_000


@dataclasses.dataclass(frozen=True)
class Work:
    """What one HTTP request asks of the engine. arrived: on time.monotonic's clock. trace: the
    headers that name the client's span."""

    id: str
    prompts: list[list[int]]
    params: SamplingParams
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    trace: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def work_of(
    request: Request, prefix: str, prompts: list[list[int]], params: SamplingParams, body=None
) -> Work:
    """The Work of an HTTP request. prefix: of its id; body: with vLLM's extras, if it has them.
    Raises ApiError for more log-probabilities of prompts than an answer may hold."""
    service = service_of(request)
    if params.prompt_logprobs is not None:
        count = params.n * (1 + params.prompt_logprobs) * sum(map(len, prompts))
        if count > MAX_PROMPT_SCORES:
            message = (
                f"{count} log-probabilities of prompt tokens in one answer; at most "
                f"{MAX_PROMPT_SCORES}: ask for fewer prompts, choices or alternatives"
            )
            raise ApiError(400, message, "invalid_value", "logprobs")
    extra = lambda name: getattr(body, name, None)
    return Work(
        id=prefix + request.state.request_id,
        prompts=prompts,
        params=params,
        tenant=caller_of(request).tenant,
        priority=extra("priority") or 0,
        timeout_s=service.timeout_s(extra("timeout")),
        cache_salt=service.cache_salt(request, extra("cache_salt")),
        arrived=request.state.arrived,
        trace={k: request.headers[k] for k in CONTEXT_HEADERS if k in request.headers},
    )


@dataclasses.dataclass
class Choice:
    """One choice so far. prompt_index: which of the request's prompts it continues."""

    index: int
    prompt_index: int
    text: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    pooled: np.ndarray | None = None  # float32 [hidden size]

    def add(self, delta: OutputDelta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason = finish_name(delta.finish_reason)
            self.stop_reason = delta.stop_reason
            self.pooled = delta.pooled


@dataclasses.dataclass
class Tally:
    """Token counts of a request, for its usage. Prompts count once, however many choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = dataclasses.field(default_factory=dict)  # by prompt

    def add(self, prompt_index: int, delta: OutputDelta) -> None:
        self.completion_tokens += len(delta.token_ids)
        if delta.index == 0 and delta.num_cached_tokens:  # the others reuse the first one's prompt
            self.cached_tokens[prompt_index] = delta.num_cached_tokens

    def usage(self) -> dict:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }


def finish_name(reason: FinishReason | str) -> str:
    return reason.value if isinstance(reason, FinishReason) else reason


async def run(service: Service, work: Work) -> AsyncIterator[list[tuple[int, OutputDelta]]]:
    """Yields (prompt index, delta) as they come, several a wake-up. Closing it aborts the work.

    A delta's index counts the choices of its prompt. Raises what the engine raises; times and ends
    of the request go to the metrics.
    """
    watches = _watches(service, work)
    source = _one(service, work, 0) if len(work.prompts) == 1 else _several(service, work)
    reason = "abort"
    try:
        async with contextlib.aclosing(source):
            async for batch in source:
                count = sum(len(delta.token_ids) for _, delta in batch)
                for watch in watches:
                    watch.saw_tokens(count)
                yield batch
                for _, delta in batch:
                    if delta.finish_reason is not None:
                        reason = finish_name(delta.finish_reason)
    except RequestRefused as refusal:
        for watch in watches:
            watch.refused(refusal.code)
        watches = []
        raise
    except Exception:  # any fault is recorded as one; who answers the client deals with it
        reason = "error"
        raise
    finally:
        for watch in watches:
            watch.end(reason)


def _watches(service: Service, work: Work) -> list[Stopwatch | RequestSpan]:
    """Who follows this request."""
    watches = [service.metrics.stopwatch(work.arrived, work.num_prompt_tokens)]
    if service.tracing is not None:
        params = work.params
        attributes = {
            "gen_ai.request.model": service.engine.model_name,
            "gen_ai.usage.input_tokens": work.num_prompt_tokens,
            "gen_ai.request.choice.count": len(work.prompts) * params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.max_tokens": params.max_tokens or 0,
        }
        span = service.tracing.request(work.id, work.arrived, work.trace, attributes)
        watches.append(span)
    return watches


async def _one(service, work, prompt_index) -> AsyncIterator[list[tuple[int, OutputDelta]]]:
    async with contextlib.aclosing(_start(service, work, prompt_index)) as stream:
        async for deltas in stream:
            yield [(prompt_index, delta) for delta in merged(deltas)]


async def _several(service, work) -> AsyncIterator[list[tuple[int, OutputDelta]]]:
    """Runs many prompts at once. The first to fail ends them all."""
    news: asyncio.Queue = asyncio.Queue(maxsize=2 * len(work.prompts))
    places = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def feed(prompt_index):
        async with places, contextlib.aclosing(_one(service, work, prompt_index)) as source:
            async for batch in source:
                await news.put(batch)

    async def feed_all():
        try:
            async with asyncio.TaskGroup() as group:
                for prompt_index in range(len(work.prompts)):
                    group.create_task(feed(prompt_index))
        except* Exception as errors:
            await news.put(errors.exceptions[0])
        else:
            await news.put(None)

    feeding = asyncio.ensure_future(feed_all())
    try:
        while (item := await news.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


def _start(service: Service, work: Work, prompt_index: int) -> AsyncIterator[list[OutputDelta]]:
    suffix = f"-{prompt_index}" if len(work.prompts) > 1 else ""
    return service.engine.generate(
        work.prompts[prompt_index],
        work.params,
        request_id=work.id + suffix,
        tenant=work.tenant,
        priority=work.priority,
        timeout_s=work.timeout_s,
        cache_salt=work.cache_salt,
    )


def merged(deltas: list[OutputDelta]) -> list[OutputDelta]:
    """Deltas of one wake-up with at most one a choice: fewer, larger chunks for slow readers."""
    if len(deltas) < 2:
        return deltas
    by_index: dict[int, OutputDelta] = {}
    for delta in deltas:
        first = by_index.get(delta.index)
        by_index[delta.index] = delta if first is None else _joined(first, delta)
    return list(by_index.values())


def _joined(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    return OutputDelta(
        index=first.index,
        text=first.text + second.text,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
        pooled=second.pooled,
    )


async def collect(service: Service, work: Work) -> tuple[list[Choice], Tally]:
    """All choices, finished, and the counts."""
    n = work.params.n
    choices = [Choice(i, i // n) for i in range(len(work.prompts) * n)]
    tally = Tally(work.num_prompt_tokens)
    async with contextlib.aclosing(run(service, work)) as news:
        async for batch in news:
            for prompt_index, delta in batch:
                tally.add(prompt_index, delta)
                choices[prompt_index * n + delta.index].add(delta)
                if delta.prompt_logprobs is not None:
                    for choice in choices[prompt_index * n : (prompt_index + 1) * n]:
                        choice.prompt_logprobs = delta.prompt_logprobs
    return choices, tally

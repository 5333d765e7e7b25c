"""What every endpoint needs: the engine, the limits, the way from a socket's bytes to token ids."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import time

import orjson
from starlette.requests import Request

from jaxserve.config import ServerConfig
from jaxserve.grammar import GrammarRefused
from jaxserve.obs.metrics import Metrics
from jaxserve.obs.tracing import Tracing
from jaxserve.server import speech, structured
from jaxserve.server.auth import CacheSalts, Caller
from jaxserve.server.errors import ApiError, quote
from jaxserve.server.limits import read_body
from jaxserve.server.protocol import MAX_PROMPTS, Body, Generating
from jaxserve.server.toolbox import Toolbox
from jaxserve.types import SamplingParams

TOKENIZER_THREADS = 2
# Bodies above this are parsed in a thread: a list of a million ids takes 0.3 s to validate.
INLINE_BODY_BYTES = 128 << 10


@dataclasses.dataclass
class Service:
    """The application's state. Immutable after start but for the engine behind it."""

    engine: object  # AsyncEngine, or anything that keeps its contract
    config: ServerConfig
    metrics: Metrics
    tracing: Tracing | None = None
    salts: CacheSalts = dataclasses.field(default_factory=CacheSalts)
    started: int = dataclasses.field(default_factory=lambda: int(time.time()))
    pool: concurrent.futures.ThreadPoolExecutor = dataclasses.field(
        default_factory=lambda: concurrent.futures.ThreadPoolExecutor(
            TOKENIZER_THREADS, thread_name_prefix="tokenizer"
        )
    )

    profiling: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)

    @property
    def tokenizer(self):
        return self.engine.tokenizer

    async def in_thread(self, function, *arguments):
        """Result of a CPU-bound call, made where it blocks neither event loop nor engine."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.pool, function, *arguments)

    async def parse(self, request: Request, kind: type[Body]):
        """The request's body as a checked `kind`; raises ApiError or pydantic.ValidationError."""
        body = await read_body(request, self.config.max_body_bytes, self.config.client_timeout_s)
        if len(body) > INLINE_BODY_BYTES:
            return await self.in_thread(_parse, body, kind)
        return _parse(body, kind)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 unless the client means the model that is served here."""
        if name is not None and name != self.engine.model_name:
            message = f"The model {quote(name)} is not served here; see /v1/models."
            raise ApiError(404, message, "model_not_found", "model")

    def open_for(self, params: SamplingParams) -> SamplingParams:
        """params, if the engine can serve them now; else refused, before any tokenising."""
        params.check_vocabulary(self.engine.vocab_size)
        self.check_open()
        return params

    async def params_of(self, body: Generating) -> SamplingParams:
        """Checked parameters of the body, its grammar included."""
        params = self.open_for(body.params())
        make = structured.grammar_of(body)
        if make is None:
            return params
        return dataclasses.replace(params, grammar=await self.in_thread(make))

    def check_open(self) -> None:
        """Refuses early what the engine would refuse or never run."""
        health = self.engine.health()
        if health.state == "draining":
            message = "The server is shutting down; send this to another one."
            raise ApiError(503, message, "shutting_down", retry_after=1, close=True)
        if health.state != "ready":
            message = f"The engine is not able to serve (state: {health.state})."
            raise ApiError(503, message, f"engine_{health.state}", retry_after=5)
        waiting, limit = self.engine.stats().waiting, self.engine.config.max_queued
        if waiting >= limit:
            message = f"{waiting} requests are waiting already (limit {limit}); try again later."
            self.metrics.refused.labels("queue_full").inc()
            raise ApiError(429, message, "queue_full", retry_after=self.engine.retry_after())

    def style_of(self, prompt: list[int], toolbox: Toolbox = speech.EMPTY) -> speech.Style:
        """How to read the answers to a rendered prompt; raises ApiError for tools that cannot."""
        parser = None if self.config.tool_parser == "auto" else self.config.tool_parser
        return speech.style_of(self.tokenizer, prompt, toolbox, parser=parser)

    async def params_for(self, style: speech.Style, params: SamplingParams) -> SamplingParams:
        """params whose text can be read in this style, and keeps its rules."""
        if style.needs_special:
            params = dataclasses.replace(params, skip_special_tokens=False)
        if params.grammar is None and not style.toolbox.constrained:
            return params
        try:
            grammar = await self.in_thread(style.grammar, params.grammar)
        except GrammarRefused as error:
            raise ApiError(400, f"tools: {error}", "invalid_grammar", "tools") from None
        return dataclasses.replace(params, grammar=grammar)

    def timeout_s(self, asked: float | None) -> float:
        limit = self.config.request_timeout_s
        return limit if asked is None else min(asked, limit)

    def cache_salt(self, request: Request, asked: str | None) -> str:
        return self.salts.salt(caller_of(request).tenant, asked)

    # Prompts

    async def encode_prompts(
        self, prompt: str | list, *, special: bool = True, n: int = 1, field: str = "prompt"
    ) -> list[list[int]]:
        """Token ids of one prompt or several, checked against vocabulary and context.

        n: choices of each; field: the one to blame.
        """
        prompts = _prompt_list(prompt)
        if len(prompts) * n > MAX_PROMPTS:
            message = f"{field}: {len(prompts)} of them with n={n}: at most {MAX_PROMPTS} in all"
            raise ApiError(400, message, "invalid_value", field)
        for prompt in prompts:
            self.check_chars(len(prompt) if isinstance(prompt, str) else 0, field)
        if any(isinstance(prompt, str) for prompt in prompts):
            encode = functools.partial(self._encode, special=special, field=field)
            prompts = await self.in_thread(lambda: [encode(prompt) for prompt in prompts])
        for ids in prompts:
            self.check_prompt(ids, field)
        return prompts

    def _encode(self, prompt: str | list[int], special: bool, field: str) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        self.check_fits(prompt, field)
        return self.tokenizer.encode(prompt, add_special_tokens=special)

    def check_fits(self, text: str, param: str) -> None:
        """Refuses text of too many tokens after a look at its beginning. Tokenises some: for a
        thread."""
        limit = self.engine.max_model_len
        if self.tokenizer.cannot_fit(text, limit):
            message = (
                f"This model's context is {limit} tokens and the {param} has more. Shorten it."
            )
            raise ApiError(400, message, "context_length_exceeded", param)

    def check_chars(self, count: int, param: str) -> None:
        """Refuses text that cannot fit at a glance, before it waits for a thread."""
        limit = self.tokenizer.max_chars_for(self.engine.max_model_len)
        if count > limit:
            message = (
                f"The prompt has {count} characters; with a context of {self.engine.max_model_len} "
                f"tokens this model takes at most {limit}."
            )
            raise ApiError(400, message, "context_length_exceeded", param)

    def check_ids(self, ids: list[int], param: str) -> None:
        """Refuses ids that the model does not have: devices clamp or wrap them silently."""
        low, high, size = min(ids, default=0), max(ids, default=0), self.engine.vocab_size
        if low < 0 or high >= size:
            wrong = low if low < 0 else high
            message = f"{param}: token id {wrong} is not in the vocabulary (0 to {size - 1})"
            raise ApiError(400, message, "invalid_value", param)

    def check_prompt(self, ids: list[int], param: str) -> None:
        """Refuses empty prompts, unknown ids, and prompts that leave no room for a token."""
        if not ids:
            raise ApiError(400, f"The {param} has no tokens.", "invalid_value", param)
        limit = self.engine.max_model_len
        if len(ids) >= limit:
            message = (
                f"This model's context is {limit} tokens; the prompt has {len(ids)} and leaves no "
                "room for output. Shorten it."
            )
            raise ApiError(400, message, "context_length_exceeded", param)
        self.check_ids(ids, param)  # only now: millions would take a while to look at


def _parse(body: bytes, kind: type[Body]) -> Body:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        near = error.doc[max(0, error.pos - 30) : error.pos + 10]
        message = f"The body is not valid JSON: {error}; near {quote(near)}"
        raise ApiError(400, message, "invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError(400, "The body must be a JSON object.", "invalid_json")
    parsed = kind.model_validate(content)
    parsed.check_fields()
    return parsed


def _prompt_list(prompt) -> list:
    """One prompt or several, text or ids, to a list of prompts."""
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return prompt if several else [prompt]


def caller_of(request: Request) -> Caller:
    return request.scope["state"].get("caller") or Caller()


def service_of(request: Request) -> Service:
    return request.app.state.service

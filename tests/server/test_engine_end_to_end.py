"""The server over the real AsyncEngine and scheduler; only the device is pretended."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import time

import httpx
import numpy as np
import openai
import pytest
from fake_engine import EOS, VOCAB, byte_tokenizer
from test_completions import error_of
from test_lifecycle import wait_for
from test_observability import scrape, value

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.core import EngineCore
from jaxserve.engine.output import OutputStage
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.sim.fake_runner import FakeRunner, expected_output
from jaxserve.types import MAX_LOGPROBS, Request, SamplingParams
from tests.server.conftest import http, serving


class Clock:
    """The system's, which a test may set forward."""

    ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class SlowRunner(FakeRunner):
    """pause: seconds a step takes. fault: raised by the next step. All tokens score -1."""

    compilations = 0
    pause = 0.0
    fault: Exception | None = None

    def fetch(self, pending):
        time.sleep(self.pause)
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        result = super().fetch(pending)
        top_ids_SK = (result.token_S[:, None] + np.arange(MAX_LOGPROBS, dtype=np.int32)) % VOCAB
        top_logprobs_SK = np.broadcast_to(-np.arange(1.0, 1 + MAX_LOGPROBS), top_ids_SK.shape)
        return dataclasses.replace(
            result,
            logprob_S=np.full(len(result.token_S), -1.0, np.float32),
            top_ids_SK=top_ids_SK,
            top_logprobs_SK=top_logprobs_SK,
        )


@contextlib.contextmanager
def real_engine(**settings):
    config = EngineConfig(
        **{"num_slots": 4, "token_budget": 32, "page_size": 4, "num_pages": 65,
           "max_model_len": 64, **settings}
    )  # fmt: skip
    tokenizer = byte_tokenizer()
    runner = SlowRunner(
        config.num_slots, config.num_pages, config.page_size, VOCAB, frozenset([EOS])
    )
    scheduler = Scheduler.from_config(
        config, SchedulerConfig(), eos_ids=[EOS], vocab_size=VOCAB, cache_key=b"test"
    )
    core = EngineCore(scheduler, runner, OutputStage(tokenizer), Clock())
    engine = AsyncEngine(core, tokenizer, config=config, model_name="tiny")
    engine.wait_until_ready()
    try:
        yield engine, runner
    finally:
        engine.shutdown()


@pytest.fixture
def stack():
    with real_engine() as (engine, runner), serving(engine) as running:
        running.runner = runner
        yield running


def client_of(running, **kw):
    return openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0, **kw)


def expected_text(engine, prompt_ids, count, seed):
    params = SamplingParams(max_tokens=count, seed=seed)
    request = Request("r", tuple(prompt_ids), params, seed=seed)
    total = len(prompt_ids) + count
    tokens = expected_output(request, 0, total, VOCAB, frozenset([EOS]))
    return engine.tokenizer.decode([token for token in tokens if token != EOS])


def test_many_clients_each_get_their_own_text(stack):
    engine = stack.engine

    async def ask(client, i):
        prompt = f"prompt number {i}"
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=12, seed=i, stream=bool(i % 2)
        )
        if i % 2:
            return "".join([chunk.choices[0].text async for chunk in stream])
        return stream.choices[0].text

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=stack.url + "/v1", api_key="x") as client:
            return await asyncio.gather(*[ask(client, i) for i in range(24)])

    encode = engine.tokenizer.encode
    expected = [expected_text(engine, encode(f"prompt number {i}"), 12, i) for i in range(24)]
    assert asyncio.run(all_of_them()) == expected
    assert_idle(stack)


def assert_idle(running):
    wait_for(lambda: running.engine.stats().running + running.engine.stats().waiting == 0)
    stats = running.engine.stats()
    assert stats.pages_free == stats.pages_total
    assert http.get(running.url + "/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_give_their_pages_back(stack, stream):
    stack.runner.pause = 0.02
    body = {"prompt": "x" * 20, "max_tokens": 40, "ignore_eos": True, "stream": stream}
    with contextlib.ExitStack() as open_streams:
        for _ in range(12):  # some run, some queue behind four slots
            with contextlib.suppress(httpx.ReadTimeout):
                answer = httpx.stream(
                    "POST", stack.url + "/v1/completions", json=body, timeout=60 if stream else 0.05
                )
                open_streams.enter_context(answer)
        assert stack.engine.stats().running > 0 or not stream
    assert_idle(stack)


def test_a_failed_step_hurts_only_what_ran_and_the_next_request_works(stack):
    stack.runner.fault = RuntimeError("device lost at 0x7fff1234 in /usr/lib/libtpu.so")
    body = {"prompt": "a", "max_tokens": 5, "seed": 1}
    error = error_of(http.post(stack.url + "/v1/completions", json=body), 500)
    assert error["code"] == "engine_failed" and "libtpu" not in error["message"]
    assert http.post(stack.url + "/v1/completions", json=body).status_code == 200
    assert_idle(stack)


def test_a_deadline_keeps_the_partial_text(stack):
    stack.runner.pause = 0.1
    body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "timeout": 300}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(http.post, stack.url + "/v1/completions", json=body)
        wait_for(lambda: stack.engine.stats().generation_tokens > 2)
        stack.engine.core.clock.ahead = 301
        answer = asking.result().json()
    assert answer["choices"][0]["finish_reason"] == "timeout"
    assert 2 < answer["usage"]["completion_tokens"] < 60
    assert_idle(stack)


def test_usage_counts_and_reuse_of_prefixes(stack):
    body = {"prompt": "the same long beginning of it", "max_tokens": 4, "n": 2, "seed": 3,
            "ignore_eos": True}  # fmt: skip
    first = http.post(stack.url + "/v1/completions", json=body).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["prompt_tokens"] == 30 and first["completion_tokens"] == 8
    again = http.post(stack.url + "/v1/completions", json=body).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == 28
    salted = http.post(stack.url + "/v1/completions", json={**body, "cache_salt": "s"}).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


class Scraper:
    def __init__(self, running):
        self.get = lambda path: http.get(running.url + path)


def test_accounting_is_exact(stack):
    total = 0
    for i in range(6):
        body = {"prompt": f"p{i}", "max_tokens": 3 + i, "ignore_eos": True}
        total += http.post(stack.url + "/v1/completions", json=body).json()["usage"][
            "completion_tokens"
        ]
    samples = scrape(Scraper(stack))
    assert value(samples, "jaxserve:generation_tokens_total") == total == 33
    assert value(samples, "jaxserve:requests_total") == 6
    assert value(samples, "jaxserve:request_success_total", finished_reason="length") == 6


def test_a_prompt_beyond_the_pool_is_refused_not_queued():
    with real_engine(num_pages=5) as (engine, _), serving(engine) as running:
        client = client_of(running)
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="x" * 40)
        assert caught.value.code == "capacity_exceeded"
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices


def test_overload_is_refused_at_once_with_a_time_to_retry():
    with real_engine(max_queued=2) as (engine, runner), serving(engine) as running:
        runner.pause = 0.05

        async def ask(client):
            body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True}
            return await client.post("/v1/completions", json=body)

        async def flood():
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=running.url, limits=limits, timeout=30) as client:
                return await asyncio.gather(*[ask(client) for _ in range(40)])

        answers = asyncio.run(flood())
        refused = [answer for answer in answers if answer.status_code == 429]
        assert {answer.status_code for answer in answers} == {200, 429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert_idle(running)


def test_a_dead_engine_is_reported_and_its_clients_are_told(stack):
    stack.engine.core.step = None  # calling it raises on the engine thread
    body = {"prompt": "a", "max_tokens": 5}
    assert http.post(stack.url + "/v1/completions", json=body).status_code == 500
    wait_for(lambda: http.get(stack.url + "/health").status_code == 503)
    error_of(http.post(stack.url + "/v1/completions", json=body), 503)


def test_spans_of_requests_over_http():
    spans = pytest.importorskip("tests.obs.test_tracing").Spans()
    with real_engine() as (engine, _), serving(engine, tracing=spans.tracing) as running:
        engine.observe(spans.tracing)
        headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        body = {"prompt": ["secret", "other"], "max_tokens": 3, "ignore_eos": True}
        url = running.url + "/v1/completions"
        assert http.post(url, json=body, headers=headers).status_code == 200
        assert http.post(url, json=body | {"stream": True, "prompt": "b"}).status_code == 200
        wait_for(lambda: len(spans.finished) == 2)
    first, second = sorted(spans.finished, key=lambda span: span.start_time)
    assert [event.name for event in first.events] == ["queued", "prefill", "decode"]
    assert [event.name for event in second.events] == ["queued", "prefill", "decode"]
    times = [first.start_time, *(event.timestamp for event in first.events), first.end_time]
    assert times == sorted(times)
    assert first.attributes["gen_ai.usage.output_tokens"] == 6
    assert first.parent.span_id == 0xB7AD6B7169203331 and second.parent is None
    assert "secret" not in first.to_json()

"""The official openai package against a real server: what it parses is what clients get."""

import openai
import pytest
from fake_engine import BOS, MODEL, FakeEngine, text_of
from test_chat import rendered

from jaxserve.grammar import GrammarSpec
from jaxserve.types import RequestRefused
from tests.server.conftest import serving


@pytest.fixture(scope="module")
def running():
    with serving(FakeEngine()) as running:
        yield running


@pytest.fixture
def api(running):
    running.engine.refusal = running.engine.fail_at = None
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)


HI = [{"role": "user", "content": "hi"}]


def test_models(api):
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).owned_by == "jaxserve"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")


def test_chat(api):
    answer = api.chat.completions.create(model=MODEL, messages=HI, max_tokens=5, seed=1)
    assert answer.choices[0].message.content == text_of(rendered(("user", "hi")), 5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream(api):
    stream = api.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=4, n=2, stream=True,
        stream_options={"include_usage": True}, logprobs=True, top_logprobs=1,
    )  # fmt: skip
    texts, reasons, usage, roles = {0: "", 1: ""}, {}, [], []
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        usage += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.index] if choice.delta.role else []
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
            if choice.logprobs:
                assert choice.logprobs.content[0].top_logprobs
    prompt = rendered(("user", "hi"))
    assert texts == {0: text_of(prompt, 4, 0), 1: text_of(prompt, 4, 1)}
    assert reasons == {0: "length", 1: "length"} and sorted(roles) == [0, 1]
    assert [u.completion_tokens for u in usage] == [8]


def test_stream_helper(api, running):
    running.engine.scripts["speak up"] = "héllo".encode()
    messages = [{"role": "user", "content": "speak up"}]
    with api.chat.completions.stream(model=MODEL, messages=messages) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "héllo"
    assert final.choices[0].finish_reason == "stop"


def test_completions(api):
    answer = api.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=3, echo=True, logprobs=1, n=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == "a" + text_of([BOS, 97], 3)
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    stream = api.completions.create(model=MODEL, prompt="a", max_tokens=3, stream=True)
    assert "".join(c.choices[0].text for c in stream) == text_of([BOS, 97], 3)


def test_extra_body(api, running):
    api.completions.create(
        model=MODEL, prompt="a", max_tokens=2, user="u", extra_body={"top_k": 5, "min_p": 0.1}
    )
    assert running.engine.calls[-1].params.top_k == 5


EXTRAS = dict(top_k=5, min_p=0.1, repetition_penalty=1.2, min_tokens=1, ignore_eos=True)


def test_every_parameter_of_the_client_reaches_the_engine(api, running):
    both = dict(
        n=2, seed=11, stop=["x", "yz"], temperature=0.5, top_p=0.9, presence_penalty=0.2,
        frequency_penalty=-0.3, logit_bias={"5": -100},
    )  # fmt: skip
    asked = dict(max_completion_tokens=4, logprobs=True, top_logprobs=2, user="u")
    form = {"type": "json_object"}
    api.chat.completions.create(
        model=MODEL, messages=HI, **both, **asked, response_format=form, extra_body=EXTRAS
    )
    in_chat = running.engine.calls[-1].params
    api.completions.create(
        model=MODEL, prompt=[97, 98], **both, max_tokens=4, logprobs=2,
        extra_body=EXTRAS | {"guided_json": {"type": "object"}, "prompt_logprobs": 1},
    )  # fmt: skip
    in_completion = running.engine.calls[-1].params
    assert running.engine.calls[-1].prompt_ids == [97, 98]
    assert (in_chat.prompt_logprobs, in_completion.prompt_logprobs) == (None, 1)
    expected = both | EXTRAS | {"stop": ("x", "yz"), "logit_bias": {5: -100.0}}
    expected |= {"max_tokens": 4, "logprobs": 2, "grammar": GrammarSpec.json_object()}
    for params in (in_chat, in_completion):
        assert {name: getattr(params, name) for name in expected} == expected


def test_what_is_not_offered_is_refused_by_name(api):
    for field, value in (("suffix", "end"), ("best_of", 3)):
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(model=MODEL, prompt="a", **{field: value})
        assert caught.value.param == field and field in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "code, kind, retry",
    [
        ("queue_full", openai.RateLimitError, "7"),
        ("shutting_down", openai.InternalServerError, "1"),
        ("capacity_exceeded", openai.BadRequestError, None),
    ],
)
def test_refusals_keep_their_status_also_when_streamed(api, running, stream, code, kind, retry):
    after = 7.0 if code == "queue_full" else None
    running.engine.refusal = RequestRefused("no room", code=code, retry_after=after)
    with pytest.raises(kind) as caught:
        api.chat.completions.create(model=MODEL, messages=HI, stream=stream)
    error = caught.value
    assert error.code == code and "no room" in error.message
    assert error.response.headers.get("retry-after") == retry
    if code == "shutting_down":
        assert error.status_code == 503 and error.response.headers["connection"] == "close"


def test_a_failed_step_is_a_500_that_tells_nothing(api, running):
    running.engine.fail_at = 0
    with pytest.raises(openai.InternalServerError) as caught:
        api.completions.create(model=MODEL, prompt="a")
    message = str(caught.value)
    assert caught.value.code == "engine_failed" and "0x" not in message
    assert caught.value.response.headers["x-request-id"] in message
    running.engine.fail_at = None
    assert api.completions.create(model=MODEL, prompt="a").choices


def test_a_step_that_fails_under_a_stream_ends_it_with_an_error(api, running):
    running.engine.fail_at = 3
    stream = api.completions.create(model=MODEL, prompt="a", max_tokens=9, stream=True)
    text = ""
    with pytest.raises(openai.APIError) as caught:
        for chunk in stream:
            text += chunk.choices[0].text
    assert text == text_of([BOS, 97], 3) and caught.value.code == "engine_failed"


def test_wrong_field(api):
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model=MODEL, messages=HI, temperature=101)
    assert caught.value.param == "temperature"


def test_async_client_with_many_streams(running):
    import asyncio

    async def one(client, i):
        stream = await client.completions.create(
            model=MODEL, prompt=f"p{i}", max_tokens=8, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="x") as client:
            return await asyncio.gather(*[one(client, i) for i in range(40)])

    running.engine.refusal = running.engine.fail_at = None
    expected = [text_of([BOS, *f"p{i}".encode()], 8) for i in range(40)]
    assert asyncio.run(all_of_them()) == expected

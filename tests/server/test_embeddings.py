"""/v1/embeddings: OpenAI's shape, and what it refuses. The fake engine pools to (0.6, 0.8, 0)."""

import openai
import pytest
from fake_engine import BOS, MODEL
from test_completions import error_of

from jaxserve.types import FinishReason, OutputDelta
from tests.server.conftest import serving


def embed(client, input="abc", **body):
    return client.post("/v1/embeddings", {"model": MODEL, "input": input, **body})


@pytest.mark.parametrize(
    "encoding", [{"encoding_format": "float"}, {"encoding_format": "base64"}, {}]
)
def test_by_the_openai_package(engine, encoding):
    with serving(engine) as running:
        api = openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0)
        answer = api.embeddings.create(model=MODEL, input=["abc", "d"], **encoding)
    assert [item.index for item in answer.data] == [0, 1]
    if encoding == {"encoding_format": "base64"}:
        assert {item.embedding for item in answer.data} == {"mpkZP83MTD8AAAAA"}
    else:
        for item in answer.data:
            assert item.embedding == pytest.approx([0.6, 0.8, 0])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 4 + 2
    assert answer.model == MODEL and answer.object == "list"


@pytest.mark.parametrize(
    "input, prompts",
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_inputs(client, engine, input, prompts):
    answer = embed(client, input).json()
    assert [call.prompt_ids for call in engine.calls] == prompts
    assert len(answer["data"]) == len(prompts)
    assert all((c.params.max_tokens, c.params.pooling) == (0, "mean") for c in engine.calls)
    assert answer["pooling"] == "mean" and answer["trained_for_embeddings"] is False


def test_the_last_token_without_a_begin_token(client, engine):
    answer = embed(client, pooling="last", add_special_tokens=False, dimensions=3).json()
    assert answer["data"][0]["embedding"] == pytest.approx([-0.6, -0.8, 0])
    assert engine.calls[0].prompt_ids == [*b"abc"]


@pytest.mark.parametrize(
    "body, field",
    [
        ({"dimensions": 2}, "dimensions"), ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"), ({"input": ""}, None), ({"input": []}, "input"),
        ({"input": [-1]}, "input"), ({"input": [260]}, "input"), ({"input": "x" * 64}, "input"),
        ({"input": ["a"] * 1025}, "input"), ({"input": {}}, "input"), ({"stream": True}, "stream"),
    ],
)  # fmt: skip
def test_what_is_refused(client, engine, body, field):
    if field is None:  # an empty text still has its begin token
        assert embed(client, **body).status_code == 200
        return
    assert error_of(embed(client, **body))["param"] == field and engine.calls == []


def test_a_deadline_is_an_error_not_half_a_vector(client, engine):
    async def expire(call):
        yield [OutputDelta(0, finish_reason=FinishReason.TIMEOUT)]

    engine._produce = expire
    assert error_of(embed(client), 503)["code"] == "timeout"


def test_the_card_says_what_these_vectors_are(client):
    card = client.get("/v1/models").json()["data"][0]["embeddings"]
    assert card == {"dimensions": 3, "pooling": ["mean", "last"], "trained_for_embeddings": False}


def test_many_inputs_do_not_fill_the_queue(client, engine):
    most, seen = 0, engine.generate

    async def counted(*args, **kwargs):
        nonlocal most
        async for deltas in seen(*args, **kwargs):
            most = max(most, len(engine.open))
            yield deltas

    engine.generate = counted
    assert len(embed(client, ["ab"] * 300).json()["data"]) == 300
    assert most <= 128

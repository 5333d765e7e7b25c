"""Everything a stranger may put into a body: each answer is a 400 that names the field."""

import gzip

import orjson
import pytest
from test_completions import error_of

BAD_FIELDS = [
    ("logprobs", "2"), ("logprobs", 21), ("logprobs", -1), ("n", 0), ("n", 1.5), ("n", 1_000_000),
    ("n", True), ("seed", "a"), ("seed", 2**80), ("max_tokens", -1), ("max_tokens", "5"),
    ("temperature", "1"), ("temperature", -0.1), ("temperature", True), ("top_p", 0),
    ("top_p", 1.01), ("min_p", 2), ("top_k", -2), ("repetition_penalty", 0),
    ("presence_penalty", 2.1), ("frequency_penalty", -3), ("stop", ["a"] * 17), ("stop", [""]),
    ("stop", [1]), ("stop", "x" * 257), ("stop_token_ids", [-1]), ("stop_token_ids", [260]),
    ("min_tokens", 99), ("stream", "yes"), ("echo", 1), ("cache_salt", ""), ("timeout", 0),
    ("timeout", -1), ("priority", 2**40), ("priority", 1.5), ("prompt_logprobs", 21),
    ("logit_bias", {"abc": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"99999999": 1}),
    ("logit_bias", {"5": "x"}), ("logit_bias", {"5": 1e9}), ("logit_bias", {"٣": 1}),
    ("logit_bias", {"5.0": 1}), ("logit_bias", [5]), ("suffix", "end"), ("best_of", 3),
    ("use_beam_search", True), ("prompt_embeds", "AAAA"), ("max_token", 5),
    ("stream_options", {"include_usage": True}), ("ignore_eos", "true"),
]  # fmt: skip


@pytest.mark.parametrize("name, value", BAD_FIELDS)
def test_bad_values_name_their_field(client, engine, name, value):
    error = error_of(client.complete(**{"prompt": "a", name: value}))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == name and name in error["message"]
    assert engine.calls == []


BAD_CHAT = [
    ("top_logprobs", 21), ("top_logprobs", 2), ("logprobs", 1), ("messages", []), ("messages", {}),
    ("messages", "hi"), ("messages", [{"role": "wizard", "content": "x"}]),
    ("messages", [{"role": "user"}]), ("messages", [{"content": "x"}]), ("messages", [None]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "user", "content": 5}]), ("max_completion_tokens", -1),
    ("audio", {"voice": "x"}), ("modalities", ["text", "audio"]), ("web_search_options", {}),
    ("functions", [{"name": "f"}]), ("chat_template", "{{ x }}"), ("echo", True),
    ("chat_template_kwargs", {"messages": []}), ("chat_template_kwargs", {"tokenize": True}),
    ("chat_template_kwargs", 1),
]  # fmt: skip


@pytest.mark.parametrize("name, value", BAD_CHAT)
def test_bad_chat_values_name_their_field(client, engine, name, value):
    error = error_of(client.chat(**{name: value}))
    assert error["param"] == name and engine.calls == []


def raw(client, body: bytes, path="/v1/completions"):
    return client.post(path, content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_compressed_body_is_refused_by_its_encoding(client, path):
    body = gzip.compress(b'{"prompt": "a"}')
    answer = client.post(path, content=body, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415 and answer.headers["connection"] == "close"
    assert 'Content-Encoding "gzip"' in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty"])
def test_numbers_that_are_not_finite(client, name, number):
    body = f'{{"prompt": "a", "{name}": {number}}}'.encode()
    error = error_of(raw(client, body))
    assert error["code"] == "invalid_json" and name in error["message"]
    assert number[:3] in error["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b'"x"', b"null", b"[" * 100_000, b'{"a":' * 2000, b"\xff\xfe",
     b"{'a':1}",
     b'{"prompt": "\\ud800"}', b'{"prompt": "a"} trailing', b"\x00", b'{"prompt": "a" "b"}'],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_bodies_that_are_no_json_object(client, path, body):
    assert error_of(raw(client, body, path))["code"] == "invalid_json"
    assert client.complete(prompt="x").status_code == 200


def test_deep_but_harmless_metadata_is_fine(client):
    body = orjson.dumps({"prompt": "a", "metadata": [[[[[[[[]]]]]]]]})
    assert raw(client, body).status_code == 200


def test_json_is_json_whatever_it_is_called(client):
    body = b'{"prompt": "a"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=x"):
        headers = {"Content-Type": kind}
        assert client.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_bias_by_digits_bans_a_token(client, engine):
    first = client.complete(prompt="a", max_tokens=1).json()["choices"][0]["text"]
    bias = {str(ord(first)): -100}
    banned = client.chat(n=3, seed=1, logit_bias=bias, max_tokens=2).json()
    assert engine.calls[-1].params.logit_bias == {ord(first): -100.0}
    assert [choice["index"] for choice in banned["choices"]] == [0, 1, 2]
    assert all(choice["message"]["content"][0] != first for choice in banned["choices"])
    assert banned["usage"]["completion_tokens"] == 6


def test_unknown_models_are_404(client):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        body = {"model": "x\nINFO fake", "prompt": "a", "messages": None}
        if "chat" in path:
            body = {"model": "nope", "messages": [{"role": "user", "content": "x"}]}
        error = error_of(client.post(path, body), 404)
        assert error["code"] == "model_not_found" and "\n" not in error["message"]


def test_paths_and_methods_answer_in_the_same_shape(client):
    assert error_of(client.get("/v2/nothing"), 404)["code"] == "not_found"
    assert error_of(client.get("/v1/completions"), 405)["code"] == "method_not_allowed"
    assert error_of(client.post("/v1/models/", {}), 405)["code"] == "method_not_allowed"
    for path in ("/pause", "/reset_prefix_cache", "/docs", "/redoc", "/v1/completions/"):
        assert client.post(path, {}).status_code in (404, 405)


def test_long_values_are_quoted_short(client):
    error = error_of(client.complete(prompt="a", temperature="y" * 5000))
    assert len(error["message"]) < 250


def test_a_template_that_refuses_is_a_400(client):
    error = error_of(client.chat("refused by the template"))
    assert "refuses this conversation" in error["message"] and error["param"] == "messages"

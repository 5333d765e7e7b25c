"""/v1/completions over the fake engine: shapes, prompts of every form, echo, scores, limits."""

import json

import pytest
from fake_engine import BOS, EOS, STEP_LOGPROB, VOCAB, FakeEngine, text_of

from tests.server.conftest import Client


def ids(text):
    return [BOS, *text.encode()]


def error_of(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events(response):
    """The JSON of each data line; the stream must end in [DONE], once."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_text_usage_and_finish_reason(client):
    body = client.complete(prompt="hello", max_tokens=5).json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "text": text_of(ids("hello"), 5),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 5,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_default_is_sixteen_tokens(client):
    assert client.complete(prompt="x").json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    "prompt, sent",
    [
        ("ab", [ids("ab")]),
        (["ab", "c"], [ids("ab"), ids("c")]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_prompt_forms_and_choice_numbering(client, engine, prompt, sent):
    choices = client.complete(prompt=prompt, n=2, max_tokens=3).json()["choices"]
    assert sorted(call.prompt_ids for call in engine.calls) == sorted(sent)
    assert [choice["index"] for choice in choices] == list(range(2 * len(sent)))
    expected = [text_of(prompt_ids, 3, i) for prompt_ids in sent for i in range(2)]
    assert [choice["text"] for choice in choices] == expected


def test_without_special_tokens(client, engine):
    client.complete(prompt="ab", add_special_tokens=False, max_tokens=1)
    assert engine.calls[0].prompt_ids == [97, 98]


@pytest.mark.parametrize("prompt", [[], [""], [[]], [97, []], {}, None, 5, [None], ["a", 1]])
def test_unusable_prompts_are_refused_and_the_next_works(client, prompt):
    response = client.complete(prompt=prompt, add_special_tokens=False)
    assert error_of(response)["param"] == "prompt"
    assert client.complete(prompt="x").status_code == 200


def test_an_empty_prompt_starts_from_the_begin_token(client, engine):
    assert client.complete(prompt="", max_tokens=1).status_code == 200
    assert engine.calls[0].prompt_ids == [BOS]


@pytest.mark.parametrize("bad", [[-1], [VOCAB], [2147483648], [True], [1.0, 2], [10**30]])
def test_ids_outside_the_vocabulary_never_reach_the_engine(client, engine, bad):
    error = error_of(client.complete(prompt=bad))
    assert error["param"] == "prompt" and engine.calls == []
    if isinstance(bad[0], int) and not isinstance(bad[0], bool) and bad[0] < 2**53:
        assert str(bad[0]) in error["message"]


@pytest.mark.parametrize("limit", [None, 16])
def test_the_context_clamps_the_output(client, limit):
    body = client.complete(prompt=[97] * 63, max_tokens=limit).json()
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"
    body = client.complete(prompt=[97] * 60, max_tokens=10).json()
    assert body["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("count", [64, 65, 255])
def test_a_prompt_without_room_is_refused_with_both_numbers(client, engine, count):
    error = error_of(client.complete(prompt=[97] * count))
    assert error["code"] == "context_length_exceeded" and engine.calls == []
    assert "64" in error["message"] and str(count) in error["message"]


def test_text_that_cannot_fit_is_refused_before_tokenising(client, engine, monkeypatch):
    def encode(*arguments):
        raise AssertionError("tokenised")

    monkeypatch.setattr(engine.tokenizer, "encode", encode)
    monkeypatch.setattr(engine.tokenizer, "encode_rendered", encode)
    # 700 characters could be 64 tokens of 12, but their beginning says that they are more.
    for text in ("a" * 700, "a" * 2_000_000, " " * 2_000_000, "\U0001f600" * 500_000):
        assert error_of(client.complete(prompt=text))["code"] == "context_length_exceeded"
        assert error_of(client.chat(text))["code"] == "context_length_exceeded"


def test_scores_null_zero_and_one(client):
    ask = lambda count: client.complete(prompt="a", max_tokens=3, logprobs=count).json()
    assert ask(None)["choices"][0]["logprobs"] is None
    zero = ask(0)["choices"][0]["logprobs"]
    assert zero["token_logprobs"] == [STEP_LOGPROB] * 3
    assert zero["top_logprobs"] == [{}, {}, {}]
    one = ask(1)["choices"][0]
    assert [list(top) for top in one["logprobs"]["top_logprobs"]] == [[c] for c in one["text"]]
    two = ask(2)["choices"][0]["logprobs"]["top_logprobs"]
    assert all(list(top.values()) == [STEP_LOGPROB, STEP_LOGPROB - 1] for top in two)


def test_echo_alone_and_with_scores(client):
    plain = client.complete(prompt="abc", echo=True, max_tokens=2).json()["choices"][0]
    assert plain["text"] == "abc" + text_of(ids("abc"), 2)
    choice = client.complete(prompt="abc", echo=True, max_tokens=2, logprobs=1).json()["choices"][0]
    scores = choice["logprobs"]
    assert scores["tokens"][1:] == list(choice["text"])
    assert scores["token_logprobs"] == [None, *[STEP_LOGPROB] * 5]
    assert scores["top_logprobs"][0] is None
    assert scores["text_offset"] == [0, 0, 1, 2, 3, 4]


def test_echo_of_scores_without_output(client):
    body = client.complete(prompt="abc", echo=True, max_tokens=0, logprobs=1).json()
    choice = body["choices"][0]
    assert choice["text"] == "abc" and len(choice["logprobs"]["tokens"]) == 4
    assert body["usage"]["completion_tokens"] == 0
    assert client.complete(prompt="x").status_code == 200


def test_echo_of_ids_shows_their_text(client):
    choice = client.complete(prompt=[BOS, 97, 98], echo=True, max_tokens=1).json()["choices"][0]
    assert choice["text"] == "ab" + text_of([BOS, 97, 98], 1)


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("echo", [False, True])
def test_stream_joins_to_the_whole_answer(client, echo, logprobs):
    asked = dict(prompt=["aé", "b"], n=2, max_tokens=4, echo=echo, logprobs=logprobs)
    whole = client.complete(**asked).json()["choices"]
    joined = {i: {"text": "", "logprobs": {}} for i in range(4)}
    for chunk in events(client.complete(stream=True, **asked)):
        assert "usage" not in chunk
        for choice in chunk["choices"]:
            joined[choice["index"]]["text"] += choice["text"]
            for key, values in (choice["logprobs"] or {}).items():
                joined[choice["index"]]["logprobs"].setdefault(key, []).extend(values)
            joined[choice["index"]]["finish_reason"] = choice["finish_reason"]
    for choice in whole:
        stream = joined[choice["index"]]
        assert stream["text"] == choice["text"]
        assert (stream["logprobs"] or None) == choice["logprobs"]
        assert stream["finish_reason"] == "length"


def test_token_ids_on_request(client, engine):
    """Those of a character in pieces come as they are, before its text."""
    engine.scripts["q"] = "é€".encode()
    asked = dict(prompt=["q", "aq"], max_tokens=9, return_token_ids=True)
    expected = [([BOS, *b"q"], [*"é€".encode(), EOS]), ([BOS, *b"aq"], [*"é€".encode(), EOS])]
    whole = client.complete(**asked).json()["choices"]
    assert [(choice["prompt_token_ids"], choice["token_ids"]) for choice in whole] == expected
    joined = [([], []), ([], [])]
    for chunk in events(client.complete(stream=True, **asked)):
        for choice in chunk["choices"]:
            prompt, output = joined[choice["index"]]
            prompt += choice.get("prompt_token_ids", [])
            output += choice["token_ids"]
    assert joined == expected


def test_offsets_count_characters_not_bytes(client, engine):
    engine.scripts["q"] = "é€x".encode()
    choice = client.complete(prompt="q", max_tokens=9, logprobs=0).json()["choices"][0]
    assert choice["text"] == "é€x"
    # Two bytes of é, three of €, x, then the end token, which shows nothing.
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2, 3]


def test_prompt_scores_in_vllms_shape(client):
    choice = client.complete(prompt="ab", max_tokens=1, prompt_logprobs=2).json()["choices"][0]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second["97"] == {"logprob": STEP_LOGPROB, "rank": 1, "decoded_token": "a"}
    assert second["98"] == {"logprob": STEP_LOGPROB - 1, "rank": 2, "decoded_token": "b"}
    assert set(third) == {"98", "99"}


def test_the_models_own_end_wins_at_max_tokens(client, engine):
    engine.scripts["q"] = b"abcd"  # its end token is the fifth
    ends = {
        limit: client.complete(prompt="q", max_tokens=limit).json()["choices"][0]["finish_reason"]
        for limit in (4, 5, 6)
    }
    assert ends == {4: "length", 5: "stop", 6: "stop"}


def test_a_stop_string_that_ends_at_the_limit_wins(client, engine):
    engine.scripts["q"] = b"abcdefgh"
    ask = lambda limit: client.complete(prompt="q", max_tokens=limit, stop=["de"]).json()
    ends = {limit: ask(limit)["choices"][0] for limit in (4, 5, 6)}
    assert {k: end["finish_reason"] for k, end in ends.items()} == {
        4: "length", 5: "stop", 6: "stop",
    }  # fmt: skip
    assert [end["text"] for end in ends.values()] == ["abcd", "abc", "abc"]


def test_stop_strings_are_cut_and_named(client, engine):
    engine.scripts["q"] = b"one two three"
    choice = client.complete(prompt="q", max_tokens=30, stop=[" two"]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one", "stop")
    assert choice["stop_reason"] == " two"


def test_parameters_reach_the_engine(client, engine):
    sent = dict(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=-0.3, seed=11, min_tokens=1, max_tokens=4,
        ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False,
    )  # fmt: skip
    lists = dict(stop=["x", "yz"], stop_token_ids=[3], logit_bias={"5": -100, "6": 2.5})
    asked = client.complete(prompt="a", priority=-3, timeout=2, **sent, **lists)
    assert asked.status_code == 200
    call = engine.calls[0]
    assert {name: getattr(call.params, name) for name in sent} == sent
    assert call.params.stop == ("x", "yz") and call.params.stop_token_ids == (3,)
    assert call.params.logit_bias == {5: -100, 6: 2.5}
    assert (call.priority, call.timeout_s) == (-3, 2)


def test_timeout_never_exceeds_the_servers(engine):
    client = Client(engine, request_timeout_s=5)
    client.complete(prompt="a", timeout=100, max_tokens=1)
    client.complete(prompt="a", max_tokens=1)
    assert [call.timeout_s for call in engine.calls] == [5, 5]


def test_an_expired_request_keeps_its_partial_text(client, engine):
    engine.expire_at = 2
    choice = client.complete(prompt="a", max_tokens=9).json()["choices"][0]
    assert choice["text"] == text_of(ids("a"), 2)
    assert choice["finish_reason"] == "timeout"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_no_usage_unless_asked(client, options):
    for chunk in events(client.complete(prompt="a", stream=True, stream_options=options)):
        assert "usage" not in chunk


def test_usage_comes_once_in_a_chunk_without_choices(client):
    response = client.complete(
        prompt="a", n=2, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = events(response)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    assert last["usage"]["prompt_tokens"] == 2
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


def test_many_tokens_a_wake_up_share_one_chunk(client, engine):
    engine.burst = 8
    chunks = events(client.complete(prompt="a", max_tokens=16, stream=True))
    assert len(chunks) == 2
    assert "".join(c["choices"][0]["text"] for c in chunks) == text_of(ids("a"), 16)


def test_vllm_and_openai_labels_are_ignored(client):
    assert client.complete(prompt="a", user="u", store=True, metadata={"a": "b"}).status_code == 200
    assert client.complete(prompt="a", suffix=None, best_of=1, logit_bias=None).status_code == 200


def test_work_in_one_request_is_bounded():
    client = Client(FakeEngine())
    assert error_of(client.complete(prompt=["a"] * 1025))["param"] == "prompt"
    assert error_of(client.complete(prompt=["a"] * 100, n=11))["param"] == "prompt"
    assert error_of(client.complete(prompt="a", n=129))["param"] == "n"
    client = Client(FakeEngine(max_model_len=4000))
    scored = dict(prompt=[97] * 3000, n=128, echo=True, max_tokens=1)
    assert error_of(client.complete(**scored, logprobs=5))["param"] == "logprobs"
    assert error_of(client.complete(**scored, prompt_logprobs=5))["param"] == "logprobs"

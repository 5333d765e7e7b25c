"""/v1/chat/completions over the fake engine: message forms, envelopes of streams, scores."""

import pytest
from fake_engine import BOS, END, START, STEP_LOGPROB, text_of
from test_completions import error_of, events


def rendered(*turns):
    ids = [BOS]
    for role, content in turns:
        ids += [START, *f"{role}\n{content}".encode(), END]
    return [*ids, START, *b"assistant\n"]


def test_answer(client):
    body = client.chat("hi", max_tokens=4).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    content = text_of(rendered(("user", "hi")), 4)
    assert choice["message"] == {"role": "assistant", "content": content, "refusal": None}
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None


@pytest.mark.parametrize(
    "message, role, content",
    [
        ({"role": "user", "content": "a"}, "user", "a"),
        ({"role": "developer", "content": "a"}, "system", "a"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"},
                                         {"type": "text", "text": "b"}]},
            "user", "a\nb",
        ),
        ({"role": "assistant", "content": None}, "assistant", ""),
        ({"role": "tool", "content": "4", "tool_call_id": "c"}, "tool", "4"),
    ],
)  # fmt: skip
def test_message_forms(client, engine, message, role, content):
    assert client.chat(messages=[message], max_tokens=1).status_code == 200
    assert engine.calls[0].prompt_ids == rendered((role, content))


def test_output_may_fill_the_context(client):
    body = client.chat("hi").json()
    assert body["usage"]["total_tokens"] == 64


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(client, name):
    assert client.chat(**{name: 3}).json()["usage"]["completion_tokens"] == 3


def test_scores(client):
    ask = lambda **kw: client.chat(max_tokens=3, **kw).json()["choices"][0]["logprobs"]
    assert ask(logprobs=None) is None and ask(logprobs=False) is None
    plain = ask(logprobs=True, top_logprobs=0)["content"]
    assert [entry["top_logprobs"] for entry in plain] == [[], [], []]
    assert ask(logprobs=True)["content"] == plain
    two = ask(logprobs=True, top_logprobs=2)["content"]
    assert [entry["logprob"] for entry in two] == [STEP_LOGPROB] * 3
    assert all(len(entry["top_logprobs"]) == 2 for entry in two)
    assert two[0]["bytes"] == list(two[0]["token"].encode())


def test_stream_envelope(client):
    options = {"include_usage": True}
    response = client.chat(stream=True, n=2, max_tokens=4, stream_options=options)
    *chunks, usage = events(response)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 8
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    for index in (0, 1):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        text = "".join(choice["delta"].get("content", "") for choice in mine)
        assert text == text_of(rendered(("user", "hi")), 4, index)


def test_stream_scores_join_to_the_whole(client):
    asked = dict(max_tokens=5, logprobs=True, top_logprobs=1)
    whole = client.chat(**asked).json()["choices"][0]["logprobs"]["content"]
    joined = []
    for chunk in events(client.chat(stream=True, **asked)):
        joined += (chunk["choices"][0]["logprobs"] or {}).get("content", [])
    assert joined == whole


def test_token_ids_on_request(client):
    asked = dict(max_tokens=3, n=2, return_token_ids=True)
    whole = client.chat(**asked).json()
    prompt, outputs = [], {0: [], 1: []}
    for chunk in events(client.chat(stream=True, **asked)):
        (choice,) = chunk["choices"]
        prompt = choice.get("prompt_token_ids", prompt)
        outputs[choice["index"]] += choice.get("token_ids", [])
    assert prompt == whole["prompt_token_ids"] == rendered(("user", "hi"))
    assert list(outputs.values()) == [choice["token_ids"] for choice in whole["choices"]]
    assert len(outputs[0]) == 3


def test_prompt_scores(client):
    body = client.chat(max_tokens=1, prompt_logprobs=1).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


def test_tokenize_both_forms_and_back(client):
    body = client.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert body["tokens"] == [BOS, *"hé".encode()] and body["count"] == 4
    assert body["max_model_len"] == 64 and body["token_strs"][:2] == ["<s>", "h"]
    bare = client.post("/tokenize", {"prompt": "h", "add_special_tokens": False}).json()
    assert bare["tokens"] == [104]
    messages = [{"role": "user", "content": "x"}]
    chat = client.post("/tokenize", {"messages": messages}).json()
    assert chat["tokens"] == rendered(("user", "x"))
    back = client.post("/detokenize", {"tokens": chat["tokens"]}).json()
    assert back["prompt"] == "<s><|im_start|>user\nx<|im_end|><|im_start|>assistant\n"
    assert client.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"prompt": ["a"]}])
def test_tokenize_wants_one_input(client, body):
    error_of(client.post("/tokenize", body))


@pytest.mark.parametrize("tokens", [[-1], [260], [True], ["a"], "abc", [1.5]])
def test_detokenize_checks_ids(client, tokens):
    assert error_of(client.post("/detokenize", {"tokens": tokens}))["param"] == "tokens"

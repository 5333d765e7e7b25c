"""/v1/messages and /v1/responses: by Anthropic's and OpenAI's packages, and by hand."""

import json

import openai
import pytest
from fake_engine import MODEL, FakeEngine, text_of
from test_chat import rendered
from test_completions import error_of

from jaxserve.grammar import Calls, GrammarSpec, framed
from tests.server.conftest import Client, http, serving


@pytest.fixture(scope="module")
def running():
    with serving(FakeEngine(max_model_len=256)) as running:
        running.engine.scripts["speak"] = "héllo wörld".encode()
        yield running


@pytest.fixture
def claude(running):
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0)


@pytest.fixture
def api(running):
    return openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0)


HI = [{"role": "user", "content": "hi"}]
SPEAK = [{"role": "user", "content": "speak"}]


def test_message_by_anthropics_package(claude):
    answer = claude.messages.create(model=MODEL, max_tokens=5, messages=HI, system="be brief")
    prompt = rendered(("system", "be brief"), ("user", "hi"))
    assert answer.content[0].text == text_of(prompt, 5)
    assert answer.stop_reason == "max_tokens" and answer.role == "assistant"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), 5)
    done = claude.messages.create(model=MODEL, max_tokens=50, messages=SPEAK)
    assert done.stop_reason == "end_turn" and done.content[0].text == "héllo wörld"
    stopped = claude.messages.create(
        model=MODEL, max_tokens=50, messages=SPEAK, stop_sequences=[" w"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " w")
    assert claude.messages.count_tokens(model=MODEL, messages=HI).input_tokens == len(
        rendered(("user", "hi"))
    )


def test_message_stream_by_anthropics_package(claude):
    with claude.messages.stream(model=MODEL, max_tokens=50, messages=SPEAK) as stream:
        assert "".join(stream.text_stream) == "héllo wörld"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == 14


def test_anthropic_errors_by_its_package(claude, running):
    import anthropic

    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model=MODEL, max_tokens=0, messages=HI)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    running.engine.fail_at = 2
    try:
        with pytest.raises(anthropic.APIError):
            claude.messages.create(model=MODEL, max_tokens=9, messages=HI)
        with (
            pytest.raises(anthropic.APIError),
            claude.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream,
        ):
            stream.get_final_message()
    finally:
        running.engine.fail_at = None


TOOL = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}
CALL = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Plzeň"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tooled():
    anthropic = pytest.importorskip("anthropic")
    engine = FakeEngine(max_model_len=600)
    engine.scripts["call"] = CALL.encode()
    with serving(engine, tool_parser="hermes") as running:
        yield anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0), engine


def test_tool_use_by_anthropics_package(tooled):
    claude, engine = tooled
    asked = dict(model=MODEL, max_tokens=200, tools=[TOOL])
    ask = [{"role": "user", "content": "call"}]
    whole = claude.messages.create(messages=ask, **asked)
    with claude.messages.stream(messages=ask, **asked) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        text, use = answer.content
        assert (text.text, use.name, use.input) == ("Well.", "weather", {"city": "Plzeň"})
        assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns = [*ask, {"role": "assistant", "content": whole.content},
             {"role": "user", "content": [result]}]  # fmt: skip
    claude.messages.create(messages=turns, **asked)
    assert "tool\nsunny" in engine.tokenizer.decode(engine.calls[-1].prompt_ids)


def test_thinking_is_a_block_of_its_own(client, engine):
    engine.scripts["hi"] = b"<think>hmm</think>\n\nyes"
    engine.tokenizer.chat_template += "<think>"
    body = {"max_tokens": 40, "messages": HI}
    kinds = [block["type"] for block in client.post("/v1/messages", body).json()["content"]]
    assert kinds == ["thinking", "text"]
    events = named_events(client.post("/v1/messages", body | {"stream": True}))
    starts = [e["content_block"]["type"] for name, e in events if name == "content_block_start"]
    assert starts == kinds


def named_events(response):
    blocks = [block.split("\n") for block in response.text.strip().split("\n\n")]
    events = [
        (b[0].removeprefix("event: "), json.loads(b[1].removeprefix("data: "))) for b in blocks
    ]
    assert all(name == content["type"] for name, content in events)
    return events


def test_message_events_in_order(running):
    body = {"max_tokens": 2, "stream": True, "messages": HI}
    events = named_events(http.post(running.url + "/v1/messages", json=body))
    assert [name for name, _ in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[-2][1]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize(
    "change",
    [{"max_tokens": None}, {"tools": [{"name": "f"}]}, {"tools": [{"type": "web_search_1"}]},
     {"tool_choice": {"type": "any"}}, {"temperature": 1.5}, {"messages": []},
     {"thinking": {"type": "enabled", "budget_tokens": 9}}, {"unheard": 1}, {"system": 5},
     {"messages": [*HI, {"role": "assistant", "content": "I"}]},
     {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}],
)  # fmt: skip
def test_bad_messages_are_refused_in_anthropics_shape(client, change):
    answer = client.post("/v1/messages", {"max_tokens": 5, "messages": HI} | change)
    assert answer.status_code == 400 and answer.json()["type"] == "error"
    assert set(answer.json()["error"]) == {"type", "message"}


@pytest.mark.parametrize(
    "choice, calls",
    [
        ({"type": "auto"}, None),
        ({"type": "any"}, Calls("hermes", {"f": {}, "g": {}}, forced=True)),
        ({"type": "tool", "name": "g"}, Calls("hermes", {"g": {}}, forced=True, single=True)),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            Calls("hermes", {"f": {}, "g": {}}, forced=True, single=True),
        ),
    ],
)
def test_messages_that_must_use_tools(engine, choice, calls):
    client = Client(engine, tool_parser="hermes")
    tools = [{"name": name, "input_schema": {}} for name in "fg"]
    body = {"max_tokens": 5, "messages": HI, "tools": tools, "tool_choice": choice}
    assert client.post("/v1/messages", body).status_code == 200
    assert engine.calls[0].params.grammar == framed(None, calls, None)
    refused = client.post("/v1/messages", body | {"tool_choice": {"type": "tool", "name": "h"}})
    assert refused.status_code == 400 and "'h'" in refused.text.replace('\\"', "'")


def test_response_by_openais_package(api):
    answer = api.responses.create(model=MODEL, input="speak", instructions="now")
    assert answer.output_text == "héllo wörld" and answer.status == "completed"
    prompt = rendered(("system", "now"), ("user", "speak"))
    assert answer.usage.input_tokens == len(prompt) and answer.usage.output_tokens == 14
    cut = api.responses.create(model=MODEL, input=HI, max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output_text == text_of(rendered(("user", "hi")), 3)


def test_response_stream_by_openais_package(api):
    with api.responses.stream(model=MODEL, input="speak") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "héllo wörld"
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(numbers)
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == (
        "héllo wörld"
    )


@pytest.mark.parametrize(
    "change",
    [{"previous_response_id": "r"}, {"background": True}, {"tools": [{"type": "web_search"}]},
     {"max_output_tokens": 0}, {"text": {"format": {"type": "xml"}}}, {"text": {"format": 5}},
     {"text": {"format": {"type": "json_schema", "name": "x"}}}, {"input": []},
     {"tools": [{"type": "function"}]}, {"tool_choice": "required"},
     {"input": [{"type": "item_reference", "id": "x"}]}, {"input": None}, {"top_p": 2}],
)  # fmt: skip
def test_what_responses_cannot_do_is_refused(client, change):
    error = error_of(client.post("/v1/responses", {"input": "hi"} | change))
    assert error["param"] in (*change, "messages")


def test_a_response_stream_that_fails_says_so(client, engine):
    engine.fail_at = 2
    events = named_events(client.post("/v1/responses", {"input": "hi", "stream": True}))
    assert events[-1][0] == "error" and events[-1][1]["code"] == "engine_failed"


def test_a_response_keeps_reasoning_to_itself(client, engine):
    engine.scripts["hi"] = b"<think>hmm</think>\n\nyes"
    engine.tokenizer.chat_template += "<think>"
    whole = client.post("/v1/responses", {"input": "hi"}).json()
    assert whole["output"][0]["content"][0]["text"] == "yes"
    events = named_events(client.post("/v1/responses", {"input": "hi", "stream": True}))
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == "yes"


WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def test_calls_in_responses_by_openais_package(engine):
    engine.scripts["call"] = (
        b'Well.<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        b'<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    )
    engine.max_model_len = 600
    with serving(engine, tool_parser="hermes") as running:
        api = openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0)
        whole = api.responses.create(model=MODEL, input="call", tools=[WEATHER])
        with api.responses.stream(model=MODEL, input="call", tools=[WEATHER]) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        for answer in (whole, streamed):
            said, first, second = answer.output
            assert answer.output_text == "Well." and answer.status == "completed"
            assert (first.name, json.loads(first.arguments)) == ("weather", {"city": "Oslo"})
            assert json.loads(second.arguments) == {} and first.call_id != second.call_id
            assert {said.status, first.status, second.status} == {"completed"}
        deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(e.delta for e in deltas if e.output_index == 1) == first.arguments
        done = [e for e in events if e.type == "response.output_item.done"]
        assert [e.output_index for e in done] == [0, 1, 2]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": output}
            for call, output in ((first, "sunny"), (second, "dry"))
        ]
        turns = [{"role": "user", "content": "call"}, *whole.output, *results]
        api.responses.create(model=MODEL, input=turns, tools=[WEATHER], max_output_tokens=1)
    shown = engine.tokenizer.decode(engine.calls[-1].prompt_ids)
    assert "tool\nsunny" in shown and "tool\ndry" in shown


@pytest.mark.parametrize(
    "choice, calls",
    [
        ("required", Calls("hermes", {"weather": {"type": "object"}}, forced=True)),
        (
            {"type": "function", "name": "weather"},
            Calls("hermes", {"weather": {"type": "object"}}, forced=True, single=True),
        ),
    ],
)
def test_responses_that_must_call(engine, choice, calls):
    body = {"input": "hi", "tools": [WEATHER], "tool_choice": choice}
    assert Client(engine, tool_parser="hermes").post("/v1/responses", body).status_code == 200
    assert engine.calls[0].params.grammar == framed(None, calls, None)


def test_responses_of_a_form(client, engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form, spec in [
        ({"type": "text"}, None),
        ({"type": "json_object"}, GrammarSpec.json_object()),
        ({"type": "json_schema", "name": "x", "schema": schema}, GrammarSpec.json_schema(schema)),
    ]:
        answer = client.post("/v1/responses", {"input": "hi", "text": {"format": form}})
        assert answer.json()["text"]["format"] == form
        assert engine.calls[-1].params.grammar == spec

"""Tool calls and reasoning in chats: whole and streamed, by the openai package and by hand."""

import dataclasses
import json

import openai
import pytest
from fake_engine import MODEL, FakeEngine
from test_completions import error_of, events

from jaxserve.config import ServerConfig
from jaxserve.grammar import Calls, GrammarSpec, Thought, framed
from jaxserve.server.speech import Call, Reply, Style, Thinking
from jaxserve.server.toolbox import of_openai
from jaxserve.tokenizer.tools import PARSERS
from jaxserve.tokenizer.tools.json_calls import HermesParser
from tests.server.conftest import Client, serving

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TIME = {"type": "function", "function": {"name": "time"}}
ASK = [{"role": "user", "content": "call"}]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Plzeň"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def engine():
    engine = FakeEngine(max_model_len=400)
    engine.scripts["call"] = CALLS.encode()
    engine.scripts["think"] = b"<think>\nhmm, easy\n</think>\n\nforty-two"
    return engine


@pytest.fixture
def client(engine):
    return Client(engine, tool_parser="hermes")


def test_whole_answer(client):
    choice = client.chat(messages=ASK, tools=[TOOL, TIME]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "time"]
    arguments = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert arguments == [{"city": "Plzeň"}, {}]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("burst", [1, 3, 7, 1000])
def test_streamed_answer_is_numbered_and_joins_to_the_whole(client, engine, burst):
    engine.burst = burst
    opened, arguments, content, reasons = [], {}, "", []
    for chunk in events(client.chat(messages=ASK, tools=[TOOL, TIME], stream=True)):
        choice = chunk["choices"][0]
        content += choice["delta"].get("content") or ""
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["type"] == "function"
                opened.append((call["index"], call["function"]["name"]))
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
            arguments.setdefault(call["index"], "")
            arguments[call["index"]] += call["function"]["arguments"]
    assert opened == [(0, "weather"), (1, "time")] and reasons == ["tool_calls"]
    assert {i: json.loads(text) for i, text in arguments.items()} == {0: {"city": "Plzeň"}, 1: {}}
    assert content == "Let me see."


def test_no_parallel_calls(client):
    body = client.chat(messages=ASK, tools=[TOOL, TIME], parallel_tool_calls=False).json()
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("tools", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_calls_are_text(client, tools):
    choice = client.chat(messages=ASK, **tools).json()["choices"][0]
    assert choice["message"]["content"] == CALLS and choice["finish_reason"] == "stop"


def test_a_call_cut_by_the_limit_stays_a_length(client):
    choice = client.chat(messages=ASK, tools=[TOOL], max_tokens=70).json()["choices"][0]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "web_search"}], [{"type": "function"}], [TOOL, TOOL], [TOOL] * 200,
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        "f", [5],
    ],
)  # fmt: skip
def test_bad_tools_are_refused(client, engine, tools):
    assert error_of(client.chat(messages=ASK, tools=tools))["param"] == "tools"
    assert engine.calls == []


def test_a_model_that_cannot_call_tools_says_so(engine):
    error = error_of(Client(engine).chat(messages=ASK, tools=[TOOL]))
    assert "--tool_parser" in error["message"] and engine.calls == []


def test_a_turn_of_results_reaches_the_template(client, engine):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "42"}]  # fmt: skip
    assert client.chat(messages=messages, max_tokens=1).status_code == 200
    assert "tool\n42" in engine.tokenizer.decode(engine.calls[0].prompt_ids)
    call["function"]["arguments"] = "{broken"
    assert error_of(client.chat(messages=messages))["param"] == "messages"


def test_reasoning_is_split_out(engine):
    client = Client(engine)
    messages = [{"role": "user", "content": "think"}]
    plain = client.chat(messages=messages).json()["choices"][0]["message"]
    assert plain["content"].startswith("<think>"), "this template knows nothing of thinking"
    engine.tokenizer.chat_template += "<think>"
    message = client.chat(messages=messages).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "hmm, easy" and message["content"] == "forty-two"
    thought = content = ""
    for chunk in events(client.chat(messages=messages, stream=True)):
        delta = chunk["choices"][0]["delta"]
        thought += delta.get("reasoning_content", "")
        content += delta.get("content", "")
    assert (thought, content) == ("hmm, easy", "forty-two")


@pytest.mark.parametrize("size", [1, 3, 7, 500])
def test_parts_do_not_depend_on_pieces(size):
    toolbox = of_openai([TOOL, TIME], "auto", parallel=None)
    thought = Thought("<think>", "</think>", opened=False)
    style = Style(thought, HermesParser, toolbox)
    text = f"<think>a\nb</think>{CALLS}"
    speech, reply = style.speech(), Reply()
    for i in range(0, len(text), size):
        for part in speech.push(text[i : i + size]):
            reply.add(part)
    for part in speech.finish():
        reply.add(part)
    assert reply.reasoning == "a\nb" and reply.content == "Let me see."
    assert [call.name for call in reply.calls] == ["weather", "time"]
    assert Reply.of(style, text).reasoning == reply.reasoning


def test_parts():
    reply = Reply()
    for part in ["a", Thinking("t"), Call(0, "i", "f", "{"), Call(0, None, None, "}"), "b"]:
        reply.add(part)
    assert (reply.content, reply.reasoning) == ("ab", "t")
    assert reply.calls == [Call(0, "i", "f", "{}")]


def test_the_openai_package_streams_tool_calls(engine):
    with serving(engine, tool_parser="hermes") as running:
        api = openai.OpenAI(base_url=running.url + "/v1", api_key="x")
        with api.chat.completions.stream(model=MODEL, messages=ASK, tools=[TOOL, TIME]) as stream:
            message = stream.get_final_completion().choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["weather", "time"]
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Plzeň"}


def named(name):
    return {"type": "function", "function": {"name": name}}


def chosen(mode, *names):
    tools = {"mode": mode, "tools": [named(name) for name in names]}
    return {"type": "allowed_tools", "allowed_tools": tools}


BOTH = {"weather": {"type": "object"}, "time": None}
ONE = {"time": None}


@pytest.mark.parametrize(
    "choice, parallel, calls",
    [
        ("auto", None, None),
        (None, False, None),
        ("required", None, Calls("hermes", BOTH, forced=True)),
        ("required", False, Calls("hermes", BOTH, forced=True, single=True)),
        (named("time"), None, Calls("hermes", ONE, forced=True, single=True)),
        (chosen("required", "time"), True, Calls("hermes", ONE, forced=True)),
        (chosen("auto", "time"), None, Calls("hermes", ONE)),
        (chosen("auto", "time", "weather"), None, None),
    ],
)
def test_a_choice_becomes_a_grammar(client, engine, choice, parallel, calls):
    body = {"tools": [TOOL, TIME], "tool_choice": choice, "parallel_tool_calls": parallel}
    assert client.chat(messages=ASK, **body).status_code == 200
    assert engine.calls[0].params.grammar == framed(None, calls, None)
    shown = [tool["function"] for tool in body["tools"]]
    assert of_openai(body["tools"], choice, parallel=parallel).functions == shown


def test_strict_tools_and_answers_of_a_form(client, engine):
    strict = {"type": "function", "function": {"name": "time", "strict": True}}
    assert client.chat(messages=ASK, tools=[TOOL, strict]).status_code == 200
    both = Calls("hermes", BOTH)
    assert engine.calls[0].params.grammar == framed(None, both, None)
    form = {"type": "json_object"}
    assert client.chat(messages=ASK, tools=[TOOL, TIME], response_format=form).status_code == 200
    assert engine.calls[1].params.grammar == framed(GrammarSpec.json_object(), both, None)


@pytest.mark.parametrize(
    "choice",
    ["any", "needed", named("sun"), chosen("auto"), chosen("maybe", "time"), {}, {"type": "x"}],
)
def test_choices_that_cannot_be_are_refused(client, engine, choice):
    error = error_of(client.chat(messages=ASK, tools=[TOOL, TIME], tool_choice=choice))
    assert error["param"] == "tool_choice" and engine.calls == []
    error_of(client.chat(messages=ASK, tool_choice="required"))


def test_schemas_that_cannot_be_enforced_are_refused_when_calls_are_forced(client, engine):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    assert client.chat(messages=ASK, tools=[tool]).status_code == 200
    error = error_of(client.chat(messages=ASK, tools=[tool], tool_choice="required"))
    assert error["param"] == "tools" and "f.parameters" in error["message"]
    assert len(engine.calls) == 1


def test_reasoning_comes_before_forced_calls_and_formed_answers(client, engine):
    engine.tokenizer.chat_template += "<think>"
    thought = Thought("<think>", "</think>", opened=False)
    client.chat(messages=ASK, tools=[TIME], tool_choice="required")
    assert engine.calls[0].params.grammar == framed(None, Calls("hermes", ONE, True), thought)
    client.chat(messages=ASK, response_format={"type": "json_object"})
    assert engine.calls[1].params.grammar == framed(GrammarSpec.json_object(), None, thought)


def test_calls_announced_by_control_tokens(engine):
    """<|im_start|> stands in for the [TOOL_CALLS] of real vocabularies."""
    parser = type("Marked", (HermesParser,), {"marks": ("<|im_start|>",)})
    assert Style(parser=parser, control=engine.tokenizer.control_tokens(parser.marks)).needs_special
    assert not Style(parser=HermesParser, control={}).needs_special
    client = Client(engine, tool_parser="mistral")
    engine.tokenizer.control_tokens = lambda texts: {text: 258 for text in texts if text[0] == "["}
    client.chat(messages=ASK, tools=[TIME])
    assert engine.calls[0].params.skip_special_tokens is False
    client.chat(messages=ASK)
    assert engine.calls[1].params.skip_special_tokens is True


def test_every_format_has_its_flag():
    (field,) = (f for f in dataclasses.fields(ServerConfig) if f.name == "tool_parser")
    assert set(field.metadata["choices"]) == {"auto", *PARSERS}

"""The whole of it: openai's client, HTTP, the scheduler, jax and a tiny random model.

The model writes nonsense, so what holds its output to a form is the grammar alone.
"""

import json
import shutil

import numpy as np
import openai
import pytest
from fake_engine import EOS, TEMPLATE, write_byte_tokenizer
from test_engine_end_to_end import assert_idle, client_of

from jaxserve.config import EngineConfig
from jaxserve.engine.async_engine import AsyncEngine
from tests.conftest import DATA
from tests.server.conftest import serving

TOOL_TEMPLATE = TEMPLATE.replace(
    "{% for", "{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}{% endfor %}{% for", 1
)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
HI = [{"role": "user", "content": "hi"}]


def tool(name, parameters=None, **more):
    function = {"name": name, "parameters": parameters or {"type": "object", "properties": {}}}
    return {"type": "function", "function": function | more}


WEATHER = tool("weather", CITY)
TOOLS = [WEATHER, tool("now", {"type": "object", "properties": {}, "additionalProperties": False})]


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """A server over the real engine, one compiled step shape."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(DATA / "models" / "llama_llama3" / "model.safetensors", folder)
    config = json.loads((DATA / "models" / "llama_llama3" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": EOS}))
    write_byte_tokenizer(folder, TOOL_TEMPLATE)
    engine = AsyncEngine.start(
        EngineConfig(
            model=str(folder), served_model_name="tiny", num_slots=4, token_budget=64,
            page_size=16, num_pages=129, max_model_len=1024, deterministic=True,
            compile_cache="off",
        )
    )  # fmt: skip
    with serving(engine) as running:
        yield running
    engine.shutdown()


@pytest.fixture
def api(stack):
    yield client_of(stack)
    assert_idle(stack)
    assert stack.engine.stats().compilations == 0


def chat(api, **body):
    return api.chat.completions.create(model="tiny", messages=HI, **body)


def text_of_stream(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_answers_in_a_schema(api, temperature):
    body = {"response_format": FORM, "temperature": temperature, "seed": 7, "max_tokens": 600}
    answer = chat(api, **body).choices[0]
    value = json.loads(answer.message.content)
    assert value.keys() == {"city", "days"} and value["city"] in ("Oslo", "Rome")
    assert value["days"] in (1, 2, 3) and answer.finish_reason == "stop"
    assert text_of_stream(chat(api, **body, stream=True)) == answer.message.content


@pytest.mark.parametrize(
    "form, fits",
    [
        ({"guided_choice": ["yes", "no <|im_end|> no"]}, ["yes", "no <|im_end|> no"]),
        ({"guided_regex": "a[bc]"}, ["ab", "ac"]),
        ({"structured_outputs": {"grammar": 'start: "x" | "yy"'}}, ["x", "yy"]),
    ],
)
def test_answers_in_other_forms(api, form, fits):
    asked = {"temperature": 2, "max_tokens": 40, "n": 4, "extra_body": form}
    texts = [choice.message.content for choice in chat(api, **asked).choices]
    assert set(texts) <= set(fits)
    answer = api.completions.create(model="tiny", prompt="a", max_tokens=40, extra_body=form)
    assert answer.choices[0].text in fits


def check_call(call):
    arguments = json.loads(call.function.arguments)
    assert arguments == {} if call.function.name == "now" else arguments["city"] in ("Oslo", "Rome")


def test_forced_calls(api):
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    body |= {"temperature": 1, "max_tokens": 700}
    for seed in range(3):
        answer = chat(api, **body, seed=seed).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        check_call(call)
    named = {"type": "function", "function": {"name": "weather"}}
    with api.chat.completions.stream(
        model="tiny", messages=HI, **body | {"tool_choice": named}
    ) as stream:
        choice = stream.get_final_completion().choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    check_call(choice.message.tool_calls[0])
    assert choice.finish_reason == "tool_calls"


def test_responses_in_a_schema_and_with_forced_calls(api):
    asked = {"model": "tiny", "input": "hi", "temperature": 1, "max_output_tokens": 700}
    form = {"type": "json_schema", "name": "city", "schema": CITY}
    answer = api.responses.create(**asked, text={"format": form})
    assert json.loads(answer.output_text).keys() == {"city", "days"}
    flat = {"type": "function", "name": "weather", "parameters": CITY}
    named = {"type": "function", "name": "weather"}
    (call,) = api.responses.create(**asked, tools=[flat], tool_choice=named).output
    assert call.name == "weather" and json.loads(call.arguments).keys() == {"city", "days"}


def test_strict_tools_leave_text_free(api):
    tools = [tool("weather", CITY, strict=True)]
    answer = chat(api, tools=tools, max_tokens=12, temperature=1, seed=1).choices[0]
    assert answer.message.tool_calls is None and answer.finish_reason == "length"


def test_forced_tools_that_cannot_be_are_refused(api):
    broken = tool("f", {"type": "object", "properties": {"a": {"pattern": "(a{1,999}){1,999}"}}})
    with pytest.raises(openai.BadRequestError, match=r"f\.parameters"):
        chat(api, tools=[broken], tool_choice="required")
    nothing = tool("f", NEVER)
    with pytest.raises(openai.BadRequestError) as caught:
        chat(api, tools=[nothing], tool_choice="required", stream=True)
    assert caught.value.param == "tools"


NEVER = {"type": "object", "properties": {"a": False}, "required": ["a"]}


@pytest.mark.parametrize(
    "field, value",
    [
        ("guided_json", NEVER), ("guided_regex", "(a"), ("guided_grammar", "start: b"),
        ("structured_outputs", {"regex": "[z-a]"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": NEVER}}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_only_the_compiler_can_refuse_is_told_by_the_clients_name(api, field, value, stream):
    asked = {"model": "tiny", "extra_body": {field: value}, "stream": stream}
    for ask in (
        lambda: api.completions.create(prompt="a", **asked),
        lambda: api.chat.completions.create(messages=HI, **asked),
    ):
        with pytest.raises(openai.BadRequestError, match=field) as caught:
            ask()
        assert (caught.value.param, caught.value.code) == (field, "invalid_grammar")


def test_logprobs_of_an_answer_are_those_of_the_prompt_it_becomes(api):
    said = "ghij"
    body = {"model": "tiny", "temperature": 0, "logprobs": 2}
    first = api.completions.create(
        **body, prompt="abc", max_tokens=9, extra_body={"guided_choice": [said]}
    ).choices[0]
    assert first.text == said and first.logprobs.tokens[:4] == list(said)
    assert [len(top) >= 2 for top in first.logprobs.top_logprobs] == [True] * 4
    echoed = api.completions.create(**body, prompt="abc" + said, max_tokens=1, echo=True)
    scores = echoed.choices[0].logprobs
    assert scores.tokens[:8] == ["<s>", *"abcghij"] and len(scores.tokens) == 9
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[4:8] == pytest.approx(first.logprobs.token_logprobs, abs=1e-4)
    ids = api.completions.create(**body, prompt=[256, *b"abcghij"], max_tokens=1, echo=True)
    assert ids.choices[0].logprobs == scores


def test_choices_differ_and_seeds_repeat_them(api):
    body = {"n": 2, "seed": 3, "temperature": 1, "max_tokens": 12, "logprobs": True}
    first, second = chat(api, **body), chat(api, **body)
    texts = [choice.message.content for choice in first.choices]
    assert texts[0] != texts[1]
    assert texts == [choice.message.content for choice in second.choices]
    assert first.usage.completion_tokens == sum(
        len(choice.logprobs.content) for choice in first.choices
    )


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings(api, stack, pooling):
    embed = lambda texts, **more: api.embeddings.create(
        model="tiny", input=texts, extra_body={"pooling": pooling}, **more
    )
    texts = ["a word", "another one, longer than a step " * 8, "a word"]
    vectors = [item.embedding for item in embed(texts, encoding_format="float").data]
    assert [len(vector) for vector in vectors] == [stack.engine.hidden_size] * 3 == [64] * 3
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 1])
    assert vectors[0] == vectors[2] != vectors[1]
    alone = embed(texts[1]).data[0].embedding  # as base64, which the client asks for
    assert alone == pytest.approx(vectors[1], abs=1e-6)


def test_a_stream_that_is_left_gives_its_pages_back(api, stack):
    stream = chat(api, stream=True, max_tokens=900, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert stack.engine.stats().pages_free < stack.engine.stats().pages_total
    stream.close()

"""Tool calls and reasoning in answers: found whatever the pieces; other text comes out as it is."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.tokenizer.chat import ChatTemplate
from jaxserve.tokenizer.reasoning import ReasoningSplitter, opens_reasoning
from jaxserve.tokenizer.tools import PARSERS, CallDelta, ToolCall, find_parser, parse

NAMES = {"get_weather": {}, "add": {}}
WEATHER = '{"city": "Zürich \\"x\\" }", "days": [1, {"a": null}]}'
ANSWERS = {
    "hermes": (
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n'
        "</tool_call>\n"
        '<tool_call>{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call>\n'
    ),
    "llama3_json": (
        f'{{"type": "function", "name": "get_weather", "parameters": {WEATHER}}}; '
        '{"parameters": {"a": 1, "b": 2}, "name": "add"}'
    ),
    "mistral": (
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}, "id": "123456789"}}, '
        '{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}]'
    ),
    "qwen3_coder": (
        "Let me see.\n<tool_call>\n<function=get_weather>\n"
        '<parameter=city>\nZürich "x" }\n</parameter>\n'
        '<parameter=days>\n[1, {"a": null}]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call><function=add><parameter=a>\n1\n</parameter><parameter=b>2</parameter>"
        "</function></tool_call>"
    ),
    "deepseek_v3": (
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{WEATHER}\n```<｜tool▁call▁end｜>\n"
        '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
    ),
    "phi4": (
        f'functools[{{"name": "get_weather", "arguments": {WEATHER}}}, '
        '{"name": "add", "arguments": {"a": 1, "b": 2}}]'
    ),
    "gemma4": (
        'Let me see.<|tool_call>call:get_weather{city:<|"|>Zürich "x" }<|"|>,'
        'days:[1,{<|"|>a<|"|>:null}]}<tool_call|><|tool_call>call:add{a:1, b:2}<tool_call|>'
    ),
    "pythonic": ('[get_weather(city="Zürich \\"x\\" }", days=[1, {"a": None}]), add(a=1, b=2)]'),
}


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "functools[",
    "<function=add>",
    "<parameter=a>",
    "</parameter>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<|tool_call>call:add{",
    "<tool_call|>",
    '{"name": "add"',
    '"arguments": {"a": 1}',
]
FRAGMENTS += ["add(a='", "')", *'{}[],"\\ x\n']


def stream(parser, pieces):
    events = []
    for piece in pieces:
        events += parser.push(piece)
    return events + parser.finish()


def put_together(events):
    """(content, calls), checking the order of deltas: index k, its name once, then arguments."""
    content, calls = "", []
    for event in events:
        if isinstance(event, str):
            content += event
            continue
        if event.name is not None:
            assert event.index == len(calls)
            calls.append([event.name, ""])
        assert event.index == len(calls) - 1
        calls[-1][1] += event.arguments
    return content, [ToolCall(*call) for call in calls]


def cut(text, size):
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 3, 7, 10**6])
@pytest.mark.parametrize("name", ANSWERS)
def test_two_calls_in_pieces_of_any_size(name, size):  # B017
    text = ANSWERS[name]
    content, calls = put_together(stream(PARSERS[name](NAMES), cut(text, size)))
    assert (content, calls) == parse(PARSERS[name](NAMES), text)
    assert content == ("Let me see." if text.startswith("Let") else "")
    assert [call.name for call in calls] == ["get_weather", "add"]
    assert json.loads(calls[0].arguments) == json.loads(WEATHER)
    assert json.loads(calls[1].arguments) == {"a": 1, "b": 2}


def test_arguments_stream_while_they_come():
    parser = PARSERS["hermes"]()
    assert parser.push('Yes <tool_call>{"name": "f", "arguments": {"a"') == [
        "Yes",
        CallDelta(0, "f", '{"a"'),
    ]
    assert parser.push(": 1") == [CallDelta(0, None, ": 1")]
    assert parser.push("}}</tool_call>") == [CallDelta(0, None, "}")]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[TOOL_CALLS]get_weather[ARGS]" + WEATHER, [("get_weather", WEATHER)]),
        ('[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]add{}', [("add", '{"a": 1}'), ("add", "{}")]),
    ],
)
def test_newer_mistral_calls(text, calls):
    expected = ("", [ToolCall(*call) for call in calls])
    assert parse(PARSERS["mistral"](), text) == expected
    assert put_together(stream(PARSERS["mistral"](), text)) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "No call, 1 < 2 <tool"),
        ("hermes", "<tool_call>not json</tool_call> then text"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", "  leading and trailing \n"),
        ("hermes", '<tool_call>{"name": 3}'),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", '{"answer": 42} and text'),
        ("llama3_json", '{"name": '),
        ("llama3_json", "plain"),
        ("llama3_json", "{"),
        ("mistral", "[TOOL_CALL] is not the mark"),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", "[TOOL_CALLS]"),
        ("pythonic", "[1, 2, 3] are numbers"),
        ("pythonic", "[a link](http://x)"),
        ("pythonic", "[delete(all=1)]"),
        ("pythonic", "[add(1, 2)]"),
        ("pythonic", "[add(a=__import__('os'))]"),
        ("pythonic", "[add(a=open)]"),
        ("pythonic", "[add(a=" + "(" * 2000 + ")" * 2000 + ")]"),
        ("pythonic", "[add(a=1"),
        ("qwen3_coder", "<tool_call>\n<function=>\n</function>"),
        ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>'),
        ("qwen3_coder", "<tool_call><function=add"),
        ("phi4", "functools are [1, 2]"),
        ("phi4", "functools[1]"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n[]"),
        ("gemma4", "<|tool_call>call:add{a:1"),
        ("gemma4", "<|tool_call>call:add{a}<tool_call|>"),
        ("gemma4", "<|tool_call>add(a=1)<tool_call|>"),
        ("gemma4", '<|tool_call>call:add{a:<|"|>x}<tool_call|>'),
        ("gemma4", "<|tool_call>call:add{a:" + "[" * 5000 + "}<tool_call|>"),
        ("pythonic", "[add(a=1e999)]"),
        ("pythonic", ""),
    ],
)
def test_text_that_is_no_call_comes_out_unchanged(name, text):
    for size in (1, 3, 10**6):
        content, calls = put_together(stream(PARSERS[name](NAMES), cut(text, size)))
        assert calls == []
        assert content == text


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "f"}</tool_call>', "{}"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, "b": "x', '{"a": 1, "b": "x'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "id": 7}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "null"),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', '{"a": "</tool_call>"}'),
    ],
)
def test_arguments_are_sent_as_written(text, arguments):
    for size in (1, 4, 10**6):
        events = stream(PARSERS["hermes"](), cut(text, size))
        assert put_together(events) == ("", [ToolCall("f", arguments)])


def test_the_token_that_asks_for_results_is_no_content():
    call = "<|tool_call>call:f{a:1}<tool_call|>"
    assert parse(PARSERS["gemma4"](), f"{call}<|tool_response>") == (
        "",
        [ToolCall("f", '{"a": 1}')],
    )
    assert parse(PARSERS["gemma4"](), "a<|tool_response>b") == ("a<|tool_response>b", [])


def test_halves_of_characters_stay_escapes():
    text = '[add(a="\\ud83d\\ude00", b="\\ud83d")]'
    (call,) = parse(PARSERS["pythonic"](NAMES), text)[1]
    assert call.arguments.isascii()
    assert json.loads(call.arguments) == {"a": "😀", "b": "\ud83d"}


SCHEMA = {
    "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "size": {"type": "number"},
        "both": {"type": ["string", "integer"]}, "one_of": {"enum": ["1", "2"]}, "any": True,
    }
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "12", "12"),
        ("text", "\nlines\n", "\nlines\n"),
        ("text", '"quoted"', '"quoted"'),
        ("count", "12", 12),
        ("count", "twelve", "twelve"),  # wrong, and for the client to judge
        ("size", "7", 7),
        ("both", "7", 7),
        ("both", "[7]", "[7]"),
        ("both", "x", "x"),
        ("one_of", "1", "1"),
        ("any", "True", True),
        ("any", "None", None),
        ("any", '{"a": [1]}', {"a": [1]}),
        ("any", "NaN", "NaN"),
        ("any", "[" * 5000, "[" * 5000),
        ("unheard", "5", 5),
    ],
)
def test_bare_values_mean_what_the_schema_says(key, written, value):
    parameter = f"<parameter={key}>\n{written}\n</parameter>"
    text = f"<tool_call><function=f>{parameter}</function></tool_call>"
    (call,) = parse(PARSERS["qwen3_coder"]({"f": SCHEMA}), text)[1]
    assert json.loads(call.arguments) == {key: value}


@pytest.mark.parametrize("schemas", [{}, {"f": None}, {"f": []}, {"f": {"properties": 5}}])
def test_bare_values_without_a_usable_schema(schemas):
    text = "<tool_call><function=f><parameter=a>5</parameter></function></tool_call>"
    assert parse(PARSERS["qwen3_coder"](schemas), text) == ("", [ToolCall("f", '{"a": 5}')])
    cut_off = text.removesuffix("</function></tool_call>")
    assert parse(PARSERS["qwen3_coder"](schemas), cut_off) == ("", [ToolCall("f", '{"a": 5')])


def test_content_before_and_after_calls():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(PARSERS["hermes"](), f"a b\n\n{call}\n c \n{call}\n") == (
        "a b\n c",
        [ToolCall("f", "{}")] * 2,
    )


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(PARSERS)),
    parts=st.lists(
        st.sampled_from([*ANSWERS.values(), *FRAGMENTS]),
        max_size=8,
    ),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_pieces_never_matter(name, parts, cuts):
    text, pieces, at = "".join(parts), [], 0
    while at < len(text):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(text[at : at + size])
        at += size
    expected = parse(PARSERS[name](NAMES), text)
    assert put_together(stream(PARSERS[name](NAMES), pieces)) == expected
    if not expected[1]:
        assert expected[0] == text


def test_the_parser_that_fits_a_template(shared):
    expected = {
        "gguf_qwen2.5-coder-0.5b-instruct": "hermes",
        "hf_qwen3": "hermes",
        "qwen3": "hermes",
        "vllm_tool_chat_template_hermes": "hermes",
        "vllm_tool_chat_template_llama3.1_json": "llama3_json",
        "vllm_tool_chat_template_llama3.2_json": "llama3_json",
        "vllm_tool_chat_template_llama4_pythonic": "pythonic",
        "vllm_tool_chat_template_gemma3_pythonic": "pythonic",
        "vllm_tool_chat_template_mistral3": "mistral",
        "vllm_tool_chat_template_qwen3coder": "qwen3_coder",
        "qwen35": "qwen3_coder",
        "vllm_tool_chat_template_deepseekv3": "deepseek_v3",
        "vllm_tool_chat_template_phi4_mini": "phi4",
        "vllm_tool_chat_template_gemma4": "gemma4",
    }
    for file in sorted((shared / "chat_templates").glob("*.jinja")):
        name = expected.get(file.stem)
        assert find_parser(None, file.read_text("utf-8")) is PARSERS.get(name), file.name


@pytest.mark.parametrize("count", [1, 2])
def test_calls_that_templates_write_are_read_again(shared, count):
    arguments = [{"city": 'Zürich "x"', "n": 1, "deep": {"a": [True, None]}}, {"x": "y"}]
    calls = [
        {"id": f"call0000{i}", "type": "function",
         "function": {"name": "fg"[i], "arguments": json.dumps(arguments[i])}}
        for i in range(count)
    ]  # fmt: skip
    user = {"role": "user", "content": "hi"}
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    schemas = {"f": {"properties": {"city": {"type": "string"}}}, "g": {}}
    seen = set()
    for file in sorted((shared / "chat_templates").glob("*.jinja")):
        source = file.read_text("utf-8")
        parser = find_parser(None, source)
        if parser is None or parser.name in ("pythonic", "phi4"):
            continue  # these two templates show past calls in another form than they ask for
        named = {"bos_token": "<s>", "eos_token": "</s>"}
        template = ChatTemplate(source, named_tokens=named)
        if parser.name == "llama3_json" and count == 2:
            continue  # its templates take one call at once
        before = template.render([user], add_generation_prompt=False).text
        after = template.render([user, said], add_generation_prompt=False).text
        start = after.index('{"name"') if parser.name == "llama3_json" else len(before.rstrip())
        found = parse(parser(schemas), after[start:])[1]
        assert [call.name for call in found] == [*"fg"][:count], file.name
        assert [json.loads(call.arguments) for call in found] == arguments[:count], file.name
        seen.add(parser.name)
    assert len(seen) == 6 - (count == 2)


def test_parsers_by_name():
    assert find_parser("mistral", None) is PARSERS["mistral"]
    assert find_parser(None, None) is None
    with pytest.raises(ValueError, match="hermes"):
        find_parser("unknown", None)


# ---- reasoning


def split(pieces, **options):
    splitter, reasoning, content = ReasoningSplitter(**options), "", ""
    for thought, text in [*map(splitter.push, pieces), splitter.finish()]:
        reasoning, content = reasoning + thought, content + text
    return reasoning, content


@pytest.mark.parametrize("size", [1, 3, 7, 10**6])
@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nwhy\n\nso\n</think>\n\nYes.\n", False, "why\n\nso", "Yes.\n"),
        ("why\n</think>\nYes </think> no", True, "why", "Yes </think> no"),
        ("\n <think>a</think>b", False, "a", "b"),
        ("No marks, 1 < 2 <thi", False, "", "No marks, 1 < 2 <thi"),
        ("I <think> so</think>", False, "", "I <think> so</think>"),
        ("<think>cut </thi", False, "cut </thi", ""),
        ("<think>cut \n", False, "cut", ""),
        ("<think></think>x", False, "", "x"),
        ("<th", False, "", "<th"),
        ("  ", False, "", "  "),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_split_out(text, opened, reasoning, content, size):
    assert split(cut(text, size), opened=opened) == (reasoning, content)


@settings(deadline=None)
@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "a", " ", "\n"]), max_size=10),
    size=st.integers(1, 5),
    opened=st.booleans(),
)
def test_reasoning_pieces_never_matter(parts, size, opened):
    text = "".join(parts)
    assert split(cut(text, size), opened=opened) == split([text], opened=opened)


def test_prompts_that_end_inside_reasoning():
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")

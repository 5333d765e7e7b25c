"""Grammars of tool calls: whatever they allow, the parser of the format reads as valid calls."""

import json
import random

import numpy as np
import pytest

from jaxserve.grammar import Calls, GrammarRefused, GrammarSpec, Thought, framed
from jaxserve.grammar.calls import FORMATS
from jaxserve.tokenizer.tools import PARSERS, parse
from tests.grammar.patient import PatientCompiler
from tests.tokenizer.tiny_tokenizers import byte_level

TOOL_CALLS, ARGS, END = 256, 257, 258
TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Zürich", 'a "b" </c>']},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "units": {"$ref": "#/$defs/units"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"units": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    },
    "now": None,
}
ENDLESS = {"$ref": "#/$defs/a"}
WEATHER = '{"city": "Zürich", "days": 3}'
ANSWERS = {
    "hermes": [
        f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>',
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ],
    "llama3_json": [
        f'{{"name": "weather", "parameters": {WEATHER}}}',
        '; {"name": "now", "parameters": {}}',
    ],
    "mistral": [
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {WEATHER}}}',
        ', {"name": "now", "arguments": {}}',
        "]",
    ],
    "phi4": [
        f'functools[{{"name": "weather", "arguments": {WEATHER}}}',
        ', {"name": "now", "arguments": {}}',
        "]",
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{WEATHER}\n```<｜tool▁call▁end｜>",
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ],
    "gemma4": [
        '<|tool_call>call:weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|>',
        "<|tool_call>call:now{}<tool_call|>",
    ],
    "pythonic": ['[weather(city="Zürich", days=3)', ", now()", "]"],
}


@pytest.fixture(scope="module")
def compiler():
    """Bytes 0 to 255, [TOOL_CALLS] 256 and [ARGS] 257 as control tokens, an end token 258."""
    tokenizer = byte_level(control=["[TOOL_CALLS]", "[ARGS]", "</s>"], eos_token_id=END)
    return PatientCompiler(tokenizer, tokenizer.vocab_size)


def allowed(compiler, matcher):
    row = np.zeros(compiler.mask_words, np.uint32)
    matcher.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def accepts(compiler, spec, text):
    """Whether an output may be this text, given as bytes and control tokens."""
    matcher = compiler.matcher(spec)
    tokens = text.encode() if isinstance(text, str) else text
    return all(matcher.advance(token) for token in tokens) and matcher.accepting


def forced(name, **options):
    return framed(None, Calls(name, TOOLS, forced=True, **options), None)


def whole(name, single=False):
    parts = ANSWERS[name]
    return "".join(parts[:1] + parts[2:] if single else parts)


@pytest.mark.parametrize("name", FORMATS)
def test_forced_answers_are_calls_and_nothing_else(compiler, name):
    many, one = forced(name), forced(name, single=True)
    assert accepts(compiler, many, whole(name))
    assert accepts(compiler, many, whole(name, single=True))
    assert accepts(compiler, one, whole(name, single=True))
    assert not accepts(compiler, one, whole(name))
    wrong = [
        "", "Sure! " + whole(name), whole(name).replace("now", "then"),
        whole(name).replace("3", "0"), whole(name).replace("Zürich", "Rome"), whole(name)[:-1],
    ]  # fmt: skip
    for text in wrong:
        assert not accepts(compiler, many, text), text
    assert len(parse(PARSERS[name](TOOLS), whole(name))[1]) == 2


def test_forced_calls_have_an_end(compiler):
    call = '{"name": "now", "parameters": {}}'
    assert accepts(compiler, forced("llama3_json"), "; ".join([call] * 32))
    assert not accepts(compiler, forced("llama3_json"), "; ".join([call] * 33))


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_comes_of_the_masks_is_read_as_valid_calls(compiler, name):
    for seed in range(12):
        chance, matcher, text = random.Random(seed), compiler.matcher(forced(name)), b""
        while (token := chance.choice(allowed(compiler, matcher))) != END:
            assert matcher.advance(token)
            text += bytes([token])
            if matcher.done:
                break
        content, calls = parse(PARSERS[name](TOOLS), text.decode())
        assert content == "" and calls
        for call in calls:
            check(call.name, json.loads(call.arguments))


def check(name, arguments):
    """Whether the arguments are what TOOLS asks for."""
    if name == "now":
        assert arguments == {}
        return
    assert name == "weather" and "city" in arguments
    assert arguments.keys() <= {"city", "days", "units"}
    assert arguments["city"] in TOOLS["weather"]["properties"]["city"]["enum"]
    assert arguments.get("days", 1) in range(1, 10)
    units = arguments.get("units", [])
    assert len(units) <= 2 and all(isinstance(unit, bool) for unit in units)


@pytest.mark.parametrize("name", FORMATS)
def test_answers_that_may_be_text_are_valid_once_they_call(compiler, name):
    spec = framed(None, Calls(name, TOOLS), None)
    broken = whole(name).replace("Zürich", "Rome")
    assert accepts(compiler, spec, "No calls: 1 < 2.")
    assert accepts(compiler, spec, whole(name))
    assert not accepts(compiler, spec, broken)
    marked = bool(PARSERS[name].marks)
    assert accepts(compiler, spec, "Well:\n" + whole(name))
    assert accepts(compiler, spec, "Well:\n" + broken) == (not marked)


def test_control_tokens_are_written_as_tokens(compiler):
    control = {"[TOOL_CALLS]": TOOL_CALLS}
    spec = forced("mistral", control=control)
    rest = whole("mistral").removeprefix("[TOOL_CALLS]").encode()
    assert accepts(compiler, spec, [TOOL_CALLS, *rest])
    assert not accepts(compiler, spec, whole("mistral"))
    newer = forced("mistral", control=control | {"[ARGS]": ARGS})
    call = [TOOL_CALLS, *b"weather", ARGS, *WEATHER.encode()]
    assert accepts(compiler, newer, [*call, TOOL_CALLS, *b"now", ARGS, *b"{}"])
    maybe = framed(None, Calls("mistral", TOOLS, control=control | {"[ARGS]": ARGS}), None)
    assert accepts(compiler, maybe, [*b"text", *call])
    assert not accepts(compiler, maybe, [*b"text", TOOL_CALLS, *b"weathering", ARGS])


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_comes_first(compiler, opened):
    thought = Thought("<think>", "</think>", opened)
    begin = "" if opened else "<think>\n"
    call = whole("llama3_json")
    for spec, rest in [
        (framed(None, Calls("llama3_json", TOOLS, forced=True), thought), call),
        (framed(GrammarSpec.choice(["yes", "no"]), None, thought), "yes"),
    ]:
        assert accepts(compiler, spec, f"{begin}hm <b> </think>\n\n{rest}")
        assert accepts(compiler, spec, rest) or opened
        assert not accepts(compiler, spec, f"{begin}never ending")
    assert not accepts(compiler, spec, f"{begin}hm</think>\n\nmaybe")
    text = framed(None, Calls("llama3_json", TOOLS), thought)
    assert accepts(compiler, text, f"{begin}hm</think>\nplain text")
    token = Thought("<think>", "</think>", opened, {"<think>": TOOL_CALLS, "</think>": ARGS})
    maybe = framed(None, Calls("hermes", TOOLS), token)
    for rest in ("plain", whole("hermes")):
        assert accepts(compiler, maybe, [*[TOOL_CALLS][opened:], *b"hm", ARGS, *rest.encode()])
    spec = framed(GrammarSpec.regex("[0-9]+"), None, token)
    assert accepts(compiler, spec, [*[TOOL_CALLS][opened:], *b"hm </think> hm", ARGS, *b"\n12"])


def test_answers_have_their_own_form_beside_calls(compiler):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    answer = GrammarSpec.json_schema(schema)
    for name in FORMATS:
        spec = framed(answer, Calls(name, TOOLS), None)
        assert accepts(compiler, spec, '{"a": 1}') and accepts(compiler, spec, whole(name))
        assert not accepts(compiler, spec, "text") and not accepts(compiler, spec, '{"b": 1}')
        assert framed(answer, Calls(name, TOOLS, forced=True), None) == forced(name)


def test_nothing_asked_nothing_framed():
    assert framed(None, None, Thought("<think>", "</think>", True)) is None
    answer = GrammarSpec.regex("a")
    assert framed(answer, None, None) is answer


@pytest.mark.parametrize(
    ("name", "schema", "rule"),
    [
        ("hermes", {"type": "array"}, "an object"),
        ("hermes", {"properties": {"a": {"not": {}}}}, "'not'"),
        ("pythonic", {"properties": {"a-b": {}}}, "'a-b'"),
        ("pythonic", {"properties": {"from": {}}}, "'from'"),
        ("pythonic", {"minProperties": 2}, "'minProperties'"),
        ("pythonic", {"required": ["x"]}, "'x'"),
        ("qwen3_coder", {"properties": {"a<": {}}}, "'a<'"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "maxLength": 3}}}, "'maxLength'"),
        ("qwen3_coder", {"properties": {"a": {"const": "</parameter>"}}}, "bare text"),
        ("gemma4", {"properties": {"a b": {}}}, "'a b'"),
        ("gemma4", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "'pattern'"),
        ("gemma4", {"properties": {"a": {"$ref": "#/$defs/b"}}}, "ref"),
        ("gemma4", {"properties": {"a": {"minimum": 1}}}, "'minimum' needs a type"),
        ("gemma4", {"properties": {"a": {"enum": [[1]]}}}, "plain values"),
        ("gemma4", {"properties": {"a": ENDLESS}, "$defs": {"a": ENDLESS}}, "nested deeper"),
        ("latin", {}, "latin"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(name, schema, rule):
    with pytest.raises(GrammarRefused, match=rule):
        framed(None, Calls(name, {"f": schema}), None)


def test_bare_text_in_tagged_calls(compiler):
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}, "required": ["b"]}
    spec = framed(None, Calls("qwen3_coder", {"f": schema}, forced=True, single=True), None)
    call = lambda *lines: "\n".join(["<tool_call>", "<function=f>", *lines, "</tool_call>"])
    text = ["<parameter=a>", 'any\n"text" <b>', "</parameter>"]
    flag = ["<parameter=b>", "true", "</parameter>"]
    for lines in ([*text, *flag], flag):
        assert accepts(compiler, spec, call(*lines, "</function>"))
    for lines in (text, [], [*flag, *text], ["<parameter=b>", "yes", "</parameter>"]):
        assert not accepts(compiler, spec, call(*lines, "</function>"))


def test_values_in_gemma_calls(compiler):
    """Each is what the template of Gemma 4 writes for it."""
    schema = {
        "properties": {
            "point": {"properties": {"y": {"type": "number"}, "x": {"type": ["number", "null"]}}},
            "names": {"type": "array", "items": {"$ref": "#/$defs/name"}, "minItems": 1,
                      "maxItems": 2},
            "free": {"description": "anything"},
            "text": {"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 9}]},
        },
        "$defs": {"name": {"enum": ["Ada", 1, None]}},
    }  # fmt: skip
    spec = framed(None, Calls("gemma4", {"f": schema}, forced=True, single=True), None)
    call = "<|tool_call>call:f{%s}<tool_call|>"
    for given, value in (
        ("", {}),
        ("point:{x:1,y:-2.5}", {"point": {"x": 1, "y": -2.5}}),
        ("point:{x:null}", {"point": {"x": None}}),
        ('names:[<|"|>Ada<|"|>,null]', {"names": ["Ada", None]}),
        ('text:<|"|>a "b", {c}<|"|>', {"text": 'a "b", {c}'}),
        ('free:{a:[true],<|"|>b c<|"|>:0},text:9', {"free": {"a": [True], "b c": 0}, "text": 9}),
    ):  # fmt: skip
        assert accepts(compiler, spec, call % given), given
        (read,) = parse(PARSERS["gemma4"]({"f": schema}), call % given)[1]
        assert json.loads(read.arguments) == value
    for given in (
        "point:{z:1}", "point:{y:1,x:2}", "names:[]", "names:[1,1,1]", 'names:[<|"|>Eve<|"|>]',
        "text:10", 'text:"a"', "text:<|\"|>a", "other:1", ",", "free:[1,]",
    ):  # fmt: skip
        assert not accepts(compiler, spec, call % given), given


def test_gemma_strings_end_at_their_token(compiler):
    """Where the quotes are control tokens, spelled ones are part of a string."""
    schema = {"properties": {"a": {"type": "string"}}, "required": ["a"]}
    control = {'<|"|>': TOOL_CALLS}
    spec = framed(None, Calls("gemma4", {"f": schema}, forced=True, control=control), None)
    begin, end = b"<|tool_call>call:f{a:", b"}<tool_call|>"
    inside = b'x <|"|> y'
    assert accepts(compiler, spec, [*begin, TOOL_CALLS, *inside, TOOL_CALLS, *end])
    assert not accepts(compiler, spec, [*begin, *b'<|"|>x<|"|>', *end])


def test_optional_arguments_in_python_calls(compiler):
    schema = {"properties": {key: {"type": "boolean"} for key in "abc"}}
    spec = framed(None, Calls("pythonic", {"f": schema}, forced=True), None)
    for given in ("", "a=true", "b=true", "a=true, c=false", "a=true, b=true, c=true"):
        assert accepts(compiler, spec, f"[f({given})]"), given
    for given in ("a", "b=true, a=true", ", a=true", "a=true,", "a=1"):
        assert not accepts(compiler, spec, f"[f({given})]"), given
    many = {"properties": {f"a{i}": {"type": "boolean"} for i in range(60)}}
    spec = framed(None, Calls("pythonic", {"f": many}, forced=True), None)
    assert accepts(compiler, spec, "[f(a7=true, a59=false)]")
    schema["required"] = ["b"]
    spec = framed(None, Calls("pythonic", {"f": schema}, forced=True), None)
    assert accepts(compiler, spec, "[f(b=true, c=true)]")
    assert not accepts(compiler, spec, "[f(a=true, c=true)]")


def test_tools_are_bounded_in_sum():
    schema = {"type": "object", "properties": {"a": {"const": "x" * 10_000}}}
    functions = {f"f{i}": schema for i in range(20)}
    with pytest.raises(GrammarRefused, match="at most"):
        framed(None, Calls("hermes", functions), None)

"""Structured output: what matches is allowed, nothing else is, and what cannot be is refused."""

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.grammar import GrammarCompiler, GrammarMatcher, GrammarRefused, GrammarSpec
from jaxserve.grammar import compiler as grammar_compiler
from jaxserve.grammar.compiler import GrammarFailed
from jaxserve.grammar.schema import MAX_DEPTH
from jaxserve.grammar.spec import TakesLonger
from jaxserve.tokenizer import gguf
from jaxserve.tokenizer.bytelevel import CHAR_OF_BYTE
from tests.grammar.patient import PatientCompiler
from tests.tokenizer.tiny_tokenizers import word_marked

END = 258
VOCAB = 320  # more than the tokenizer has, as models pad theirs


def tokenizer():
    """Tokens: the 256 bytes, "ab" 256, "true" 257, an end token 258; ids to 319 are padding."""
    tokens = [CHAR_OF_BYTE[byte] for byte in range(256)] + ["ab", "true", "<|end|>"]
    return gguf.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array([1] * 258 + [3], np.int32),
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.eos_token_id": END,
        }
    )


@pytest.fixture(scope="module")
def compiler():
    return PatientCompiler(tokenizer(), VOCAB)


def allowed(matcher):
    row = np.full(VOCAB // 32, 2**32 - 1, np.uint32)
    matcher.fill_mask(row)
    return set(np.nonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0].tolist())


def accepts(compiler, spec, text):
    """Whether an output may be this text: every byte allowed by its mask, and an end after it."""
    matcher = compiler.matcher(spec)
    for byte in text.encode():
        inside = byte in allowed(matcher)
        assert matcher.advance(byte) == inside
        if not inside:
            return False
    return matcher.accepting and END in allowed(matcher)


def schema(value):
    return GrammarSpec.json_schema(value)


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec.regex(r"\d{3}-[a-c]+"), ["123-abc"], ["12-a", "123-d", "123-", "12٣-a"]),
        (GrammarSpec.regex(r"[\d-x]\D\\d"), ["5é\\d", "-x\\d"], ["٣a\\d", "55\\d", "5a5"]),
        (GrammarSpec.regex(r"\w[^\w.]\W"), ["aéé", "_ -"], ["é --", "a.-", "a-b"]),
        (GrammarSpec.choice(["yes", "no", "a|b"]), ["yes", "no", "a|b"], ["a", "y", "maybe"]),
        (GrammarSpec.lark('start: "a" NUM\nNUM: /[0-9]+/'), ["a12"], ["a", "12"]),
        (GrammarSpec.json_object(), ['{"a": [1, null]}', "{}"], ["[]", "1", "{'a': 1}"]),
        (schema({"type": "integer", "multipleOf": 7}), ["14", "0"], ["8"]),  # B022, S11
        (schema({"properties": {"a": {"type": "integer"}}}), ['{"a":1}'], ['{"a":"x"}']),  # B022
        (schema('{"enum": [1, "x"]}'), ["1", '"x"'], ["2"]),
        (schema({"$ref": "#/$defs/x", "$defs": {"x": {"const": True}}}), ["true"], ["false"]),
        (schema({"items": {"$ref": "#"}, "type": "array"}), ["[[],[[]]]"], ["[1]"]),  # B023
        (schema({"type": "string", "x-note": 1, "title": "t"}), ['"é"'], ["1"]),
        (schema(True), ["1", "[]", '"a"'], ["a"]),
    ],
)
def test_outputs_that_match_and_outputs_that_do_not(compiler, spec, good, bad):
    for text in good:
        assert accepts(compiler, spec, text), text
    for text in bad:
        assert not accepts(compiler, spec, text), text


def test_masks_cover_tokens_of_several_bytes_and_never_padding(compiler):
    matcher = compiler.matcher(GrammarSpec.choice(["abc", "true"]))
    assert allowed(matcher) == {ord("a"), 256, ord("t"), 257}
    assert matcher.advance(256)
    assert allowed(matcher) == {ord("c")}
    assert not matcher.advance(ord("d"))  # refused, and nothing changed
    assert matcher.advance(ord("c"))
    assert matcher.done
    assert matcher.accepting
    assert allowed(matcher) == {END}
    assert max(allowed(compiler.matcher(GrammarSpec.regex("(?s:.)*")))) == END


def test_an_end_token_may_come_when_the_output_may_end(compiler):
    matcher = compiler.matcher(GrammarSpec.regex("a+"))
    assert END not in allowed(matcher)
    assert not matcher.advance(END)
    matcher.advance(ord("a"))
    assert END in allowed(matcher)
    assert matcher.accepting
    assert not matcher.done
    assert matcher.advance(END)


def test_matchers_of_one_grammar_are_apart(compiler):
    spec = GrammarSpec.choice(["xy"])
    one, two = compiler.matcher(spec), compiler.matcher(spec)
    one.advance(ord("x"))
    assert allowed(one) == {ord("y")}
    assert allowed(two) == {ord("x")}
    assert isinstance(two, GrammarMatcher)


@settings(deadline=None, max_examples=50)
@given(choices=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4))
def test_any_text_can_be_a_choice(compiler, choices):
    spec = GrammarSpec.choice(choices)
    for choice in choices:
        assert accepts(compiler, spec, choice)
    longer = max(choices, key=len) + "x"
    assert not accepts(compiler, spec, longer)


PRINTABLE = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=4)


@settings(deadline=None, max_examples=50)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-1000, 1000) | PRINTABLE,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PRINTABLE, inner, max_size=3),
        max_leaves=8,
    )
)
def test_every_json_value_is_allowed_where_all_are(compiler, value):
    assert accepts(compiler, schema({}), json.dumps(value, ensure_ascii=False))


# ---- refusals


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"not": {}}, "'not'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"if": {}, "then": {}}, "'if'"),
        ({"contains": {}}, "'contains'"),
        ({"properties": {"a": {"frobnicate": 1}}}, "properties / a uses 'frobnicate'"),
        ({"anyOf": [{"type": "string"}, {"nullable": True}]}, "anyOf / 1 uses 'nullable'"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "'x-guidance'"),
        ({"$ref": "http://x/y"}, "http://x/y"),
        ({"properties": []}, "properties"),
        ({"items": 3}, "items is 3"),
        ([], "not a schema"),
        (False, "nothing satisfies"),
        ("{", "not JSON"),
        ("[" * 100000, "not JSON"),
        ({"pattern": 3}, "pattern"),
    ],
)
def test_what_is_not_enforced_is_refused_by_name(value, named):  # B022, S11
    with pytest.raises(GrammarRefused, match=re.escape(named)):
        schema(value)


@pytest.mark.parametrize(
    "value",
    [
        {"enum": []},  # B022
        {"$ref": "#"},  # B023
        {"type": "frob"},
        {"format": "frob"},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "("},
        {"oneOf": [{"type": "string"}, {"minLength": 3}]},
        {"type": "number", "minimum": 3, "maximum": 2},
        {"type": "string", "minLength": -1},
    ],
)
def test_schemas_nothing_can_satisfy_or_that_are_wrong(compiler, value):
    with pytest.raises(GrammarRefused):
        compiler.matcher(schema(value))


def nested(depth, leaf="string"):
    value = {"type": leaf}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


def test_nesting_is_bounded(compiler):  # B023
    compiler.matcher(schema(nested(MAX_DEPTH // 2 - 1)))
    with pytest.raises(GrammarRefused, match="nested"):
        schema(nested(2000))
    deep = []
    for _ in range(100000):
        deep = [deep]
    with pytest.raises(GrammarRefused, match="nested"):
        schema({"enum": deep})


@pytest.mark.parametrize(
    "pattern", ["(a{1,999}){1,999}", "a{99999999999}", "((a{9}){9,99}){999,}", "a{ 1 , 999999 }"]
)
def test_repetition_is_bounded(pattern):  # S10
    with pytest.raises(GrammarRefused, match="repeats"):
        GrammarSpec.regex(pattern)
    with pytest.raises(GrammarRefused, match="repeats"):
        schema({"properties": {"a": {"type": "string", "pattern": pattern}}})
    with pytest.raises(GrammarRefused, match="repeats"):
        schema({"patternProperties": {pattern: {}}})


def test_ordinary_repetition_is_not(compiler):
    uuid = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    assert accepts(compiler, GrammarSpec.regex(uuid), "0123abcd-0123-4567-89ab-0123456789ab")


@pytest.mark.parametrize(
    "make",
    [
        lambda: GrammarSpec.regex("a" * 200_000),
        lambda: GrammarSpec.lark("start: A\n" + "A: /a/\n" * 50_000),
        lambda: GrammarSpec.choice(["x" * 200_000]),
        lambda: GrammarSpec.choice([str(n) for n in range(10_000)]),
        lambda: GrammarSpec.choice([]),
        lambda: GrammarSpec.choice([""]),
        lambda: schema({"enum": list(range(100_000))}),
        lambda: schema({"enum": ["x" * 200_000]}),
        lambda: GrammarSpec.lark('start: %json {"not": {}}'),
        lambda: schema({"enum": [object()]}),
        lambda: schema({"enum": ["\ud800"]}),
        lambda: GrammarSpec.regex("\ud800"),
        lambda: GrammarSpec.choice(["\ud800"]),
    ],
)
def test_sizes_are_bounded(make):  # S10
    with pytest.raises(GrammarRefused):
        make()


@pytest.mark.parametrize("text", ["start: foo", "x", "start: /(/", 'start: "a'])
def test_wrong_grammars_are_refused(compiler, text):
    with pytest.raises(GrammarRefused):
        compiler.matcher(GrammarSpec.lark(text))


# ---- the published suite

# Held to their syntax, not to the calendar or to punycode's tables.
SYNTAX_ONLY = {"date-time.json", "date.json", "time.json", "hostname.json"}
# The suite follows ECMA here, where U+FEFF is a space; ours follows Unicode.
ECMA_SPACES = {"ecmascript-regex.json"}


def test_no_output_breaks_a_published_schema(compiler, shared):
    """JSON-Schema-Test-Suite: each schema is refused, or allows none of its invalid documents."""
    suite = json.loads((shared / "json_schema" / "draft2020-12.json").read_text("utf-8"))
    compiled, allowed_valid, valid = 0, 0, 0
    for file, groups in suite.items():
        for group in groups:
            try:
                spec = schema(group["schema"])
                compiler.matcher(spec)
            except GrammarRefused:
                continue
            compiled += 1
            for test in group["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
                matcher = compiler.matcher(spec)
                fits = all(map(matcher.advance, text.encode("utf-8", "surrogatepass")))
                fits = fits and matcher.accepting
                allowed_valid += fits and test["valid"]
                valid += test["valid"]
                known = file.rsplit("/", 1)[-1] in SYNTAX_ONLY | ECMA_SPACES
                assert not fits or test["valid"] or known, (file, group["description"], text)
    assert compiled > 190
    assert allowed_valid > 0.9 * valid  # the rest: other orders of keys, 1.0 for 1


AMBIGUOUS = GrammarSpec.lark('start: e\ne: e e | e e e | "a" | "b"')


def test_a_matcher_in_a_hurry_stops_and_goes_on_when_it_has_time(monkeypatch):
    """And then has the masks of one that had time from the beginning."""
    monkeypatch.setitem(grammar_compiler.QUICK_LIMITS, "step_max_items", 100)
    compiler = PatientCompiler(tokenizer(), VOCAB)
    hasty, patient = GrammarCompiler.matcher(compiler, AMBIGUOUS), compiler.matcher(AMBIGUOUS)
    assert not hasty.patient
    stops = 0
    for token in b"ab" * 15:
        try:
            assert hasty.advance(token)
            mask = allowed(hasty)
        except TakesLonger:
            stops += 1
            hasty.patient = True
            mask = allowed(hasty)
        assert patient.advance(token)
        assert mask == allowed(patient)
    assert stops == 1


def test_one_outputs_text_does_not_use_up_anothers_limit(monkeypatch):
    monkeypatch.setitem(grammar_compiler.LIMITS, "max_lexer_states", 400)
    monkeypatch.setitem(grammar_compiler.QUICK_LIMITS, "max_lexer_states", 400)
    compiler = PatientCompiler(tokenizer(), VOCAB)
    spec, chance = GrammarSpec.regex("(a|b)*a(a|b){12}c"), random.Random(1)
    calm, wild = compiler.matcher(spec), compiler.matcher(spec)
    with pytest.raises(GrammarFailed):
        for _ in range(20_000):
            assert wild.advance(chance.choice(b"ab")) and allowed(wild)
    for matcher in (calm, compiler.matcher(spec)):  # one that ran, and one to come
        for _ in range(20):
            assert matcher.advance(ord("b")) and ord("a") in allowed(matcher)


def test_spelled_control_tokens_are_text(compiler):
    """What is forced comes in ordinary tokens: the control token of that spelling is forbidden."""
    matcher = compiler.matcher(GrammarSpec.choice(["<|end|>x"]))
    assert END not in allowed(matcher)
    assert accepts(compiler, GrammarSpec.choice(["<|end|>x"]), "<|end|>x")


def test_vocabularies_that_put_a_space_before_text():
    tokenizer = word_marked(["▁", "▁h", "h", "i"])
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    row = np.zeros(compiler.mask_words, np.int32)
    for text in ("hi hi", " hi"):
        matcher, written = compiler.matcher(GrammarSpec.choice([text])), b""
        while not matcher.done:
            matcher.fill_mask(row)
            token = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0]
            assert matcher.advance(int(token))
            written += tokenizer.token_bytes(int(token))
        assert written == text.encode()

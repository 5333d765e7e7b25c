"""Structured output: every way to ask for it, and what is refused. Engines get a GrammarSpec."""

import json

import pytest
from test_completions import error_of

from jaxserve.grammar import GrammarSpec

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    "field, value, spec",
    [
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, GrammarSpec.json_object()),
        ("response_format", form(SCHEMA), GrammarSpec.json_schema(SCHEMA)),
        ("guided_json", SCHEMA, GrammarSpec.json_schema(SCHEMA)),
        ("guided_json", json.dumps(SCHEMA), GrammarSpec.json_schema(SCHEMA)),
        ("guided_regex", "[ab]+", GrammarSpec.regex("[ab]+")),
        ("guided_choice", ["yes", "no"], GrammarSpec.choice(["yes", "no"])),
        ("guided_grammar", 'start: "a"', GrammarSpec.lark('start: "a"')),
        ("structured_outputs", {"regex": "a+"}, GrammarSpec.regex("a+")),
        ("structured_outputs", {"json": SCHEMA}, GrammarSpec.json_schema(SCHEMA)),
        ("structured_outputs", {"json_object": True}, GrammarSpec.json_object()),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_ways_to_ask(client, engine, field, value, spec, chat):
    ask = client.chat if chat else lambda **body: client.complete(prompt="a", **body)
    assert ask(max_tokens=1, **{field: value}).status_code == 200
    assert engine.calls[0].params.grammar == spec


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}},
        {"response_format": form([])}, {"structured_outputs": {"grammar": 5}},
        {"response_format": {}}, {"guided_json": "{"}, {"guided_regex": "(a{1,999}){1,999}"},
        {"guided_choice": []}, {"guided_choice": [""]}, {"structured_outputs": {"magic": 1}},
        {"guided_regex": "a", "guided_choice": ["a"]}, {"guided_choice": "a"},
        {"structured_outputs": {"regex": 5}}, {"structured_outputs": {"choice": 5}},
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(client, engine, body):
    error = error_of(client.complete(prompt="a", **body))
    assert error["param"] in body and engine.calls == []


def test_nesting_beyond_the_bound_is_a_400_and_the_next_request_works(client):
    schema = {"type": "object"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    assert client.chat(response_format=form(schema), max_tokens=1).status_code in (200, 400)
    assert client.chat(max_tokens=1).status_code == 200

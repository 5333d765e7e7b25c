"""What a request asks its output to look like, checked for everything we can check cheaply."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

MAX_CHARS = 128 * 1024  # of a schema, pattern, grammar or all choices together
MAX_CHOICES = 4096
MAX_REPETITION = 100_000  # product of a pattern's counted repetitions: each multiplies its states

# White space between the parts of JSON: enough to indent, not enough to print nothing but it.
JSON_SPACES = r"[ \t\r\n]{0,64}"


class GrammarRefused(ValueError):
    """A grammar we cannot honour exactly, or not at a bounded cost; the message names the part."""


class TakesLonger(Exception):
    """A matcher that is not patient has reached the limit of what may be done at once."""


@dataclasses.dataclass(frozen=True)
class GrammarSpec:
    """One request for structured output; equal specs share a compiled grammar.

    kind: json_schema, regex, choice or lark. text: the schema's or choices' JSON, the pattern, or
    the grammar. Made by the functions below, which raise GrammarRefused.

    frame: Lark of the whole output when there is more to it, with @answer where kind and text come
    in (kind "": nowhere). Made by jaxserve.grammar.calls.

    field: the client's name for it, to blame in a refusal.
    """

    kind: str
    text: str
    frame: str = ""
    field: str = dataclasses.field(default="grammar", compare=False)

    @property
    def what(self) -> str:
        """What was asked for, in a message."""
        return self.kind or "form of the tool calls"

    @classmethod
    def json_schema(cls, schema: dict | bool | str) -> GrammarSpec:
        """A JSON schema, as an object or as text."""
        from jaxserve.grammar.schema import check_schema

        try:
            schema = json.loads(bounded(schema)) if isinstance(schema, str) else schema
        except (ValueError, RecursionError) as error:
            raise GrammarRefused(f"the schema is not JSON: {error}") from None
        check_schema(schema)
        if schema is False:
            raise GrammarRefused("nothing satisfies the schema false")
        schema = {} if schema is True else schema
        return cls("json_schema", bounded(json.dumps(schema, ensure_ascii=False)))

    @classmethod
    def json_object(cls) -> GrammarSpec:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """A regular expression that the whole output matches."""
        return cls("regex", check_pattern(pattern))

    @classmethod
    def choice(cls, choices: Sequence[str]) -> GrammarSpec:
        """One of several texts."""
        if not choices or len(choices) > MAX_CHOICES:
            raise GrammarRefused(f"{len(choices)} choices; give 1 to {MAX_CHOICES}")
        if not all(isinstance(choice, str) and choice for choice in choices):
            raise GrammarRefused("choices are texts of one character or more")
        return cls("choice", bounded(json.dumps(list(choices), ensure_ascii=False)))

    @classmethod
    def lark(cls, grammar: str) -> GrammarSpec:
        """A grammar in Lark's notation, start rule `start`."""
        if re.search(r"%json\b", grammar):
            raise GrammarRefused("%json in a Lark grammar: send that schema as a JSON schema")
        return cls("lark", bounded(grammar))


def check_pattern(pattern: Any, where: str = "the pattern") -> str:
    """Bounds a regular expression's size. What it means is checked when it is compiled."""
    if not isinstance(pattern, str):
        raise GrammarRefused(f"{where} is not a text")
    counts = re.findall(r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}", bounded(pattern))
    if math.prod(min(int(f"0{high or low}"[:12]) or 1, 10**12) for low, high in counts) > (
        MAX_REPETITION
    ):
        raise GrammarRefused(
            f"{where} repeats too much: its {{m,n}}, multiplied, may come to {MAX_REPETITION}"
        )
    return pattern


def schema_options() -> dict[str, Any]:
    """What a schema must hold for llguidance to take it as we mean it."""
    return {"x-guidance": {"whitespace_pattern": JSON_SPACES, "lenient": False}}


def bounded(text: str) -> str:
    """The text, if it is of a size we compile."""
    if len(text) > MAX_CHARS:
        raise GrammarRefused(f"{len(text)} characters of grammar; at most {MAX_CHARS}")
    if any("\ud800" <= char <= "\udfff" or char >= "\U0010fffe" for char in text):
        raise GrammarRefused("the grammar holds halves of surrogate pairs or noncharacters")
    return text

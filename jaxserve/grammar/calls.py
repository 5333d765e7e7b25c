"""Tool calls as grammars: answers that must call tools, or may, in the formats our parsers read.

JSON formats take a tool's schema as it is; the others spell out its properties one by one. The
result is a frame: the Lark grammar of a whole answer, which is perhaps the model's reasoning first,
then calls, free text, or what another GrammarSpec asks for.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping

from jaxserve.grammar.arguments import as_json, as_python, as_tags
from jaxserve.grammar.gemma import RULES as GEMMA_RULES
from jaxserve.grammar.gemma import as_gemma
from jaxserve.grammar.schema import check_schema
from jaxserve.grammar.spec import GrammarRefused, GrammarSpec, bounded

NAME, ARGUMENTS = "<NAME>", "<ARGUMENTS>"  # no tool's name holds < or >
MAX_CALLS = 32  # of a forced answer: small models know no end
SPACES = r"/[ \t\r\n]{0,8}/"
_JSON_SYMBOLS = re.compile(r'"[^"]*"|[^"]')


@dataclasses.dataclass(frozen=True)
class Calls:
    """The calls that an answer may hold.

    format: a parser's name. functions: the tools that may be called, each with its parameters'
    schema. forced: the answer is calls and nothing else. single: no more than one. control: those
    of the format's marks that are control tokens, with their ids.
    """

    format: str
    functions: Mapping[str, dict | None]
    forced: bool = False
    single: bool = False
    control: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Thought:
    """The reasoning before an answer, from begin to end. opened: the prompt has begun it, so there
    is some; else it may be left out. control: as in Calls."""

    begin: str
    end: str
    opened: bool
    control: Mapping[str, int] = dataclasses.field(default_factory=dict)


def framed(
    answer: GrammarSpec | None, calls: Calls | None, thought: Thought | None
) -> GrammarSpec | None:
    """The grammar of a whole answer; None when everything is allowed.

    answer: the form of what is no call. Raises GrammarRefused for what cannot be enforced.
    """
    if calls is None and (answer is None or thought is None):
        return answer
    rules: dict[str, str] = {} if calls is None else _call_rules(calls)
    if calls is not None and calls.forced:
        answer, body = None, "block"
    elif answer is not None:
        body = "@answer" if calls is None else "block | @answer"
    else:
        body = _calls_or_text(calls, rules)
        if thought is not None and not thought.control and _format(calls).mark:
            thought = None  # free text may hold it as it is
    start = body if thought is None else _thought_before(thought, body, rules)
    frame = "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **rules}.items())
    kind, text = ("", "") if answer is None else (answer.kind, answer.text)
    return GrammarSpec(kind, text, bounded(frame), answer.field if calls is None else "tools")


def _thought_before(thought: Thought, body: str, rules: dict[str, str]) -> str:
    """start of an answer with reasoning before its body."""
    literal = _Literal(thought.control)
    if thought.end in thought.control:
        rules["thought"] = f"TEXT {literal(thought.end)}"
        rules["TEXT"] = r"/(.|\n)*/"
    else:
        rules["thought[lazy]"] = rf"/(.|\n)*{_pattern(thought.end)}/"
    if thought.opened:
        return f"thought {SPACES} ({body})"
    return f"({SPACES} {literal(thought.begin)} thought {SPACES})? ({body})"


def _calls_or_text(calls: Calls, rules: dict[str, str]) -> str:
    """start of answers that may be text: it turns into calls at the format's mark. Without a mark,
    an answer is calls when it begins like them."""
    form, literal = _format(calls), _Literal(calls.control)
    if not form.mark:
        first = re.escape((form.begin + form.call)[0])
        rules["FREE"] = rf"/[ \t\r\n]*([^{first} \t\r\n](.|\n)*)?/"
        return "block | FREE"
    rules["TEXT"] = r"/(.|\n)*/"
    if form.mark in calls.control:
        rules["opening"] = f"TEXT {literal(form.mark)}"
    else:
        rules["opening[lazy]"] = rf"/(.|\n)*{_pattern(form.mark)}/"
    return f"(opening tail){'*' if form.repeats and not calls.single else '?'} TEXT"


def _call_rules(calls: Calls) -> dict[str, str]:
    """Rules: block, all calls of an answer; tail, what follows the first mark in it."""
    form, literal = _format(calls), _Literal(calls.control)
    rules, ways = dict(form.rules), []

    def part(expression: str, name: str = "") -> str:
        """Names an expression that stands in several places."""
        name = name or f"part_{len(rules)}"
        rules[name] = expression
        return name

    for name, schema in calls.functions.items():
        before, after = form.call.replace(NAME, name).split(ARGUMENTS)
        symbols = _JSON_SYMBOLS.findall(before) if form.in_json else [before]
        arguments = form.arguments(name, _checked(name, schema), literal, part)
        ways.append(" ".join([*map(literal, symbols), arguments, literal(after)]))
    rules["call"] = " | ".join(map(part, ways))
    mark = literal(form.mark)
    next_one = f"{literal(form.between)} {mark if form.repeats else ''} call"
    more = "" if calls.single else f"({next_one}){{0,{MAX_CALLS - 1}}}"
    if form.repeats:
        return rules | {"block": f"{mark} call {more}", "tail": "call"}
    tail = f"{literal(form.begin)} call {more} {literal(form.end)}"
    return rules | {"block": f"{mark} tail", "tail": tail}


def _checked(name: str, schema: dict | None) -> dict:
    """A tool's parameters as the schema of an object; none at all mean an empty one."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        check_schema(schema)
    except GrammarRefused as error:
        raise GrammarRefused(f"{name}.parameters: {error}") from None
    if schema.get("type", "object") != "object":
        raise GrammarRefused(f"{name}.parameters: arguments are an object, type is not")
    return {**schema, "type": "object"}


# ---- formats


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How calls are written: mark begin call between call ... end.

    call: one of them, with NAME and ARGUMENTS in their places. repeats: the mark stands before
    every call, and there is neither begin nor end. arguments(name, schema, literal, part): Lark for
    the arguments of a tool; literal makes Lark of a text, part names an expression. in_json: calls
    begin as answers in JSON may, so the grammar must be made of the same symbols: its lexer takes
    the longest one it can, and does not come back. rules: more Lark that the arguments use.
    """

    call: str
    arguments: Callable[..., str] = as_json
    mark: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    repeats: bool = False
    in_json: bool = False
    rules: Mapping[str, str] = dataclasses.field(default_factory=dict)


FORMATS = {
    "hermes": CallFormat(
        mark="<tool_call>",
        call=f'\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>',
        between="\n",
        repeats=True,
    ),
    "llama3_json": CallFormat(
        call=f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}', between="; ", in_json=True
    ),
    "mistral": CallFormat(
        mark="[TOOL_CALLS]",
        begin=" [",
        call=f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}',
        between=", ",
        end="]",
    ),
    "phi4": CallFormat(
        mark="functools[",
        call=f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}',
        between=", ",
        end="]",
    ),
    "deepseek_v3": CallFormat(
        mark="<｜tool▁calls▁begin｜>",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        f"{NAME}\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    "qwen3_coder": CallFormat(
        mark="<tool_call>",
        call=f"\n<function={NAME}>\n{ARGUMENTS}</function>\n</tool_call>",
        between="\n",
        repeats=True,
        arguments=as_tags,
        rules={"bare_text[lazy]": r"/(.|\n)*\n<\/parameter>\n/"},
    ),
    "gemma4": CallFormat(
        mark="<|tool_call>",
        call=f"call:{NAME}{{{ARGUMENTS}}}<tool_call|>",
        repeats=True,
        arguments=as_gemma,
        rules=GEMMA_RULES,
    ),
    "pythonic": CallFormat(
        begin="[", call=f"{NAME}({ARGUMENTS})", between=", ", end="]", arguments=as_python
    ),
}
# Vocabularies with [ARGS] belong to the newer models.
_NEWER_MISTRAL = CallFormat(mark="[TOOL_CALLS]", call=f"{NAME}[ARGS]{ARGUMENTS}", repeats=True)


def _format(calls: Calls) -> CallFormat:
    if calls.format == "mistral" and "[ARGS]" in calls.control:
        return _NEWER_MISTRAL
    if calls.format not in FORMATS:
        raise GrammarRefused(
            f"calls in the format {calls.format} cannot be enforced; leave tool_choice at auto and "
            "strict out"
        )
    return FORMATS[calls.format]


# ---- Lark


class _Literal:
    """Texts as Lark: control tokens in them by their ids."""

    def __init__(self, control: Mapping[str, int]):
        self._control = control
        self._cut = re.compile("(" + "|".join(map(re.escape, control)) + ")") if control else None

    def __call__(self, text: str) -> str:
        pieces = self._cut.split(text) if self._cut else [text]
        return " ".join(map(self._piece, filter(None, pieces)))

    def is_token(self, text: str) -> bool:
        return text in self._control

    def _piece(self, piece: str) -> str:
        if piece in self._control:
            return f"<[{self._control[piece]}]>"
        return json.dumps(piece, ensure_ascii=False)


def _pattern(text: str) -> str:
    """A regular expression in Lark's slashes that matches just this text."""
    return re.escape(text).replace("/", r"\/")

"""What a model said, sorted: its reasoning, its answer, and the tools it wants called.

A Style says how one request's answers are to be read; each choice gets a Speech of its own, fed
with the text as it streams. The answer that is not streamed is the streamed one put together.
"""

from __future__ import annotations

import dataclasses
import re
import uuid

from jaxserve.server.errors import ApiError, quote
from jaxserve.tokenizer import reasoning, tools

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclasses.dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """News of tool call `index`: id and name come once, first; then pieces of its arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Part = str | Thought | Call  # a str is a piece of the answer


@dataclasses.dataclass(frozen=True)
class Style:
    """How to read the answers of one request.

    thinks: the model reasons between <think> and </think>; opened: its prompt ends inside.
    parser: reads tool calls, None when there are no tools. names: of the tools. single: no more
    than one call an answer.
    """

    thinks: bool = False
    opened: bool = False
    parser: type[tools.ToolParser] | None = None
    names: frozenset[str] = frozenset()
    single: bool = False

    @property
    def needs_special(self) -> bool:
        """Whether special tokens must be part of the text for the calls to be seen."""
        return self.parser is not None and self.parser.needs_special

    def speech(self) -> Speech:
        return Speech(self)


class Speech:
    """One choice's text to parts. num_calls: calls that have begun."""

    def __init__(self, style: Style):
        self._reasoning = reasoning.ReasoningSplitter(style.opened) if style.thinks else None
        self._calls = style.parser(style.names) if style.parser else None
        self._single = style.single
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text)
        return self._parts(thought, text, self._calls.push(text) if self._calls else None)

    def finish(self) -> list[Part]:
        """What was held back, at the end of the text."""
        thought = text = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.finish()
        events = None
        if self._calls:
            events = [*self._calls.push(text), *self._calls.finish()]
        return self._parts(thought, text, events)

    def _parts(self, thought: str, text: str, events) -> list[Part]:
        parts: list[Part] = [Thought(thought)] if thought else []
        for event in [text] if events is None else events:
            if isinstance(event, str):
                parts += [event] if event else []
            elif not (self._single and event.index):
                parts.append(self._call(event))
        return parts

    def _call(self, event: tools.CallDelta) -> Call:
        if event.name is None:
            return Call(event.index, None, None, event.arguments)
        self.num_calls += 1
        return Call(event.index, f"call_{uuid.uuid4().hex[:24]}", event.name, event.arguments)


@dataclasses.dataclass
class Reply:
    """The parts of one whole answer, put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, style: Style, text: str) -> Reply:
        speech, reply = style.speech(), cls()
        for part in [*speech.push(text), *speech.finish()]:
            reply.add(part)
        return reply

    def add(self, part: Part) -> None:
        match part:
            case Thought(text):
                self.reasoning += text
            case Call(index=index, id=None):
                known = self.calls[index]
                joined = known.arguments + part.arguments
                self.calls[index] = dataclasses.replace(known, arguments=joined)
            case Call():
                self.calls.append(part)
            case _:
                self.content += part


def style_of(
    tokenizer, prompt_ids: list[int], functions: list[dict], *, parser: str | None, single: bool
) -> Style:
    """The Style for a rendered prompt. functions: OpenAI's function objects, checked.

    Raises ApiError when the model has no way of calling functions that the server can read.
    """
    template = tokenizer.chat_template or ""
    found = tools.find_parser(parser, template) if functions else None
    if functions and found is None:
        message = (
            "tools: this model's chat template has no tool calls that the server can read; "
            "start it with --tool_parser to name their format"
        )
        raise ApiError(400, message, "unsupported_value", "tools")
    tail = tokenizer.decode(prompt_ids[-8:], skip_special_tokens=False)
    return Style(
        thinks=reasoning.BEGIN in template,
        opened=reasoning.opens_reasoning(tail),
        parser=found,
        names=frozenset(function["name"] for function in functions),
        single=single,
    )


def checked_functions(tool_list: list[dict] | None) -> list[dict]:
    """The function objects of [{"type": "function", "function": {...}}]; raises ApiError."""
    if len(tool_list or ()) > MAX_TOOLS:
        raise _refused(f"{len(tool_list)} of them; at most {MAX_TOOLS}")
    functions = []
    for i, tool in enumerate(tool_list or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise _refused(f"entry {i} has type {quote(tool.get('type'))}; only function is known")
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise _refused(f"entry {i} has name {quote(name)}: 1 to 64 of A-Z a-z 0-9 _ . -")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise _refused(f"{name}.parameters must be a JSON schema object")
        if function.get("strict"):
            raise _refused(f"{name}.strict=true is not supported: arguments are not constrained")
        functions.append(function)
    if len({function["name"] for function in functions}) != len(functions):
        raise _refused("two of them have the same name")
    return functions


def _refused(rule: str) -> ApiError:
    return ApiError(400, f"tools: {rule}", "invalid_value", "tools")

"""What a model said, sorted: its reasoning, its answer, and the tools it wants called.

A Style says how one request's answers are to be read; each choice gets a Speech of its own, fed
with the text as it streams. The answer that is not streamed is the streamed one put together.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping

from jaxserve.grammar import Calls, GrammarSpec, Thought, framed
from jaxserve.server.errors import ApiError
from jaxserve.server.toolbox import Toolbox
from jaxserve.tokenizer import reasoning, tools

EMPTY = Toolbox()


@dataclasses.dataclass(frozen=True, slots=True)
class Thinking:
    """A piece of reasoning."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """News of tool call `index`: id and name come once, first; then pieces of its arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Part = str | Thinking | Call  # a str is a piece of the answer


@dataclasses.dataclass(frozen=True)
class Style:
    """How to read the answers of one request.

    thought: the model's reasoning before it, None for models that do not reason. parser: reads tool
    calls, None when there are no tools. control: those of its marks that are control tokens.
    """

    thought: Thought | None = None
    parser: type[tools.ToolParser] | None = None
    toolbox: Toolbox = EMPTY
    control: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def needs_special(self) -> bool:
        """Whether control tokens must be part of the text for its parts to be seen."""
        return bool(self.control or (self.thought and self.thought.control))

    def grammar(self, answer: GrammarSpec | None) -> GrammarSpec | None:
        """The grammar of the whole text when its answer has one, and of its calls where they must
        be held to one. May take some milliseconds; raises GrammarRefused."""
        box, calls = self.toolbox, None
        if self.parser is not None and (box.constrained or answer is not None):
            schemas = {name: each for name, each in box.schemas.items() if name in box.allowed}
            calls = Calls(self.parser.name, schemas, box.forced, box.single, self.control)
        return framed(answer, calls, self.thought)

    def speech(self) -> Speech:
        return Speech(self)


class Speech:
    """One choice's text to parts. num_calls: calls that have begun."""

    def __init__(self, style: Style):
        thought = style.thought
        self._reasoning = reasoning.ReasoningSplitter(thought.opened) if thought else None
        self._calls = style.parser(style.toolbox.schemas) if style.parser else None
        self._single = style.toolbox.single
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
        parts: list[Part] = [Thinking(thought)] if thought else []
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
            case Thinking(text):
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
    tokenizer, prompt_ids: list[int], toolbox: Toolbox = EMPTY, *, parser: str | None = None
) -> Style:
    """The Style for a rendered prompt. parser: the format of calls; None finds the template's.

    Raises ApiError when the model has no way of calling functions that the server can read.
    """
    template = tokenizer.chat_template or ""
    found = tools.find_parser(parser, template) if toolbox.functions else None
    if toolbox.functions and found is None:
        message = (
            "tools: this model's chat template has no tool calls that the server can read; "
            "start it with --tool_parser to name their format"
        )
        raise ApiError(400, message, "unsupported_value", "tools")
    return Style(
        thought=_thought(tokenizer, prompt_ids, template),
        parser=found,
        toolbox=toolbox,
        control=tokenizer.control_tokens(found.marks) if found else {},
    )


def _thought(tokenizer, prompt_ids: list[int], template: str) -> Thought | None:
    """The reasoning that an answer to this prompt begins with, if the model reasons."""
    begin, end = reasoning.BEGIN, reasoning.END
    tail = tokenizer.decode(prompt_ids[-8:], skip_special_tokens=False)
    if begin not in template or reasoning.ends_reasoning(tail):
        return None
    opened = reasoning.opens_reasoning(tail)
    return Thought(begin, end, opened, tokenizer.control_tokens([begin, end]))

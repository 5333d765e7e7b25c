"""Tool calls in a model's text: found while it streams, and the same however it is cut into pieces.

A `ToolParser` reads text and gives events: plain content, or news of a call. Parsers are coroutines
that get one character at a time, so pieces cannot matter, and the answer that is not streamed
(`parse`) is the streamed one put together. Text that only looked like a call comes out unchanged.

Arguments leave as JSON text. Where a model writes JSON they are its own characters, sent on as they
come; whether they fit the tool's schema is the client's to judge.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from jaxserve.tokenizer.stream import StopStrings

END = ""  # comes in place of a character when there are no more
SPACES = " \t\r\n"


@dataclasses.dataclass(slots=True)
class CallDelta:
    """News of call `index`: its name (once, first), or a piece of its arguments' JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str


class ToolParser:
    """Splits one answer into content and tool calls; subclasses know what calls look like.

    functions: the request's tools, each name with its parameters' JSON schema. Formats that mark
    their calls can do without the names; in the others a call of something else is content. White
    space around calls is dropped.

    name: of the format. marks: texts that announce calls and part them, the first one before all.
    They may be special tokens of a vocabulary; then the text must show special tokens.
    num_calls: how many calls have begun.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, functions: Mapping[str, Any] = MappingProxyType({})):
        self.num_calls = 0
        self._functions = functions
        self._events: list[tuple[int | None, str | None, str]] = []  # call or None, name, text
        self._seen: list[str] = []  # read, and content unless it turns out to be a call
        self._gap: list[str] = []  # white space that is content if more content follows
        self._machine = self._read()
        next(self._machine)

    def push(self, text: str) -> list[str | CallDelta]:
        """Events that this text completes."""
        for char in text:
            self._machine.send(char)
        return self._take()

    def finish(self) -> list[str | CallDelta]:
        """Events at the end of the text: what was held back is content now."""
        self._machine.send(END)
        if self._gap and not self.num_calls:
            self._events.append((None, None, "".join(self._gap)))
        return self._take()

    def _take(self) -> list[str | CallDelta]:
        """The events so far; neighbours that belong to the same thing become one."""
        events, self._events = self._events, []
        taken: list[str | CallDelta] = []
        for index, group in itertools.groupby(events, operator.itemgetter(0)):
            _, names, texts = zip(*group)
            text = "".join(texts)
            taken.append(text if index is None else CallDelta(index, names[0], text))
        return taken

    def _read(self) -> Generator[None, str, None]:
        """Reads the whole answer, and goes on reading after END."""
        raise NotImplementedError

    # ---- events

    def _content(self, text: str) -> None:
        body = text.rstrip(SPACES)
        if body:
            self._events.append((None, None, "".join(self._gap) + body))
            self._gap.clear()
        if len(body) < len(text):
            self._gap.append(text[len(body) :])

    def _begin(self, name: str) -> None:
        self._gap.clear()
        self._events.append((self.num_calls, name, ""))
        self.num_calls += 1

    def _arguments(self, text: str) -> None:
        self._events.append((self.num_calls - 1, None, text))

    def _give_back(self) -> None:
        """What was read since the last call was no call: it is content."""
        self._content("".join(self._seen))
        self._seen.clear()

    def _callable(self, name: str | None) -> bool:
        return bool(name) and (bool(self.marks) or not self._functions or name in self._functions)

    # ---- reading

    def _char(self) -> Generator[None, str, str]:
        char = yield
        self._seen.append(char)
        return char

    def _word(self) -> Generator[None, str, str]:
        """The next character that is not white space."""
        char = yield from self._char()
        while char and char in SPACES:
            char = yield from self._char()
        return char

    def _follows(self, expected: str) -> Generator[None, str, bool]:
        """Whether these characters come next."""
        for wanted in expected:
            if (yield from self._char()) != wanted:
                return False
        return True

    def _until(self, *marks: str) -> Generator[None, str, str | None]:
        """Content up to one of the marks, which goes to _seen. None at the end of the text."""
        stops, state, held = StopStrings(marks), 0, ""
        while (char := (yield)) != END:
            held += char
            state, found, _ = stops.scan(state, char)
            safe = len(held) - (len(found) if found else stops.depth[state])
            self._content(held[:safe])
            held = held[safe:]
            if found:
                self._seen[:] = [found]
                return found
        self._content(held)
        return None

    def _text_up_to(self, mark: str) -> Generator[None, str, str | None]:
        """What comes before a mark; None if the mark does not come."""
        stops, state, text = StopStrings([mark]), 0, []
        while (char := (yield from self._char())) != END:
            text.append(char)
            state, found, _ = stops.scan(state, char)
            if found:
                return "".join(text)[: -len(mark)]
        return None

    def _rest(self) -> Generator[None, str, None]:
        """Everything else is content."""
        while True:
            self._content((yield))


def parse(parser: ToolParser, text: str) -> tuple[str, list[ToolCall]]:
    """Content and calls of a whole answer."""
    content, calls = "", []
    for event in [*parser.push(text), *parser.finish()]:
        if isinstance(event, str):
            content += event
        elif event.name is not None:
            calls.append(ToolCall(event.name, event.arguments))
        else:
            calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + event.arguments)
    return content, calls


def json_string(text: str) -> str | None:
    """The string that a JSON text is; None if it is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None

"""Tool calls in a model's text: found while it streams, and the same however it is cut into pieces.

A `ToolParser` reads text and gives events: plain content, or news of a call. Parsers are coroutines
that get one character at a time, so pieces cannot matter, and the answer that is not streamed
(`parse`) is the streamed one put together. Text that only looked like a call comes out unchanged.

Arguments leave as JSON text. Where a model writes JSON they are its own characters, sent on as they
come; whether they fit the tool's schema is the client's to judge.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import operator
from collections.abc import Callable, Collection, Generator
from typing import ClassVar

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

    names: the request's tools. Formats that mark their calls need them not; in the others a call
    of something else is content. White space around calls is dropped.

    needs_special: special tokens announce the calls, so the text must show them.
    num_calls: how many calls have begun.
    """

    needs_special = False
    marked = True

    def __init__(self, names: Collection[str] = ()):
        self.num_calls = 0
        self._names = frozenset(names)
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
        return bool(name) and (self.marked or not self._names or name in self._names)

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

    def _until(self, mark: str) -> Generator[None, str, bool]:
        """Content up to a mark, which goes to _seen. False at the end of the text."""
        stops, state, held = StopStrings([mark]), 0, ""
        while (char := (yield)) != END:
            held += char
            state, found, _ = stops.scan(state, char)
            safe = len(held) - (len(mark) if found else stops.depth[state])
            self._content(held[:safe])
            held = held[safe:]
            if found:
                self._seen[:] = [mark]
                return True
        self._content(held)
        return False

    def _rest(self) -> Generator[None, str, None]:
        """Everything else is content."""
        while True:
            self._content((yield))

    def _json_value(self, char: str, send: Callable[[str], None] | None):
        """One JSON value that begins with char, each character also sent. Returns its text (None if
        it does not end) and the character behind it."""
        if char in (*",:]}", END):
            return None, char
        send = send or (lambda char: None)
        text = [char]
        send(char)
        if char not in ("{", "[", '"'):
            while (char := (yield from self._char())) not in (*",]}", *SPACES, END):
                text.append(char)
                send(char)
            return "".join(text), char
        depth, quoted, escaped = int(char != '"'), char == '"', False
        while depth or quoted:
            char = yield from self._char()
            if char == END:
                return None, END
            text.append(char)
            send(char)
            if quoted:
                quoted = char != '"' or escaped
                escaped = char == "\\" and not escaped
            else:
                quoted = char == '"'
                depth += (char in "{[") - (char in "}]")
        return "".join(text), (yield from self._char())

    def _json_call(self, arguments: Collection[str]) -> Generator[None, str, bool]:
        """A call written as an object whose { was just read. False if it is none.

        arguments: the keys that may hold them. A call that has begun and turns out malformed stays,
        as far as it came.
        """
        call = _JsonCall(self, arguments)
        char = yield from self._word()
        while char == '"':
            key, char = yield from self._json_value(char, None)
            if char in SPACES:
                char = yield from self._word()
            if char != ":":
                break
            char = yield from self._word()
            key = json_string(key)
            value, char = yield from self._json_value(char, call.stream_for(key, char))
            if value is None or not call.take(key, value):
                return call.name is not None
            if char and char in SPACES:
                char = yield from self._word()
            if char != ",":
                break
            char = yield from self._word()
        call.end()
        return call.name is not None


class _JsonCall:
    """A call while the members of its object come in, in any order.

    The arguments leave as they come, if the name came before them and they are not a string (which
    holds their JSON text encoded once more). Otherwise they wait.
    """

    def __init__(self, parser: ToolParser, keys: Collection[str]):
        self.name: str | None = None
        self._parser = parser
        self._keys = keys
        self._waiting: str | None = None
        self._sent = False

    def stream_for(self, key: str | None, first: str) -> Callable[[str], None] | None:
        """Where the characters of a value that begins with `first` go at once, if anywhere."""
        if key not in self._keys or self._sent or self.name is None or first == '"':
            return None
        self._sent = True
        return self._parser._arguments

    def take(self, key: str | None, value: str) -> bool:
        """A member is complete. False if its name is none that can be called."""
        if key == "name" and self.name is None:
            name = json_string(value)
            if not self._parser._callable(name):
                return False
            self.name = name
            self._parser._begin(name)
        elif key in self._keys and self._waiting is None:
            self._waiting = json_string(value) or value
        if self.name is not None and self._waiting is not None and not self._sent:
            self._sent = True
            self._parser._arguments(self._waiting)
        return True

    def end(self) -> None:
        if self.name is not None and not self._sent:
            self._parser._arguments("{}")


class HermesParser(ToolParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated: Hermes, Qwen 2 and 3."""

    def _read(self):
        while (yield from self._until("<tool_call>")):
            if (yield from self._word()) == "{" and (yield from self._json_call(("arguments",))):
                yield from self._close("</tool_call>")
            else:
                self._give_back()
        yield from self._rest()

    def _close(self, mark: str):
        """Reads over the end of a call."""
        stops, state, found = StopStrings([mark]), 0, None
        while found is None and (char := (yield)) != END:
            state, found, _ = stops.scan(state, char)
        self._seen.clear()


class Llama3Parser(ToolParser):
    """{"name": ..., "parameters": {...}}, several parted by ';' or ',': Llama 3."""

    marked = False

    def _read(self):
        char = yield from self._word()
        while char == "{" and (yield from self._json_call(("parameters", "arguments"))):
            self._seen.clear()
            char = yield from self._word()
            if char in (";", ","):
                char = yield from self._word()
        self._give_back()
        yield from self._rest()


class MistralParser(ToolParser):
    """[TOOL_CALLS] and a list of objects, or of newer models name[ARGS]{...}, repeated."""

    needs_special = True

    def _read(self):
        while (yield from self._until("[TOOL_CALLS]")):
            char = yield from self._word()
            found = (yield from self._list()) if char == "[" else (yield from self._named(char))
            if not found:
                self._give_back()
        yield from self._rest()

    def _list(self):
        found = False
        while (yield from self._word()) == "{" and (yield from self._json_call(("arguments",))):
            self._seen.clear()
            found = True
            if (yield from self._word()) != ",":
                break
        if found:
            self._seen.clear()
        return found

    def _named(self, char: str):
        name = ""
        while char and char not in "[{":
            name += char
            char = yield from self._char()
        if char == "[" and (yield from self._follows("ARGS]")):
            char = yield from self._word()
        if char != "{" or not self._callable(name.strip()):
            return False
        self._begin(name.strip())
        yield from self._object_text(char)
        self._seen.clear()
        return True

    def _object_text(self, char: str):
        """Like _json_value, but leaves the character behind the object unread."""
        depth, quoted, escaped = 0, False, False
        while char != END:
            self._arguments(char)
            if quoted:
                quoted = char != '"' or escaped
                escaped = char == "\\" and not escaped
            else:
                quoted = char == '"'
                depth += (char in "{[") - (char in "}]")
                if depth == 0:
                    return
            char = yield from self._char()


class PythonicParser(ToolParser):
    """[name(key=value, ...), ...] as in Python: Llama 4, Gemma 3. A call leaves when whole."""

    marked = False

    def _read(self):
        if (yield from self._word()) == "[":
            while (yield from self._call()):
                self._seen.clear()
                if (yield from self._word()) != ",":
                    self._seen.clear()
                    break
        self._give_back()
        yield from self._rest()

    def _call(self):
        name, char = "", (yield from self._word())
        while char and (char.isalnum() or char in "_."):
            name += char
            char = yield from self._char()
        if char != "(" or not self._callable(name):
            return False
        text, depth, quote, escaped = "(", 1, "", False
        while depth:
            char = yield from self._char()
            if char == END:
                return False
            text += char
            if quote:
                quote = "" if char == quote and not escaped else quote
                escaped = char == "\\" and not escaped
            elif char in "'\"":
                quote = char
            else:
                depth += (char in "([{") - (char in ")]}")
        arguments = python_arguments(text)
        if arguments is None:
            return False
        self._begin(name)
        self._arguments(arguments)
        return True


PARSERS = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}


def find_parser(name: str | None, chat_template: str | None) -> type[ToolParser] | None:
    """The parser of a name, or for None the one that fits the template; None if none does."""
    if name is not None:
        if name not in PARSERS:
            raise ValueError(f"tool parser {name!r}: choose one of {', '.join(PARSERS)}")
        return PARSERS[name]
    template = chat_template or ""
    if "[TOOL_CALLS]" in template:
        return MistralParser
    if "<tool_call>" in template:
        return None if "<function=" in template else HermesParser
    if "func_name1(" in template or "[func_name" in template:
        return PythonicParser
    if '"parameters": ' in template and "ipython" in template:
        return Llama3Parser
    return None


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


def python_arguments(text: str) -> str | None:
    """JSON text of the keyword arguments in a parenthesis; None if they are no plain values."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            values[keyword.arg] = ast.literal_eval(_JsonNames().visit(keyword.value))
        return json.dumps(values, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _JsonNames(ast.NodeTransformer):
    """true, false and null, as models write them among Python's values."""

    VALUES: ClassVar = {"true": True, "false": False, "null": None}

    def visit_Name(self, node):
        if node.id in self.VALUES:
            return ast.copy_location(ast.Constant(self.VALUES[node.id]), node)
        return node

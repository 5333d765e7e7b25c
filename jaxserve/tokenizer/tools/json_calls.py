"""Calls written as JSON objects: {"name": ..., "arguments": {...}}, in the marks of each model.

Arguments are the model's own characters, sent on as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator

from jaxserve.tokenizer.tools.parser import END, SPACES, ToolParser, json_string


class JsonCallParser(ToolParser):
    """Reads JSON values, and calls that are JSON objects."""

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
        inside = _Inside(char)
        while inside.is_open:
            char = yield from self._char()
            if char == END:
                return None, END
            text.append(char)
            send(char)
            inside.take(char)
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

    def _json_list(self) -> Generator[None, str, bool]:
        """Calls in a list whose [ was just read. False if there is none."""
        found = False
        while (yield from self._word()) == "{" and (yield from self._json_call(("arguments",))):
            self._seen.clear()
            found = True
            if (yield from self._word()) != ",":
                break
        if found:
            self._seen.clear()
        return found

    def _object_text(self, char: str):
        """The object whose { is char, sent on; leaves the character behind it unread."""
        self._arguments(char)
        inside = _Inside(char)
        while inside.is_open and (char := (yield from self._char())) != END:
            self._arguments(char)
            inside.take(char)


class _Inside:
    """How deep in a JSON text the characters read so far have led, first one included."""

    def __init__(self, first: str):
        self._depth, self._quoted, self._escaped = 0, False, False
        self.take(first)

    @property
    def is_open(self) -> bool:
        return self._depth > 0 or self._quoted

    def take(self, char: str) -> None:
        if self._quoted:
            self._quoted = char != '"' or self._escaped
            self._escaped = char == "\\" and not self._escaped
        else:
            self._quoted = char == '"'
            self._depth += (char in "{[") - (char in "}]")


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


class HermesParser(JsonCallParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated: Hermes, Qwen 2 and 3."""

    name = "hermes"
    marks = ("<tool_call>", "</tool_call>")

    def _read(self):
        while (yield from self._until("<tool_call>")):
            if (yield from self._word()) == "{" and (yield from self._json_call(("arguments",))):
                yield from self._text_up_to("</tool_call>")
                self._seen.clear()
            else:
                self._give_back()
        yield from self._rest()


class Llama3Parser(JsonCallParser):
    """{"name": ..., "parameters": {...}}, several parted by ';' or ',': Llama 3."""

    name = "llama3_json"

    def _read(self):
        char = yield from self._word()
        while char == "{" and (yield from self._json_call(("parameters", "arguments"))):
            self._seen.clear()
            char = yield from self._word()
            if char in (";", ","):
                char = yield from self._word()
        self._give_back()
        yield from self._rest()


class MistralParser(JsonCallParser):
    """[TOOL_CALLS] and a list of objects, or of newer models name[ARGS]{...}, repeated."""

    name = "mistral"
    marks = ("[TOOL_CALLS]", "[ARGS]")

    def _read(self):
        while (yield from self._until("[TOOL_CALLS]")):
            char = yield from self._word()
            found = (
                (yield from self._json_list()) if char == "[" else (yield from self._named(char))
            )
            if not found:
                self._give_back()
        yield from self._rest()

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


class Phi4Parser(JsonCallParser):
    """functools[{"name": ..., "arguments": {...}}, ...]: Phi-4-mini."""

    name = "phi4"
    marks = ("functools[",)

    def _read(self):
        while (yield from self._until("functools[")):
            if not (yield from self._json_list()):
                self._give_back()
        yield from self._rest()


class DeepSeekParser(JsonCallParser):
    """Control tokens around a kind, a name and a fenced block of JSON: DeepSeek V3 and R1. V3.1
    writes the name in place of the kind, and JSON without a fence."""

    BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL_BEGIN, NAME, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    name = "deepseek_v3"
    marks = (BEGIN, CALL_BEGIN, NAME, CALL_END, ALL_END)

    def _read(self):
        while (yield from self._until(self.BEGIN)):
            found = False
            while (yield from self._call()):
                found = True
                self._seen.clear()
            if found:
                self._seen.clear()  # the end of all
            else:
                self._give_back()
        yield from self._rest()

    def _call(self):
        if (yield from self._word()) != "<":
            return False
        mark = yield from self._text_up_to(">")
        if mark is None or f"<{mark}>" != self.CALL_BEGIN:
            return False
        name = yield from self._text_up_to(self.NAME)
        char = END if name is None else (yield from self._word())
        if char not in ("{", END):
            name = yield from self._text_up_to("```json")
            name = None if name is None else char + name
            char = END if name is None else (yield from self._word())
        if char != "{" or not self._callable(name.strip()):
            return False
        self._begin(name.strip())
        yield from self._object_text(char)
        yield from self._text_up_to(self.CALL_END)
        return True

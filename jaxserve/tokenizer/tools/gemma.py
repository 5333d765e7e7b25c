"""Calls of Gemma 4: <|tool_call>call:name{key:value, ...}<tool_call|>, strings between tokens."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxserve.tokenizer.tools.parser import ToolParser

QUOTE = '<|"|>'
CALL = re.compile(r"\s*call:([\w.-]+)(?=\{)")
BARE = re.compile(r"[^,\[\]{}:]*")


class Gemma4Parser(ToolParser):
    """Gemma 4. A call leaves when it is whole; the token behind calls that asks for their results
    is dropped."""

    name = "gemma4"
    marks = ("<|tool_call>", QUOTE, "<tool_call|>", "<|tool_response>")

    def _read(self):
        while mark := (yield from self._until("<|tool_call>", "<|tool_response>")):
            if mark == "<|tool_response>":
                if not self.num_calls:
                    self._give_back()
                continue
            text = yield from self._text_up_to("<tool_call|>")
            call = CALL.match(text or "")
            arguments = arguments_of(text[call.end() :]) if call else None
            if arguments is None or not self._callable(call[1]):
                self._give_back()
                continue
            self._seen.clear()
            self._begin(call[1])
            self._arguments(arguments)
        yield from self._rest()


def arguments_of(text: str) -> str | None:
    """JSON text of an object in Gemma's notation; None if it is none."""
    reader = _Reader(text)
    try:
        value = reader.value()
        return json.dumps(value, ensure_ascii=False) if reader.at_end() else None
    except (ValueError, RecursionError):
        return None


class _Reader:
    """Reads values from the front of a text. Raises ValueError where they are malformed."""

    def __init__(self, text: str):
        self._text, self._at = text, 0

    def value(self) -> Any:
        if self._take("{"):
            return dict(self._until("}", self._member))
        if self._take("["):
            return list(self._until("]", self.value))
        if self._take(QUOTE):
            return self._string()
        word = BARE.match(self._text, self._at)
        self._at = word.end()
        try:
            return json.loads(word[0], parse_constant=lambda name: name)
        except ValueError:
            return word[0].strip()

    def at_end(self) -> bool:
        return not self._text[self._at :].strip()

    def _member(self) -> tuple[str, Any]:
        if self._take(QUOTE):
            key = self._string()
        else:
            word = BARE.match(self._text, self._at)
            key, self._at = word[0].strip(), word.end()
        if not key or not self._take(":"):
            raise ValueError("a key and a colon must come here")
        return key, self.value()

    def _until(self, end: str, read):
        while not self._take(end):
            yield read()
            if not self._take(",") and not self._text.startswith(end, self._at):
                raise ValueError("a comma must come here")

    def _string(self) -> str:
        end = self._text.index(QUOTE, self._at)
        text, self._at = self._text[self._at : end], end + len(QUOTE)
        return text

    def _take(self, mark: str) -> bool:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found
